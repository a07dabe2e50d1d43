"""One measured run, alone in its process: a quantization by ours or by the peer, or a plain pass of the float model.

    python -I one_quantization.py JOB        JOB is JSON: who, model, samples, input_name, count, preset, output, result
                                             (and finetune: settings that go before those of the preset's FastFinetune)

Whoever is imported as `quark` in the interpreter that runs this is measured, so nothing of this folder is imported. The
clock runs while a model file becomes a quantized file; imports, reading the images and making the session of a plain
pass are outside. The memory is the most that the process ever had, all of that included.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Job = dict[str, Any]


class Reader:
    """The images one by one, by ONNX Runtime's protocol."""

    def __init__(self, images: np.ndarray, input_name: str) -> None:
        self.images, self.input_name, self.next = images, input_name, 0

    def get_next(self) -> dict[str, np.ndarray] | None:
        if self.next == len(self.images):
            return None
        self.next += 1
        return {self.input_name: self.images[self.next - 1 : self.next]}

    def rewind(self) -> None:
        self.next = 0


def prepare_ours(job: Job, images: np.ndarray) -> Callable[[], object]:
    from quark.onnx import get_default_config, quantize

    config = job["preset"]
    if job.get("finetune"):
        config = get_default_config(job["preset"])
        config.extra_options["FastFinetune"].update(job["finetune"])
    return lambda: quantize(job["model"], images, config, num_samples=job["count"]).save(job["output"])


def prepare_peer(job: Job, images: np.ndarray) -> Callable[[], object]:
    from quark.onnx import ModelQuantizer
    from quark.onnx.quantization.config import Config, get_default_config

    reader = Reader(images[: job["count"]], job["input_name"])

    def run() -> None:
        config = get_default_config(job["preset"])
        if job.get("finetune"):
            config.extra_options["FastFinetune"].update(job["finetune"])
        quantizer = ModelQuantizer(Config(global_quant_config=config))
        quantizer.quantize_model(job["model"], job["output"], reader)

    return run


def prepare_pass(job: Job, images: np.ndarray) -> Callable[[], object]:
    import onnxruntime

    session = onnxruntime.InferenceSession(job["model"], providers=["CPUExecutionProvider"])
    samples = [{job["input_name"]: images[i : i + 1]} for i in range(job["count"])]
    return lambda: [session.run(None, each) for each in samples]


def peak_megabytes() -> float:
    """Of this process since it began to run this program.

    Linux hands the `ru_maxrss` of the process that started this one on to it; VmHWM begins afresh.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def main() -> None:
    job: Job = json.loads(sys.argv[1])
    prepare = {"ours": prepare_ours, "peer": prepare_peer, "pass": prepare_pass}[job["who"]]
    run = prepare(job, np.load(job["samples"]))
    begin = time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    Path(job["result"]).write_text(json.dumps({"seconds": seconds, "peak_mb": peak_megabytes()}))


if __name__ == "__main__":
    main()

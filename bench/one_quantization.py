"""One measured run, alone in its process: a quantization by ours or by a peer, or a plain pass of the float model.

    python -I one_quantization.py JOB

JOB is JSON: who, model, samples, input_name, count, preset, output, result, settings (what a peer without our presets
is asked for instead), and finetune (settings that go before those of the preset's FastFinetune).

It runs in the environment of whoever is measured, so nothing of this folder is imported, and packages only in the
function that is about them. The clock runs while a model file becomes a quantized file; imports, reading the images and
making the session of a plain pass are outside. The memory is the most that the process ever had, all of that included.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PART = 16  # samples in a part of a calibration that would hold them all
Job = dict[str, Any]


class Reader:
    """The images one by one, by ONNX Runtime's protocol; it may ask for a range of them."""

    def __init__(self, images: np.ndarray, input_name: str) -> None:
        self.images, self.input_name = images, input_name
        self.next, self.end = 0, len(images)

    def __len__(self) -> int:
        return len(self.images)

    def set_range(self, start_index: int, end_index: int) -> None:
        self.next, self.end = start_index, end_index

    def get_next(self) -> dict[str, np.ndarray] | None:
        if self.next == self.end:
            return None
        self.next += 1
        return {self.input_name: self.images[self.next - 1 : self.next]}

    def rewind(self) -> None:
        self.set_range(0, len(self.images))


def prepare_ours(job: Job, images: np.ndarray) -> Callable[[], object]:
    from quark.onnx import get_default_config, quantize

    config = job["preset"]
    if job.get("finetune"):
        config = get_default_config(job["preset"])
        config.extra_options["FastFinetune"].update(job["finetune"])
    return lambda: quantize(job["model"], images, config, num_samples=job["count"]).save(job["output"])


def prepare_amd_quark(job: Job, images: np.ndarray) -> Callable[[], object]:
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


def prepare_onnxruntime(job: Job, images: np.ndarray) -> Callable[[], object]:
    """Its own order of work: shape inference and optimization into a file beside the result, then quantization."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    wanted = job["settings"]
    weight = quantization.QuantType[wanted["weight"]]
    prepared = str(Path.cwd() / "prepared.onnx")
    if wanted["method"] == "dynamic":

        def run_dynamic() -> None:
            quant_pre_process(job["model"], prepared)
            quantization.quantize_dynamic(prepared, job["output"], weight_type=weight)

        return run_dynamic
    reader = Reader(images[: job["count"]], job["input_name"])
    options = dict(wanted["options"])
    if wanted["method"] != "MinMax":
        # histograms keep the tensors of all samples until they are counted: gigabytes, were it not done in parts
        options["CalibStridedMinMax"] = math.gcd(job["count"], PART)

    def run() -> None:
        quant_pre_process(job["model"], prepared)
        quantization.quantize_static(
            prepared,
            job["output"],
            reader,
            per_channel=wanted["per_channel"],
            activation_type=quantization.QuantType[wanted["activation"]],
            weight_type=weight,
            calibrate_method=quantization.CalibrationMethod[wanted["method"]],
            extra_options=options,
        )

    return run


def prepare_nncf(job: Job, images: np.ndarray) -> Callable[[], object]:
    import nncf
    import onnx

    count = job["count"]
    dataset = nncf.Dataset([images[i : i + 1] for i in range(count)], lambda x: {job["input_name"]: x})
    preset = nncf.QuantizationPreset(job["settings"]["preset"])

    def run() -> None:
        quantized = nncf.quantize(onnx.load(job["model"]), dataset, preset=preset, subset_size=count)
        onnx.save(quantized, job["output"])

    return run


def prepare_pass(job: Job, images: np.ndarray) -> Callable[[], object]:
    import onnxruntime

    session = onnxruntime.InferenceSession(job["model"], providers=["CPUExecutionProvider"])
    samples = [{job["input_name"]: images[i : i + 1]} for i in range(job["count"])]
    return lambda: [session.run(None, each) for each in samples]


PREPARE: dict[str, Callable[[Job, np.ndarray], Callable[[], object]]] = {
    "ours": prepare_ours,
    "pass": prepare_pass,
    "amd-quark": prepare_amd_quark,
    "onnxruntime": prepare_onnxruntime,
    "nncf": prepare_nncf,
}


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
    run = PREPARE[job["who"]](job, np.load(job["samples"]))
    begin = time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    Path(job["result"]).write_text(json.dumps({"seconds": seconds, "peak_mb": peak_megabytes()}))


if __name__ == "__main__":
    main()

"""One measured run, alone in its process: a quantization by ours or by a peer, or a plain pass of the float model.

    python -I one_quantization.py JOB

JOB is JSON: who, model, samples, input_name, count, preset, output, result, settings (what a peer without our presets
is asked for instead; for ours, fields of the configuration), extra_options (of ours and AMD Quark's, beside the
preset's), and finetune (settings that go before those of the preset's FastFinetune). `samples` is an .npy file for the
input of that name, or a folder with one .npz file per sample, which holds an array for each input.

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
Feed = dict[str, np.ndarray]


def read_feeds(job: Job) -> list[Feed]:
    """Return all samples of the job, those to calibrate on first."""
    path = Path(job["samples"])
    if path.is_dir():
        feeds = []
        for file in sorted(path.glob("*.npz")):
            with np.load(file) as arrays:
                feeds.append(dict(arrays))
        return feeds
    images = np.load(path)
    return [{job["input_name"]: images[i : i + 1]} for i in range(len(images))]


class Reader:
    """The samples one by one, by ONNX Runtime's protocol; it may ask for a range of them."""

    def __init__(self, feeds: list[Feed]) -> None:
        self.feeds = feeds
        self.next, self.end = 0, len(feeds)

    def __len__(self) -> int:
        return len(self.feeds)

    def set_range(self, start_index: int, end_index: int) -> None:
        self.next, self.end = start_index, end_index

    def get_next(self) -> Feed | None:
        if self.next == self.end:
            return None
        self.next += 1
        return self.feeds[self.next - 1]

    def rewind(self) -> None:
        self.set_range(0, len(self.feeds))


def prepare_ours(job: Job, feeds: list[Feed]) -> Callable[[], object]:
    from quark.onnx import get_default_config, quantize

    config = job["preset"]
    if job.get("finetune") or job.get("extra_options") or job.get("settings"):
        config = get_default_config(job["preset"])
        for name, value in (job.get("settings") or {}).items():
            setattr(config, name, value)
        config.extra_options.update(job.get("extra_options") or {})
        if job.get("finetune"):
            config.extra_options["FastFinetune"].update(job["finetune"])
    return lambda: quantize(job["model"], feeds, config, num_samples=job["count"]).save(job["output"])


def prepare_amd_quark(job: Job, feeds: list[Feed]) -> Callable[[], object]:
    from quark.onnx import ModelQuantizer
    from quark.onnx.quantization.config import Config, get_default_config

    reader = Reader(feeds[: job["count"]])

    def run() -> None:
        config = get_default_config(job["preset"])
        config.extra_options.update(job.get("extra_options") or {})
        if job.get("finetune"):
            config.extra_options["FastFinetune"].update(job["finetune"])
        quantizer = ModelQuantizer(Config(global_quant_config=config))
        quantizer.quantize_model(job["model"], job["output"], reader)

    return run


def prepare_onnxruntime(job: Job, feeds: list[Feed]) -> Callable[[], object]:
    """Its own order of work: shape inference and optimization into a file beside the result, then quantization.

    Symbolic shape inference cannot handle every network; where it fails, ONNX's own shape inference is used alone.
    """
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    wanted = job["settings"]
    if wanted["method"] == "weight_only":
        return prepare_onnxruntime_weights(job)
    weight = quantization.QuantType[wanted["weight"]]
    prepared = str(Path.cwd() / "prepared.onnx")

    def prepare() -> None:
        try:
            quant_pre_process(job["model"], prepared)
        except Exception as error:  # it raises a plain Exception
            print(f"without symbolic shape inference: {error}")
            quant_pre_process(job["model"], prepared, skip_symbolic_shape=True)

    if wanted["method"] == "dynamic":

        def run_dynamic() -> None:
            prepare()
            quantization.quantize_dynamic(
                prepared, job["output"], weight_type=weight, per_channel=wanted.get("per_channel", False)
            )

        return run_dynamic
    reader = Reader(feeds[: job["count"]])
    options = dict(wanted["options"])
    if wanted["method"] != "MinMax":
        # histograms keep the tensors of all samples until they are counted: gigabytes, were it not done in parts
        options["CalibStridedMinMax"] = math.gcd(job["count"], wanted.get("part", PART))

    def run() -> None:
        prepare()
        quantization.quantize_static(
            prepared,
            job["output"],
            reader,
            op_types_to_quantize=wanted.get("op_types"),
            per_channel=wanted["per_channel"],
            activation_type=quantization.QuantType[wanted["activation"]],
            weight_type=weight,
            calibrate_method=quantization.CalibrationMethod[wanted["method"]],
            extra_options=options,
        )

    return run


def prepare_onnxruntime_weights(job: Job) -> Callable[[], object]:
    """Its MatMulNBits quantizer; `config` names the class of its algorithm's settings, and `arguments` has these."""
    import onnx
    from onnxruntime.quantization import matmul_nbits_quantizer as nbits

    wanted = job["settings"]
    config = getattr(nbits, wanted["config"])(**wanted["arguments"])

    def run() -> None:
        quantizer = nbits.MatMulNBitsQuantizer(onnx.load(job["model"]), algo_config=config)
        quantizer.process()
        quantizer.model.save_model_to_file(job["output"])

    return run


def prepare_nncf(job: Job, feeds: list[Feed]) -> Callable[[], object]:
    import nncf
    import onnx

    count = job["count"]
    dataset = nncf.Dataset(feeds[:count])
    wanted = job["settings"]
    preset = nncf.QuantizationPreset(wanted["preset"])
    model_type = nncf.ModelType(wanted["model_type"]) if "model_type" in wanted else None

    def run() -> None:
        quantized = nncf.quantize(
            onnx.load(job["model"]), dataset, preset=preset, subset_size=count, model_type=model_type
        )
        onnx.save(quantized, job["output"])

    return run


def prepare_pass(job: Job, feeds: list[Feed]) -> Callable[[], object]:
    import onnxruntime

    session = onnxruntime.InferenceSession(job["model"], providers=["CPUExecutionProvider"])
    return lambda: [session.run(None, feed) for feed in feeds[: job["count"]]]


PREPARE: dict[str, Callable[[Job, list[Feed]], Callable[[], object]]] = {
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
    run = PREPARE[job["who"]](job, read_feeds(job))
    begin, processor_begin = time.perf_counter(), time.process_time()
    run()
    found = {"seconds": time.perf_counter() - begin, "processor_seconds": time.process_time() - processor_begin}
    Path(job["result"]).write_text(json.dumps({**found, "peak_mb": peak_megabytes()}))


if __name__ == "__main__":
    main()

"""An odd model through a preset: the file it becomes, loaded again, beside what the float model gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from odd_collection import calibration_of, feeds_of, made
from onnx_models import Array

from quark.formats.native import library_file
from quark.onnx import get_default_config, get_library_path, quantize
from quark.onnx.quantization.config import QuantizationConfig

Outputs = list[list[Array]]  # by sample, by output


@dataclass(frozen=True)
class Run:
    """What came out: the files' outputs with the native operators and with portable ones, and those of float.

    Without the library, `native` is `portable`.
    """

    float_model: onnx.ModelProto
    model: onnx.ModelProto
    expected: Outputs
    native: Outputs
    portable: Outputs


def config_of(preset: str) -> QuantizationConfig:
    """The preset; where it finetunes, a few steps on a few samples."""
    config = get_default_config(preset)
    if "FastFinetune" in config.extra_options:
        config.extra_options["FastFinetune"] |= {"NumIterations": 4, "DataSize": 4}
    return config


def session_of(model: onnx.ModelProto, *, has_library: bool) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if has_library:
        options.register_custom_ops_library(get_library_path())
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def outputs_of(model: onnx.ModelProto, feeds: Sequence[Mapping[str, Array]], *, has_library: bool = False) -> Outputs:
    """Copies: to ONNX Runtime 1.22 at least, an output that is an input is the memory of what was fed."""
    session = session_of(model, has_library=has_library)
    return [[np.array(each) for each in session.run(None, dict(feed))] for feed in feeds]


@cache
def float_outputs(name: str) -> Outputs:
    return outputs_of(made(name), feeds_of(name))


def run(name: str, preset: str, folder: Path) -> Run:
    """Quantizes, saves to `folder`, loads and runs; whatever is raised on the way is not caught."""
    feeds = feeds_of(name)
    path = quantize(made(name), calibration_of(name), config_of(preset)).save(folder / "quantized.onnx")
    model = onnx.load(path)
    portable = outputs_of(model, feeds)
    native = outputs_of(model, feeds, has_library=True) if library_file() else portable
    return Run(made(name), model, float_outputs(name), native, portable)


def sqnr_db(actual: Outputs, expected: Outputs) -> float:
    """Over all samples, of the output that fares worst; outputs of integers and booleans do not count.

    300 where nothing differs, and where there is nothing to differ from.
    """
    worst = 300.0
    for one, other in zip(zip(*actual, strict=True), zip(*expected, strict=True), strict=True):
        if other[0].dtype.kind != "f" or not other[0].size:
            continue
        a, b = (np.stack(value).astype(np.float64) for value in (one, other))
        noise, signal = float(np.square(a - b).sum()), float(np.square(b).sum())
        if noise > 0:
            worst = min(worst, 10 * np.log10(max(signal, 1e-300) / noise))
    return worst


def is_valid(model: onnx.ModelProto) -> bool:
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError:
        return False
    return True

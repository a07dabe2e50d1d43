"""What finetuning needs to be there: torch, and the devices by their names.

torch trains on 'cpu' or 'cuda:N'; its builds for AMD's GPUs call theirs 'cuda' as well, so that 'hip:N' is that. ONNX
Runtime computes activations there where it has a provider for such devices. torch is imported here only to ask for a
device that is not the CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from quark.errors import InvalidValueError, MissingDependencyError, UnsupportedOptionError
from quark.onnx.refine.fast_finetune.devices import providers_of


def check_torch() -> None:
    """Raise an error where torch is not installed; it is not imported."""
    if not _is_torch_there():
        raise MissingDependencyError(
            "finetuning (include_fast_ft=True) trains with torch, which is not installed: "
            "pip install 'quark-quantizer[torch]', or set include_fast_ft=False"
        )


def _is_torch_there() -> bool:
    if "torch" in sys.modules:
        return sys.modules["torch"] is not None  # None: its import was forbidden
    return importlib.util.find_spec("torch") is not None


def check_optim_device(device: str) -> str:
    """What torch calls the device; an error where it has no such device."""
    if device == "cpu":
        return device
    cuda: Any = importlib.import_module("torch").cuda
    count = cuda.device_count() if cuda.is_available() else 0
    if count <= _number(device):
        there = ", ".join(["cpu", *(f"cuda:{number}" for number in range(count))])
        raise InvalidValueError(
            f"FastFinetune.OptimDevice {device!r}: torch has no such device here, only {there}. Another build of "
            "torch, for CUDA or for ROCm, may have it"
        )
    return f"cuda:{_number(device)}"


def check_infer_device(device: str) -> None:
    """Raise an error where ONNX Runtime cannot compute there, or would do so on another of several devices."""
    if _number(device):
        raise UnsupportedOptionError(
            f"FastFinetune.InferDevice {device!r}: inference is on the first device; use {device.partition(':')[0]}:0, "
            "and CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES to say which that is"
        )
    if device == "cpu" or providers_of(device) != providers_of("cpu"):
        return
    import onnxruntime

    available = ", ".join(onnxruntime.get_available_providers())
    raise InvalidValueError(
        f"FastFinetune.InferDevice {device!r}: this ONNX Runtime has {available} and nothing that computes there. Use "
        "cpu, or install onnxruntime-gpu for cuda (CUDAExecutionProvider), onnxruntime-rocm for hip "
        "(ROCMExecutionProvider) or onnxruntime-migraphx for hip (MIGraphXExecutionProvider)"
    )


def _number(device: str) -> int:
    return int(device.partition(":")[2] or 0)

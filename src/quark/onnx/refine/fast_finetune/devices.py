"""Devices by the names that users give them: cpu, cuda:0, hip:0 (which torch calls cuda)."""

from __future__ import annotations

_PROVIDERS = {
    "cpu": (),
    "cuda": ("CUDAExecutionProvider",),
    "hip": ("MIGraphXExecutionProvider", "ROCMExecutionProvider"),
}


def providers_of(device: str) -> tuple[str, ...]:
    """The execution providers of ONNX Runtime that compute on a device; those that this runtime has.

    >>> providers_of("cpu")
    ('CPUExecutionProvider',)
    """
    wanted = _PROVIDERS[device.partition(":")[0]]
    if not wanted:
        return ("CPUExecutionProvider",)
    import onnxruntime

    available = onnxruntime.get_available_providers()
    return (*(each for each in wanted if each in available), "CPUExecutionProvider")

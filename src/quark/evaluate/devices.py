"""A device as people name it, as the execution providers that ONNX Runtime has for it here."""

from __future__ import annotations

from quark.errors import MissingDependencyError, unknown_name

CPU = "CPUExecutionProvider"
PROVIDERS = {
    "cpu": (CPU,),
    "cuda": ("CUDAExecutionProvider",),
    "rocm": ("ROCMExecutionProvider", "MIGraphXExecutionProvider"),
    "gpu": ("CUDAExecutionProvider", "ROCMExecutionProvider", "MIGraphXExecutionProvider", "DmlExecutionProvider"),
}


def providers_of(device: str) -> tuple[str, ...]:
    """The provider for that device, and the CPU for what it cannot do; an error where the runtime has none.

    >>> providers_of("cpu")
    ('CPUExecutionProvider',)
    """
    name = device.lower().partition(":")[0]
    if name not in PROVIDERS:
        raise unknown_name("device", device, PROVIDERS)
    if name == "cpu":
        return (CPU,)
    import onnxruntime

    available = onnxruntime.get_available_providers()
    found = next((each for each in PROVIDERS[name] if each in available), None)
    if found is None:
        raise MissingDependencyError(
            f"device '{device}': this ONNX Runtime has {', '.join(available)}; install the distribution for your GPU "
            f"(onnxruntime-gpu, onnxruntime-rocm ...) in its place, or leave the option out to run on the CPU"
        )
    return (found, CPU)

"""The devices that ONNX Runtime computes on, and why one cannot be used. NVIDIA's driver is asked through ctypes: it is
on every machine with a usable GPU, other libraries of CUDA are not.

A list of names says where a session runs. Each is a device, or a provider of ONNX Runtime:

    cpu                     always there
    cuda, cuda:N            the CUDA provider on GPU N
    hip, hip:N, rocm:N      the MIGraphX or the ROCm provider
    gpu, gpu:N              the first provider for GPUs that this ONNX Runtime has
    CUDAExecutionProvider   that provider with its own defaults, skipped with a warning if this ONNX Runtime lacks it

A device that was asked for must work: ONNX Runtime itself silently falls back to the CPU if a provider does not load.
On CUDA, products are computed in float32 (not TF32), so that outputs are those of the CPU within rounding.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quark.errors import InvalidValueError, MissingDependencyError, unknown_name
from quark.text import get_logger

_LOG = get_logger(__name__)
CPU_PROVIDER, CUDA_PROVIDER = "CPUExecutionProvider", "CUDAExecutionProvider"
_HIP_PROVIDERS = ("MIGraphXExecutionProvider", "ROCMExecutionProvider")
PROVIDERS = {
    "cpu": (CPU_PROVIDER,),
    "cuda": (CUDA_PROVIDER,),
    "hip": _HIP_PROVIDERS,
    "rocm": _HIP_PROVIDERS,
    "gpu": (CUDA_PROVIDER, *_HIP_PROVIDERS, "DmlExecutionProvider"),
}
INSTALL = {
    "cuda": "pip uninstall onnxruntime, then pip install onnxruntime-gpu",
    "hip": "pip uninstall onnxruntime, then install onnxruntime-migraphx or onnxruntime-rocm",
}
INSTALL |= {"rocm": INSTALL["hip"], "gpu": INSTALL["cuda"]}
# float32 as on the CPU; convolutions are chosen by rules instead of by trying all for every new shape
_CUDA_OPTIONS = {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}
_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_NAME_BYTES = 256


@dataclass(frozen=True)
class Driver:
    """The GPUs that a process may use, by number, and why there are none. `version` is the newest CUDA that the driver
    supports, such as 13.0."""

    devices: tuple[str, ...] = ()
    version: str = ""
    trouble: str = ""


@functools.cache
def driver() -> Driver:
    """Return what the driver says; CUDA_VISIBLE_DEVICES counts."""
    try:
        library = ctypes.CDLL(_DRIVER)
    except OSError:
        return Driver(trouble=f"there is no NVIDIA driver ({_DRIVER} is not found)")
    status = library.cuInit(0)
    if status == _NO_DEVICE:
        return Driver(trouble="the NVIDIA driver finds no GPU; CUDA_VISIBLE_DEVICES may hide it")
    if status:
        return Driver(trouble=f"the NVIDIA driver does not start (error {status} of cuInit); nvidia-smi may say why")
    version, count, handle = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    library.cuDeviceGetCount(ctypes.byref(count))
    names = []
    for number in range(count.value):
        name = ctypes.create_string_buffer(_NAME_BYTES)
        library.cuDeviceGet(ctypes.byref(handle), number)
        library.cuDeviceGetName(name, _NAME_BYTES, handle)
        names.append(name.value.decode(errors="replace"))
    major, minor = version.value // 1000, version.value % 1000 // 10
    return Driver(tuple(names), f"{major}.{minor}")


@dataclass(frozen=True)
class Device:
    """A processor, or GPU number `index` of a kind.

    >>> str(Device.parse("cuda")), str(Device.parse("CPU"))
    ('cuda:0', 'cpu')
    """

    kind: str = "cpu"
    index: int = 0

    @classmethod
    def parse(cls, text: str) -> Device:
        """Read a name such as cuda:1. Raises an error that lists the kinds."""
        match = re.fullmatch(r"([a-z]+)(?::(\d{1,3}))?", text.lower(), re.ASCII)
        if match is None or match[1] not in PROVIDERS or (match[1] == "cpu" and match[2]):
            raise unknown_name("device", text, (*PROVIDERS, "cuda:0", "cuda:1"))
        return cls(match[1], int(match[2] or 0))

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def options(self) -> dict[str, str]:
        """Options of the provider."""
        if self.is_cpu:
            return {}
        return {"device_id": str(self.index), **(_CUDA_OPTIONS if self.provider == CUDA_PROVIDER else {})}

    @property
    def provider(self) -> str:
        """The provider that computes there. Raises MissingDependencyError if this ONNX Runtime has none."""
        import onnxruntime

        available = onnxruntime.get_available_providers()
        for name in PROVIDERS[self.kind]:
            if name in available:
                return name
        raise MissingDependencyError(
            f"device '{self}': this ONNX Runtime has {', '.join(available)} and nothing that computes there: "
            f"{INSTALL[self.kind]}; or use the device cpu"
        )

    def check(self) -> None:
        """Raise an error that says why if the device cannot be used. A provider that does not load shows only when
        there is a session: `check_loaded`."""
        if self.is_cpu or self.provider != CUDA_PROVIDER:
            return
        nvidia = driver()
        if nvidia.trouble:
            raise InvalidValueError(f"device '{self}': {nvidia.trouble}; or use the device cpu")
        if self.index >= len(nvidia.devices):
            there = ", ".join(f"cuda:{number} ({name})" for number, name in enumerate(nvidia.devices))
            raise InvalidValueError(f"device '{self}': there is no such GPU, only {there}")

    def check_loaded(self, session: Any) -> None:
        """Raise an error if ONNX Runtime fell back to the CPU for this session, and see that it does not later."""
        session.disable_fallback()
        if self.provider not in session.get_providers():
            raise InvalidValueError(
                f"device '{self}': ONNX Runtime cannot load its {self.provider}: {_loading_trouble(self.provider)}"
            )

    def __str__(self) -> str:
        return self.kind if self.is_cpu else f"{self.kind}:{self.index}"


def is_device(name: str) -> bool:
    """True for the name of a device, not of a provider."""
    return not name.endswith("Provider")


def checked_device(name: str) -> tuple[str]:
    """The list with this device alone; an error if it cannot be used."""
    Device.parse(name).check()
    return (name,)


def device_of(names: Iterable[str]) -> Device:
    """The device that a list of devices and providers stands for: that of its first entry, except for providers that
    this ONNX Runtime does not have."""
    import onnxruntime

    available = onnxruntime.get_available_providers()
    first = next((name for name in names if is_device(name) or name in available), "cpu")
    if is_device(first):
        return Device.parse(first)
    return Device(next((kind for kind, providers in PROVIDERS.items() if first in providers), "cpu"))


@dataclass(frozen=True)
class Providers:
    """The providers of a session: names with options, and the devices among them, which must work."""

    names: tuple[str, ...]
    options: tuple[dict[str, str], ...]
    devices: tuple[Device, ...]

    def check_loaded(self, session: Any) -> None:
        """Raise an error if ONNX Runtime fell back to the CPU for this session."""
        for device in self.devices:
            device.check_loaded(session)

    @property
    def kind(self) -> str:
        """The kind of device that the first provider computes on."""
        return device_of(self.names).kind


def providers_of(names: Iterable[str]) -> Providers:
    """The providers for a list of devices and providers; the CPU's is the last. Raises if a device cannot be used."""
    import onnxruntime

    available = onnxruntime.get_available_providers()
    providers: dict[str, dict[str, str]] = {}
    devices = []
    for name in names:
        if is_device(name):
            device = Device.parse(name)
            if device.is_cpu:
                continue
            device.check()
            devices.append(device)
            providers[device.provider] = device.options
        elif name in available:
            providers.setdefault(name, {})
        else:
            _LOG.warning("this ONNX Runtime has no %s; it has %s", name, ", ".join(available))
    providers.setdefault(CPU_PROVIDER, {})
    if CUDA_PROVIDER in providers:
        load_cuda_libraries()
    return Providers(tuple(providers), tuple(providers.values()), tuple(devices))


@functools.cache
def load_cuda_libraries() -> None:
    """Load CUDA's libraries from the packages that torch brings along. What is not found shows when a session is
    opened; the function prints instead of raising."""
    import onnxruntime

    preload = getattr(onnxruntime, "preload_dlls", None)  # since 1.21
    if preload is None:
        return
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        preload()
    if text := printed.getvalue().strip():
        _LOG.debug("preload_dlls: %s", text)


def _loading_trouble(provider: str) -> str:
    """Load a provider's library, and return the reason if that fails."""
    import onnxruntime

    name = provider.removesuffix("ExecutionProvider").lower()
    folder = Path(onnxruntime.__file__).parent / "capi"
    reason = "its library loads, and ONNX Runtime gives no reason"
    file = next(folder.glob(f"*onnxruntime_providers_{name}.*"), None)
    try:
        ctypes.CDLL(str(file or f"onnxruntime_providers_{name}"))
    except OSError as error:
        reason = str(error).replace(str(folder), "").lstrip("/\\")
    cuda = getattr(onnxruntime, "cuda_version", "")
    built = f" It was built for CUDA {cuda};" if cuda else ""
    return f"{reason}.{built} a build of torch for the same CUDA brings the libraries, or install CUDA and cuDNN 9"

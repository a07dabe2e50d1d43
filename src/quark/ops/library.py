"""The path of the compiled operator library."""

from __future__ import annotations

import sys
import warnings

from quark.errors import MissingDependencyError, unknown_name
from quark.formats.native import FILE_NAME, library_file

DEVICES = ("CPU", "CUDA", "ROCM")
COMPILED_FOR = ("CPU",) if sys.platform == "darwin" else ("CPU", "CUDA")


def get_library_path(device: str = "CPU") -> str:
    """The file to pass to `SessionOptions.register_custom_ops_library`.

    There is one library for all devices; it is part of the package, and nothing is compiled here. It holds every
    operator for the CPU and for ONNX Runtime's CUDA provider, whose kernels NVIDIA's driver compiles on first use.

    A device without kernels, such as ROCM, gets the same library and a warning: its operators will run on the CPU, and
    ONNX Runtime will copy their tensors there and back.

    >>> get_library_path("CPU") == get_library_path("CUDA")
    True
    """
    if not isinstance(device, str) or device.upper() not in DEVICES:
        raise unknown_name("device", device, DEVICES)
    path = library_file()
    if path is None:
        raise MissingDependencyError(
            f"the compiled operator library {FILE_NAME} is not in the installed package. Models that quark writes run "
            "without it: do not register it; quark.onnx.add_portable_functions does the same for other models. For the "
            "library, install a C++17 compiler, then quark again: pip install --force-reinstall --no-cache-dir PATH"
        )
    if device.upper() not in COMPILED_FOR:
        warnings.warn(
            f"the operator library has kernels for {' and '.join(COMPILED_FOR)}, and none for {device.upper()}: its "
            "operators will run on the CPU, and ONNX Runtime will copy their tensors from the device and back",
            stacklevel=2,
        )
    return str(path)

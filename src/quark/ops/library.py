"""The path of the compiled operator library."""

from __future__ import annotations

from quark.errors import MissingDependencyError, unknown_name
from quark.formats.native import FILE_NAME, library_file

DEVICES = ("CPU", "CUDA", "ROCM")


def get_library_path(device: str = "CPU") -> str:
    """The file to pass to `SessionOptions.register_custom_ops_library`.

    There is one library for all devices: its operators run on the CPU, and ONNX Runtime copies the tensors of a model
    that otherwise runs on a GPU. It is part of the package; nothing is compiled here.

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
    return str(path)

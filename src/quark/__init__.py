"""Number formats, ONNX operators and tools for quantizing neural networks.

    quark.formats     the formats as values; quantize arrays of numpy or torch, pack and unpack them
    quark.onnx        the same formats in ONNX models

Importing `quark` alone loads neither.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("quark-quantizer")
except PackageNotFoundError:  # sources on PYTHONPATH that were never installed: pyproject.toml has the version
    __version__ = "0+unbuilt"

__all__ = ["__version__"]

"""Check that some ONNX Runtime is installed. Its distributions exclude each other and share one import name, so none of
them can be a dependency of this package."""

from __future__ import annotations

from importlib.util import find_spec

from quark.errors import MissingDependencyError

CHOICES = (
    "'pip install onnxruntime' runs everywhere; where the hardware wants it, install instead onnxruntime-gpu "
    "(NVIDIA), onnxruntime-rocm or onnxruntime-migraphx (AMD), onnxruntime-directml (Windows) or onnxruntime-openvino "
    "(Intel). One only: they all import as onnxruntime"
)


def require_onnxruntime() -> None:
    """Raise MissingDependencyError if no ONNX Runtime can be imported. This does not import it."""
    if find_spec("onnxruntime") is None:
        raise MissingDependencyError(f"quark.onnx needs ONNX Runtime, and none is installed. {CHOICES}.")

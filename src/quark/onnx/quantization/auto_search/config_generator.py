"""The combinations of a space at the import path that existing scripts use."""

from quark.onnx.quantization.auto_search.lookup import lookup

_NAMES = ("generate_all_configs",)

__all__ = list(_NAMES)

__getattr__ = lookup(__name__, _NAMES)

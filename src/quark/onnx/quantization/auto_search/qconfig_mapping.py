"""Ready-made searches at the import path that existing scripts use."""

from quark.onnx.quantization.auto_search.lookup import lookup

_NAMES = ("get_auto_search_config",)

__all__ = list(_NAMES)

__getattr__ = lookup(__name__, _NAMES)

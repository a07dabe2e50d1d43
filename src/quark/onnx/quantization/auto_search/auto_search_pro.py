"""AutoSearchPro and its parts at the import path that existing scripts use."""

from quark.onnx.quantization.auto_search.lookup import lookup

_NAMES = (
    "AutoSearchPro",
    "replace_keys",
    "validate_keys",
)

__all__ = list(_NAMES)

__getattr__ = lookup(__name__, _NAMES)

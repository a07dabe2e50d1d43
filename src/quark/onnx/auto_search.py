"""The search for a configuration at the import path that existing scripts use; it is in `quark.search`."""

from quark.onnx.quantization.auto_search import __all__ as __all__
from quark.onnx.quantization.auto_search.lookup import lookup

__getattr__ = lookup(__name__, tuple(__all__))

"""The search for a configuration at the import path that existing scripts use; it is in `quark.search`.

quark.search lies right of quark.onnx, so that its modules are imported by name, when something is asked for.
"""

from quark.onnx.quantization.auto_search.lookup import lookup

_NAMES = (
    "AutoSearch",
    "AutoSearchConfig",
    "AutoSearchPro",
    "SearchSpace",
    "generate_all_configs",
    "get_auto_search_config",
)

__all__ = list(_NAMES)

__getattr__ = lookup(__name__, _NAMES)

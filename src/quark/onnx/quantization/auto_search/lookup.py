"""Names of `quark.search` under other paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

_MODULES = {
    "quark.search.auto_search": ("AutoSearch", "AutoSearchConfig", "logger_config"),
    "quark.search.auto_search_pro": ("AutoSearchPro", "replace_keys", "validate_keys"),
    "quark.search.distances": ("cos_metric", "l1_metric", "l2_metric", "psnr_metric", "ssim_metric"),
    "quark.search.search_configs": ("get_auto_search_config",),
    "quark.search.spaces": ("SearchSpace", "generate_all_configs", "split_config_levels"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def lookup(module: str, names: Sequence[str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module that has these names."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)

    return find

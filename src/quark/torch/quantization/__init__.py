"""The pipeline, and the configuration and observers under the names that AMD uses.

`from quark.torch.quantization import QConfig, QLayerConfig, Int4PerGroupSpec` gives the names of config/config.py.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_CONFIG = "quark.torch.quantization.config.config"


def __getattr__(name: str) -> Any:
    """Names of config/config.py, loaded when first asked for: the steps of the pipeline import this package too."""
    if not name.startswith("_") and name != "config":
        module = import_module(_CONFIG)
        if name in module.__all__ or name == "__all__":
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *import_module(_CONFIG).__all__]

"""Where a quantized network differs from the float one, layer by layer, why, and what to do about it.

diagnose           two files and some data in, a Diagnosis out
first_divergence   the first layer where the two networks part

The code is in `quark.inspect.diagnose`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quark.diagnosis import BELOW_DB, Divergence, first_divergence

if TYPE_CHECKING:
    from quark.inspect.diagnose import diagnose

__all__ = ["BELOW_DB", "Divergence", "diagnose", "first_divergence"]


def __getattr__(name: str) -> Any:
    if name != "diagnose":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("quark.inspect.diagnose").diagnose

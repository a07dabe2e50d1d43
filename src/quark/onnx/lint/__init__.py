"""Check whether AMD's NPU would take a quantized file, from this project or from another tool: `quark lint`.

`CHECKS` has the checks in the order of their findings. `docs/npu.md` says what the NPU wants, and why. The code is in
`quark.inspect.lint`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quark.inspect.lint import CHECKS, Finding, Level, lint

__all__ = ["CHECKS", "Finding", "Level", "lint"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("quark.inspect.lint"), name)

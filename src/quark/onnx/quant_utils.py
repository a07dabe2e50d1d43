"""The enums and other names of `quark.onnx.quantization.quant_utils`, by the path of older releases."""

from importlib import import_module
from typing import Any

from quark.onnx.quantization.config.quant_types import *  # noqa: F403 - every name of its __all__
from quark.onnx.quantization.config.quant_types import __all__ as __all__


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module("quark.onnx.quantization.quant_utils"), name)

"""The enums by the path that scripts import them from; they are in `quark.onnx.quantization.config.quant_types`."""

from quark.onnx.quantization.config.quant_types import *  # noqa: F403 - every name of its __all__
from quark.onnx.quantization.config.quant_types import __all__ as __all__

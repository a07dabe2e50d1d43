"""QuantizationConfig at the import path that existing scripts use."""

from quark.onnx.quantization.config.config import QuantizationConfig

__all__ = ["QuantizationConfig"]

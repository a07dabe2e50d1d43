"""ModelQuantizer at the import path that existing scripts use."""

from quark.onnx.quantization.quantizer import ModelQuantizer

__all__ = ["ModelQuantizer"]

"""ModelQuantizer at the import path that existing scripts use."""

from quark.torch.quantization.pipeline import ModelQuantizer

__all__ = ["ModelQuantizer"]

"""ModelQuantizer and load_params at the import path that existing scripts use."""

from quark.torch.export.params import load_params
from quark.torch.quantization.pipeline import ModelQuantizer

__all__ = ["ModelQuantizer", "load_params"]

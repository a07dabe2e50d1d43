"""The exporters at the import path that existing scripts use."""

from quark.torch.export.exporter import ModelExporter, export_onnx
from quark.torch.export.params import save_params
from quark.torch.export.safetensors_file import export_safetensors

__all__ = ["ModelExporter", "export_onnx", "export_safetensors", "save_params"]

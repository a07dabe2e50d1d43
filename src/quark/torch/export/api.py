"""The exporters, and the loader of language models, at the import path that existing scripts use."""

from quark.torch.export.exporter import ModelExporter, export_onnx
from quark.torch.export.params import save_params
from quark.torch.export.safetensors_file import export_safetensors
from quark.torch.language.loading import import_model_from_safetensors

__all__ = ["ModelExporter", "export_onnx", "export_safetensors", "import_model_from_safetensors", "save_params"]

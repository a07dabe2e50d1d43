"""The exporters, and the loader of language models, at the import path that existing scripts use."""

from typing import NoReturn

from torch import nn

from quark.errors import UnsupportedOptionError
from quark.torch.export.exporter import ModelExporter, export_onnx
from quark.torch.export.params import save_params
from quark.torch.export.safetensors_file import export_gguf, export_safetensors
from quark.torch.language.loading import import_model_from_safetensors


def _move_quantizer_to_dict(model: nn.Module) -> NoReturn:
    """Refuse what AMD's scripts call before tensor parallelism."""
    raise UnsupportedOptionError("use_tp: models are evaluated on one device; leave it out")


__all__ = [
    "ModelExporter",
    "export_gguf",
    "export_onnx",
    "export_safetensors",
    "import_model_from_safetensors",
    "save_params",
]

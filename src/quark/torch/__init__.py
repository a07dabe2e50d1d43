"""Quantize PyTorch models: post-training quantization, quantization-aware training, export to ONNX.

>>> import torch
>>> from quark.torch import ModelQuantizer
>>> from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
>>> from quark.torch.quantization.config.type import Dtype
>>> int8 = QuantizationSpec(Dtype.int8)
>>> config = Config(global_quant_config=QuantizationConfig(input_tensors=int8, output_tensors=int8, weight=int8))
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
>>> quantized = ModelQuantizer(config).quantize_model(model, [torch.rand(4, 8)])
>>> quantized(torch.rand(3, 8)).shape
torch.Size([3, 2])
"""

from quark.errors import MissingDependencyError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(
        "quark.torch needs torch, which is not installed: pip install torch onnxscript safetensors"
    ) from error

from quark.torch.capture import export_for_training
from quark.torch.export import ModelExporter, export_gguf, export_onnx, export_safetensors, load_safetensors
from quark.torch.export.params import load_params, save_params
from quark.torch.language.loading import import_model_from_safetensors
from quark.torch.quantization.config.template import LLMTemplate
from quark.torch.quantization.config.type import QuantFlow
from quark.torch.quantization.from_onnx import from_onnx
from quark.torch.quantization.pipeline import ModelQuantizer, RuntimeOptions
from quark.torch.runtime import simulate_runtime
from quark.torch.train.callback import QuantizationCallback
from quark.torch.train.parameters import parameter_groups

__all__ = [
    "LLMTemplate",
    "ModelExporter",
    "ModelQuantizer",
    "QuantFlow",
    "QuantizationCallback",
    "RuntimeOptions",
    "export_for_training",
    "export_gguf",
    "export_onnx",
    "export_safetensors",
    "from_onnx",
    "import_model_from_safetensors",
    "load_params",
    "load_safetensors",
    "parameter_groups",
    "save_params",
    "simulate_runtime",
]

"""Export a frozen network as an ONNX file, checked against torch, or as safetensors with JSON."""

from quark.torch.export.config.config import ExporterConfig, JsonExporterConfig, OnnxExporterConfig
from quark.torch.export.deployable import ExportError, ParityError
from quark.torch.export.exporter import ExportReport, ModelExporter, export_onnx, write_onnx
from quark.torch.export.parity import Divergence, ParityReport
from quark.torch.export.safetensors_file import export_gguf, export_safetensors, load_safetensors

__all__ = [
    "Divergence",
    "ExportError",
    "ExportReport",
    "ExporterConfig",
    "JsonExporterConfig",
    "ModelExporter",
    "OnnxExporterConfig",
    "ParityError",
    "ParityReport",
    "export_gguf",
    "export_onnx",
    "export_safetensors",
    "load_safetensors",
    "write_onnx",
]

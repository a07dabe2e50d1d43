"""ModelExporter: the files of a quantized network, in one folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import nn

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.onnx.save import write_text, writing
from quark.torch.export.config.config import ExporterConfig
from quark.torch.export.deployable import deployable
from quark.torch.export.onnx_file import ExportReport, export_onnx
from quark.torch.export.safetensors_file import export_safetensors

_REAL = "real_quantized"


class ModelExporter:
    """Writes quantized networks to `export_dir`, which is made where it is missing.

    >>> import tempfile, torch
    >>> from quark.torch import ModelQuantizer
    >>> from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
    >>> from quark.torch.quantization.config.type import Dtype
    >>> weights = Config(global_quant_config=QuantizationConfig(weight=QuantizationSpec(Dtype.int8)))
    >>> network = ModelQuantizer(weights).quantize_model(torch.nn.Linear(8, 2), [torch.rand(4, 8)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ModelExporter(export_dir=folder).export_onnx_model(network, torch.rand(1, 8)).name
    'quark_model.onnx'
    """

    def __init__(self, config: ExporterConfig | None = None, export_dir: str | os.PathLike[str] = ".") -> None:
        if config is not None and not isinstance(config, ExporterConfig):
            raise UnsupportedTypeError(f"config: expected an ExporterConfig, got {type(config).__name__}")
        self.config = ExporterConfig() if config is None else config
        self.export_dir = Path(export_dir)
        self.report: ExportReport | None = None  # of the last ONNX file

    def export_onnx_model(
        self,
        model: nn.Module,
        example_input: Any,
        file_name: str = "quark_model.onnx",
        *,
        opset: int | None = None,
        dynamic_batch: bool = True,
        check: bool = True,
    ) -> Path:
        """The network as `file_name` in the folder; see `export_onnx`. With a `json_export_config`, the plan, the
        configuration and the comparison with torch are written beside it."""
        path = self._folder() / _plain_name(file_name)
        network = deployable(model, example_input)
        self.report = export_onnx(network, example_input, path, opset=opset, dynamic_batch=dynamic_batch, check=check)
        if self.config.json_export_config is not None:
            write_text(_as_json(self.report, network), path.with_suffix(".json"))
        return path

    def export_safetensors_model(self, model: nn.Module) -> tuple[Path, Path]:
        """The state of the network as safetensors, with JSON; see `export_safetensors`."""
        options = self.config.json_export_config
        return export_safetensors(model, self._folder(), has_codes=options is None or options.weight_format == _REAL)

    def _folder(self) -> Path:
        with writing(self.export_dir):
            self.export_dir.mkdir(parents=True, exist_ok=True)
        return self.export_dir


def _plain_name(name: str) -> str:
    if Path(name).name != name or not name.endswith(".onnx"):
        raise InvalidValueError(f"file_name {name!r}: expected a name without folders that ends in .onnx")
    return name


def _as_json(report: ExportReport, network: nn.Module) -> str:
    parity = report.parity
    content = {
        "file": report.path.name,
        "opset": report.opset,
        "plan": json.loads(report.plan.to_json()),
        "config": dict(getattr(network, "config", {})),
        "parity": None if parity is None else parity.to_json(),
    }
    return json.dumps(content, indent=1, default=str)

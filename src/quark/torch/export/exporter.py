"""Write quantized networks as files: ONNX, compared with torch, or safetensors with JSON."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.export import ExportedProgram

import quark
from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.onnx.insert import InsertOptions, insert
from quark.onnx.save import SaveOptions, check_output, finish, write_model, write_text, writing
from quark.plan import QuantizationPlan
from quark.text import get_logger
from quark.torch.export.config.config import ExporterConfig
from quark.torch.export.deployable import deployable, example_inputs, samples_around
from quark.torch.export.exported_graph import exported_graph
from quark.torch.export.parity import ParityReport, check_parity
from quark.torch.export.safetensors_file import export_safetensors

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class ExportReport:
    """The file, the plan in its names, and how it compares with the network; `parity` is None if that was not
    checked."""

    path: Path
    plan: QuantizationPlan
    parity: ParityReport | None
    opset: int


def export_onnx(
    model: nn.Module | ExportedProgram,
    example_input: Any,
    path: str | os.PathLike[str],
    *,
    opset: int | None = None,
    dynamic_batch: bool = True,
    check: bool = True,
    has_external_data: bool = False,
) -> ExportReport:
    """Write a network, quantized or float, as ONNX: quantizers as QuantizeLinear and DequantizeLinear, block formats as
    operators of com.amd.quark with portable functions.

    `example_input` is a tensor, a tuple of them or a dictionary by name. `opset` None takes the oldest that supports
    the types. The batch is dynamic unless `dynamic_batch` is False, which fixes it to that of the example. A network
    that still trains is frozen first, in a copy. `check` runs the file in ONNX Runtime and compares it with the
    network: a ParityError names the first layer that differs, and the file is kept for inspection.
    """
    target = check_output(path)
    network = deployable(model, example_input)
    example = example_inputs(network, example_input)
    graph, plan, computed = exported_graph(network, example, opset=opset, has_dynamic_batch=dynamic_batch)
    version = graph.opset_imports[""]
    insert(graph, plan, InsertOptions(has_casts=True))
    values = {}
    for tensor, value in computed.items():
        producer = value.producer()
        if producer is not None and producer.graph is graph.graph:  # dynamic quantization replaces whole layers
            values[tensor] = str(value.name)
    options = SaveOptions(has_external_data=has_external_data)
    metadata = {"quark.version": quark.__version__, "quark.plan_sha256": plan.digest}
    write_model(finish(graph, metadata, options), target, options)
    parity = None
    if check:
        batches = samples_around(example, has_dynamic_batch=dynamic_batch)
        parity = check_parity(network, target, batches, values)
        _LOG.info("%s: ONNX Runtime and torch agree: %s", target.name, parity)
    return ExportReport(target, plan, parity, version)


class ModelExporter:
    """Writes quantized networks to `export_dir`, which is created if necessary.

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
        """Write the network as `file_name` in the folder, see `export_onnx`, and return the path. With a
        `json_export_config`, the plan, the configuration and the comparison with torch are written beside it."""
        folder = self._folder()
        if Path(file_name).name != file_name or not file_name.endswith(".onnx"):
            raise InvalidValueError(f"file_name {file_name!r}: expected a name without folders that ends in .onnx")
        path = folder / file_name
        network = deployable(model, example_input)
        report = export_onnx(network, example_input, path, opset=opset, dynamic_batch=dynamic_batch, check=check)
        self.report = report
        if self.config.json_export_config is not None:
            content = {
                "file": report.path.name,
                "opset": report.opset,
                "plan": json.loads(report.plan.to_json()),
                "config": dict(getattr(network, "config", {})),
                "parity": None if report.parity is None else report.parity.to_json(),
            }
            write_text(json.dumps(content, indent=1, default=str), path.with_suffix(".json"))
        return path

    def export_safetensors_model(self, model: nn.Module) -> tuple[Path, Path]:
        """Write the state of the network as safetensors, with JSON; see `export_safetensors`."""
        options = self.config.json_export_config
        has_codes = options is None or options.weight_format == "real_quantized"
        return export_safetensors(model, self._folder(), has_codes=has_codes)

    def _folder(self) -> Path:
        with writing(self.export_dir):
            self.export_dir.mkdir(parents=True, exist_ok=True)
        return self.export_dir

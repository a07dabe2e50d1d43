"""A network as an ONNX file: the plan carried out on the exported graph, the file written and compared with torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import fx, nn
from torch.export import ExportedProgram

import quark
from quark.onnx.insert import InsertOptions, insert
from quark.onnx.save import SaveOptions, check_output, finish, write_model
from quark.plan import QuantizationPlan
from quark.text import get_logger
from quark.torch.export.deployable import deployable
from quark.torch.export.exported_graph import exported_graph
from quark.torch.export.parity import ParityReport, check_parity
from quark.torch.export.samples import example_inputs, samples_around

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class ExportReport:
    """The file, the plan in its names, and how it compares with the network; `parity` is None where that was not
    wanted."""

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

    `example_input` is a tensor, a tuple of them or a dictionary by name. `opset` None takes the oldest that the numbers
    can be written in. The batch is free unless `dynamic_batch` is False, which fixes that of the example. A network
    that still trains is frozen first, in a copy. `check` runs the file in ONNX Runtime and compares it with the
    network: a ParityError names the first layer that differs, and leaves the file for inspection.
    """
    target = check_output(path)
    network = deployable(model, example_input)
    example = tuple(_in_type_of(network, each) for each in example_inputs(network, example_input))
    exported = exported_graph(network, example, opset=opset, has_dynamic_batch=dynamic_batch)
    graph, plan = exported.model, exported.plan
    version = graph.opset_imports[""]
    insert(graph, plan, InsertOptions(has_casts=True))
    values = {tensor: str(value.name) for tensor, value in exported.values.items() if _is_there(graph, value)}
    options = SaveOptions(has_external_data=has_external_data)
    metadata = {"quark.version": quark.__version__, "quark.plan_sha256": plan.digest}
    write_model(finish(graph, metadata, options), target, options)
    parity = None
    if check:
        batches = samples_around(example, has_dynamic_batch=dynamic_batch)
        parity = check_parity(network, target, batches, values)
        _LOG.info("%s: ONNX Runtime and torch agree: %s", target.name, parity)
    return ExportReport(target, plan, parity, version)


def _in_type_of(network: fx.GraphModule, x: torch.Tensor) -> torch.Tensor:
    """Numbers in the type of the network's weights: bfloat16 and float64 networks are exported in float32."""
    kinds = {each.dtype for each in network.parameters() if each.is_floating_point()}
    return x.to(kinds.pop()) if x.dtype in (torch.bfloat16, torch.float64) and len(kinds) == 1 else x


def _is_there(model: ir.Model, value: ir.Value) -> bool:
    """That the graph still computes the value: dynamic quantization replaces whole layers."""
    producer = value.producer()
    return producer is not None and producer.graph is model.graph

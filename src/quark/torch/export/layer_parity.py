"""Every layer by itself: the first one whose results differ although it is given the same numbers.

Both networks are run once. The file's graph is cut at the tensors whose names are known in torch: what stands behind a
cut reads the numbers that torch has there, and what stands before it is compared with them. So no difference is handed
on, and none can hide behind another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import fx

from quark.fidelity import FidelityMeter
from quark.onnx.session import open_session
from quark.torch.export.samples import Inputs
from quark.torch.graph import layer_name, outputs_of
from quark.torch.train.quantizers import DynamicQuantizer

Array = NDArray[Any]

LAYER_SQNR_DB = 60.0  # the same numbers are rounded the same way: only the order of sums differs
_LOOSE_SQNR_DB = 35.0  # float16 sums, and scales that are found at run time, whose layers cannot be told apart
_MOST_SAMPLES = 2  # all tensors of the network are held at once


@dataclass(frozen=True)
class Divergence:
    """A layer that computes something else in the file: its tensor in torch, and how far that is."""

    layer: str
    tensor: str
    sqnr_db: float
    max_abs_diff: float

    def __str__(self) -> str:
        name = "" if self.tensor == self.layer else f", tensor '{self.tensor}'"
        return f"'{self.layer}'{name} (SQNR {self.sqnr_db:.1f} dB, largest difference {self.max_abs_diff:.2g})"


def first_divergence(
    network: fx.GraphModule, path: Path, inputs: Inputs, values: Mapping[str, str]
) -> Divergence | None:
    """The first layer in the order of the file whose result is not what torch has; None where all agree. `values` has
    the name in the file for names of nodes in torch."""
    model = ir.load(path)
    own = [str(value.name) for value in model.graph.outputs]
    arguments = [str(value.name) for value in model.graph.inputs]
    inputs = _fewer(model, inputs)
    compared = _cut(model, {name: tensor for tensor, name in values.items()})
    given = dict(compared)
    for name, node in zip(own, outputs_of(network.graph), strict=True):
        compared.setdefault(name, str(node.name))
    expected = _values_of(network, inputs, set(compared.values()))
    feeds = {name: _array(x) for name, x in zip(arguments, inputs, strict=True)}
    feeds |= {_given(name): expected[tensor] for name, tensor in given.items() if _given(name) in _inputs(model)}
    least = _least_sqnr(network)
    results = open_session(model, has_optimizations=False).run(list(compared), feeds)
    for tensor, actual in zip(compared.values(), results, strict=True):
        meter = FidelityMeter(tensor)
        meter.add(expected[tensor].reshape(np.shape(actual)), np.asarray(actual))
        found = meter.result()
        if found.sqnr_db < least:
            return Divergence(_layer(network, tensor), tensor, found.sqnr_db, found.max_error)
    return None


def _least_sqnr(network: fx.GraphModule) -> float:
    is_half = any(each.dtype is torch.float16 for each in network.parameters())
    is_dynamic = any(isinstance(each, DynamicQuantizer) for each in network.modules())
    return _LOOSE_SQNR_DB if is_half or is_dynamic else LAYER_SQNR_DB


def _cut(model: ir.Model, tensors: Mapping[str, str]) -> dict[str, str]:
    """Let the readers of these tensors read inputs of the graph instead, and make the tensors outputs; in the order of
    the graph, those that it has."""
    found: dict[str, str] = {}
    for value in [value for node in model.graph for value in node.outputs if value.name in tensors]:
        name = str(value.name)
        found[name] = tensors[name]
        uses = list(value.uses())
        if uses:
            given = ir.Value(name=_given(name), type=value.type, shape=value.shape)
            model.graph.inputs.append(given)
            for use in uses:
                use.node.replace_input_with(use.idx, given)
        if not value.is_graph_output():
            model.graph.outputs.append(value)
    return found


def _given(name: str) -> str:
    return f"{name}/given"


def _inputs(model: ir.Model) -> set[str]:
    return {str(value.name) for value in model.graph.inputs}


def _fewer(model: ir.Model, inputs: Inputs) -> Inputs:
    """The first samples, where the file takes batches of any length."""
    is_free = [
        bool(value.shape) and not isinstance(value.shape[0], int)  # type: ignore[index]
        for value in model.graph.inputs
    ]
    return tuple(x[:_MOST_SAMPLES] if free else x for x, free in zip(inputs, is_free, strict=True))


def _values_of(network: fx.GraphModule, inputs: Inputs, wanted: Collection[str]) -> dict[str, Array]:
    recorder = _Recorder(network, wanted)
    with torch.no_grad():
        recorder.run(*inputs)
    return recorder.values


class _Recorder(fx.Interpreter):
    """Runs a network and keeps the values of some nodes."""

    def __init__(self, network: fx.GraphModule, wanted: Collection[str]) -> None:
        super().__init__(network)
        self.wanted = wanted
        self.values: dict[str, Array] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self.wanted and isinstance(value, torch.Tensor):
            self.values[n.name] = _array(value)
        return value


def _array(x: torch.Tensor) -> Array:
    return np.ascontiguousarray(x.detach().cpu().numpy())


def _layer(network: fx.GraphModule, tensor: str) -> str:
    """The layer that a tensor comes from; that of a quantizer is the one before it."""
    node = next(each for each in network.graph.nodes if each.name == tensor)
    while node.op == "call_module" and "nn_module_stack" not in node.meta and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return layer_name(node)

"""Fit the layers of a block together: the part of a network between two tensors is computed by torch, so that the
gradient of its output reaches every layer.

Activations are rounded for each reader as the plan says, and constants too; weights and biases of the trained layers
are handed in with every call. Activations of both networks are kept for all samples while the block is fitted, beyond a
limit in a temporary file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from quark.features.finetuning.blocks import Block, nodes_of
from quark.features.finetuning.fit_block import BlockLayer, BlockProblem, fit_block
from quark.features.finetuning.layers import TrainedLayer, bias_of
from quark.features.finetuning.operators import OPERATORS, operand
from quark.features.finetuning.options import FinetuneOptions
from quark.features.finetuning.problem import Array, Fitted
from quark.features.finetuning.quantizers import Quantizer, quantizer_of, straight_through
from quark.features.finetuning.walk import Walk, held_out
from quark.onnx.graph import attribute, constant, input_value, is_constant, readers
from quark.plan import Choice, DynamicChoice
from quark.rounded import rounded

Choices = Mapping[tuple[str, int], Choice]  # by the name of a node and the index of its input

# inputs that say what is computed, and have to be known beforehand
_PARAMETERS = {
    "Reshape": (1,),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
    "Pad": (1, 2, 3),
    "ReduceMean": (1,),
    "BatchNormalization": (1, 2, 3, 4),
}
_REFUSED: Mapping[str, Callable[[ir.Node], bool]] = {
    "Pad": lambda node: attribute(node, "mode", "constant") != "constant",
    "ConvTranspose": lambda node: "output_shape" in node.attributes,
    "BatchNormalization": lambda node: bool(attribute(node, "training_mode", 0)),
    "Pow": lambda node: any(getattr(constant(value), "dtype", np.dtype(float)).kind != "f" for value in node.inputs),
}


def unsupported(nodes: Iterable[ir.Node]) -> str | None:
    """The first node that cannot be computed here, and why; None if all can."""
    for node in nodes:
        reason = _reason_against(node)
        if reason is not None:
            return f"{node.op_type} '{node.name}' {reason}"
    return None


def _reason_against(node: ir.Node) -> str | None:
    if node.domain or node.op_type not in OPERATORS:
        return "is not an operator that training computes"
    refuse = _REFUSED.get(node.op_type)
    if refuse is not None and refuse(node):
        return "is of a kind that training does not know"
    values = [input_value(node, index) for index in _PARAMETERS.get(node.op_type, ())]
    if any(value is not None and not is_constant(value) for value in values):
        return "is told at run time what to do"
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return "has a second output that is read"
    data = [value for value in node.inputs if value is not None and not is_constant(value)]
    if any(value.dtype not in (None, ir.DataType.FLOAT) for value in (*data, node.outputs[0])):
        return "is not computed in float32"
    return None


@dataclass(frozen=True, eq=False)
class _Step:
    """A node. `constants` are its inputs that are known: tensors, or numpy arrays of integers. `layer` is the number of
    the trained layer that it is."""

    name: str
    operator: Callable[..., Any]
    attributes: Mapping[str, Any]
    inputs: tuple[str | None, ...]
    output: str
    constants: Mapping[int, Any]
    choices: Mapping[int, Choice]
    layer: int | None


class TorchGraph:
    """Call it with a batch of the block's inputs, and weight and bias of each layer as they are to be used; a bias of
    None is the layer's own. It returns the block's output, and the output of each layer."""

    def __init__(self, model: ir.Model, block: Block, choices: Choices, device: str = "cpu") -> None:
        self._block = block
        numbers = {layer.name: number for number, layer in enumerate(block.layers)}
        nodes = nodes_of(model, block)
        self._steps = [_step(node, numbers.get(str(node.name)), choices, device) for node in nodes]
        self._quantizers: dict[tuple[str, int, tuple[int, ...]], Quantizer] = {}

    def __call__(
        self, x: torch.Tensor, weights: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        values = {self._block.input: x}
        seen: dict[tuple[str, Choice], torch.Tensor] = {}
        given: list[Any] = [None] * len(self._block.layers)
        for step in self._steps:
            constants = step.constants
            if step.layer is not None:
                weight, bias = weights[step.layer]
                constants = {**constants, 1: weight}
                if bias is not None:
                    constants[2] = bias.reshape(step.constants[2].shape)
            inputs = [
                constants[index] if index in constants else self._read(step, index, values, seen)
                for index in range(len(step.inputs))
            ]
            values[step.output] = step.operator(inputs, step.attributes)
            if step.layer is not None:
                given[step.layer] = values[step.output]
        return values[self._block.output], given

    def _read(
        self,
        step: _Step,
        index: int,
        values: Mapping[str, torch.Tensor],
        seen: dict[tuple[str, Choice], torch.Tensor],
    ) -> torch.Tensor | None:
        """An input as the reader sees it; readers that see the same share it."""
        name = step.inputs[index]
        if name is None:
            return None
        choice = step.choices.get(index)
        if choice is None:
            return values[name]
        if (name, choice) not in seen:
            x = values[name]
            key = (step.name, index, tuple(x.shape))
            if key not in self._quantizers:
                self._quantizers[key] = quantizer_of(choice, tuple(x.shape), x.device)
            seen[name, choice] = straight_through(x, self._quantizers[key])
        return seen[name, choice]


def _step(node: ir.Node, layer: int | None, choices: Choices, device: str) -> _Step:
    own = {index: choices.get((str(node.name), index)) for index in range(len(node.inputs))}
    known = {
        index: choice for index, choice in own.items() if choice is not None and not isinstance(choice, DynamicChoice)
    }
    constants = {
        index: operand(values if index not in known else rounded(values, known[index]), device)
        for index, value in enumerate(node.inputs)
        if (values := constant(value)) is not None
    }
    return _Step(
        str(node.name),
        OPERATORS[node.op_type],
        {name: attribute(node, name) for name in node.attributes},
        tuple(None if value is None else str(value.name) for value in node.inputs),
        str(node.outputs[0].name),
        constants,
        {index: choice for index, choice in known.items() if index not in constants},
        layer,
    )


@dataclass(frozen=True, eq=False)
class BlockFitter:
    """`model` is the network without quantizers, `choices` how inputs of its nodes are rounded. `count` samples are
    walked through the float network and through the quantized one, which has the nodes of the model by name.
    `make_store` returns an empty store of samples (append, [], len, close)."""

    model: ir.Model
    choices: Mapping[tuple[str, int], Choice]
    float_walk: Walk
    quantized_walk: Walk
    count: int
    make_store: Callable[[], Any]
    options: FinetuneOptions
    starts: Mapping[str, Array]  # weights to start from that are not those that stand, by layer

    def why_not(self, block: Block) -> str | None:
        """The reason why the layers of the block have to be fitted one by one; None if they need not."""
        if len(block.layers) == 1:
            return "it has one layer"
        if self.count < 2:
            return "there is one sample only"
        if self.float_walk.value(block.output) is None:
            return f"the float network has no '{block.output}'"
        return unsupported(nodes_of(self.model, block))

    def fit(self, block: Block, place: int) -> list[Fitted]:
        """Fit all layers; `place` is the number of the first of them among all."""
        options = replace(self.options.fit, seed=self.options.fit.seed + place)
        nodes = {str(node.name): node for node in self.model.graph}
        layers = tuple(_layer(nodes[layer.name], layer, self.starts.get(layer.name)) for layer in block.layers)
        network = TorchGraph(self.model, block, self.choices, options.device)
        output = next(value for node in nodes.values() for value in node.outputs if value.name == block.output)
        seen = (self.choices.get((str(reader.name), index)) for reader, index in readers(output))
        behind = next((choice for choice in seen if choice is not None and not isinstance(choice, DynamicChoice)), None)
        with ExitStack() as stack:

            def keep(walk: Walk, tensor: str) -> Sequence[Array]:
                store = stack.enter_context(closing(self.make_store()))
                walk.store([tensor], store)
                return _Activations(store, tensor)

            inputs = keep(self.quantized_walk, self._name_in_quantized(block.input))
            outputs = keep(self.float_walk, block.output)
            floats = None
            if options.drop_ratio < 1 and self.float_walk.value(block.input) is not None:
                floats = keep(self.float_walk, block.input)
            held = held_out(self.count)
            problem = BlockProblem(block.name, layers, network, inputs, outputs, held, floats, behind)
            return fit_block(problem, options)

    def _name_in_quantized(self, tensor: str) -> str:
        """The name in the quantized network: an output of the graph that is quantized has given its name away."""
        for node in self.model.graph:
            for index, value in enumerate(node.outputs):
                if value.name == tensor:
                    copied = next(
                        candidate for candidate in self.quantized_walk.model.graph if candidate.name == node.name
                    )
                    return str(copied.outputs[index].name)
        return tensor


class _Activations(Sequence[Array]):
    """One tensor for every sample, read when it is asked for."""

    def __init__(self, store: Any, tensor: str) -> None:
        self._store, self._tensor = store, tensor

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, number: Any) -> Any:
        return self._store[number][self._tensor]


def _layer(node: ir.Node, layer: TrainedLayer, start: Array | None) -> BlockLayer:
    weight, bias = constant(input_value(node, 1)), bias_of(node)
    assert weight is not None, layer.name
    flat = None if bias is None else bias.reshape(-1)
    return BlockLayer(layer.name, weight, layer.layout, flat, layer.weight, layer.bias, layer.has_bias, start)

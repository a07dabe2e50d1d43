"""The part of a network between two tensors, computed by torch, so that the gradient of its output reaches every layer.

Activations are rounded for each reader as the plan says, and constants too; weights and biases of the trained layers
are handed in with every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import attribute, constant, input_value, is_constant
from quark.onnx.refine.fast_finetune.blocks import Block, nodes_of
from quark.plan import Choice, DynamicChoice
from quark.reconstruction.operators import OPERATORS, operand
from quark.reconstruction.problem import Array
from quark.reconstruction.quantizers import Quantizer, quantizer_of
from quark.reconstruction.straight_through import straight_through
from quark.rounded import rounded

if TYPE_CHECKING:
    import torch

Choices = Mapping[tuple[str, int], Choice]  # by the name of a node and the number of its input

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
    """The first node that cannot be computed here, and why; None where all can."""
    for node in nodes:
        reason = _reason_against(node)
        if reason is not None:
            return f"{node.op_type} '{node.name}' {reason}"
    return None


def _reason_against(node: ir.Node) -> str | None:
    if node.domain or node.op_type not in OPERATORS:
        return "is no operator that training computes"
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
    None is the layer's own. It returns the block's output, and what each layer gives."""

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
            constants = step.constants if step.layer is None else _with(step.constants, *weights[step.layer])
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
            seen[name, choice] = straight_through(values[name], self._quantizer(step, index, values[name]))
        return seen[name, choice]

    def _quantizer(self, step: _Step, index: int, x: torch.Tensor) -> Quantizer:
        key = (step.name, index, tuple(x.shape))
        if key not in self._quantizers:
            self._quantizers[key] = quantizer_of(step.choices[index], tuple(x.shape), x.device)
        return self._quantizers[key]


def _step(node: ir.Node, layer: int | None, choices: Choices, device: str) -> _Step:
    own = {index: choices.get((str(node.name), index)) for index in range(len(node.inputs))}
    known = {index: each for index, each in own.items() if each is not None and not isinstance(each, DynamicChoice)}
    constants = {
        index: _constant(values, known.get(index), device)
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
        {index: each for index, each in known.items() if index not in constants},
        layer,
    )


def _constant(values: Array, choice: Choice | None, device: str) -> Any:
    return operand(values if choice is None else rounded(values, choice), device)


def _with(constants: Mapping[int, Any], weight: torch.Tensor, bias: torch.Tensor | None) -> Mapping[int, Any]:
    trained = {**constants, 1: weight}
    return trained if bias is None else {**trained, 2: bias.reshape(constants[2].shape)}

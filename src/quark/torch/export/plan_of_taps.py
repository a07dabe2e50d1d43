"""Where the taps stand in an ONNX graph is the plan; then they go.

    x -> tap -> Conv                      tensor x, reader Conv
    W -> tap -> Transpose -> MatMul       tensor W, turned once and for all, reader MatMul: integer kernels want
                                          constant weights; axis and scales are turned with it

A quantizer right behind another one, and one between an input of the graph and an output, get an Identity to stand
behind: a plan speaks of tensors, and these would be one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import (
    add_initializer,
    add_node,
    attribute,
    constant,
    is_constant,
    nodes,
    readers,
    remove_dead,
    replace_input,
)
from quark.plan import AffineChoice, BlockChoice, Choice, QuantizationPlan, Reader, Role, TensorChoice
from quark.rounded import parameter_shape
from quark.torch.export.names import rename
from quark.torch.export.taps import Tap
from quark.torch.export.translate import TAP, TAP_DOMAIN


@dataclass(eq=False)
class Place:
    """A tensor, and who reads it quantized; names are looked up when everything has its own."""

    tap: Tap
    value: ir.Value
    choice: Choice
    inputs: list[tuple[ir.Node, int]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def tensor_choice(self, reason: str) -> TensorChoice:
        read = [Reader(str(node.name), index) for node, index in self.inputs]
        read += [Reader("", index) for index in self.outputs]
        role = self.tap.role if is_constant(self.value) else Role.ACTIVATION
        return TensorChoice(str(self.value.name), role, self.choice, tuple(read), reason)


@dataclass(frozen=True, eq=False)
class TappedPlaces:
    """Where taps stood that were quantizers, and the computed values of the graph by the names that torch has."""

    places: tuple[Place, ...]
    values: Mapping[str, ir.Value]

    def plan(self, reasons: Mapping[str, str]) -> QuantizationPlan:
        """The plan, in the names that the graph has now."""
        tensors = [each.tensor_choice(reasons.get(each.tap.tensor, "")) for each in self.places]
        return QuantizationPlan(tuple(_merged(tensors)))


def remove_taps(model: ir.Model, taps: Sequence[Tap]) -> TappedPlaces:
    """Take the taps out of the graph, in place, and say where they were."""
    by_number = {tap.number: tap for tap in taps}
    removal = _Removal(model)
    removal.part_chains()
    for node in removal.taps():
        removal.take_out(node, by_number[int(attribute(node, "number"))])
    remove_dead(model)
    removal.name_turned()
    if all(node.domain != TAP_DOMAIN for node in model.graph):
        model.opset_imports.pop(TAP_DOMAIN, None)
    return TappedPlaces(tuple(each for each in removal.places if each.inputs or each.outputs), removal.values)


class _Removal:
    """The graph, and what was found in it so far."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.values: dict[str, ir.Value] = {}
        self.places: list[Place] = []
        self._turned: dict[tuple[str, tuple[int, ...]], ir.Value] = {}

    def taps(self) -> list[ir.Node]:
        return [node for node in nodes(self.model) if _is_tap(node)]

    def part_chains(self) -> None:
        """Put a tensor between a tap and the one right behind it."""
        for node in self.taps():
            source = node.inputs[0]
            if source is not None and _is_tap(source.producer()):
                self._identity_before(node)

    def take_out(self, node: ir.Node, tap: Tap) -> None:
        """Let whoever reads the tap read its source."""
        source, result = node.inputs[0], node.outputs[0]
        assert source is not None, node.name
        if result.is_graph_output() and (source.is_graph_output() or source.producer() is None):
            source = self._identity_before(node)
        self._note_value(source, tap)
        place = None if tap.choice is None else Place(tap, source, tap.choice)
        for reader, index in readers(result):
            if _is_turning(reader, source):
                self._turn(reader, source, tap)
                continue
            replace_input(reader, index, source)
            if place is not None:
                place.inputs.append((reader, index))
        outputs = [index for index, output in enumerate(self.model.graph.outputs) if output is result]
        for index in outputs:
            self._hand_out(index, source)
        if place is not None:
            place.outputs += outputs
            self.places.append(place)

    def name_turned(self) -> None:
        """Weights that are there only turned get their names back."""
        for (name, _), value in self._turned.items():
            if name not in self.model.graph.initializers:
                value.name = name

    def _identity_before(self, tap: ir.Node) -> ir.Value:
        source = tap.inputs[0]
        assert source is not None, tap.name
        value = add_node(self.model, "Identity", [source], before=tap, name=f"{source.name}_Identity").outputs[0]
        value.shape = source.shape
        replace_input(tap, 0, value)
        return value

    def _note_value(self, source: ir.Value, tap: Tap) -> None:
        """Remember a computed value by the name that torch has for it, and give it that name where it can have it."""
        if is_constant(source):
            return
        self.values.setdefault(tap.tensor, source)
        if source.producer() is not None and not source.is_graph_output() and source.name not in self.values:
            rename(self.model, source, tap.tensor)

    def _hand_out(self, index: int, source: ir.Value) -> None:
        """Let an output of the graph be the source, under the name that the output has."""
        old = self.model.graph.outputs[index]
        name, old.name = str(old.name), f"{old.name}/tap"
        rename(self.model, source, name)
        source.shape = old.shape if source.shape is None else source.shape
        self.model.graph.outputs[index] = source

    def _turn(self, node: ir.Node, source: ir.Value, tap: Tap) -> None:
        """Let the readers of a Transpose read a constant that is transposed already."""
        array = constant(source)
        assert array is not None, source.name
        perm = tuple(int(axis) for axis in attribute(node, "perm", tuple(reversed(range(array.ndim)))))
        key = (str(source.name), perm)
        if key not in self._turned:
            self._turned[key] = add_initializer(self.model, key[0], np.ascontiguousarray(array.transpose(perm)))
        turned = self._turned[key]
        place = None if tap.choice is None else Place(tap, turned, turned_choice(tap.choice, array.shape, perm))
        for reader, index in readers(node.outputs[0]):
            replace_input(reader, index, turned)
            if place is not None:
                place.inputs.append((reader, index))
        if place is not None:
            self.places.append(place)


def turned_choice(choice: Choice, shape: tuple[int, ...], perm: Sequence[int]) -> Choice:
    """The choice for the transpose of an array of that shape.

    >>> choice = AffineChoice("int4", (1.0, 2.0, 3.0, 4.0), (0,) * 4, axis=1, group_size=8)
    >>> turned_choice(choice, (2, 16), (1, 0)).scale
    (1.0, 3.0, 2.0, 4.0)
    """
    if isinstance(choice, BlockChoice):
        return replace(choice, axis=perm.index(choice.axis % len(shape)))
    if not isinstance(choice, AffineChoice) or choice.axis is None:
        return choice
    axis = perm.index(choice.axis % len(shape))
    if choice.group_size is None:
        return replace(choice, axis=axis)
    groups = parameter_shape(choice, shape)
    scale, zero_point = (
        tuple(np.array(numbers).reshape(groups).transpose(perm).reshape(-1).tolist())
        for numbers in (choice.scale, choice.zero_point)
    )
    return replace(choice, axis=axis, scale=scale, zero_point=zero_point)


def _merged(tensors: Iterable[TensorChoice]) -> list[TensorChoice]:
    """One entry for each tensor and choice: quantizers that do the same to a tensor become one pair of nodes."""
    merged: list[TensorChoice] = []
    for each in tensors:
        same = next((i for i, other in enumerate(merged) if _is_same(other, each)), None)
        if same is None:
            merged.append(each)
        else:
            merged[same] = replace(merged[same], readers=(*merged[same].readers, *each.readers))
    return merged


def _is_same(one: TensorChoice, other: TensorChoice) -> bool:
    return (one.tensor, one.role) == (other.tensor, other.role) and one.choice == other.choice


def _is_tap(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == TAP and node.domain == TAP_DOMAIN


def _is_turning(node: ir.Node, source: ir.Value) -> bool:
    is_transpose = node.op_type == "Transpose" and not node.domain
    return is_transpose and is_constant(source) and not node.outputs[0].is_graph_output()

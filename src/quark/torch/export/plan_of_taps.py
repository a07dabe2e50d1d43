"""Read the plan from the taps in an ONNX graph, remove them, and give nodes and tensors names that people recognize.

    x -> tap -> Conv                      tensor x, reader Conv
    W -> tap -> Transpose -> MatMul       tensor W, transposed once and for all, reader MatMul: integer kernels want
                                          constant weights; axis and scales are transposed with it

A quantizer right behind another one, and one between an input of the graph and an output, get an Identity to stand
behind: a plan speaks of tensors, and these would be one. The names:

    nodes      the path of the module that they came from, `layer1.0.conv1`; where several nodes came from it, with the
               operator: `layer1.0/Add`. Outside of any module, the name that the node had in torch
    outputs    output, output_1 ...; inputs keep the names of the arguments
    sizes      `batch` for the free axis
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import (
    add_initializer,
    add_node,
    attribute,
    constant,
    fresh_name,
    is_constant,
    nodes,
    readers,
    remove_dead,
    replace_input,
)
from quark.plan import AffineChoice, Choice, DynamicChoice, QuantizationPlan, Reader, Role, TensorChoice
from quark.rounded import parameter_shape
from quark.torch.export.translate import TAP, TAP_DOMAIN, Tap

BATCH = "batch"
_AXES = {(2, 1): "sequence", (3, 1): "sequence", (4, 2): "height", (4, 3): "width"}
_SCOPES = "pkg.torch.onnx.name_scopes"
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"  # torch's word for sizes of inputs
_MADE_UP = re.compile(r"(val|n|node)_?\w*\d+")


@dataclass(eq=False)
class Place:
    """A tensor behind a tap, and its readers; names are looked up after everything has been named."""

    tap: Tap
    value: ir.Value
    choice: Choice | None
    inputs: list[tuple[ir.Node, int]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


def remove_taps(model: ir.Model, taps: Sequence[Tap]) -> TappedPlaces:
    """Take the taps out of the graph, in place, and return where they were."""
    by_number = {tap.number: tap for tap in taps}
    places = TappedPlaces(model)
    for node in _taps(model):  # put a tensor between a tap and the one right behind it
        source = node.inputs[0]
        if source is not None and _is_tap(source.producer()):
            places.identity_before(node, source)
    for node in _taps(model):
        places.take_out(node, by_number[int(attribute(node, "number"))])
    remove_dead(model)
    for (name, _), value in places.transposed.items():
        if name not in model.graph.initializers:  # the weight is only needed transposed
            value.name = name
    if all(node.domain != TAP_DOMAIN for node in model.graph):
        model.opset_imports.pop(TAP_DOMAIN, None)
    return places


class TappedPlaces:
    """The places of taps, and the computed values of the graph by their names in torch."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.values: dict[str, ir.Value] = {}
        self.places: list[Place] = []
        self.transposed: dict[tuple[str, tuple[int, ...]], ir.Value] = {}

    def plan(self, reasons: Mapping[str, str]) -> QuantizationPlan:
        """Return the plan, in the names that the graph has now. Quantizers that do the same to a tensor are merged."""
        merged: dict[tuple[str, Role, Choice], TensorChoice] = {}
        for place in self.places:
            if place.choice is None or not (place.inputs or place.outputs):
                continue
            read = [Reader(str(node.name), index) for node, index in place.inputs]
            read += [Reader("", index) for index in place.outputs]
            role = place.tap.role if is_constant(place.value) else Role.ACTIVATION
            key = (str(place.value.name), role, place.choice)
            known = merged.get(key)
            if known is None:
                merged[key] = TensorChoice(*key, tuple(read), reasons.get(place.tap.tensor, ""))
            else:
                merged[key] = replace(known, readers=(*known.readers, *read))
        return QuantizationPlan(tuple(merged.values()))

    def take_out(self, node: ir.Node, tap: Tap) -> None:
        """Connect all readers of the tap to its source."""
        source, result = node.inputs[0], node.outputs[0]
        assert source is not None, node.name
        if result.is_graph_output() and (source.is_graph_output() or source.producer() is None):
            source = self.identity_before(node, source)
        is_fixed = is_constant(source)
        if not is_fixed:  # remember it by its name in torch, and give it that name if it can have it
            self.values.setdefault(tap.tensor, source)
            if source.producer() is not None and not source.is_graph_output() and source.name not in self.values:
                rename(self.model, source, tap.tensor)
        place = Place(tap, source, tap.choice)
        for reader, index in readers(result):
            is_transpose = reader.op_type == "Transpose" and not reader.domain
            if is_transpose and is_fixed and not reader.outputs[0].is_graph_output():
                self._transpose(reader, source, tap)
            else:
                replace_input(reader, index, source)
                place.inputs.append((reader, index))
        for index, output in enumerate(self.model.graph.outputs):
            if output is result:
                name, output.name = str(output.name), f"{output.name}/tap"
                rename(self.model, source, name)
                source.shape = output.shape if source.shape is None else source.shape
                self.model.graph.outputs[index] = source
                place.outputs.append(index)
        self.places.append(place)

    def identity_before(self, tap: ir.Node, source: ir.Value) -> ir.Value:
        value = add_node(self.model, "Identity", [source], before=tap, name=f"{source.name}_Identity").outputs[0]
        value.shape = source.shape
        replace_input(tap, 0, value)
        return value

    def _transpose(self, node: ir.Node, source: ir.Value, tap: Tap) -> None:
        """Replace a Transpose of a constant by a transposed constant."""
        array = constant(source)
        assert array is not None, source.name
        perm = tuple(int(axis) for axis in attribute(node, "perm", tuple(reversed(range(array.ndim)))))
        key = (str(source.name), perm)
        if key not in self.transposed:
            self.transposed[key] = add_initializer(self.model, key[0], np.ascontiguousarray(array.transpose(perm)))
        choice = None if tap.choice is None else transposed_choice(tap.choice, array.shape, perm)
        place = Place(tap, self.transposed[key], choice)
        for reader, index in readers(node.outputs[0]):
            replace_input(reader, index, self.transposed[key])
            place.inputs.append((reader, index))
        self.places.append(place)


def _taps(model: ir.Model) -> list[ir.Node]:
    return [node for node in nodes(model) if _is_tap(node)]


def _is_tap(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == TAP and node.domain == TAP_DOMAIN


def transposed_choice(choice: Choice, shape: tuple[int, ...], perm: Sequence[int]) -> Choice:
    """Return the choice for the transpose of an array of that shape.

    >>> choice = AffineChoice("int4", (1.0, 2.0, 3.0, 4.0), (0,) * 4, axis=1, group_size=8)
    >>> transposed_choice(choice, (2, 16), (1, 0)).scale
    (1.0, 3.0, 2.0, 4.0)
    """
    if isinstance(choice, DynamicChoice) or choice.axis is None:
        return choice
    axis = perm.index(choice.axis % len(shape))
    if not isinstance(choice, AffineChoice) or choice.group_size is None:
        return replace(choice, axis=axis)
    groups = parameter_shape(choice, shape)
    scale, zero_point = (
        tuple(np.array(numbers).reshape(groups).transpose(perm).reshape(-1).tolist())
        for numbers in (choice.scale, choice.zero_point)
    )
    return replace(choice, axis=axis, scale=scale, zero_point=zero_point)


def give_names(model: ir.Model) -> None:
    """Name nodes, outputs and the batch, in place.

    Everything else that the exporter wrote about a node is removed, such as lines of code with paths of the machine.
    """
    bases: dict[ir.Node, str] = {}  # the innermost module, or the node of torch, that an ONNX node came from
    for node in nodes(model):
        try:
            scopes = [str(scope) for scope in ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))]
        except (ValueError, SyntaxError):
            scopes = []
        path, name = (scopes[-2] if len(scopes) > 1 else ""), (scopes[-1] if scopes else "")
        path = "" if path == _NO_MODULE else path
        given = str(node.outputs[0].name) if node.outputs else ""
        given = "" if _MADE_UP.fullmatch(given) else given
        bases[node] = path.removeprefix("L['self'].") or given or name or str(node.name)
    counts = Counter(bases.values())
    taken: set[str] = set()
    for node, base in bases.items():
        name = base if counts[base] == 1 else f"{base}/{node.op_type}"
        count = 0
        while name in taken:
            count += 1
            name = f"{base}/{node.op_type}_{count}"
        taken.add(name)
        node.name = name
    for value in model.graph.outputs:
        value.name = f"{value.name}/output"  # avoids clashes between names
    for index, value in enumerate(model.graph.outputs):
        rename(model, value, "output" if index == 0 else f"output_{index}")
    for node in nodes(model):
        for value in node.outputs:
            if _MADE_UP.fullmatch(str(value.name)):
                rename(model, value, f"{node.name}_output")
    _name_batch(model)
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.graph.name, model.doc_string, model.graph.doc_string = "network", "", ""
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
    for value in values_of(model):
        value.metadata_props.clear()


def rename(model: ir.Model, value: ir.Value, name: str) -> None:
    """Give a value a name. Another value with that name is renamed, unless it is an input, an output or a constant:
    then the new name gets a number."""
    holder = next((other for other in values_of(model) if other.name == name), None)
    if holder is value:
        return
    if holder is None:
        fresh_name(model, name)  # marks the name as taken
        value.name = name
    elif holder.is_graph_input() or holder.is_graph_output() or holder.is_initializer():
        value.name = fresh_name(model, name)
    else:
        holder.name = fresh_name(model, f"{name}_inner")
        value.name = name


def values_of(model: ir.Model) -> Iterable[ir.Value]:
    """Yield inputs, constants and results of nodes."""
    yield from model.graph.inputs
    yield from list(model.graph.initializers.values())
    for node in model.graph:
        yield from node.outputs


def _name_batch(model: ir.Model) -> None:
    """Rename the symbols that torch gave to free axes of inputs, in all shapes: `batch` for the first axis, `sequence`
    for the second of inputs with two or three axes, `height` and `width` for images."""
    names: dict[str, str] = {}
    for value in model.graph.inputs:
        for axis, size in enumerate(value.shape or ()):
            if not isinstance(size, ir.SymbolicDim) or not size.value or size.value in names:
                continue
            word = BATCH if axis == 0 else _AXES.get((len(value.shape or ()), axis), f"{value.name}_{axis}")
            numbered = (word if number == 0 else f"{word}_{number}" for number in range(len(names) + 1))
            free = (name for name in numbered if axis == 0 or name not in names.values())
            names[size.value] = next(free)  # one batch for all inputs
    rename_sizes(model, names)


def rename_sizes(model: ir.Model, names: Mapping[str, str]) -> None:
    """Rename free sizes, in all shapes."""

    def renamed(size: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
        if isinstance(size, int) or not size.value:
            return size
        return ir.SymbolicDim(re.sub(r"\w+", lambda match: names.get(match[0], match[0]), size.value))

    for value in values_of(model):
        if value.shape is not None and value.shape.is_dynamic():
            value.shape = ir.Shape([renamed(size) for size in value.shape])

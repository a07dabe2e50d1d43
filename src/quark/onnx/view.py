"""An ONNX model as decisions see it (quark.decide.view)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.decide.operators import OperatorFacts, facts
from quark.decide.view import MISSING, Array, Graph, Node, Value, all_finite
from quark.formats.affine import find_ranges
from quark.onnx.graph import READS_FLOAT, attribute, constant, dimensions, input_value, is_constant, opset
from quark.onnx.large_tensors import pieces, whole

_QUANTIZABLE = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def view_of(model: ir.Model) -> Graph:
    """The main graph; nodes inside subgraphs appear as readers of what they capture."""
    values: dict[ir.Value, Value] = {}
    nodes: dict[ir.Node, Node] = {}
    version = opset(model)

    def value_of(origin: ir.Value) -> Value:
        if origin not in values:
            kind = None if origin.dtype is None else origin.dtype.name.lower()
            held = TensorConstant(origin) if is_constant(origin) else None
            is_quantizable = origin.dtype in _QUANTIZABLE
            values[origin] = Value(str(origin.name), origin, dimensions(origin), kind, is_quantizable, held)
        return values[origin]

    def node_of(origin: ir.Node, is_inner: bool = False) -> Node:
        if origin not in nodes:
            name = str(origin.name)
            nodes[origin] = Node(
                name,
                origin.op_type,
                origin,
                label=name,
                aliases=(name,),
                kinds=(origin.op_type,),
                is_standard=origin.domain in ("", "ai.onnx"),
                is_inner=is_inner,
                reads_float_for=str(origin.meta.get(READS_FLOAT, "")),
                settings=partial(_setting, origin, version=version),
            )
        return nodes[origin]

    ordered = [node_of(origin) for origin in model.graph]
    for node in ordered:
        node.inputs = [None if value is None else value_of(value) for value in node.origin.inputs]
        node.outputs = [value_of(value) for value in node.origin.outputs]
        for value in node.outputs:
            value.producer = node
    for index, output in enumerate(model.graph.outputs):
        value = value_of(output)
        value.outputs = (*value.outputs, index)
    for origin, value in values.items():
        value.readers = [(node_of(use.node, use.node.graph is not model.graph), use.idx) for use in origin.uses()]
    names = {node.name for node in ordered}

    def matches(pattern: str, node: Node) -> bool:
        """True if the node has that name; if no node has it, True if a regular expression matches the whole name."""
        return node.name == pattern or (pattern not in names and _matcher(pattern)(node.name))

    return Graph(ordered, matches)


def tensor_names(model: ir.Model) -> set[str]:
    """The names of all inputs, constants and results of the main graph."""
    names = {str(value.name) for value in (*model.graph.inputs, *model.graph.initializers.values())}
    return names | {str(value.name) for node in model.graph for value in node.outputs}


def operator_facts(node: ir.Node) -> OperatorFacts | None:
    """The facts about a single node's operator, without a view of the graph around it."""
    is_standard = node.domain in ("", "ai.onnx")
    inputs = [
        None if input_ is None or not is_constant(input_) else Value("", input_, constant=TensorConstant(input_))
        for input_ in node.inputs
    ]
    settings = partial(_setting, node, version=0)
    return facts(Node("", node.op_type, node, inputs=inputs, is_standard=is_standard, settings=settings))


@lru_cache(maxsize=4096)
def _matcher(pattern: str) -> Callable[[str], bool]:
    try:
        compiled = re.compile(pattern)
    except re.error:
        return lambda name: False
    return lambda name: compiled.fullmatch(name) is not None


def _setting(node: ir.Node, name: str, version: int) -> Any:
    """See `quark.decide.view.Node.setting`."""
    op_type = node.op_type
    if name == "bounds" and op_type == "Clip":
        return _bounds(node)
    if name == "axes" and op_type == "Slice":
        starts, given = constant(input_value(node, 1)), input_value(node, 3)
        axes = constant(given) if given is not None else None if starts is None else np.arange(starts.size)
        return None if axes is None else [int(axis) for axis in axes.reshape(-1)]
    if name == "axes" and op_type.startswith("Reduce"):
        if version < 18 and op_type != "ReduceSum":
            return list(attribute(node, "axes") or ()) or None
        value = constant(input_value(node, 1))
        return None if value is None else [int(axis) for axis in value.reshape(-1)] or None
    if name == "pads" and op_type == "Pad":
        pads, axes = constant(input_value(node, 1)), constant(input_value(node, 3))
        if pads is None or (input_value(node, 3) is not None and axes is None):
            return None
        amounts = pads.reshape(2, -1)
        order = range(amounts.shape[1]) if axes is None else [int(axis) for axis in axes.reshape(-1)]
        return tuple((axis, int(amounts[0, i]), int(amounts[1, i])) for i, axis in enumerate(order))
    if name == "fill" and op_type == "Pad":
        given = input_value(node, 2)
        fill = constant(given)
        return MISSING if given is None else None if fill is None else float(fill.any() and fill.reshape(-1)[0])
    return attribute(node, name, MISSING)


def _bounds(node: ir.Node) -> tuple[float, float] | None:
    bounds = []
    for index, missing in ((1, -math.inf), (2, math.inf)):
        array = constant(input_value(node, index))
        if input_value(node, index) is None:
            bounds.append(missing)
        elif array is None or array.size != 1:
            return None
        else:
            bounds.append(float(array.reshape(())))
    return bounds[0], bounds[1]


@dataclass(frozen=True, eq=False)
class TensorConstant:
    """A constant of the model, which may be larger than the memory."""

    value: ir.Value

    @property
    def tensor(self) -> ir.TensorProtocol:
        assert self.value.const_value is not None, self.value.name
        return self.value.const_value

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape.numpy())

    def array(self) -> Array:
        return whole(self.tensor)

    def extremes(self, axis: int | None = None, group_size: int | None = None) -> tuple[Array, Array]:
        dims = self.shape
        if not math.prod(dims) or not dims:
            low, high = find_ranges(self.tensor.numpy().astype(np.float32), axis, group_size)
            return np.atleast_1d(low).ravel(), np.atleast_1d(high).ravel()
        shape: tuple[int, ...] = (1,)
        if axis is not None:
            axis %= len(dims)
            groups = -(-dims[axis] // (group_size or 1))
            shape = (math.prod(dims[:axis]), groups, math.prod(dims[axis + 1 :])) if group_size else (groups,)
        low, high = np.full(shape, np.inf, np.float32), np.full(shape, -np.inf, np.float32)
        for piece in pieces(self.tensor, axis, group_size or 1):
            place: Any = slice(None) if axis is None else piece.along
            if group_size is not None:
                place = (piece.outer, slice(piece.along.start // group_size, -(-piece.along.stop // group_size)))
            values = piece.array.astype(np.float32, copy=False)
            lowest, highest = find_ranges(values, None if axis is None else 1, group_size)
            low[place], high[place] = np.minimum(low[place], lowest), np.maximum(high[place], highest)
        return low.ravel(), high.ravel()

    def is_finite(self) -> bool:
        return all(all_finite(piece.array) for piece in pieces(self.tensor))

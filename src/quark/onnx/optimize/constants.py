"""Rewrites of what is known beforehand: nodes that do nothing, constant expressions, shared constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from onnx import helper

from quark.onnx.graph import (
    add_copy,
    add_initializer,
    attribute,
    bypass,
    constant,
    dimensions,
    input_value,
    is_constant,
    is_float,
    nodes,
    opset,
    rank,
    readers,
    replace_input,
    replace_value,
)
from quark.onnx.large_tensors import is_large_tensor
from quark.onnx.optimize.rewrite import integers, scalar
from quark.onnx.session import open_session
from quark.text import get_logger

SMALL_BYTES = 64 * 1024
MAX_GROWTH = 2
MOST_TOGETHER = 1000  # nodes whose growth is judged together
MAX_AT_ONCE_BYTES = 64 << 20

_RANDOM = ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
_QUANTIZERS = ("DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear")
_NOT_FOLDED = frozenset({*_RANDOM, *_QUANTIZERS, "Constant", "Dropout"})
_LAYERS_WITH_BIAS = ("Conv", "ConvTranspose", "Gemm")

_log = get_logger(__name__)
Array = np.ndarray[Any, Any]

# ---- remove_identity ----


def remove_identity(model: ir.Model) -> int:
    """Remove nodes that do nothing.

        Identity, Dropout in inference, Cast to the type it has, Transpose that keeps the order, Reshape and Flatten to
        the shape it has, Pad by nothing, Slice of everything, Concat and Sum of one, Expand and Tile by ones,
        x + 0, x - 0, x * 1, x / 1

    Applies when that is known beforehand from shapes, constants and types. A node between an input and an output of the
    graph stays, because both keep their names. Adding zero may change the sign of a zero, and nothing else.
    """
    count = 0
    for node in nodes(model):
        unchanged = _UNCHANGED.get(node.op_type)
        if node.domain or unchanged is None:
            continue
        if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
            continue
        source = unchanged(node)
        if source is not None:
            count += bypass(node, source)
    return count


_Rule: TypeAlias = Callable[[ir.Node], ir.Value | None]
_UNCHANGED: dict[str, _Rule] = {}  # rules by operator; they return the input that equals the output, or None


def _unchanged(*op_types: str) -> Callable[[_Rule], _Rule]:
    """Register a function as the rule of these operators."""

    def register(rule: _Rule) -> _Rule:
        _UNCHANGED.update(dict.fromkeys(op_types, rule))
        return rule

    return register


@_unchanged("Identity")
def _first(node: ir.Node) -> ir.Value | None:
    return input_value(node, 0)


@_unchanged("Dropout")
def _dropout(node: ir.Node) -> ir.Value | None:
    if attribute(node, "training_mode", 0):
        return None
    mode = input_value(node, 2)
    training = constant(mode)
    is_inference = mode is None or (training is not None and not training.any())
    return _first(node) if is_inference else None


@_unchanged("Cast")
def _cast(node: ir.Node) -> ir.Value | None:
    value = _first(node)
    return value if value is not None and value.dtype == attribute(node, "to") else None


@_unchanged("Transpose")
def _transpose(node: ir.Node) -> ir.Value | None:
    perm = attribute(node, "perm")
    return _first(node) if perm is not None and list(perm) == list(range(len(perm))) else None


@_unchanged("Reshape")
def _reshape(node: ir.Node) -> ir.Value | None:
    """The input, if every size is the one it has. For an unknown size, that is a zero (where it means so) or one -1."""
    value, target = _first(node), integers(input_value(node, 1))
    dims = dimensions(value)
    if dims is None or target is None or len(target) != len(dims) or target.count(-1) > 1:
        return None
    keeps = not attribute(node, "allowzero", 0)
    is_same = all(size == had or size == -1 or (size == 0 and keeps) for size, had in zip(target, dims, strict=True))
    return value if is_same else None


@_unchanged("Flatten")
def _flatten(node: ir.Node) -> ir.Value | None:
    return _first(node) if rank(_first(node)) == 2 and attribute(node, "axis", 1) in (1, -1) else None


@_unchanged("Pad")
def _pad(node: ir.Node) -> ir.Value | None:
    pads = integers(input_value(node, 1))
    return _first(node) if pads is not None and not any(pads) else None


@_unchanged("Slice")
def _slice(node: ir.Node) -> ir.Value | None:
    value = _first(node)
    starts, ends = integers(input_value(node, 1)), integers(input_value(node, 2))
    dims = dimensions(value)
    if dims is None or starts is None or ends is None or any(starts):
        return None
    axes = list(range(len(starts))) if input_value(node, 3) is None else integers(input_value(node, 3))
    steps = [1] if input_value(node, 4) is None else integers(input_value(node, 4))
    if axes is None or steps is None or any(step != 1 for step in steps):
        return None
    sizes = [dims[axis] for axis in axes]
    is_all = all(end >= 2**31 - 1 or (size is not None and end >= size) for end, size in zip(ends, sizes, strict=True))
    return value if is_all else None


@_unchanged("Concat", "Sum", "Max", "Min", "Mean")
def _of_one(node: ir.Node) -> ir.Value | None:
    return _first(node) if len(node.inputs) == 1 else None


@_unchanged("Expand", "Tile")
def _all_ones(node: ir.Node) -> ir.Value | None:
    value, sizes = _first(node), integers(input_value(node, 1))
    has_room = sizes is not None and (rank(value) or -1) >= len(sizes)
    return value if sizes is not None and has_room and all(size == 1 for size in sizes) else None


def _neutral(number: float, *, is_commutative: bool) -> _Rule:
    """The other operand, if one is a constant of nothing but `number` that does not make the result larger."""

    def other(node: ir.Node) -> ir.Value | None:
        for index in (1, 0) if is_commutative else (1,):
            value = input_value(node, 1 - index)
            if value is None or (rank(input_value(node, index)) or 0) > (rank(value) or 0):
                continue
            if scalar(input_value(node, index)) == number:
                return value
        return None

    return other


_UNCHANGED |= {
    "Add": _neutral(0, is_commutative=True),
    "Sub": _neutral(0, is_commutative=False),
    "Mul": _neutral(1, is_commutative=True),
    "Div": _neutral(1, is_commutative=False),
}


# ---- fold_constants ----


def fold_constants(model: ir.Model) -> int:
    """Compute what depends on constants alone, and the Shape of a tensor whose shape is known.

    ONNX Runtime computes the values, so they are those of the float model. Not folded: random numbers, quantization,
    subgraphs, operators of other domains, graph outputs, and whatever would make the file much larger (a result of more
    than twice its inputs, and more than 64 KB).
    """
    count = 0
    for node in nodes(model):
        dims = dimensions(input_value(node, 0)) if node.op_type == "Shape" and not node.domain else None
        if dims is None or node.outputs[0].is_graph_output() or not node.outputs[0].uses():
            continue
        part = dims[slice(attribute(node, "start", 0), attribute(node, "end"))]
        if all(size is not None for size in part):
            _replace(model, node, [np.array(part, np.int64)])
            count += 1
    foldable = _foldable(model)
    is_much = sum(_bytes(value) or 0 for node in foldable for value in node.outputs) > MAX_AT_ONCE_BYTES
    results = _compute(model, foldable) if foldable and not is_much else {}
    if results is not None and not is_much:
        for node, arrays in results.items():
            _replace(model, node, arrays)
        return count + len(results)
    for node in foldable:  # one by one: the results would fill the memory, or the runtime cannot run some of the nodes
        reads_constants = all(value is None or is_constant(value) for value in node.inputs)
        single = _compute(model, [node]) if reads_constants else None
        if single:
            _replace(model, node, single[node])
            count += 1
    return count


def _foldable(model: ir.Model) -> list[ir.Node]:
    """The nodes that read only constants or results of such nodes, in the order of the graph, and whose results are
    known not to be much larger than their inputs.

    What lies between such nodes leaves no trace in the file. A node therefore also counts together with all that leads
    to it: of the small network that computes the position biases of a Swin transformer, only the result is stored.
    """
    candidates: dict[ir.Node, None] = {}
    found: dict[ir.Node, None] = {}
    for node in nodes(model):
        if node.domain or node.op_type in _NOT_FOLDED or not node.inputs:
            continue
        if any(attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attr in node.attributes.values()):
            continue
        if any(value.is_graph_output() for value in node.outputs) or not any(value.uses() for value in node.outputs):
            continue
        inputs = [value for value in node.inputs if value is not None]
        if not all(value.producer() in candidates or is_constant(value) for value in inputs):
            continue
        candidates[node] = None
        if all(value.producer() in found or is_constant(value) for value in inputs):
            size = _results(node)
            if size is not None and size <= max(SMALL_BYTES, MAX_GROWTH * sum(_bytes(value) or 0 for value in inputs)):
                found[node] = None
    for node in [candidate for candidate in candidates if candidate not in found]:
        if all(reader in candidates for value in node.outputs for reader, _ in value.uses()):
            continue
        before = _leading_to(node, candidates)
        if before is not None and _is_small_together(before, found):
            found |= dict.fromkeys(before)
    return [node for node in candidates if node in found]


def _leading_to(node: ir.Node, candidates: Collection[ir.Node]) -> set[ir.Node] | None:
    """The node and all candidates that its result depends on; None if they are too many."""
    seen, pending = {node}, [node]
    while pending:
        for value in pending.pop().inputs:
            producer = None if value is None else value.producer()
            if producer is not None and producer in candidates and producer not in seen:
                seen.add(producer)
                pending.append(producer)
        if len(seen) > MOST_TOGETHER:
            return None
    return seen


def _is_small_together(folded: Collection[ir.Node], found: Collection[ir.Node]) -> bool:
    """True if the results that stay, because other nodes read them, are not much larger than the constants that are
    read, and all results together fit into the memory."""
    sizes = {node: _results(node) for node in folded}
    known = [size for size in sizes.values() if size is not None]
    if len(known) < len(sizes) or sum(known) > MAX_AT_ONCE_BYTES:
        return False
    constants = {value for node in folded for value in node.inputs if value is not None and is_constant(value)}
    staying = [
        size or 0
        for node, size in sizes.items()
        if any(reader not in folded and reader not in found for value in node.outputs for reader, _ in value.uses())
    ]
    return sum(staying) <= max(SMALL_BYTES, MAX_GROWTH * sum(_bytes(value) or 0 for value in constants))


def _results(node: ir.Node) -> int | None:
    """The bytes of all results; None if one is unknown."""
    sizes = [_bytes(value) for value in node.outputs if value.name]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _bytes(value: ir.Value) -> int | None:
    dims = dimensions(value)
    known = [size for size in dims or () if size is not None]
    if dims is None or len(known) < len(dims) or value.dtype is None or value.dtype == ir.DataType.STRING:
        return None
    return -(-math.prod(known) * value.dtype.bitwidth // 8)


def _compute(model: ir.Model, foldable: Sequence[ir.Node]) -> dict[ir.Node, list[Array]] | None:
    """The named outputs of the nodes; None if the runtime cannot compute them.

    Large constants are fed, which does not copy them, if the runtime takes their type as an array. Small ones become
    initializers: the runtime may have to know them when it makes the session.
    """
    feeds: dict[str, Array | None] = {}
    inputs, initializers = [], []
    for name, value in {
        str(input_.name): input_ for node in foldable for input_ in node.inputs if input_ is not None
    }.items():
        tensor = value.const_value
        if tensor is None or not is_constant(value):
            continue
        if is_large_tensor(tensor) and np.dtype(tensor.dtype.numpy()).isbuiltin == 1:
            inputs.append(helper.make_tensor_value_info(name, int(tensor.dtype), dimensions(value)))
            feeds[name] = constant(value)
        else:
            initializers.append(ir.serde.serialize_tensor(tensor))
            initializers[-1].name = name
    wanted = [value.name for node in foldable for value in node.outputs if value.name]
    outputs = [helper.make_empty_tensor_value_info(name) for name in wanted]
    body = [ir.serde.serialize_node(node) for node in foldable]
    graph = helper.make_graph(body, "constants", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", opset(model))]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)
    try:
        session = open_session(proto.SerializeToString(), threads=1, has_optimizations=False, has_library=False)
        arrays = [np.asarray(array) for array in session.run(None, dict(feeds))]
    except Exception as error:  # noqa: BLE001 - ONNX Runtime has a class for each status, and no common one
        _log.debug("constants are left to the runtime: %s", error)
        return None
    by_name = dict(zip(wanted, arrays, strict=True))
    return {node: [by_name[value.name] for value in node.outputs if value.name] for node in foldable}


def _replace(model: ir.Model, node: ir.Node, arrays: Sequence[Array]) -> None:
    outputs = [value for value in node.outputs if value.name]
    for value, array in zip(outputs, arrays, strict=True):
        if value.uses():
            replace_value(value, add_initializer(model, f"{value.name}_folded", array))


# ---- copy_shared_init and copy_bias_init ----


def copy_shared_init(model: ir.Model, op_types: Sequence[str] = ()) -> int:
    """Give each reader of a shared constant its own copy, so that readers can have scales of their own.

    Applies to floating-point initializers that several inputs read, at readers of the listed operators, or at all; the
    first reader keeps the original. Has to be enabled, because the file grows.
    """
    return _copy_shared(model, lambda node, index: not op_types or node.op_type in op_types)


def copy_bias_init(model: ir.Model, op_types: Sequence[str] = ()) -> int:
    """Give each layer its own copy of a bias that several share.

    A bias is quantized with the scales of its layer's input and weight, so two layers cannot share the integers.
    Applies to the bias of Conv, ConvTranspose and Gemm, of the listed operators or all; the first reader keeps the
    original. Has to be enabled.
    """

    def is_wanted(node: ir.Node, index: int) -> bool:
        return index == 2 and node.op_type in _LAYERS_WITH_BIAS and (not op_types or node.op_type in op_types)

    return _copy_shared(model, is_wanted)


def _copy_shared(model: ir.Model, is_wanted: Callable[[ir.Node, int], bool]) -> int:
    """Copy float constants with several readers for the wanted ones. If all are wanted, the first keeps the original,
    unless that is a graph output."""
    count = 0
    for value in [initializer for initializer in model.graph.initializers.values() if len(initializer.uses()) > 1]:
        if not is_constant(value) or not is_float(value):
            continue
        uses = readers(value)
        wanted = [use for use in uses if is_wanted(*use)]
        copied = wanted[1:] if len(wanted) == len(uses) and not value.is_graph_output() else wanted
        for node, index in copied:
            replace_input(node, index, add_copy(model, value))
        count += len(copied)
    return count

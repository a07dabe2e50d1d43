"""Compute beforehand what depends on constants alone, and the Shape of a tensor whose shape is known.

ONNX Runtime computes the values, so that they are those of the float model. Left as they are: random numbers,
quantization, subgraphs, operators of other domains, what makes an output of the graph, and whatever would make the file
much larger (a result of more than twice its inputs, and more than 64 KB).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper

from quark.onnx.graph import (
    add_initializer,
    attribute,
    constant,
    dimensions,
    input_value,
    is_constant,
    nodes,
    opset,
    replace_value,
)
from quark.onnx.large_tensors import is_large_tensor
from quark.onnx.session import open_session
from quark.text import get_logger

SMALL_BYTES = 64 * 1024
MAX_GROWTH = 2
MAX_AT_ONCE_BYTES = 64 << 20

_KEPT = frozenset(
    {
        "Bernoulli",
        "Constant",
        "DequantizeLinear",
        "Dropout",
        "DynamicQuantizeLinear",
        "Multinomial",
        "QuantizeLinear",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    }
)

_log = get_logger(__name__)
Array = np.ndarray[Any, Any]


class FoldConstants:
    name: ClassVar[str] = "fold_constants"
    is_default: ClassVar[bool] = True

    def apply(self, model: ir.Model) -> int:
        return _fold_shapes(model) + _fold_nodes(model)


def _fold_shapes(model: ir.Model) -> int:
    count = 0
    for node in nodes(model):
        dims = dimensions(input_value(node, 0)) if node.op_type == "Shape" and not node.domain else None
        if dims is None or node.outputs[0].is_graph_output() or not node.outputs[0].uses():
            continue
        part = dims[slice(attribute(node, "start", 0), attribute(node, "end"))]
        if all(size is not None for size in part):
            _replace(model, node, [np.array(part, np.int64)])
            count += 1
    return count


def _fold_nodes(model: ir.Model) -> int:
    """All foldable nodes at once; one by one where that fails, so that a node the runtime cannot run stays alone, or
    where the results would fill the memory."""
    found = _foldable(model)
    is_much = sum(_bytes(value) or 0 for node in found for value in node.outputs) > MAX_AT_ONCE_BYTES
    results = _compute(model, found) if found and not is_much else {}
    if results is None or is_much:
        return sum(_fold_alone(model, node) for node in found)
    for node, arrays in results.items():
        _replace(model, node, arrays)
    return len(results)


def _fold_alone(model: ir.Model, node: ir.Node) -> bool:
    results = _compute(model, [node]) if _reads_constants(node) else None
    if results:
        _replace(model, node, results[node])
    return bool(results)


def _foldable(model: ir.Model) -> list[ir.Node]:
    """In the order of the graph: those that read constants, or what one of these makes."""
    found: dict[ir.Node, None] = {}
    for node in nodes(model):
        if node.domain or node.op_type in _KEPT or not node.inputs or _has_graph(node):
            continue
        if any(value.is_graph_output() for value in node.outputs) or not any(value.uses() for value in node.outputs):
            continue
        inputs = [value for value in node.inputs if value is not None]
        is_known = all(value.producer() in found or is_constant(value) for value in inputs)
        if is_known and _is_bounded(node, inputs):
            found[node] = None
    return list(found)


def _has_graph(node: ir.Node) -> bool:
    return any(attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attr in node.attributes.values())


def _reads_constants(node: ir.Node) -> bool:
    return all(value is None or is_constant(value) for value in node.inputs)


def _is_bounded(node: ir.Node, inputs: Sequence[ir.Value]) -> bool:
    """That the results are known not to be much larger than what they come from."""
    sizes = [_bytes(value) for value in node.outputs if value.name]
    known = [size for size in sizes if size is not None]
    given = sum(_bytes(value) or 0 for value in inputs)
    return len(known) == len(sizes) and sum(known) <= max(SMALL_BYTES, MAX_GROWTH * given)


def _bytes(value: ir.Value) -> int | None:
    dims = dimensions(value)
    known = [size for size in dims or () if size is not None]
    if dims is None or len(known) < len(dims) or value.dtype is None or value.dtype == ir.DataType.STRING:
        return None
    return -(-math.prod(known) * value.dtype.bitwidth // 8)


def _compute(model: ir.Model, found: Sequence[ir.Node]) -> dict[ir.Node, list[Array]] | None:
    """What the nodes make that others read; None where the runtime cannot tell."""
    read = {str(value.name): value for node in found for value in node.inputs if is_constant(value) and value}
    # what is fed is not copied; what is small may have to be known when the session is made
    feeds = {name: value for name, value in read.items() if _is_fed(value)}
    proto, wanted = _as_model(model, found, {name: read[name] for name in read if name not in feeds}, feeds)
    arrays = _run(proto, {name: constant(value) for name, value in feeds.items()})
    if arrays is None:
        return None
    by_name = dict(zip(wanted, arrays, strict=True))
    return {node: [by_name[value.name or ""] for value in node.outputs if value.name] for node in found}


def _is_fed(value: ir.Value) -> bool:
    """That a constant is large, and of a type that the runtime takes as an array."""
    is_taken = value.dtype is not None and np.dtype(value.dtype.numpy()).isbuiltin == 1
    return is_taken and value.const_value is not None and is_large_tensor(value.const_value)


def _as_model(
    model: ir.Model, found: Sequence[ir.Node], inside: Mapping[str, ir.Value], fed: Mapping[str, ir.Value]
) -> tuple[onnx.ModelProto, list[str]]:
    made = [value for node in found for value in node.outputs if value.name]
    initializers = []
    for name, value in inside.items():
        assert value.const_value is not None
        initializers.append(ir.serde.serialize_tensor(value.const_value))
        initializers[-1].name = name
    inputs = [
        helper.make_tensor_value_info(name, int(value.dtype or 1), dimensions(value)) for name, value in fed.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(value.name or "") for value in made]
    body = [ir.serde.serialize_node(node) for node in found]
    graph = helper.make_graph(body, "constants", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", opset(model))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version), [v.name or "" for v in made]


def _run(proto: onnx.ModelProto, feeds: Mapping[str, Array | None]) -> list[Array] | None:
    try:
        session = open_session(proto.SerializeToString(), threads=1, has_optimizations=False, has_library=False)
        return [np.asarray(each) for each in session.run(None, dict(feeds))]
    except Exception as error:  # ONNX Runtime has a class for each status; a model may ask for what it cannot do
        _log.debug("constants are left to the runtime: %s", error)
        return None


def _replace(model: ir.Model, node: ir.Node, arrays: Sequence[Array]) -> None:
    outputs = [value for value in node.outputs if value.name]
    for value, array in zip(outputs, arrays, strict=True):
        if value.uses():
            replace_value(value, add_initializer(model, f"{value.name}_folded", array))

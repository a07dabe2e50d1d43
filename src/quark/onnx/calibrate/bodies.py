"""Tensors inside the bodies of If, Loop and Scan as outputs of the main graph, so that their ranges can be measured.

A tensor becomes a further output of its body. A Loop carries all values along in one dimension, and each round adds to
them: shapes may change from round to round. A Scan stacks the values of all rounds. Of the two branches of an If, the
one that is not taken returns a tensor without elements, from which observers learn nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from quark.errors import ModelError
from quark.onnx.graph import attribute, bodies, fresh_name, graphs_in


def with_lifted_tensors(model: ir.Model, tensors: Iterable[str]) -> tuple[ir.Model, dict[str, str]]:
    """Return a copy of the model that computes these tensors in its main graph, and the names they have there.

    Names must be unique over all graphs.
    """
    copy = model.clone()
    holders = dict(bodies(copy.graph))
    homes: dict[str, tuple[ir.Value, ir.Graph]] = {}
    for graph in (copy.graph, *holders):
        values = (*graph.inputs, *(value for node in graph for value in node.outputs))
        homes.update({str(value.name): (value, graph) for value in values})
    names = {}
    for name in tensors:
        if name not in homes:
            raise ModelError(f"tensor '{name}': no graph of the model computes it")
        value, graph = homes[name]
        while graph is not copy.graph:
            holder = holders[graph]
            graph_of_holder = next(candidate for candidate in (copy.graph, *holders) if candidate is holder.graph)
            value = (_carried if holder.op_type == "Loop" else _as_output)(copy, value, graph, holder)
            homes.update({str(output.name): (output, graph_of_holder) for output in holder.outputs})
            graph = graph_of_holder
        names[name] = str(value.name)
    return copy, names


def _as_output(model: ir.Model, value: ir.Value, body: ir.Graph, holder: ir.Node) -> ir.Value:
    """Hand a value of a body out; returns the new output of the node that holds the body."""
    dtype = value.dtype or ir.DataType.FLOAT
    others = [graph for attr in holder.attributes.values() for graph in graphs_in(attr) if graph is not body]
    _append(model, body, ir.Node("", "Identity", [value]), dtype)
    for other in others:
        _append(model, other, _constant(model, np.zeros(0, dtype.numpy())), dtype)
    for name in ("scan_output_axes", "scan_output_directions"):
        if attribute(holder, name) is not None:
            holder.attributes[name] = ir.AttrInt64s(name, [*attribute(holder, name), 0])
    holder.resize_outputs(len(holder.outputs) + 1)
    result = holder.outputs[-1]
    result.name, result.type = fresh_name(model, f"{value.name}_lifted"), ir.TensorType(dtype)
    return result


def _carried(model: ir.Model, value: ir.Value, body: ir.Graph, holder: ir.Node) -> ir.Value:
    """Carry all values of a tensor through a Loop, in one dimension; returns the Loop's output with them."""
    kind, count = ir.TensorType(value.dtype or ir.DataType.FLOAT), len(holder.inputs) - 2
    empty = _constant(model, np.zeros(0, kind.dtype.numpy()))
    assert holder.graph is not None
    holder.graph.insert_before(holder, empty)
    holder.resize_inputs(len(holder.inputs) + 1)
    holder.replace_input_with(len(holder.inputs) - 1, empty.outputs[0])
    before = ir.Value(name=fresh_name(model, "carried"), type=kind, shape=ir.Shape([None]))
    body.inputs.append(before)
    shape = _constant(model, np.array([-1], np.int64))
    flat = ir.Node("", "Reshape", [value, shape.outputs[0]])
    joined = ir.Node("", "Concat", [before, flat.outputs[0]], [ir.AttrInt64("axis", 0)])
    for node in (shape, flat, joined):
        node.name = fresh_name(model, "lifted")
        node.outputs[0].name = fresh_name(model, "lifted_output")
        body.append(node)
    joined.outputs[0].type = kind
    body.outputs.insert(1 + count, joined.outputs[0])
    holder.resize_outputs(len(holder.outputs) + 1)
    for index in range(len(holder.outputs) - 1, count, -1):  # the stacked outputs of a Loop come after the carried ones
        old, new = holder.outputs[index - 1], holder.outputs[index]
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        name, old.name = old.name, fresh_name(model, "shifted")
        new.name, new.type, new.shape = name, old.type, old.shape
    result = holder.outputs[count]
    result.name, result.type, result.shape = fresh_name(model, f"{value.name}_lifted"), kind, None
    return result


def _constant(model: ir.Model, array: np.ndarray) -> ir.Node:
    node = ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.tensor(array))])
    node.name = fresh_name(model, "lifted")
    node.outputs[0].name, node.outputs[0].type = (
        fresh_name(model, "lifted_output"),
        ir.TensorType(ir.DataType.from_numpy(array.dtype)),
    )
    return node


def _append(model: ir.Model, graph: ir.Graph, node: ir.Node, dtype: ir.DataType) -> None:
    node.name = fresh_name(model, "lifted")
    node.outputs[0].name, node.outputs[0].type = fresh_name(model, "lifted_output"), ir.TensorType(dtype)
    graph.append(node)
    graph.outputs.append(node.outputs[0])

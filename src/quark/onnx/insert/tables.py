"""Tables of embeddings, once a plan is in the graph: rows are dequantized after they were taken, and a table that is
also the weight of a projection is stored once. Neither changes a number."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import (
    add_node,
    attribute,
    constant,
    input_value,
    is_constant,
    is_float,
    nodes,
    rank,
    readers,
    replace_value,
)
from quark.ops.onnx_nodes import CONSTANT_DOMAIN

MIN_SHARED_BYTES = 1 << 16


def dequantize_rows(model: ir.Model) -> None:
    """Gather rows of codes from a table, and dequantize them afterwards.

        Gather(DequantizeLinear(codes), ids)  =  DequantizeLinear(Gather(codes, ids))

    ONNX Runtime dequantizes constants at every run, so the first form would turn the whole table into float each time.
    Does not apply if rows have scales of their own, nor if the rows are quantized again: ONNX Runtime then moves codes.
    """
    for node in nodes(model):
        value, taken = input_value(node, 0), input_value(node, 1)
        before = value.producer() if value is not None and node.op_type == "Gather" and not node.domain else None
        if before is None or before.op_type != "DequantizeLinear" or not is_constant(before.inputs[0]):
            continue
        dims = rank(before.inputs[0])
        axis = int(attribute(node, "axis", 0))
        scale = constant(input_value(before, 1))
        if dims is None or scale is None or "block_size" in before.attributes:
            continue
        if any(reader.op_type == "QuantizeLinear" for reader, _ in readers(node.outputs[0])):
            continue
        attributes = {key: attr.value for key, attr in before.attributes.items()}
        if scale.size > 1:
            channels, axis = int(attributes.get("axis", 1)) % dims, axis % dims
            if channels == axis:
                continue
            attributes["axis"] = channels if channels < axis else channels - dims  # Gather may add axes between them
        rows = add_node(model, "Gather", [before.inputs[0], taken], before=node, attributes={"axis": axis})
        numbers = add_node(
            *(model, before.op_type, [rows.outputs[0], *before.inputs[1:]]),
            after=rows,
            name=f"{node.name}_{before.op_type}",
            domain=before.domain,
            attributes=attributes,
        )
        rows.outputs[0].shape = node.outputs[0].shape
        result = numbers.outputs[0]
        result.type, result.shape = node.outputs[0].type, node.outputs[0].shape
        if not replace_value(node.outputs[0], result):
            model.graph.remove([numbers, rows])
            continue
        name, tensor = node.name, node.outputs[0].name
        model.graph.remove(node, safe=True)
        rows.name = name
        if not result.is_graph_output():
            result.name = tensor


def share_tables(model: ir.Model) -> None:
    """Store the weight of a projection as the transpose of the table that it equals.

        w = Transpose(table)

    Networks with tied weights have both as constants once the Transpose between them was folded. ONNX Runtime folds it
    again when a session is made. Applies to floats only, such as rounded weights: compilers want to see the codes of a
    weight right behind its DequantizeLinear.
    """
    tables = [value for value in _constants(model) if any(map(_takes_rows, _followers(value)))]
    for weight in _constants(model):
        if weight in tables:
            continue
        table = next((table for table in tables if _is_transposed(table, weight)), None)
        if table is None:
            continue
        first = next(iter(model.graph))
        turned = add_node(
            *(model, "Transpose", [table]), before=first, name=f"{weight.name}_Transpose", attributes={"perm": [1, 0]}
        )
        result, name = turned.outputs[0], str(weight.name)
        result.type, result.shape = weight.type, weight.shape
        weight.replace_all_uses_with(result)
        del model.graph.initializers[name]
        result.name = name


def _constants(model: ir.Model) -> Iterator[ir.Value]:
    """The large constant matrices of floats in the graph."""
    for value in list(model.graph.initializers.values()):
        tensor = value.const_value
        if tensor is None or not is_constant(value) or value.is_graph_output():
            continue
        if is_float(value) and len(tensor.shape) == 2 and tensor.nbytes >= MIN_SHARED_BYTES:
            yield value


def _followers(value: ir.Value) -> Iterator[ir.Node]:
    """The readers of a constant, also behind its mark or Cast."""
    for reader, _ in readers(value):
        yield reader
        if reader.domain == CONSTANT_DOMAIN or reader.op_type == "Cast":
            yield from (node for node, _ in readers(reader.outputs[0]))


def _takes_rows(node: ir.Node) -> bool:
    return node.op_type == "Gather" and not node.domain


def _is_transposed(table: ir.Value, weight: ir.Value) -> bool:
    first, other = table.const_value, weight.const_value
    if first is None or other is None or first.dtype is not other.dtype or first.shape[::-1] != other.shape:
        return False
    rows, columns = first.numpy(), other.numpy()
    return bool((rows[0] == columns[:, 0]).all()) and np.array_equal(rows, columns.T)

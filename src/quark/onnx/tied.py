"""Tied weights: a table whose rows a Gather reads, and the matrix of a product that is the same table, transposed.

Exporters fold the transposition, so that a file holds the numbers twice. Quantized alike, they have the same codes.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.decide.options import ChoiceOptions
from quark.decide.specs import AffineSpec
from quark.onnx.graph import attribute, input_value

_ROWS = 1024  # compared at a time


def tied_products(model: ir.Model, options: ChoiceOptions) -> dict[str, str]:
    """The products whose matrix is stored together with a table, by the name of the node, each with the name of the
    table. There are none if tables stay in float or have another format than matrices."""
    if not _are_alike(options):
        return {}
    tables: dict[str, ir.TensorProtocol] = {}
    products: list[tuple[ir.Node, ir.TensorProtocol, bool]] = []
    for node in model.graph:
        if node.domain or node.op_type not in ("Gather", "Gemm", "MatMul"):
            continue
        value = input_value(node, 0 if node.op_type == "Gather" else 1)
        tensor = None if value is None else value.const_value
        if value is None or tensor is None or len(tensor.shape) != 2 or tensor.dtype not in _FLOATS:
            continue
        if node.op_type == "Gather":
            tables[str(value.name)] = tensor
        else:
            products.append((node, tensor, node.op_type == "Gemm" and bool(attribute(node, "transB", 0))))
    tied: dict[str, str] = {}
    for node, matrix, is_turned in products:
        same = (name for name, table in tables.items() if are_same_numbers(table, matrix, is_turned=not is_turned))
        table = next(same, None)
        if table is not None:
            tied[str(node.name)] = table
    return tied


def are_same_numbers(first: ir.TensorProtocol, second: ir.TensorProtocol, *, is_turned: bool) -> bool:
    """True if two matrices hold the same numbers; `is_turned`: one of them transposed."""
    shape, other = tuple(first.shape.numpy()), tuple(second.shape.numpy())
    if shape != (other[::-1] if is_turned else other) or first.dtype != second.dtype:
        return False
    if first is second and not is_turned:
        return True
    left, right = first.numpy(), second.numpy().T if is_turned else second.numpy()
    rows = range(0, shape[0], _ROWS)
    return all(np.array_equal(left[start : start + _ROWS], right[start : start + _ROWS]) for start in rows)


_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def _are_alike(options: ChoiceOptions) -> bool:
    """True if tables and matrices get the same codes."""
    of_tables = dict(options.by_op_type).get("Gather")
    table = None if of_tables is None else of_tables.weight
    matrix = options.default.weight
    if not isinstance(table, AffineSpec) or not isinstance(matrix, AffineSpec):
        return False
    return (table.format, table.group_size, table.group_rule) == (matrix.format, matrix.group_size, matrix.group_rule)

"""Fuse a MatMul of matrices and the Add of a constant behind it into a Gemm.

    Add(MatMul(A, B), c)   becomes   Gemm(A, B, c)

so that the bias is quantized with its layer. Applies when A is known to be a matrix (a Gemm takes no batches), B is a
constant matrix, c is a constant row, and nothing else reads the product.
"""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from quark.onnx.graph import (
    become,
    bypass,
    dimensions,
    input_value,
    is_constant,
    is_float,
    is_read_once,
    nodes,
    rank,
    readers,
)


class FuseMatmulAdd:
    name: ClassVar[str] = "fuse_matmul_add"
    is_default: ClassVar[bool] = True

    def apply(self, model: ir.Model) -> int:
        return sum(_fuse(node) for node in nodes(model) if node.op_type == "MatMul" and not node.domain)


def _fuse(matmul: ir.Node) -> bool:
    a, weight, product = input_value(matmul, 0), input_value(matmul, 1), matmul.outputs[0]
    dims = dimensions(weight)
    if rank(a) != 2 or not is_float(a) or not is_constant(weight) or not is_read_once(product):
        return False
    if dims is None or len(dims) != 2:
        return False
    add, index = readers(product)[0]
    if add.op_type != "Add" or add.domain or add.graph is not matmul.graph:
        return False
    bias = input_value(add, 1 - index)
    if not is_constant(bias) or dimensions(bias) not in ((dims[1],), (1, dims[1]), (1,), ()):
        return False
    if not bypass(add, product):
        return False
    become(matmul, "Gemm", [a, weight, bias])
    return True

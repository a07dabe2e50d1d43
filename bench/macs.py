"""Multiply-accumulates of an ONNX file, and how many of them are made with two 8-bit integer operands.

Shapes come from a run of the file on a sample, so that files with free dimensions, foreign operators and shapes that
are computed can be counted. Products in subgraphs and in functions are not counted.

A product counts as 8-bit if both operands come from a DequantizeLinear of an 8-bit tensor, directly or through
operators that only move or choose values (a Concat if all its inputs have the same scale and zero point), or if the
operator itself takes 8-bit integers (QLinearConv, MatMulInteger, ...).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from quark.onnx.session import open_session

# operators that are products: where the second operand is among the inputs
CONVOLUTIONS = {"Conv": 1, "FusedConv": 1, "ConvInteger": 1, "QLinearConv": 3}
MATRIX_PRODUCTS = {
    "MatMul": 1,
    "Gemm": 1,
    "FusedMatMul": 1,
    "FusedGemm": 1,
    "MatMulInteger": 1,
    "MatMulIntegerToFloat": 1,
    "DynamicQuantizeMatMul": 1,
    "QLinearMatMul": 3,
    "QGemm": 3,
}
TRANSPOSED_CONVOLUTION = "ConvTranspose"
PRODUCTS = {**CONVOLUTIONS, **MATRIX_PRODUCTS, TRANSPOSED_CONVOLUTION: 1}
INTEGER_PRODUCTS = {
    "ConvInteger",
    "QLinearConv",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "QLinearMatMul",
    "QGemm",
}
QUANTIZE = ("QuantizeLinear", "ExtendedQuantizeLinear")
DEQUANTIZE = ("DequantizeLinear", "ExtendedDequantizeLinear")
MOVES = (
    *("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand"),
    *("Split", "Slice", "Gather", "MaxPool", "DepthToSpace", "SpaceToDepth"),
)
EIGHT_BITS = (TensorProto.INT8, TensorProto.UINT8)


@dataclass
class Macs:
    """Multiply-accumulates of one inference."""

    total: int = 0
    eight_bit: int = 0
    by_operator: dict[str, int] = field(default_factory=dict)

    @property
    def eight_bit_percent(self) -> float | None:
        """None if the file has no products."""
        return 100 * self.eight_bit / self.total if self.total else None


class _Graph:
    """What the count needs to know: who computes a tensor, and constants."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.producers = {name: node for node in graph.node for name in node.output if name}
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant":
                values = [attribute.t for attribute in node.attribute if attribute.name == "value"]
                self.constants.update(zip(node.output, values, strict=False))

    def code_type(self, node: onnx.NodeProto) -> int | None:
        """Return the type of the codes of a QuantizeLinear or DequantizeLinear; None if it is not known."""
        for name in (*node.input[2:], *(node.input[:1] if node.op_type in DEQUANTIZE else ())):
            if name in self.constants:
                return int(self.constants[name].data_type)
        if node.op_type in QUANTIZE:
            types = [int(attribute.i) for attribute in node.attribute if attribute.name == "output_dtype"]
            return types[0] if types else TensorProto.UINT8  # the standard's default
        codes = self.producers.get(node.input[0])
        while codes is not None and codes.op_type in MOVES:
            codes = self.producers.get(codes.input[0])
        return self.code_type(codes) if codes is not None and codes.op_type in QUANTIZE else None

    def eight_bit_grid(self, name: str) -> tuple[object, ...] | None:
        """Return scale and zero point of the 8-bit integers that a tensor comes from; None if it does not."""
        node = self.producers.get(name)
        if node is None:
            return None
        if node.op_type in MOVES:
            return self.eight_bit_grid(node.input[0])
        if node.op_type == "Concat":
            grids = {self.eight_bit_grid(each) for each in node.input}
            return grids.pop() if len(grids) == 1 else None
        if node.op_type not in DEQUANTIZE or self.code_type(node) not in EIGHT_BITS:
            return None
        constants = [self.constants.get(each) for each in node.input[1:]]
        return tuple(
            each if constant is None else numpy_helper.to_array(constant).tobytes()
            for each, constant in zip(node.input[1:], constants, strict=True)
        )


def tensor_shapes(model: onnx.ModelProto, names: set[str], feeds: Mapping[str, np.ndarray]) -> dict[str, list[int]]:
    """Return the shapes that tensors have in a run of the model, which is changed: its outputs become these shapes."""
    graph = model.graph
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer if tensor.name in names}
    wanted = sorted(names - set(shapes))
    del graph.output[:]
    for number, name in enumerate(wanted):
        output = f"bench_shape_{number}"
        graph.node.append(helper.make_node("Shape", [name], [output], name=output))
        graph.output.append(helper.make_tensor_value_info(output, TensorProto.INT64, [None]))
    if wanted:
        session = open_session(model, threads=1, has_optimizations=False)
        inputs = {port.name for port in session.get_inputs()}
        found = session.run(None, {name: array for name, array in feeds.items() if name in inputs})
        shapes |= {name: [int(size) for size in shape] for name, shape in zip(wanted, found, strict=True)}
    return shapes


def count_macs(path: Path, feeds: Mapping[str, np.ndarray]) -> Macs:
    """Count the multiply-accumulates of one inference of the file on a sample."""
    model = onnx.load(path)
    graph = _Graph(model.graph)
    nodes = [node for node in model.graph.node if node.op_type in PRODUCTS]
    operands = {node.output[0]: (node.input[0], node.input[PRODUCTS[node.op_type]]) for node in nodes}
    names = {name for node in nodes for name in (*operands[node.output[0]], node.output[0])}
    shapes = tensor_shapes(model, names, feeds)
    macs = Macs()
    for node in nodes:
        left, right = operands[node.output[0]]
        if node.op_type in CONVOLUTIONS:
            # weights [M, C/group, kernel...]: each output element sums C/group * kernel products
            count = math.prod(shapes[node.output[0]]) * math.prod(shapes[right][1:])
        elif node.op_type == TRANSPOSED_CONVOLUTION:
            # weights [C, M/group, kernel...]: each input element goes into M/group * kernel products
            count = math.prod(shapes[left]) * math.prod(shapes[right][1:])
        else:
            is_transposed = any(each.name == "transA" and each.i for each in node.attribute)
            depth = shapes[left][-2 if is_transposed else -1]
            count = math.prod(shapes[node.output[0]]) * depth
        macs.total += count
        macs.by_operator[node.op_type] = macs.by_operator.get(node.op_type, 0) + count
        if node.op_type in INTEGER_PRODUCTS or None not in (graph.eight_bit_grid(left), graph.eight_bit_grid(right)):
            macs.eight_bit += count
    return macs

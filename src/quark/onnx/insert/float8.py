"""Keep ONNX Runtime from replacing products of 8-bit floats by integer kernels that it does not have for them.

ONNX Runtime takes any QuantizeLinear and DequantizeLinear around a product for integers. Of 8-bit floats it makes

    MatMul                                                MatMulIntegerToFloat or QLinearMatMul
    Conv whose result is quantized without an operator    QLinearConv
    that computes in between

and then refuses the file, since these kernels take integers only (seen with 1.31). A Sum of one tensor is that tensor,
and ONNX Runtime leaves it alone; between the DequantizeLinear of the second operand and the product it keeps the two
apart. It goes nowhere else, so that other runtimes find the usual nodes around most convolutions.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.decide.operators import OPERATORS, Kind
from quark.onnx.graph import add_node, input_value, is_constant, nodes, readers, replace_input

APART = "apart"  # how the name of such a Sum ends
_FLOAT8 = (ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2)
_COMPUTING = (Kind.ACTIVATION, Kind.ARITHMETIC)


def keep_float8_apart(model: ir.Model) -> None:
    """Put a Sum of one tensor before the second operand of the products above, in place."""
    for node in nodes(model):
        if node.domain or node.op_type not in ("Conv", "MatMul") or not all(_is_float8(node, each) for each in (0, 1)):
            continue
        if node.op_type == "Conv" and all(_is_computing(reader) for reader, _ in readers(node.outputs[0])):
            continue
        operand = node.inputs[1]
        assert operand is not None, node.name
        apart = add_node(model, "Sum", [operand], before=node, name=f"{node.name}_{APART}").outputs[0]
        apart.type, apart.shape = operand.type, operand.shape
        replace_input(node, 1, apart)


def _is_float8(node: ir.Node, index: int) -> bool:
    value = input_value(node, index)
    before = None if value is None else value.producer()
    if before is not None and before.op_type == "Cast" and not before.domain:  # float16 data; the runtime moves Casts
        value = input_value(before, 0)
        before = None if value is None else value.producer()
    if before is None or before.op_type != "DequantizeLinear" or before.domain:
        return False
    codes = input_value(before, 0)
    return codes is not None and codes.dtype in _FLOAT8


def _is_computing(node: ir.Node) -> bool:
    """True for an operator that stays between a convolution and a quantizer: it computes, and not with a constant, with
    which ONNX Runtime would fold it into the convolution."""
    known = OPERATORS.get(node.op_type)
    if node.domain or known is None or known.kind not in _COMPUTING:
        return False
    return known.kind is Kind.ACTIVATION or not any(value is not None and is_constant(value) for value in node.inputs)

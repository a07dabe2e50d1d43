"""Keep ONNX Runtime from replacing operators on 8-bit floats by integer kernels that it does not have for them.

ONNX Runtime takes any QuantizeLinear and DequantizeLinear around an operator for integers. Of 8-bit floats it makes

    MatMul                                                MatMulIntegerToFloat or QLinearMatMul
    Conv whose result is quantized without an operator    QLinearConv, also of a float weight, which it quantizes
    that computes in between
    Add, Mul, Concat, pools, Sigmoid, Softmax, ...        QLinearAdd, QLinearMul, ...

and then refuses the file, since these kernels take integers only (seen with 1.31). A Sum of one tensor is that tensor,
and ONNX Runtime leaves it alone; between the DequantizeLinear of one operand and the operator it keeps the two apart:
the weight's if it is in 8-bit floats, since it is folded there, else the first. It goes nowhere else, so that other
runtimes find the usual nodes around most convolutions.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.decide.operators import OPERATORS, Kind
from quark.onnx.graph import add_node, input_value, is_constant, nodes, readers, replace_input

APART = "apart"  # suffix of the name of such a Sum
_FLOAT8 = (ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2)
_COMPUTING = (Kind.ACTIVATION, Kind.ARITHMETIC)
_INTEGER_KERNELS = frozenset(
    {"Add", "Mul", "Concat", "Where", "AveragePool", "GlobalAveragePool", "Sigmoid", "LeakyRelu", "Softmax"}
)  # operators other than products that ONNX Runtime replaces


def keep_float8_apart(model: ir.Model) -> None:
    """Put a Sum of one tensor before an operand of the operators above, in place."""
    for node in nodes(model):
        index = _operand_to_set_apart(node)
        if index is None:
            continue
        operand = node.inputs[index]
        assert operand is not None, node.name
        apart = add_node(model, "Sum", [operand], before=node, name=f"{node.name}_{APART}").outputs[0]
        apart.type, apart.shape = operand.type, operand.shape
        replace_input(node, index, apart)


def _operand_to_set_apart(node: ir.Node) -> int | None:
    floats = [index for index in range(len(node.inputs)) if _is_float8(node, index)]
    if node.domain or not floats:
        return None
    if node.op_type in _INTEGER_KERNELS:
        return floats[0]
    if node.op_type == "MatMul":
        return 1 if floats[:2] == [0, 1] else None
    if node.op_type != "Conv" or floats[0] != 0 or all(_is_computing(reader) for reader, _ in readers(node.outputs[0])):
        return None
    return 1 if 1 in floats else 0


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

"""Which operator on codes does what an operator does on the numbers that they stand for: facts about ONNX Runtime.

    Conv                            QLinearConv
    MatMul                          QLinearMatMul
    Gemm                            QGemm (*); its output may also be numbers
    Add Mul Concat                  QLinearAdd (*), QLinearMul (*), QLinearConcat (*)
    AveragePool GlobalAveragePool   QLinearAveragePool (*), QLinearGlobalAveragePool (*)
    LeakyRelu Sigmoid Softmax       QLinearLeakyRelu (*), QLinearSigmoid (*), QLinearSoftmax (*)
    Relu Clip                       Relu or Clip of the codes; Relu also as QLinearLeakyRelu (*) to another scale
    Reshape Transpose MaxPool ...   the same operator, as values are moved and not changed

(*) of com.microsoft. Sums of products take uint8 with uint8 or int8, and int8 with int8; the result has the type of the
first operand, and the second may have a scale for each output channel. All others want one type, and one scale for each
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.onnx.graph import attribute, constant, input_value, rank
from quark.onnx.insert.codes import Codes, Parameters, bias_read, clip_bounds, codes_read

MICROSOFT = "com.microsoft"

Array = NDArray[Any]

_OPSET_OF_INT8_RELU = 14


@dataclass(frozen=True, eq=False)
class IntegerForm:
    """A node to be made. An input that is an array becomes a constant."""

    op_type: str
    inputs: tuple[ir.Value | Array | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""


# From a node, the parameters of its result (None: it stays numbers) and the opset to the form, where there is one.
FormRule: TypeAlias = Callable[[ir.Node, Parameters | None, int], IntegerForm | None]


def clip_codes(codes: ir.Value, result: Parameters, lowest: int, highest: int, opset: int) -> IntegerForm | None:
    """Codes from `lowest` to `highest`; None where no code is beyond."""
    limits = np.iinfo(result.dtype)
    if (lowest, highest) == (limits.min, limits.max):
        return None
    if result.is_symmetric_int8 and (lowest, highest) == (0, limits.max) and opset >= _OPSET_OF_INT8_RELU:
        return IntegerForm("Relu", (codes,))
    return IntegerForm("Clip", (codes, np.array(lowest, result.dtype), np.array(highest, result.dtype)))


def _conv(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
    x, w = codes_read(node, 0), codes_read(node, 1)
    if x is None or w is None or result is None or not _are_factors(x, w, 0) or x.parameters.dtype != result.dtype:
        return None
    if (w.parameters.zero_points != w.parameters.zero_points.flat[0]).any():  # the kernel wants them all the same
        return None
    is_possible, bias = _bias(node, x.parameters.scales * w.parameters.scales)
    inputs = (*x.inputs, *w.inputs, result.scale, result.zero_point, *([] if bias is None else [bias]))
    return IntegerForm("QLinearConv", inputs, node.attributes) if is_possible else None


def _matmul(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
    a, b = codes_read(node, 0), codes_read(node, 1)
    if a is None or b is None or result is None or a.parameters.dtype != result.dtype:
        return None
    if not _are_factors(a, b, 1) or (b.parameters.axis is not None and _rank(b) != 2):
        return None
    return IntegerForm("QLinearMatMul", (*a.inputs, *b.inputs, result.scale, result.zero_point))


def _gemm(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
    a, b = codes_read(node, 0), codes_read(node, 1)
    alpha, is_transposed = float(attribute(node, "alpha", 1.0)), bool(attribute(node, "transB", 0))
    if a is None or b is None or not _are_factors(a, b, 0 if is_transposed else 1):
        return None
    if result is not None and a.parameters.dtype != result.dtype:
        return None
    is_possible, bias = _bias(node, np.float32(alpha) * a.parameters.scales * b.parameters.scales)
    if not is_possible or (bias is not None and attribute(node, "beta", 1.0) != 1.0):
        return None
    attributes = {key: attr for key, attr in node.attributes.items() if key != "beta"}
    outputs = () if result is None else (result.scale, result.zero_point)
    return IntegerForm("QGemm", (*a.inputs, *b.inputs, bias, *outputs), attributes, MICROSOFT)


def _are_factors(a: Codes, b: Codes, channel_axis: int) -> bool:
    """That the kernels multiply codes of these types, with scales for the tensor or for the channels of the second."""
    has_types = a.parameters.dtype == np.uint8 or b.parameters.dtype == np.int8
    return has_types and a.parameters.axis is None and _axis(b) in (None, channel_axis)


def _axis(codes: Codes) -> int | None:
    axis, count = codes.parameters.axis, _rank(codes)
    return axis if axis is None or axis >= 0 or count is None else axis + count


def _rank(codes: Codes) -> int | None:
    """Also where the codes are made of a constant at run time, and only its shape is known."""
    producer = codes.value.producer()
    return rank(codes.value if producer is None or codes.value.shape is not None else producer.inputs[0])


def _bias(node: ir.Node, scales: Array) -> tuple[bool, ir.Value | None]:
    """Whether the third input can be added to sums of products of that scale, and its codes."""
    if input_value(node, 2) is None:
        return True, None
    bias = bias_read(node, 2)
    return (True, bias.value) if bias is not None and bias.has_scale(scales) else (False, None)


def _of_all_inputs(node: ir.Node, result: Parameters | None) -> list[Codes] | None:
    """The codes of all inputs, where they are of the result's type and have one scale each."""
    read = [codes_read(node, index) for index in range(len(node.inputs))]
    fitting = [
        codes
        for codes in read
        if codes is not None
        and result is not None
        and codes.parameters.dtype == result.dtype
        and codes.parameters.axis is None
    ]
    return fitting if fitting and len(fitting) == len(read) else None


def _elementwise(op_type: str, *names: str) -> FormRule:
    """com.microsoft's form of an operator whose inputs are all codes, with these attributes of it."""

    def rule(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
        operands = _of_all_inputs(node, result)
        if operands is None or result is None:
            return None
        inputs = tuple(value for codes in operands for value in codes.inputs)
        attributes = {name: node.attributes[name] for name in names if name in node.attributes}
        return IntegerForm(op_type, (*inputs, result.scale, result.zero_point), attributes, MICROSOFT)

    return rule


def _concat(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
    operands = _of_all_inputs(node, result)
    if operands is None or result is None:
        return None
    inputs = tuple(value for codes in operands for value in codes.inputs)
    return IntegerForm("QLinearConcat", (result.scale, result.zero_point, *inputs), node.attributes, MICROSOFT)


_POOL_ATTRIBUTES = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
_plain_average_pool = _elementwise("QLinearAveragePool", *_POOL_ATTRIBUTES)


def _average_pool(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
    has_dilations = any(step != 1 for step in attribute(node, "dilations", ()))
    return None if has_dilations else _plain_average_pool(node, result, opset)


def _softmax(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
    operands = _of_all_inputs(node, result)
    if operands is None or result is None:
        return None
    attributes = {"axis": int(attribute(node, "axis", -1)), "opset": opset}
    inputs = (*operands[0].inputs, result.scale, result.zero_point)
    return IntegerForm("QLinearSoftmax", inputs, attributes, MICROSOFT)


def _clip(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
    x, bounds = codes_read(node, 0), clip_bounds(node)
    if x is None or result is None or bounds is None or x.parameters.axis is not None:
        return None
    if x.parameters.is_same(result):
        clipped = clip_codes(x.value, result, result.code(bounds[0]), result.code(bounds[1]), opset)
        return IntegerForm("Identity", (x.value,)) if clipped is None else clipped
    if node.op_type == "Relu" and x.parameters.dtype == result.dtype:
        inputs = (*x.inputs, result.scale, result.zero_point)
        return IntegerForm("QLinearLeakyRelu", inputs, {"alpha": 0.0}, MICROSOFT)
    return None


def _moved(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
    """The same operator on codes that mean the same before and behind it."""
    x = codes_read(node, 0)
    if x is None or result is None or x.parameters.axis is not None or not x.parameters.is_same(result):
        return None
    return IntegerForm(node.op_type, (x.value, *node.inputs[1:]), node.attributes)


def _resize(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
    """Only where no value is computed between others or beyond the edge."""
    is_nearest = attribute(node, "mode", "nearest") == "nearest"
    is_inside = attribute(node, "coordinate_transformation_mode", "half_pixel") != "tf_crop_and_resize"
    return _moved(node, result, opset) if is_nearest and is_inside else None


def _pad(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
    """The padded value becomes its code, that of 0 where none is given."""
    form, given = _moved(node, result, opset), input_value(node, 2)
    number = np.zeros(()) if given is None else constant(given)
    if form is None or result is None or number is None or number.size != 1:
        return None
    code = np.array(result.code(float(number.item())), result.dtype)
    return IntegerForm("Pad", (*form.inputs[:2], code, *form.inputs[3:]), form.attributes)


_MOVING = (
    *("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"),
    *("Slice", "Split", "Gather", "Expand", "Tile", "MaxPool"),
)

FORMS: Mapping[str, FormRule] = {
    "Conv": _conv,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Add": _elementwise("QLinearAdd"),
    "Mul": _elementwise("QLinearMul"),
    "Concat": _concat,
    "AveragePool": _average_pool,
    "GlobalAveragePool": _elementwise("QLinearGlobalAveragePool"),
    "LeakyRelu": _elementwise("QLinearLeakyRelu", "alpha"),
    "Sigmoid": _elementwise("QLinearSigmoid"),
    "Softmax": _softmax,
    "Relu": _clip,
    "Clip": _clip,
    **dict.fromkeys(_MOVING, _moved),
    "Resize": _resize,
    "Pad": _pad,
}

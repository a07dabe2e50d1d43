"""From QuantizeLinear and DequantizeLinear around float operators to ONNX Runtime's operators on the codes.

    codes -> DequantizeLinear -> Conv -> Relu -> QuantizeLinear -> codes     becomes
    codes -> QLinearConv -> codes

A node is rewritten if all its results go to QuantizeLinear with one scale and zero point. Relu and Clip in between are
applied to the codes instead, which is possible because QuantizeLinear is monotone:

    Q(clip(x, low, high)) = clip(Q(x), Q(low), Q(high))

They are dropped if Q(low) is the lowest code and Q(high) the highest. Nodes for which there is no such operator, and
the pairs around them, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.onnx.graph import (
    add_initializer,
    add_node,
    attribute,
    clip_bounds,
    constant,
    input_value,
    is_read_once,
    nodes,
    opset,
    rank,
    readers,
    remove_dead,
    replace_value,
)

Array = NDArray[Any]

MICROSOFT = "com.microsoft"
_OPSET_OF_INT8_RELU = 14
_STANDARD = ("", "ai.onnx")


def to_qoperators(model: ir.Model) -> int:
    """Rewrite nodes with 8-bit codes and constant parameters, if possible; return the number of nodes rewritten."""
    count = 0
    for node in nodes(model):
        rule = FORMS.get(node.op_type) if node.domain in _STANDARD else None
        if rule is None:
            continue
        endings = _endings(node)
        result = next((end.parameters for end in endings if end is not None), None)
        form = None if result is None else rule(node, result, opset(model))
        if form is not None and result is not None:
            kind = ir.TensorType(ir.DataType.from_numpy(result.dtype))
            for value, old, end in zip(
                _emit(model, node, form, len(node.outputs)).outputs, node.outputs, endings, strict=True
            ):
                if end is None:
                    continue
                value.type, value.shape = kind, old.shape
                codes = value
                clip = clip_codes(value, result, end.lowest, end.highest, opset(model))
                if clip is not None:
                    codes = _emit(model, node, clip, 1).outputs[0]
                    codes.type, codes.shape = kind, old.shape
                for quantizer in end.quantizers:
                    replace_value(quantizer.outputs[0], codes)
            count += 1
            continue
        form = rule(node, None, opset(model))
        if form is not None:  # the output stays float
            made = _emit(model, node, form, 1).outputs[0]
            made.type, made.shape = node.outputs[0].type, node.outputs[0].shape
            count += replace_value(node.outputs[0], made)
    remove_dead(model)
    return count


def _endings(node: ir.Node) -> list[Ending | None]:
    """The endings of the outputs of a node, None for an output without readers; empty if some output is not quantized,
    or not with the same parameters as the others."""
    result = []
    for value in node.outputs:
        is_read = bool(value.uses()) or value.is_graph_output()
        end = ending(value) if is_read else None
        if is_read and end is None:
            return []
        result.append(end)
    parameters = [end.parameters for end in result if end is not None]
    return result if all(parameters[0].is_same(other) for other in parameters) else []


def _emit(model: ir.Model, node: ir.Node, form: IntegerForm, outputs: int) -> ir.Node:
    """Add the node of a form before the node that it replaces."""
    name = f"{node.name}_{form.op_type}"
    inputs = [
        add_initializer(model, name, input_) if isinstance(input_, np.ndarray) else input_ for input_ in form.inputs
    ]
    if form.domain == MICROSOFT:
        model.opset_imports.setdefault(MICROSOFT, 1)
    return add_node(
        model,
        form.op_type,
        inputs,
        before=node,
        name=name,
        domain=form.domain,
        attributes=form.attributes,
        outputs=outputs,
    )


# ---- 8-bit codes in a graph: those that a node reads, and those made of its results ----


@dataclass(frozen=True, eq=False)
class Parameters:
    """Scale and zero point as values of the graph and as arrays; `axis` is None if there is one for the tensor."""

    scale: ir.Value
    zero_point: ir.Value
    scales: Array
    zero_points: Array
    axis: int | None

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.zero_points.dtype

    @property
    def is_symmetric_int8(self) -> bool:
        return self.dtype == np.int8 and not self.zero_points.any()

    def is_same(self, other: Parameters) -> bool:
        """True if a code stands for the same number in both."""
        return (
            self.axis == other.axis
            and self.dtype == other.dtype
            and np.array_equal(self.scales.ravel(), other.scales.ravel())
            and np.array_equal(self.zero_points.ravel(), other.zero_points.ravel())
        )

    def code(self, number: float) -> int:
        """The code of a number, with one scale for the tensor."""
        limits = np.iinfo(self.dtype)
        with np.errstate(over="ignore"):
            code = np.rint(np.float32(number) / self.scales.item()) + self.zero_points.item()
        return int(np.clip(code, limits.min, limits.max))


@dataclass(frozen=True, eq=False)
class Codes:
    """Codes as a node of the graph reads them."""

    value: ir.Value
    parameters: Parameters

    @property
    def inputs(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The inputs of operators on codes: value, scale, zero point."""
        return self.value, self.parameters.scale, self.parameters.zero_point


@dataclass(frozen=True, eq=False)
class Ending:
    """All readers of one output of a node: quantizers with the same parameters, and the lowest and the highest code
    that pass Relu and Clip in between."""

    quantizers: tuple[ir.Node, ...]
    parameters: Parameters
    lowest: int
    highest: int


def codes_read(node: ir.Node, index: int) -> Codes | None:
    """The codes that the input is dequantized from; None if it is not, or not from 8-bit codes with constant
    parameters.
    """
    dequantize = _dequantizer(node, index)
    parameters = None if dequantize is None else _parameters(dequantize)
    value = None if dequantize is None else dequantize.inputs[0]
    return None if parameters is None or value is None else Codes(value, parameters)


def ending(value: ir.Value) -> Ending | None:
    """The quantizers of a value, behind Relu and Clip; None if something else reads it too."""
    low, high = -np.inf, np.inf
    while is_read_once(value):
        clip, index = readers(value)[0]
        if clip.op_type not in ("Relu", "Clip") or clip.domain not in _STANDARD or index != 0:
            break
        bounds = clip_bounds(clip)
        if bounds is None:
            return None
        lower, upper = bounds  # if they are the wrong way round, the upper one wins
        low, high = min(max(low, lower), upper), min(max(high, lower), upper)
        value = clip.outputs[0]
    quantizers = tuple(node for node, _ in readers(value))
    if value.is_graph_output() or not quantizers:
        return None
    if not all(node.op_type == "QuantizeLinear" and node.domain in _STANDARD for node in quantizers):
        return None
    all_parameters = [_parameters(node) for node in quantizers]
    first = all_parameters[0]
    if first is None or first.axis is not None or not all(p is not None and first.is_same(p) for p in all_parameters):
        return None
    return Ending(quantizers, first, first.code(low), first.code(high))


def _dequantizer(node: ir.Node, index: int) -> ir.Node | None:
    value = input_value(node, index)
    producer = None if value is None else value.producer()
    is_one = producer is not None and producer.op_type == "DequantizeLinear" and producer.domain in _STANDARD
    return producer if is_one else None


def _parameters(node: ir.Node) -> Parameters | None:
    """The parameters of QuantizeLinear or DequantizeLinear. None if they are not constant, not for 8 bits, not float32,
    for groups, or without a zero point, which operators on codes require."""
    scale, zero_point = input_value(node, 1), input_value(node, 2)
    scales, zero_points = constant(scale), constant(zero_point)
    if scale is None or zero_point is None or scales is None or zero_points is None or scales.ndim > 1:
        return None
    if scales.dtype != np.float32 or zero_points.dtype not in (np.int8, np.uint8) or scales.size != zero_points.size:
        return None
    axis = None if scales.size == 1 else int(attribute(node, "axis", 1))
    return Parameters(scale, zero_point, scales, zero_points, axis)


# ---- the operators on codes that ONNX Runtime has ----
#
#     Conv                            QLinearConv
#     MatMul                          QLinearMatMul
#     Gemm                            QGemm (*); its output may also be numbers
#     Add Mul Concat                  QLinearAdd (*), QLinearMul (*), QLinearConcat (*)
#     AveragePool GlobalAveragePool   QLinearAveragePool (*), QLinearGlobalAveragePool (*)
#     LeakyRelu Sigmoid Softmax       QLinearLeakyRelu (*), QLinearSigmoid (*), QLinearSoftmax (*)
#     Relu Clip                       Relu or Clip of the codes; Relu also as QLinearLeakyRelu (*) to another scale
#     Reshape Transpose MaxPool ...   the same operator, as values are moved and not changed
#
# (*) of com.microsoft. Sums of products take uint8 with uint8 or int8, and int8 with int8; the result has the type of
# the first operand, and the second may have a scale for each output channel. All others require one type, and one scale
# for each tensor.


@dataclass(frozen=True, eq=False)
class IntegerForm:
    """A node to be made. An input that is an array becomes a constant."""

    op_type: str
    inputs: tuple[ir.Value | Array | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""


# Returns the form of a node, if there is one, given the parameters of its result (None: it stays float) and the opset.
FormRule: TypeAlias = Callable[[ir.Node, Parameters | None, int], IntegerForm | None]
FORMS: dict[str, FormRule] = {}  # rules by operator


def _form_of(*op_types: str) -> Callable[[FormRule], FormRule]:
    """Register a function as the rule of these operators."""

    def register(rule: FormRule) -> FormRule:
        FORMS.update(dict.fromkeys(op_types, rule))
        return rule

    return register


def clip_codes(codes: ir.Value, result: Parameters, lowest: int, highest: int, opset: int) -> IntegerForm | None:
    """Clip codes to `lowest` to `highest`; None if no code is beyond."""
    limits = np.iinfo(result.dtype)
    if (lowest, highest) == (limits.min, limits.max):
        return None
    if result.is_symmetric_int8 and (lowest, highest) == (0, limits.max) and opset >= _OPSET_OF_INT8_RELU:
        return IntegerForm("Relu", (codes,))
    return IntegerForm("Clip", (codes, np.array(lowest, result.dtype), np.array(highest, result.dtype)))


@_form_of("Conv")
def _conv(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
    x, w = codes_read(node, 0), codes_read(node, 1)
    if x is None or w is None or result is None or not _are_factors(x, w, 0) or x.parameters.dtype != result.dtype:
        return None
    if (w.parameters.zero_points != w.parameters.zero_points.flat[0]).any():  # the kernel requires equal ones
        return None
    is_possible, bias = _bias(node, x.parameters.scales * w.parameters.scales)
    inputs = (*x.inputs, *w.inputs, result.scale, result.zero_point, *([] if bias is None else [bias]))
    return IntegerForm("QLinearConv", inputs, node.attributes) if is_possible else None


@_form_of("MatMul")
def _matmul(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
    a, b = codes_read(node, 0), codes_read(node, 1)
    if a is None or b is None or result is None or a.parameters.dtype != result.dtype:
        return None
    if not _are_factors(a, b, 1) or (b.parameters.axis is not None and _rank(b) != 2):
        return None
    return IntegerForm("QLinearMatMul", (*a.inputs, *b.inputs, result.scale, result.zero_point))


@_form_of("Gemm")
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
    """True if the kernels multiply codes of these types, with scales for the tensor or for the channels of the
    second."""
    axis, count = b.parameters.axis, _rank(b)
    if axis is not None and axis < 0 and count is not None:
        axis += count
    has_types = a.parameters.dtype == np.uint8 or b.parameters.dtype == np.int8
    return has_types and a.parameters.axis is None and axis in (None, channel_axis)


def _rank(codes: Codes) -> int | None:
    """The rank, also if the codes are made of a constant at run time, and only its shape is known."""
    producer = codes.value.producer()
    return rank(codes.value if producer is None or codes.value.shape is not None else producer.inputs[0])


def _bias(node: ir.Node, scales: Array) -> tuple[bool, ir.Value | None]:
    """Return whether the third input, if any, can be added to sums of products with that scale, and its int32 codes."""
    if input_value(node, 2) is None:
        return True, None
    dequantize = _dequantizer(node, 2)
    value = None if dequantize is None else dequantize.inputs[0]
    if dequantize is None or value is None or value.dtype is not ir.DataType.INT32:
        return False, None
    own, zero_point = constant(dequantize.inputs[1]), input_value(dequantize, 2)
    zero_points = constant(zero_point)
    if own is None or own.ndim > 1 or (zero_point is not None and (zero_points is None or zero_points.any())):
        return False, None
    last_axis = (rank(value) or 0) - 1
    is_last_axis = own.size == 1 or rank(value) == 1 or attribute(dequantize, "axis", 1) in (-1, last_axis)
    has_sizes = len({own.size, scales.size} - {1}) < 2
    # up to the rounding of a product of two scales
    is_same = has_sizes and np.allclose(own.ravel(), scales.ravel(), rtol=2.0**-22, atol=0)
    return (True, value) if is_last_axis and is_same else (False, None)


def _of_all_inputs(node: ir.Node, result: Parameters | None) -> list[Codes] | None:
    """The codes of all inputs, if they are of the result's type and have one scale each."""
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
    """com.microsoft's form of an operator whose inputs are all codes, with the named attributes."""

    def rule(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
        operands = _of_all_inputs(node, result)
        if operands is None or result is None:
            return None
        inputs = tuple(value for codes in operands for value in codes.inputs)
        attributes = {name: node.attributes[name] for name in names if name in node.attributes}
        return IntegerForm(op_type, (*inputs, result.scale, result.zero_point), attributes, MICROSOFT)

    return rule


@_form_of("Concat")
def _concat(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
    operands = _of_all_inputs(node, result)
    if operands is None or result is None:
        return None
    inputs = tuple(value for codes in operands for value in codes.inputs)
    return IntegerForm("QLinearConcat", (result.scale, result.zero_point, *inputs), node.attributes, MICROSOFT)


FORMS |= {
    "Add": _elementwise("QLinearAdd"),
    "Mul": _elementwise("QLinearMul"),
    "GlobalAveragePool": _elementwise("QLinearGlobalAveragePool"),
    "LeakyRelu": _elementwise("QLinearLeakyRelu", "alpha"),
    "Sigmoid": _elementwise("QLinearSigmoid"),
}
_POOL_ATTRIBUTES = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
_plain_average_pool = _elementwise("QLinearAveragePool", *_POOL_ATTRIBUTES)


@_form_of("AveragePool")
def _average_pool(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
    has_dilations = any(step != 1 for step in attribute(node, "dilations", ()))
    return None if has_dilations else _plain_average_pool(node, result, opset)


@_form_of("Softmax")
def _softmax(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
    operands = _of_all_inputs(node, result)
    if operands is None or result is None:
        return None
    attributes = {"axis": int(attribute(node, "axis", -1)), "opset": opset}
    inputs = (*operands[0].inputs, result.scale, result.zero_point)
    return IntegerForm("QLinearSoftmax", inputs, attributes, MICROSOFT)


@_form_of("Relu", "Clip")
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


@_form_of("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose")
@_form_of("Slice", "Split", "Gather", "Expand", "Tile", "MaxPool")
def _moved(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
    """The same operator on codes that have the same parameters before and after it."""
    x = codes_read(node, 0)
    if x is None or result is None or x.parameters.axis is not None or not x.parameters.is_same(result):
        return None
    return IntegerForm(node.op_type, (x.value, *node.inputs[1:]), node.attributes)


@_form_of("Resize")
def _resize(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
    """Only if no value is interpolated, or computed beyond the edge."""
    is_nearest = attribute(node, "mode", "nearest") == "nearest"
    is_inside = attribute(node, "coordinate_transformation_mode", "half_pixel") != "tf_crop_and_resize"
    return _moved(node, result, opset) if is_nearest and is_inside else None


@_form_of("Pad")
def _pad(node: ir.Node, result: Parameters | None, opset: int) -> IntegerForm | None:
    """The padding value becomes its code; 0 by default."""
    form, given = _moved(node, result, opset), input_value(node, 2)
    number = np.zeros(()) if given is None else constant(given)
    if form is None or result is None or number is None or number.size != 1:
        return None
    code = np.array(result.code(float(number.item())), result.dtype)
    return IntegerForm("Pad", (*form.inputs[:2], code, *form.inputs[3:]), form.attributes)

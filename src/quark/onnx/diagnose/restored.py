"""Put back what other forms of a quantized file leave out, so that its tensors can be matched and compared.

    activations   ONNX Runtime's quantizer and AMD's drop a Relu or Clip where the quantizer behind it saturates at the
                  same bounds. The tensor keeps the activation's name, and is something else up to the quantizer
    codes         QLinearConv and the like compute integers. Their scale is named after the tensor that they stand for:
                  they become floats under that name, and the same codes again

Neither changes what the file computes, but for a quantizer's last step beyond a Clip's bound. And in the float graph:

    folded nodes  a BatchNormalization, or an Add or Mul with a constant, that became part of the layer before it: that
                  layer's result keeps its name, which in the float graph goes to what the folded node computes
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quark.onnx.diagnose.operands import QUANTIZE, is_quantizer
from quark.onnx.graph import (
    add_initializer,
    add_node,
    constant,
    input_value,
    is_constant,
    is_read_once,
    nodes,
    readers,
)

FOLDED = frozenset({"BatchNormalization", "Add", "Sub", "Mul", "Div"})
BEFORE_FOLDED = "/before folding"
BOUNDING = frozenset({"Relu", "Clip"})
SCALE_SUFFIX = "_scale"
# input number of the output's scale; the zero point follows
OUTPUT_SCALES = {
    "QLinearConv": 6,
    "QLinearMatMul": 6,
    "QLinearAdd": 6,
    "QLinearMul": 6,
    "QGemm": 7,
    "QLinearConcat": 0,
    "QLinearSigmoid": 3,
    "QLinearLeakyRelu": 3,
    "QLinearAveragePool": 3,
    "QLinearGlobalAveragePool": 3,
    "QLinearSoftmax": 3,
}


@dataclass(frozen=True)
class Restored:
    activations: int
    codes: int


def restore(exact: ir.Model, quantized: ir.Model) -> Restored:
    """Change the quantized graph; in the float graph only names change."""
    _rename_folded(exact, quantized)
    known = {str(value.name): value for node in exact.graph for value in node.outputs}
    codes = sum(_open_codes(quantized, node, known) for node in nodes(quantized) if node.op_type in OUTPUT_SCALES)
    found = {str(value.name): value for node in quantized.graph for value in node.outputs}
    activations = sum(
        _bound(quantized, found[name], value)
        for name, value in known.items()
        if name in found and not found[name].is_graph_output()
    )
    return Restored(activations, codes)


def _rename_folded(exact: ir.Model, quantized: ir.Model) -> None:
    found = {str(value.name) for node in quantized.graph for value in node.outputs}
    for node in exact.graph:
        result = node.outputs[0]
        if node.op_type not in FOLDED or result.name in found or result.is_graph_output():
            continue
        data = [value for value in node.inputs if value is not None and not is_constant(value)]
        if len(data) == 1 and data[0].name in found and data[0].producer() is not None and is_read_once(data[0]):
            name = str(data[0].name)
            data[0].name = f"{name}{BEFORE_FOLDED}"
            result.name = name


def _open_codes(model: ir.Model, node: ir.Node, known: dict[str, ir.Value]) -> bool:
    index = OUTPUT_SCALES[node.op_type]
    scale, zero_point = input_value(node, index), input_value(node, index + 1)
    name = str(scale.name or "").removesuffix(SCALE_SUFFIX) if scale is not None else ""
    taken = {str(value.name) for each in model.graph for value in each.outputs}
    if scale is None or zero_point is None or name not in known or name in taken:
        return False
    result = node.outputs[0]
    uses = readers(result)
    floats = add_node(model, "DequantizeLinear", [result, scale, zero_point], after=node)
    floats.outputs[0].name, floats.outputs[0].type = name, ir.TensorType(ir.DataType.FLOAT)
    again = add_node(model, "QuantizeLinear", [floats.outputs[0], scale, zero_point], after=floats)
    codes = zero_point.dtype if zero_point.const_value is None else zero_point.const_value.dtype
    again.outputs[0].type = None if codes is None else ir.TensorType(codes)
    for reader, place in uses:
        reader.replace_input_with(place, again.outputs[0])
    return True


def _bound(model: ir.Model, value: ir.Value, exact: ir.Value) -> bool:
    """Put the activation behind a tensor that has its name and is not bounded, where only quantizers read it."""
    maker, wanted = value.producer(), exact.producer()
    uses = readers(value)
    if maker is None or wanted is None or wanted.op_type not in BOUNDING:
        return False
    if maker.op_type in BOUNDING or is_quantizer(maker) or not all(each.op_type in QUANTIZE for each, _ in uses):
        return False
    bounds = _bounds(wanted)
    if bounds is None or not uses:
        return False
    name = str(value.name)
    value.name = f"{name}/unbounded"
    limits = [add_initializer(model, f"{name}_bound", np.float32(each)) for each in bounds]
    node = add_node(model, "Clip", [value, *limits], after=maker)
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = name, value.type, value.shape
    for reader, place in uses:
        reader.replace_input_with(place, node.outputs[0])
    return True


def _bounds(node: ir.Node) -> tuple[float, float] | None:
    if node.op_type == "Relu":
        return 0.0, float(np.finfo(np.float32).max)
    lowest, highest = constant(input_value(node, 1)), constant(input_value(node, 2))
    if lowest is None or highest is None:
        return None
    return float(lowest.reshape(())), float(highest.reshape(()))

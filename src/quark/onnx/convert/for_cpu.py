"""Prepare a quantized model for CPUs without changing a bit of its outputs.

ONNX Runtime computes a layer on integers if activations are uint8 (on x86), if its bias is int32 at the scale of the
sums, and if its output is quantized right away. Models for NPUs have int8 activations and biases, and a Relu or Clip
before the quantizer: there it dequantizes everything, computes in float, and is slower than the float model. This
conversion changes

    codes         q  is  q + 128  with zero point 128, as uint8
    biases        b s_b  is  c s_x s_w,  an int32 code c at the scale of the sums
    activations   Q(clip(y, l, h))  is  clip(Q(y), Q(l), Q(h)),  since Q never decreases

Float and integer arithmetic agree if all scales are powers of two, and if no sum can exceed 2^24 steps: float32 then
represents every sum of a layer exactly, in any order, and multiplying by s_x s_w / s_y rounds nothing. ModelError names
the first layer for which that cannot be shown. Layers that are not quantized stay as they are.

Block operators do what stands before them (prepared_blocks.py), which our library computes in one pass.

Integer kernels of x86 processors without VNNI (before 2019) add two products in 16 bits and may saturate: there,
compare the outputs of both models.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from quark.errors import ModelError
from quark.formats.affine import AffineParameters, integer_format, quantize_affine
from quark.onnx.convert.integers import (
    bias_of,
    bias_values,
    convert_a8w8_npu_to_a8w8_cpu,
    convert_s8s8_to_u8s8,
    dequantizer_of,
    levels_of,
    product_scale,
    scale_and_zero_point,
)
from quark.onnx.convert.quantizers import graph_of_model, model_of_graph, quantizers_in
from quark.onnx.graph import (
    add_initializer,
    add_node,
    attribute,
    clip_bounds,
    constant,
    input_value,
    is_constant,
    is_read_once,
    opset,
    readers,
    remove_dead,
    replace_input,
)
from quark.onnx.plan_reader import QuantizedGraph, is_quantize
from quark.onnx.prepared_blocks import define_functions, prepare

Array = NDArray[Any]

LAYERS = ("Conv", "Gemm")
EXACT_STEPS = 2**24  # float32 represents every integer up to here
OPSET_OF_INTEGER_CLIP = 12
_BYTES = (ir.DataType.INT8, ir.DataType.UINT8)


def convert_for_cpu(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with uint8 activations, int32 biases, Relu and Clip on codes, and prepared block operators; its
    outputs stay the same to the bit."""
    graph = graph_of_model(model)
    quantized = quantizers_in(graph)
    if opset(graph) < OPSET_OF_INTEGER_CLIP:
        raise ModelError(
            f"the model is of opset {opset(graph)}, and Clip takes integers from opset {OPSET_OF_INTEGER_CLIP} on. "
            "Convert it with 'quark convert opset-version' first"
        )
    for layer in graph.graph.all_nodes():
        if layer.op_type in LAYERS and not layer.domain:
            _check_layer(layer, quantized)
    graph = graph_of_model(convert_s8s8_to_u8s8(convert_a8w8_npu_to_a8w8_cpu(model)))
    for node in list(graph.graph.all_nodes()):
        if node.op_type in ("Relu", "Clip") and not node.domain:
            _clip_codes(graph, node)
    remove_dead(graph)
    has_prepared = prepare(graph) > 0
    converted = model_of_graph(graph)
    if has_prepared:
        define_functions(converted)
    return converted


def _check_layer(layer: ir.Node, quantized: QuantizedGraph) -> None:
    """Raise ModelError unless the layer computes the same in integers as in float. Ignores float layers."""
    what = f"node '{layer.name}' ({layer.op_type})"
    data, weight, scale = dequantizer_of(layer, 0), dequantizer_of(layer, 1), product_scale(layer)
    if data is None or weight is None:
        return
    codes, dtype = input_value(weight, 0), quantized.quantizers[data].dtype
    if scale is None or not is_constant(codes) or codes is None or dtype not in _BYTES or dtype is None:
        raise ModelError(f"{what}: expected stored weights with constant scales, and 8-bit data with one scale")
    if attribute(layer, "beta", 1.0) != 1.0:
        raise ModelError(f"{what}: it multiplies its bias by beta {attribute(layer, 'beta'):g}; expected 1")
    behind = _quantizer_behind(layer)
    scales = [scale, *([] if behind is None else [scale_and_zero_point(behind, str(layer.name))[0]])]
    for number in (number for array in scales for number in np.ravel(array).tolist()):
        if not _is_power_of_two(number):
            raise ModelError(
                f"{what}: scale {number:g} of its sums or its output is not a power of two, so that float and integer "
                "arithmetic round differently. Quantize with a preset of power-of-two scales, such as XINT8"
            )
    _, zero_point = scale_and_zero_point(data, str(layer.name))
    limits = np.iinfo(dtype.numpy())
    reach = max(limits.max - zero_point.item(), zero_point.item() - limits.min)
    steps = _sums_of_magnitudes(layer, weight, codes) * reach
    bias = bias_of(layer, quantized)
    if bias is not None:
        own = dequantizer_of(layer, 2)
        assert own is not None, what
        added = bias_values(own, bias.tensor) / scale
        if (added != np.rint(added)).any():
            raise ModelError(
                f"{what}: bias '{bias.tensor}' is not a whole number of steps of the sums, {np.max(scale):g}, and "
                "an int32 bias would round it"
            )
        steps = steps + np.abs(added).ravel()
    elif input_value(layer, 2) is not None:
        raise ModelError(f"{what}: its bias is not quantized, so its sums are not integers")
    if steps.max(initial=0) > EXACT_STEPS:
        raise ModelError(
            f"{what}: its sums may reach {steps.max():.0f} steps; float32 is exact up to {EXACT_STEPS}, so that the "
            "float sums may already be rounded"
        )


def _sums_of_magnitudes(layer: ir.Node, weight: ir.Node, codes: ir.Value) -> Array:
    """For each output of a layer, the sum of the magnitudes of its weights, in steps of their scale."""
    _, zero_point = scale_and_zero_point(weight, str(codes.name))
    levels = np.abs(levels_of(weight, codes, zero_point))
    is_by_column = layer.op_type == "Gemm" and not attribute(layer, "transB", 0)
    return np.asarray(levels.sum(axis=0) if is_by_column else levels.reshape(len(levels), -1).sum(axis=1))


def _quantizer_behind(layer: ir.Node) -> ir.Node | None:
    """The QuantizeLinear that reads the layer's output, or that of the activation behind it."""
    value = layer.outputs[0]
    while True:
        uses = readers(value)
        quantizer = next((node for node, _ in uses if is_quantize(node)), None)
        if quantizer is not None or len(uses) != 1 or uses[0][0].op_type not in ("Relu", "Clip"):
            return quantizer
        value = uses[0][0].outputs[0]


def _clip_codes(graph: ir.Model, activation: ir.Node) -> None:
    """Move an activation behind the quantizer that reads it, if the layer before it then computes on integers."""
    value, bounds = input_value(activation, 0), clip_bounds(activation)
    quantize = readers(activation.outputs[0])[0][0] if is_read_once(activation.outputs[0]) else None
    if value is None or bounds is None or not is_read_once(value) or quantize is None or not is_quantize(quantize):
        return
    layer, codes = value.producer(), quantize.outputs[0]
    if layer is None or codes.is_graph_output() or quantize.graph is not layer.graph:
        return
    scale, zero_point = constant(input_value(quantize, 1)), constant(input_value(quantize, 2))
    if scale is None or zero_point is None or scale.size != 1:
        return
    if ir.DataType.from_numpy(zero_point.dtype) not in _BYTES:
        return
    is_layer = layer.op_type in LAYERS and not layer.domain and product_scale(layer) is not None
    if not is_layer and not _is_exact_sum(layer, float(scale.item())):
        return
    format = integer_format(ir.DataType.from_numpy(zero_point.dtype).name.lower())
    parameters = AffineParameters(scale.reshape(()), zero_point.reshape(()), format)
    ends = [np.asarray(quantize_affine(np.float32(bound), parameters)) for bound in bounds]
    name = str(activation.name)
    limits = [add_initializer(graph, f"{name}_{end}", array) for end, array in zip(("min", "max"), ends, strict=True)]
    replace_input(quantize, 0, value)
    clip = add_node(graph, "Clip", [None, *limits], after=quantize, name=f"{name}_codes")
    clip.outputs[0].type, clip.outputs[0].shape = codes.type, codes.shape
    codes.replace_all_uses_with(clip.outputs[0])
    replace_input(clip, 0, codes)


def _is_exact_sum(node: ir.Node, scale: float) -> bool:
    """True if the node adds two tensors of codes, and float32 represents the sum exactly in steps of `scale`."""
    terms = [dequantizer_of(node, index) for index in range(2)] if node.op_type == "Add" and not node.domain else []
    ratios = []
    for term in terms:
        array = None if term is None else constant(input_value(term, 1))
        if array is None or array.size != 1 or not _is_power_of_two(float(array.item()) / scale):
            return False
        ratios.append(math.log2(float(array.item()) / scale))
    # codes have 8 bits, so that their sum has 9, beside the zero point of the output
    return bool(ratios) and max(*ratios, 0) - min(*ratios, 0) + 10 <= math.log2(EXACT_STEPS)


def _is_power_of_two(number: float) -> bool:
    return number > 0 and math.frexp(number)[0] == 0.5

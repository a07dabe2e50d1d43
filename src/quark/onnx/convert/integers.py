"""Other integer types and scales for the codes of a quantized model.

    convert_s8s8_to_u8s8           activations: int8 to uint8              q + 128
    convert_u16s8_to_s16s8         activations: uint16 to int16            q - 32768
    narrow_to_uint8                uint16 to uint8 over the same range     scale * 257, zero point / 257
    resize_to_power_of_two         quantizers around Resize                signed, symmetric, power-of-two scales
    convert_a8w8_npu_to_a8w8_cpu   biases: int8 to int32                   scale = activation's * weight's
    convert_bias_int32_to_int16    biases: int32 to int16                  scale * 2^k where the codes do not fit

The first two are exact. All others round half to even; a conversion that changes the scale of an activation also rounds
the int32 biases of the layers that read it to their new scale, the product of the activation's and the weight's.

A scale or zero point that other tensors use too is copied, and a bias that several layers read gets a DequantizeLinear
for each. Codes must stand between QuantizeLinear and DequantizeLinear, or be stored: ModelError names the first tensor
whose codes something else reads, or that are an input or output of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from quark.errors import InvalidValueError, ModelError
from quark.formats.affine import AffineParameters, Granularity, integer_format, quantize_affine
from quark.formats.arrays import array_kind
from quark.onnx.convert.graph_edits import convert_opset_version
from quark.onnx.convert.quantizers import graph_of_model, model_of_graph, quantizers_in
from quark.onnx.graph import (
    add_initializer,
    add_node,
    attribute,
    constant,
    input_value,
    is_constant,
    is_read_once,
    readers,
    replace_input,
)
from quark.onnx.load.structure import opset_versions
from quark.onnx.plan_reader import QuantizedGraph, Quantizer, is_dequantize, is_quantize
from quark.ops.schema import DOMAIN
from quark.text import get_logger

Array = NDArray[Any]
Change: TypeAlias = Callable[[Array, Array], tuple[Array, Array]]  # from scales and zero points to the new ones

LAYERS = ("Conv", "ConvTranspose", "Gemm")  # the weight is the second input and the bias the third
NORMS = ("LayerNormalization", "InstanceNormalization", "BatchNormalization")
OPSET_OF_INT16 = 21
_NARROW = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16)
_SAME = 2.0**-22  # two products of the same scales, however rounded
_WIDTH_RATIO = 257  # from uint16 to uint8: 65535 / 255

_log = get_logger(__name__)


def convert_s8s8_to_u8s8(model: onnx.ModelProto) -> onnx.ModelProto:
    """Change int8 activations to uint8: codes and zero points increase by 128, so every value stays the same."""
    return _shifted(model, ir.DataType.INT8, ir.DataType.UINT8, lambda zero_point: zero_point + 128)


def convert_u16s8_to_s16s8(model: onnx.ModelProto) -> onnx.ModelProto:
    """Change uint16 activations to int16: codes and zero points decrease by 32768, so values stay the same.

    Zero point 32767, which some tools call symmetric, also becomes 0. The steps stay the same; only a value beyond
    32767 steps, the highest of 65536 levels, is now clipped.
    """
    return _shifted(
        model,
        ir.DataType.UINT16,
        ir.DataType.INT16,
        lambda zero_point: np.where(zero_point == 32767, 0, zero_point - 32768),
    )


def narrow_to_uint8(model: onnx.ModelProto) -> onnx.ModelProto:
    """Change uint16 codes to uint8 over the same range, without calibration: 257 steps become one."""
    graph = graph_of_model(model)
    quantized = quantizers_in(graph)
    tensors = [tensor for tensor in _code_tensors(quantized) if tensor.dtype is ir.DataType.UINT16]

    def change(scale: Array, zero_point: Array) -> tuple[Array, Array]:
        return scale * _WIDTH_RATIO, np.rint(zero_point / _WIDTH_RATIO)

    _change_codes(graph, tensors, ir.DataType.UINT8, change)
    return model_of_graph(graph)


def resize_to_power_of_two(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give the quantizers before and behind every Resize symmetric power-of-two scales.

    The scale is the smallest power of two with which the codes still cover the present range. The codes become signed,
    with zero point 0 and as many bits as before.
    """
    graph = graph_of_model(model)
    quantized = quantizers_in(graph)
    resized = {node for node in graph.graph.all_nodes() if node.op_type == "Resize" and not node.domain}
    around = [tensor for tensor in _code_tensors(quantized) if tensor.is_around(resized)]
    for dtype in dict.fromkeys(tensor.dtype for tensor in around):
        signed = _signed(dtype)
        if signed is not None:
            same = [tensor for tensor in around if tensor.dtype is dtype]
            _change_codes(graph, same, signed, _symmetric_power_of_two(dtype))
    return model_of_graph(graph)


def convert_a8w8_npu_to_a8w8_cpu(model: onnx.ModelProto) -> onnx.ModelProto:
    """Change the biases of Conv, ConvTranspose and Gemm to int32, with the scale of the sum that they are added to.

    An NPU reads biases as int8 with a scale of their own; a CPU adds int32 to the sum of products of codes. Layers
    whose data or weight is not quantized, and int32 biases, stay as they are.
    """
    graph = graph_of_model(model)
    quantized = quantizers_in(graph)
    for layer in list(graph.graph.all_nodes()):
        scale = product_scale(layer)
        bias = bias_of(layer, quantized)
        if scale is None or bias is None or bias.dtype not in _NARROW:
            continue
        own = _own_dequantizer(graph, layer)
        _store_bias(graph, own, bias.tensor, bias_values(own, bias.tensor), scale, ir.DataType.INT32)
    return model_of_graph(graph)


def convert_bias_int32_to_int16(model: onnx.ModelProto) -> tuple[onnx.ModelProto, bool]:
    """Change int32 biases to int16. Also returns whether there were any; if not, the model is unchanged.

    Codes that fit stay as they are. Otherwise the scale of the bias, or of the channel, is multiplied by the smallest
    power of two with which they fit. The model is lifted to opset 21, the first that knows int16 codes.
    """
    if not any(_int32_biases(graph_of_model(model))):
        return model, False
    if opset_versions(model.opset_import).get("", 0) < OPSET_OF_INT16:
        model = convert_opset_version(model, OPSET_OF_INT16)
    graph = graph_of_model(model)
    raised = []
    for layer, bias in list(_int32_biases(graph)):
        own = _own_dequantizer(graph, layer)
        scale, _ = scale_and_zero_point(own, bias.tensor)
        values = bias_values(own, bias.tensor)
        factor = _fitting_factor(values, scale, ir.DataType.INT16)
        if (factor > 1).any():
            raised.append(bias.tensor)
        _store_bias(graph, own, bias.tensor, values, scale * factor, ir.DataType.INT16)
    if raised:
        names = ", ".join(raised[:5]) + (", ..." if len(raised) > 5 else "")
        _log.warning("biases that need more than 16 bits were rounded to a larger scale: %s", names)
    return model_of_graph(graph), True


# ---- codes of tensors ----


@dataclass(frozen=True, eq=False)
class _CodeTensor:
    """The codes of one tensor: the value that they are, and the nodes that make and read them."""

    name: str
    codes: ir.Value
    nodes: tuple[ir.Node, ...]
    dtype: ir.DataType
    is_constant: bool

    @property
    def is_stored(self) -> bool:
        return is_constant(self.codes)

    def is_around(self, nodes: Collection[ir.Node]) -> bool:
        """True if one of the nodes makes the data that is quantized, or reads the result as its first input."""
        for node in self.nodes:
            data = input_value(node, 0)
            if is_quantize(node) and data is not None and data.producer() in nodes:
                return True
            if is_dequantize(node) and any(reader in nodes and not index for reader, index in readers(node.outputs[0])):
                return True
        return False

    def check(self) -> None:
        """Raise ModelError if something but QuantizeLinear and DequantizeLinear makes or reads the codes."""
        if self.codes.is_graph_input() or self.codes.is_graph_output():
            raise ModelError(
                f"tensor '{self.name}': its {self.dtype.name.lower()} codes '{self.codes.name}' are an input or output "
                "of a graph, whose type would change. Let the graph read and return the numbers"
            )
        maker = self.codes.producer()
        users = [*([] if maker is None else [maker]), *(node for node, _ in readers(self.codes))]
        others = [node for node in users if node not in self.nodes]
        if others or (maker is None and not self.is_stored):
            node = others[0] if others else self.nodes[0]
            raise ModelError(
                f"tensor '{self.name}': node '{node.name}' ({node.op_type}) computes with its codes. Only codes "
                "between QuantizeLinear and DequantizeLinear can be converted: quantize with quant_format QDQ"
            )


def _code_tensors(quantized: QuantizedGraph) -> list[_CodeTensor]:
    """The tensors whose codes QuantizeLinear or DequantizeLinear make or read, in the order of the graph."""
    nodes: dict[ir.Value, list[ir.Node]] = {}
    for node in quantized.quantizers:
        codes = node.outputs[0] if is_quantize(node) else input_value(node, 0) if is_dequantize(node) else None
        if codes is not None:
            nodes.setdefault(codes, []).append(node)
    result = []
    for codes, nodes_of_codes in nodes.items():
        first = quantized.quantizers[nodes_of_codes[0]]
        if first.dtype is not None:
            result.append(_CodeTensor(first.tensor, codes, tuple(nodes_of_codes), first.dtype, first.is_constant))
    return result


def _shifted(
    model: onnx.ModelProto, source: ir.DataType, target: ir.DataType, shift: Callable[[Array], Array]
) -> onnx.ModelProto:
    """The model with other zero points for the activations of a type; the steps of their codes stay the same.

    Tensors with the middle of the codes as zero point share one: 'uint8_zp128' or 'int16_zp0', as AMD Quark names it.
    """
    graph = graph_of_model(model)
    tensors = [
        tensor for tensor in _code_tensors(quantizers_in(graph)) if tensor.dtype is source and not tensor.is_constant
    ]
    _change_codes(graph, tensors, target, lambda scale, zero_point: (scale, shift(zero_point)))
    limits = np.iinfo(target.numpy())
    middle = np.array((limits.min + limits.max + 1) // 2, target.numpy())
    for node in (node for tensor in tensors for node in tensor.nodes):
        zero_point = constant(input_value(node, 2))
        if zero_point is not None and zero_point.shape == () and zero_point == middle:
            replace_input(node, 2, _shared(graph, f"{target.name.lower()}_zp{middle}", middle))
    return model_of_graph(graph)


def _symmetric_power_of_two(dtype: ir.DataType) -> Change:
    """Change codes of a type to signed ones of the same width with zero point 0 and a power-of-two scale."""
    limits = np.iinfo(dtype.numpy())

    def change(scale: Array, zero_point: Array) -> tuple[Array, Array]:
        reach = np.maximum(zero_point - limits.min, limits.max - zero_point)
        wanted = reach * scale / 2.0 ** (dtype.bitwidth - 1)
        powers = np.array([pos2scale(scale2pos(number)) for number in wanted.ravel().tolist()])
        return powers.reshape(scale.shape), np.zeros_like(zero_point)

    return change


def scale2pos(scale: float) -> int:
    """The position of the binary point with which a power-of-two scale is at least `scale`: floor(-log2(scale)).

    Scales beyond 2**-127 to 2**127 count as these.
    """
    fraction, exponent = math.frexp(min(max(scale, 2.0**-127), 2.0**127))
    return 1 - exponent if fraction == 0.5 else -exponent


def pos2scale(pos: int) -> float:
    """The scale that a position stands for: 2**-pos."""
    return float(2.0**-pos)


def to_power_of_two(scale: onnx.TensorProto, zero_point: onnx.TensorProto) -> None:
    """Change the scale and the zero point of a quantizer in place, as `resize_to_power_of_two` does."""
    dtype = ir.DataType(zero_point.data_type)
    signed = _signed(dtype)
    if signed is None:
        raise ModelError(f"zero point '{zero_point.name}' is {dtype.name.lower()}: expected 8 or 16 bits")
    old = onnx.numpy_helper.to_array(scale), onnx.numpy_helper.to_array(zero_point).astype(np.float64)
    scales, zeros = _symmetric_power_of_two(dtype)(old[0].astype(np.float64), old[1])
    scale.CopyFrom(onnx.numpy_helper.from_array(scales.astype(old[0].dtype), scale.name))
    zero_point.CopyFrom(onnx.numpy_helper.from_array(zeros.astype(signed.numpy()), zero_point.name))


def _signed(dtype: ir.DataType) -> ir.DataType | None:
    """The signed type of the same width, None for types other than integers of 8 and 16 bits."""
    if dtype in (ir.DataType.INT8, ir.DataType.UINT8):
        return ir.DataType.INT8
    return ir.DataType.INT16 if dtype in (ir.DataType.INT16, ir.DataType.UINT16) else None


def _change_codes(graph: ir.Model, tensors: Iterable[_CodeTensor], target: ir.DataType, change: Change) -> None:
    """Give tensors other scales and zero points, in float64, and codes of another type; let int32 biases follow."""
    wanted: dict[tuple[ir.Node, int], Array] = {}
    limits = np.iinfo(target.numpy())
    for tensor in tensors:
        tensor.check()
        for node in tensor.nodes:
            scale, zero_point = scale_and_zero_point(node, tensor.name)
            new_scale, new_zero_point = change(scale, zero_point)
            if not np.array_equal(scale, new_scale):
                wanted[node, 1] = _as_scale(new_scale, node, tensor.name)
            wanted[node, 2] = np.clip(new_zero_point, limits.min, limits.max).astype(target.numpy())
            if tensor.is_stored:
                levels = levels_of(node, tensor.codes, zero_point)
                spread = [_spread(node, value, levels.shape) for value in (scale, new_scale, new_zero_point)]
                codes = np.rint(levels * (spread[0] / spread[1])) + spread[2]
                wanted[node, 0] = np.clip(codes, limits.min, limits.max).astype(target.numpy())
            node.attributes.pop("output_dtype", None)  # the zero point has the type
        tensor.codes.type = ir.TensorType(target)
    rescaled = {node for node, index in wanted if index == 1}
    biases = list(_derived_biases(graph, rescaled))
    _assign(graph, wanted)
    for layer, name in biases:
        product = product_scale(layer)
        assert product is not None, layer.name
        own = _own_dequantizer(graph, layer)
        _store_bias(graph, own, name, bias_values(own, name), product, ir.DataType.INT32)


def scale_and_zero_point(node: ir.Node, tensor: str) -> tuple[Array, Array]:
    """Scales and zero points in float64, with the same shape."""
    values = input_value(node, 1), input_value(node, 2)
    scale, zero_point = (constant(value) for value in values)
    if scale is None or (values[1] is not None and zero_point is None):
        raise ModelError(f"tensor '{tensor}': its scale or zero point is computed at run time and cannot be converted")
    zero_points = np.zeros(1) if zero_point is None else zero_point.astype(np.float64)
    if zero_points.size == 1:
        zero_points = np.full(scale.shape, zero_points.item())
    if zero_points.shape != scale.shape:
        raise ModelError(f"tensor '{tensor}' has scales of shape {scale.shape} and zero points of {zero_points.shape}")
    return scale.astype(np.float64), zero_points


def _as_scale(scale: Array, node: ir.Node, tensor: str) -> Array:
    """Scales rounded once to the type that the node has them in."""
    old = constant(input_value(node, 1))
    assert old is not None, tensor
    with np.errstate(over="ignore"):
        rounded = scale.astype(old.dtype)
    if not (np.isfinite(rounded) & (rounded > 0)).all():
        raise ModelError(f"tensor '{tensor}': scale {scale.max():g} does not fit into {old.dtype}")
    return rounded


def _axis(node: ir.Node) -> int:
    return int(attribute(node, "axis", 0 if node.domain == DOMAIN else 1))


def _spread(node: ir.Node, parameters: Array, shape: tuple[int, ...]) -> Array:
    """Parameters in a shape that broadcasts with the codes."""
    axis = None if parameters.size == 1 else _axis(node)
    size = int(attribute(node, "block_size", 0)) or None
    try:
        granularity = Granularity(axis, None if axis is None else size)
        spread: Array = granularity.spread(array_kind(parameters), parameters, shape)
    except InvalidValueError as error:
        raise ModelError(f"node '{node.name}' ({node.op_type}): {error}") from error
    return spread


def levels_of(node: ir.Node, codes: ir.Value, zero_point: Array) -> Array:
    """Stored codes less their zero points, in float64."""
    array = constant(codes)
    assert array is not None, codes.name
    levels: Array = array.astype(np.float64) - _spread(node, zero_point, array.shape)
    return levels


def _shared(graph: ir.Model, name: str, array: Array) -> ir.Value:
    """The initializer of that name and content, which is added if the graph has none."""
    value = graph.graph.initializers.get(name)
    present = constant(value)
    is_same = present is not None and present.dtype == array.dtype and np.array_equal(present, array)
    return value if value is not None and is_same else add_initializer(graph, name, array)


# ---- biases ----


def dequantizer_of(node: ir.Node, index: int) -> ir.Node | None:
    """The DequantizeLinear that makes input number `index`."""
    value = input_value(node, index)
    maker = None if value is None else value.producer()
    return maker if is_dequantize(maker) else None


def product_scale(layer: ir.Node) -> Array | None:
    """The scale of the sums of products of codes that a layer computes; None if it does not multiply constant codes."""
    data, weight = dequantizer_of(layer, 0), dequantizer_of(layer, 1)
    if layer.op_type not in LAYERS or layer.domain or data is None or weight is None:
        return None
    scales = constant(input_value(data, 1)), constant(input_value(weight, 1))
    alpha = float(attribute(layer, "alpha", 1.0)) if layer.op_type == "Gemm" else 1.0
    if scales[0] is None or scales[1] is None or scales[0].size != 1 or scales[1].ndim > 1 or alpha <= 0:
        return None
    is_transposed = layer.op_type == "Conv" or (layer.op_type == "Gemm" and attribute(layer, "transB", 0))
    if scales[1].size > 1 and _axis(weight) != (0 if is_transposed else 1):
        return None
    product: Array = np.float64(alpha) * scales[0].astype(np.float64).reshape(()) * scales[1].astype(np.float64)
    return product.reshape(()) if product.size == 1 else product


def bias_of(layer: ir.Node, quantized: QuantizedGraph, operators: Collection[str] = LAYERS) -> Quantizer | None:
    """The quantizer of the bias of a layer, None if it has none or is another operator."""
    if layer.op_type not in operators or layer.domain or dequantizer_of(layer, 2) is None:
        return None
    bias = quantized.of(input_value(layer, 2))
    return bias if bias is not None and bias.is_constant else None


def _int32_biases(graph: ir.Model) -> Iterator[tuple[ir.Node, Quantizer]]:
    quantized = quantizers_in(graph)
    for layer in graph.graph.all_nodes():
        bias = bias_of(layer, quantized, (*LAYERS, *NORMS))
        if bias is not None and bias.dtype is ir.DataType.INT32:
            yield layer, bias


def _derived_biases(graph: ir.Model, rescaled: Collection[ir.Node]) -> Iterator[tuple[ir.Node, str]]:
    """The layers that read rescaled data or weights, and have an int32 bias whose scale is the product of both; each
    with the name of the bias."""
    if not rescaled:
        return
    for layer, bias in _int32_biases(graph):
        product, dequantize = product_scale(layer), dequantizer_of(layer, 2)
        is_affected = dequantizer_of(layer, 0) in rescaled or dequantizer_of(layer, 1) in rescaled
        if product is None or dequantize is None or not is_affected:
            continue
        scale, _ = scale_and_zero_point(dequantize, bias.tensor)
        if len({scale.size, product.size} - {1}) < 2 and np.allclose(scale.ravel(), product.ravel(), _SAME, 0):
            yield layer, bias.tensor


def _own_dequantizer(graph: ir.Model, layer: ir.Node) -> ir.Node:
    """The DequantizeLinear of the bias, which nothing but this layer reads: a copy if something else does."""
    dequantize = dequantizer_of(layer, 2)
    assert dequantize is not None, layer.name
    if is_read_once(dequantize.outputs[0]):
        return dequantize
    copy = add_node(
        graph,
        dequantize.op_type,
        dequantize.inputs,
        before=layer,
        name=dequantize.name,
        domain=dequantize.domain,
        attributes=dequantize.attributes,
    )
    copy.outputs[0].type, copy.outputs[0].shape = dequantize.outputs[0].type, dequantize.outputs[0].shape
    replace_input(layer, 2, copy.outputs[0])
    return copy


def bias_values(dequantize: ir.Node, tensor: str) -> Array:
    """The numbers that a bias is, in float64. Its codes are stored, or made of stored numbers."""
    codes = input_value(dequantize, 0)
    maker = None if codes is None else codes.producer()
    scale, zero_point = scale_and_zero_point(dequantize, tensor)
    if is_constant(codes) and codes is not None:
        levels = levels_of(dequantize, codes, zero_point)
    elif maker is not None and is_quantize(maker) and is_constant(input_value(maker, 0)):
        levels = _rounded_levels(maker, tensor)
    else:
        raise ModelError(f"bias '{tensor}': its codes are computed at run time and cannot be converted")
    values: Array = levels * _spread(dequantize, scale, levels.shape)
    return values


def _rounded_levels(quantize: ir.Node, tensor: str) -> Array:
    """The result of QuantizeLinear for a constant, less the zero point."""
    numbers, scale = constant(input_value(quantize, 0)), constant(input_value(quantize, 1))
    zero_point = constant(input_value(quantize, 2))
    assert numbers is not None, tensor
    if scale is None or zero_point is None:
        raise ModelError(f"bias '{tensor}': QuantizeLinear without a constant scale and zero point cannot be converted")
    format = integer_format(ir.DataType.from_numpy(zero_point.dtype).name.lower())
    axis = None if scale.size == 1 else _axis(quantize)
    codes = quantize_affine(numbers, AffineParameters(scale, zero_point, format, axis))
    levels: Array = codes.astype(np.float64) - _spread(quantize, zero_point.astype(np.float64), numbers.shape)
    return levels


def _fitting_factor(values: Array, scale: Array, dtype: ir.DataType) -> Array:
    """The smallest powers of two, one for each scale, by which scales must grow so that all codes fit into a type."""
    codes = np.rint(values.reshape(-1, scale.size) / scale.ravel()) if scale.size > 1 else np.rint(values / scale)
    axis = 0 if scale.size > 1 else None
    lowest, highest = codes.min(axis, initial=0).reshape(scale.shape), codes.max(axis, initial=0).reshape(scale.shape)
    limits, factor = np.iinfo(dtype.numpy()), np.ones(scale.shape)
    while (is_beyond := (np.rint(lowest / factor) < limits.min) | (np.rint(highest / factor) > limits.max)).any():
        factor = np.where(is_beyond, factor * 2, factor)
    return factor


def _store_bias(
    graph: ir.Model, dequantize: ir.Node, tensor: str, values: Array, scale: Array, dtype: ir.DataType
) -> None:
    """Store a bias as codes of that type, at that scale, with zero point 0, for its DequantizeLinear."""
    rounded = _as_scale(scale, dequantize, tensor)
    if rounded.size > 1 and values.shape[-1:] != rounded.shape:
        raise ModelError(f"bias '{tensor}' of shape {values.shape} has {rounded.size} scales and cannot be converted")
    codes, limits = np.rint(values / rounded.astype(np.float64)), np.iinfo(dtype.numpy())
    if ((codes < limits.min) | (codes > limits.max)).any():
        raise ModelError(
            f"bias '{tensor}': {np.abs(values).max():g} does not fit into {dtype.name.lower()} at the scale of its "
            f"layer's sums, {rounded.min():g}"
        )
    if rounded.size > 1:
        dequantize.attributes["axis"] = ir.AttrInt64("axis", values.ndim - 1)
    names = {0: f"{tensor}_quantized", 1: f"{tensor}_scale", 2: f"{tensor}_zero_point"}
    number = dtype.numpy()
    wanted = {0: codes.astype(number), 1: rounded, 2: np.zeros(rounded.shape, number)}
    _assign(graph, {(dequantize, index): array for index, array in wanted.items()}, names)


# ---- constants ----


def _assign(
    graph: ir.Model, wanted: Mapping[tuple[ir.Node, int], Array], names: Mapping[int, str] | None = None
) -> None:
    """Replace inputs of nodes by these constants.

    An initializer that nothing else reads is changed in place, and keeps its name. Otherwise inputs that shared one and
    get the same numbers share a new one, named after the old one, or by the number of the input.
    """
    groups: dict[tuple[object, ...], list[tuple[ir.Node, int]]] = {}
    for (node, index), array in wanted.items():
        key = (input_value(node, index), array.dtype, array.shape, array.tobytes(), names and names[index])
        groups.setdefault(key, []).append((node, index))
    for uses in groups.values():
        node, index = uses[0]
        value, array = input_value(node, index), wanted[node, index]
        if (
            value is not None
            and is_constant(value)
            and not value.is_graph_output()
            and set(readers(value)) <= set(uses)
        ):
            value.const_value = ir.Tensor(array, name=value.name)
            value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(array.shape)
            continue
        default = f"{node.name}_{('codes', 'scale', 'zero_point')[index]}" if names is None else names[index]
        added = add_initializer(graph, str(value.name) if value is not None and is_constant(value) else default, array)
        for reader, position in uses:
            replace_input(reader, position, added)

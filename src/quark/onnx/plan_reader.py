"""Read the quantization plan back from a quantized model: the inverse of `insert`.

    activations       QuantizeLinear with DequantizeLinear (ONNX's, com.microsoft's or Extended*), block operators,
                      Casts to float16 or bfloat16 and back, DynamicQuantizeLinear
    constants         codes behind DequantizeLinear, rounded numbers behind a block mark, float16 or bfloat16 behind a
                      Cast, or float numbers behind one of the quantizers above, as AMD Quark writes them
    integer layers    ConvInteger, MatMulInteger, MatMulNBits, and the QLinear* operators with whatever moves codes
                      between them

A file does not hold everything that a plan says. Fields that it does not hold are read as follows:

    reason            empty, except for the two reasons of `skipped` below
    is_saturating     True only if a Clip stands before the Cast; Extended* operators saturate in any case
    format            integers are named after the type they are stored in: int7 reads as int8
    scale             as stored, in float32 or float16; for MatMulInteger it includes the alpha of a Gemm
    axis              for MatMulInteger and MatMulNBits that of a [K, N] matrix, even if a Gemm read it transposed
    tensor            if the original name is lost, the name of the value in the file: this happens to results of
                      ConvInteger and MatMulInteger, and to codes that go from one moving operator to the next

`skipped` lists Conv, ConvTranspose, Gemm and MatMul nodes that read their weight, or every input, in float.

All other tensors have the names of the float model. `insert` and ONNX Runtime's quantizer, from which AMD Quark's is
derived, name codes, scales and zero points after them, so a name is known even if a folded Relu took its tensor along.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from quark.errors import ModelError, QuarkError
from quark.formats.catalog import FORMATS
from quark.formats.spec import IntFormat
from quark.onnx.choose.operators import Kind, facts
from quark.onnx.graph import attribute, graphs_in, input_value, is_constant, readers
from quark.onnx.lint.read_graph import read_graph
from quark.ops.constant_marks import CONSTANT_DOMAIN
from quark.ops.schema import BFP_QUANTIZE_DEQUANTIZE, DOMAIN, MX_QUANTIZE_DEQUANTIZE, quantizer_of
from quark.plan import (
    AffineChoice,
    BlockChoice,
    Choice,
    DynamicChoice,
    FloatChoice,
    QuantizationPlan,
    Reader,
    Role,
    SkippedNode,
    TensorChoice,
)

Array = NDArray[Any]

QUANTIZE = ("QuantizeLinear", "ExtendedQuantizeLinear")
DEQUANTIZE = ("DequantizeLinear", "ExtendedDequantizeLinear")
BLOCK = (MX_QUANTIZE_DEQUANTIZE.name, BFP_QUANTIZE_DEQUANTIZE.name)
DYNAMIC = "DynamicQuantizeLinear"
INTEGER_PRODUCTS = ("ConvInteger", "MatMulInteger")

WEIGHT_IN_FLOAT = "its weight is in float"
ALL_IN_FLOAT = "it reads no quantized tensor"

_LINEAR_DOMAINS = ("", "com.microsoft", DOMAIN)
_SHORT_FLOATS = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}
_FLOAT8 = {ir.DataType.FLOAT8E4M3FN: "fp8_e4m3", ir.DataType.FLOAT8E5M2: "fp8_e5m2", ir.DataType.FLOAT4E2M1: "fp4_e2m1"}
_MOVING = ("Identity", "Pad", "Resize")  # besides those of which the table of operators says so
_TRANSPOSE_A = r"Transpose_output(_\d+)?"  # what insert puts before the integer form of a Gemm with transA
_WIDE_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)


@dataclass(frozen=True)
class _CodeOperator:
    """An operator on codes: the inputs that are codes (scale and zero point follow each), the int32 bias, and the scale
    of the result (its zero point follows)."""

    factors: tuple[int, ...]
    result: int
    bias: int | None = None


_CODE_OPERATORS = {
    "QLinearConv": _CodeOperator((0, 3), 6, bias=8),
    "QLinearMatMul": _CodeOperator((0, 3), 6),
    "QGemm": _CodeOperator((0, 3), 7, bias=6),
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), _CodeOperator((0, 3), 6)),
    **dict.fromkeys(("QLinearAveragePool", "QLinearGlobalAveragePool"), _CodeOperator((0,), 3)),
    **dict.fromkeys(("QLinearLeakyRelu", "QLinearSigmoid", "QLinearSoftmax"), _CodeOperator((0,), 3)),
}


@dataclass(frozen=True, eq=False)
class _Quantized:
    """What is known of a value that holds codes, or the numbers that they stand for."""

    tensor: str
    choice: Choice
    is_constant: bool


def read_plan(source: str | os.PathLike[str] | onnx.ModelProto | bytes | ir.Model) -> QuantizationPlan:
    """Return the plan that a quantized model carries out. A model in float has an empty one.

    `source` is a file, a model, or its bytes. Raises ModelError if it is not an ONNX model, or if a quantizer in it
    does something that a plan cannot express, such as float8 with a scale for each channel.
    """
    model = source if isinstance(source, ir.Model) else read_graph(source)
    reading = _Reading(model)
    for node in _all_nodes(model.graph):
        reading.read(node)
    reading.read_outputs(model.graph)
    return QuantizationPlan(reading.tensors(), tuple(reading.skipped()))


class _Reading:
    """Nodes are read in the order of the graph, so what they read is known already."""

    def __init__(self, model: ir.Model) -> None:
        self._numbers: dict[ir.Value, _Quantized] = {}  # values that are dequantized
        self._codes: dict[ir.Value, _Quantized] = {}  # values that are codes
        self._rows: dict[tuple[_Quantized, Role], list[Reader]] = {}  # a choice may be large: it is hashed once
        self._layers: list[ir.Node] = []
        self._fixed = _fixed_values(model.graph)
        self._inner = _unpacking_nodes(model.graph, self._fixed)
        self._values = {
            str(value.name): value
            for graph in model.graphs()
            for value in (*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs))
        }
        self._rules: Mapping[str, Callable[[ir.Node], bool]] = {
            **dict.fromkeys(QUANTIZE, self._quantize),
            **dict.fromkeys(DEQUANTIZE, self._dequantize),
            **dict.fromkeys(BLOCK, self._block),
            **dict.fromkeys(INTEGER_PRODUCTS, self._integer_product),
            DYNAMIC: self._dynamic,
            "Cast": self._cast,
            "MatMulNBits": self._matmul_nbits,
            "QLinearConcat": self._code_concat,
            **dict.fromkeys(_CODE_OPERATORS, self._code_operator),
        }

    def read(self, node: ir.Node) -> None:
        """Note what the node does to its input, and which quantized numbers it reads."""
        try:
            self._read(node)
        except ModelError:
            raise
        except (QuarkError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ModelError(f"node '{_name(node)}' ({node.op_type}) is damaged: {error}") from error

    def _read(self, node: ir.Node) -> None:
        if id(node) in self._inner:
            return
        for index, value in enumerate(node.inputs):
            if value in self._numbers:
                self._add(self._numbers[value], Reader(_name(node), index), node)
        rule = self._rules.get(node.op_type)
        if (rule is None or not rule(node)) and not self._moved_codes(node):
            known = facts(node) if node.domain in ("", "ai.onnx") else None
            if known is not None and known.kind is Kind.COMPUTE:
                self._layers.append(node)

    def read_outputs(self, graph: ir.Graph) -> None:
        """Note the outputs of the graph that are quantized."""
        for index, value in enumerate(graph.outputs):
            if value in self._numbers:
                self._add(self._numbers[value], Reader("", index), None)

    def tensors(self) -> tuple[TensorChoice, ...]:
        """One row for all readers that see a tensor the same way, however many quantizers it has for them."""
        merged: dict[tuple[str, Role, Choice], list[Reader]] = {}
        for (quantized, role), found in self._rows.items():
            merged.setdefault((quantized.tensor, role, quantized.choice), []).extend(found)
        return tuple(TensorChoice(*key, tuple(found)) for key, found in merged.items())

    def skipped(self) -> Iterator[SkippedNode]:
        for node in self._layers:
            quantized = [index for index, value in enumerate(node.inputs) if value in self._numbers]
            if not quantized:
                yield SkippedNode(_name(node), node.op_type, ALL_IN_FLOAT)
            elif 1 not in quantized and _is_held(input_value(node, 1)):
                yield SkippedNode(_name(node), node.op_type, WEIGHT_IN_FLOAT)

    def _add(self, quantized: _Quantized, reader: Reader, node: ir.Node | None) -> None:
        role = Role.ACTIVATION
        if quantized.is_constant:
            known = None if node is None else facts(node)
            role = Role.BIAS if known is not None and reader.index == known.bias else Role.WEIGHT
        self._rows.setdefault((quantized, role), []).append(reader)

    # The rules. Each returns False if the node is not what its name suggests.

    def _quantize(self, node: ir.Node) -> bool:
        source = input_value(node, 0)
        if node.domain not in _LINEAR_DOMAINS or source is None:
            return False
        hint = _hint(node, 1)
        widened = source.producer()
        if widened is not None and widened.op_type == "Cast" and _stem(widened.name, "wide"):  # float16 data
            hint, source = _stem(widened.name, "wide"), widened.inputs[0] or source
        tensor = self._tensor(source, hint)
        self._codes[node.outputs[0]] = _Quantized(tensor, _linear_choice(node, None), _is_held(source))
        return True

    def _dequantize(self, node: ir.Node) -> bool:
        codes = input_value(node, 0)
        if node.domain not in _LINEAR_DOMAINS or codes is None:
            return False
        quantized = self._codes.get(codes)
        if quantized is None:
            is_fixed = codes in self._fixed or _is_held(codes)
            choice = _linear_choice(node, codes)
            if isinstance(choice, DynamicChoice) and is_fixed:
                return True  # a weight that is unpacked with a scale of its own
            quantized = _Quantized(_stem(codes.name, "quantized") or str(codes.name), choice, is_fixed)
        result = node.outputs[0]
        narrow = _lone_reader(result)
        if narrow is not None and _cast_type(narrow) is ir.DataType.FLOAT16 and _stem(narrow.name, "narrow"):
            self._inner.add(id(narrow))  # float16 data
            result = narrow.outputs[0]
        self._numbers[result] = quantized
        return True

    def _block(self, node: ir.Node) -> bool:
        source = input_value(node, 0)
        if node.domain not in (DOMAIN, CONSTANT_DOMAIN) or source is None:
            return False
        attributes = {key: attr.value for key, attr in node.attributes.items()}
        choice = BlockChoice(*quantizer_of(node.op_type, attributes))
        hint = _stem(node.name, node.op_type)
        if node.domain == DOMAIN:
            quantized = _Quantized(self._tensor(source, hint), choice, _is_held(source))
        else:
            stored = str(source.name) if _is_held(source) or hint is None else hint
            quantized = _Quantized(_stem(stored, choice.format) or stored, choice, is_constant=True)
        self._numbers[node.outputs[0]] = quantized
        return True

    def _cast(self, node: ir.Node) -> bool:
        """The second of two Casts, or one that widens a constant."""
        source = input_value(node, 0)
        if source is None or node.domain or _cast_type(node) not in _WIDE_FLOATS:
            return False
        if _is_held(source):
            name = _SHORT_FLOATS.get(_dtype(source) or ir.DataType.UNDEFINED)
            original = None if name is None else _stem(source.name, name)
            if name is None or (original is None and _cast_type(node) is _dtype(source)):
                return False  # a float16 model with float16 weights has such a Cast too, with the name that says so
            tensor = original or str(source.name)
            self._numbers[node.outputs[0]] = _Quantized(tensor, FloatChoice(name), is_constant=True)
            return True
        first = source.producer()
        if first is None or first.op_type != "Cast" or first.domain or _cast_type(first) not in _SHORT_FLOATS:
            return False
        name, before = _SHORT_FLOATS[_cast_type(first)], input_value(first, 0)
        if before is None or before.dtype not in (None, _cast_type(node)):
            return False
        hint, clip = _stem(first.name, name), before.producer()
        back = _stem(node.name, "float")
        if hint != back and (hint == before.name or back == source.name):
            return False  # one of them belongs to the model, or widens data for DynamicQuantizeLinear
        is_clipped = (
            clip is not None and clip.op_type == "Clip" and hint is not None and _stem(clip.name, "Clip") == hint
        )
        if clip is not None and is_clipped:
            before = clip.inputs[0] or before
        choice = FloatChoice(name, is_saturating=is_clipped)
        self._numbers[node.outputs[0]] = _Quantized(self._tensor(before, hint), choice, _is_held(before))
        return True

    def _dynamic(self, node: ir.Node) -> bool:
        source = input_value(node, 0)
        if source is None:
            return False
        before, hint = source.producer(), None
        if before is not None and before.op_type == "Cast" and _stem(before.name, "float"):  # float16 data
            hint, source = _stem(before.name, "float"), before.inputs[0] or source
            before = source.producer()
        if before is not None and before.op_type == "Transpose" and re.fullmatch(_TRANSPOSE_A, f"{source.name}"):
            hint, source = None, before.inputs[0] or source
        quantized = _Quantized(self._tensor(source, hint), DynamicChoice("uint8"), is_constant=False)
        self._codes[node.outputs[0]] = quantized
        return True

    def _integer_product(self, node: ir.Node) -> bool:
        name, weight = _layer(node), input_value(node, 1)
        data = self._codes.get(node.inputs[0]) if node.inputs[0] is not None else None
        if data is not None:
            self._add(data, Reader(name, 0), None)
        scale = _product_scale(node)
        if weight is None or scale is None or not _is_held(weight):
            return True
        axis = None if scale.ndim == 0 else 0 if node.op_type == "ConvInteger" else 1
        zero_point = _array(input_value(node, 3))
        choice = _affine(node, _dtype(weight), scale, zero_point, axis)
        tensor = _stem(weight.name, "quantized") or str(weight.name)
        self._add(_Quantized(tensor, choice, is_constant=True), Reader(name, 1), None)
        return True

    def _matmul_nbits(self, node: ir.Node) -> bool:
        weight, scale = input_value(node, 1), _array(input_value(node, 2))
        if weight is None or scale is None:
            return True
        bits, size = int(attribute(node, "bits", 4)), int(attribute(node, "block_size", 0))
        columns = int(attribute(node, "N", 0))
        if bits not in (2, 4, 8) or columns < 1 or size < 1 or scale.size % columns:
            raise ModelError(f"node '{_name(node)}' (MatMulNBits): its attributes contradict its scales")
        packed = _array(input_value(node, 3))
        format, zero_points = f"int{bits}", np.zeros(scale.size, np.int64)
        if packed is not None and packed.dtype == np.uint8:
            codes = packed.reshape(columns, -1, 1) >> (np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits))
            codes = (codes & np.uint8((1 << bits) - 1)).reshape(columns, -1)[:, : scale.size // columns]
            format, zero_points = f"uint{bits}", codes.astype(np.int64).T.ravel()
        scales = scale.reshape(columns, -1).T.ravel()
        choice = AffineChoice(format, tuple(scales.tolist()), tuple(zero_points.tolist()), 0, size)
        tensor = _stem(weight.name, "packed") or str(weight.name)
        self._add(
            _Quantized(tensor, choice, is_constant=True), Reader(_stem(node.name, "nbits") or _name(node), 1), None
        )
        return True

    def _code_operator(self, node: ir.Node) -> bool:
        if node.domain not in _LINEAR_DOMAINS[:2] or node.op_type not in _CODE_OPERATORS:
            return False
        form = _CODE_OPERATORS[node.op_type]
        name = _layer(node)
        factors = (self._code_factor(node, position, Reader(name, i)) for i, position in enumerate(form.factors))
        scales = [scale for scale in factors if scale is not None]
        bias = None if form.bias is None else input_value(node, form.bias)
        if bias is not None and len(scales) == len(form.factors):
            product = np.asarray(np.float32(attribute(node, "alpha", 1.0)) * scales[0] * scales[1])
            choice = _affine(node, ir.DataType.INT32, product, None, 0 if product.ndim else None)
            tensor = _stem(bias.name, "quantized") or str(bias.name)
            self._rows[_Quantized(tensor, choice, is_constant=True), Role.BIAS] = [Reader(name, 2)]
        self._code_result(node, form.result)
        return True

    def _code_concat(self, node: ir.Node) -> bool:
        name = _layer(node)
        for index, position in enumerate(range(2, len(node.inputs), 3)):
            self._code_factor(node, position, Reader(name, index))
        self._code_result(node, 0)
        return True

    def _code_factor(self, node: ir.Node, position: int, reader: Reader) -> Array | None:
        """Note that the node reads these codes; their scales."""
        codes, scale = input_value(node, position), _array(input_value(node, position + 1))
        if codes is None:
            return scale
        quantized = self._codes.get(codes)
        if quantized is None and scale is not None:
            zero_point = _array(input_value(node, position + 2))
            axis = None
            if scale.ndim:  # of output channels
                axis = 0 if node.op_type == "QLinearConv" or attribute(node, "transB", 0) else 1
            choice = _affine(node, _dtype(codes), scale, zero_point, axis)
            quantized = _Quantized(_stem(codes.name, "quantized") or str(codes.name), choice, _is_held(codes))
        if quantized is not None:
            self._add(quantized, reader, None)
        return scale

    def _code_result(self, node: ir.Node, position: int) -> None:
        scale, zero_point = _array(input_value(node, position)), _array(input_value(node, position + 1))
        if scale is not None and zero_point is not None:
            choice = _affine(node, _dtype(input_value(node, position + 1)), scale, zero_point, None)
            tensor = _hint(node, position) or str(node.outputs[0].name)
            self._codes[node.outputs[0]] = _Quantized(tensor, choice, is_constant=False)

    def _moved_codes(self, node: ir.Node) -> bool:
        """A node of the standard that reads codes: those that a Reshape, MaxPool, Relu ... moves keep their scale."""
        read = [(index, value) for index, value in enumerate(node.inputs) if value in self._codes]
        if not read or node.domain:
            return bool(read)
        name, maker = _layer(node), read[0][1].producer()
        quantized = self._codes[read[0][1]]
        if maker is not None and _layer(maker) == name != _name(maker):  # the Relu of a layer, after the layer
            self._codes[node.outputs[0]] = quantized
            return True
        for index, value in read:
            self._add(self._codes[value], Reader(name, index), node)
        known = facts(node)
        is_moving = node.op_type in _MOVING or (known is not None and known.kind in (Kind.PASS, Kind.ACTIVATION))
        for result in node.outputs if is_moving else ():
            # who reads the codes next may still have the scale that was named after the tensor
            hints = (_hint(reader, index + 1) for reader, index in readers(result))
            tensor = next((hint for hint in hints if hint is not None and hint not in self._values), str(result.name))
            self._codes[result] = _Quantized(tensor, quantized.choice, quantized.is_constant)
        return True

    def _tensor(self, source: ir.Value, hint: str | None) -> str:
        """The name that a tensor had in the float model. `hint` is what the quantizer was named after.

        The hint is right if a folded Relu took its tensor with it, and if an output of the graph was quantized: the
        result has taken the name of the output then.
        """
        name, holder = str(source.name), self._values.get(hint or "")
        if hint is None or hint == name:
            return name
        if holder is None:
            return hint
        is_renamed = _stem(name, "float") == hint or name == f"{hint}_QuantizeLinear_Input"
        return hint if is_renamed and holder.is_graph_output() else name


def _linear_choice(node: ir.Node, codes: ir.Value | None) -> Choice:
    """What QuantizeLinear or DequantizeLinear does."""
    zero_point = input_value(node, 2)
    dtype = _dtype(zero_point) or _dtype(codes) or ir.DataType(int(attribute(node, "output_dtype", 0)) or 2)
    scale = _array(input_value(node, 1))
    if scale is None:
        return DynamicChoice(dtype.name.lower())
    name = _SHORT_FLOATS.get(dtype) or _FLOAT8.get(dtype)
    if name is not None:
        if scale.size != 1:
            raise ModelError(f"node '{_name(node)}' ({node.op_type}): {name} with {scale.size} scales fits no plan")
        return FloatChoice(name, scale=float(scale.reshape(())))
    axis = None
    if scale.size > 1 or (scale.ndim and "axis" in node.attributes):
        axis = int(attribute(node, "axis", 0 if node.domain == DOMAIN else 1))
    size = int(attribute(node, "block_size", 0)) or None
    return _affine(node, dtype, scale, _array(zero_point), axis, size)


def _affine(
    node: ir.Node,
    dtype: ir.DataType | None,
    scale: Array,
    zero_point: Array | None,
    axis: int | None,
    group_size: int | None = None,
) -> AffineChoice:
    """The choice for codes of that type; no zero point means 0, and one goes for all scales."""
    format = "uint8" if dtype is None else dtype.name.lower()
    if not isinstance(FORMATS.get(format), IntFormat):
        raise ModelError(f"node '{_name(node)}' ({node.op_type}): codes of type {format} fit no plan")
    scales = scale.ravel().tolist()
    zeros = [0] * len(scales) if zero_point is None else zero_point.astype(np.int64).ravel().tolist()
    if len(zeros) == 1:
        zeros *= len(scales)
    if len(zeros) != len(scales) or not scales:
        raise ModelError(f"node '{_name(node)}' ({node.op_type}) has {len(scales)} scales and {len(zeros)} zero points")
    return AffineChoice(format, tuple(scales), tuple(zeros), axis, None if axis is None else group_size)


def _product_scale(node: ir.Node) -> Array | None:
    """The scale of the weight of ConvInteger or MatMulInteger: Cast, then Mul with a product that it is a factor of."""
    cast = _lone_reader(node.outputs[0])
    scaled = _lone_reader(cast.outputs[0]) if cast is not None and cast.op_type == "Cast" else None
    if cast is None or scaled is None or scaled.op_type != "Mul":
        return None
    factor = next((value for value in scaled.inputs if value is not cast.outputs[0]), None)
    product = None if factor is None else factor.producer()
    if product is None or product.op_type != "Mul":
        return None
    return next((array for value in product.inputs if (array := _array(value)) is not None), None)


def _lone_reader(value: ir.Value) -> ir.Node | None:
    found = readers(value)
    return found[0][0] if len(found) == 1 else None


def _fixed_values(graph: ir.Graph) -> set[ir.Value]:
    """The values that are computed from nothing but constants."""
    found: set[ir.Value] = set()
    for node in _all_nodes(graph):
        is_plain = node.inputs and not node.op_type.startswith("Random")
        is_plain = is_plain and not any(graphs_in(attr) for attr in node.attributes.values())
        if is_plain and all(value is None or value in found or _is_held(value) for value in node.inputs):
            found.update(node.outputs)
    return found


def _unpacking_nodes(graph: ir.Graph, fixed: Collection[ir.Value]) -> set[int]:
    """The nodes that unpack a weight for a mark: the mark says what the weight is."""
    found: set[int] = set()
    for mark in _all_nodes(graph):
        pending = list(mark.inputs) if mark.domain == CONSTANT_DOMAIN else []
        while pending:
            value = pending.pop()
            maker = value.producer() if value is not None and value in fixed else None
            if maker is not None and id(maker) not in found:
                found.add(id(maker))
                pending += maker.inputs
    return found


def _all_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """The nodes of a graph, each followed by those of its subgraphs."""
    for node in graph:
        yield node
        for attr in node.attributes.values():
            for inner in graphs_in(attr):
                yield from _all_nodes(inner)


def _is_held(value: ir.Value | None) -> bool:
    """True if the value is an initializer or a Constant."""
    if value is None:
        return False
    maker = value.producer()
    return is_constant(value) or (maker is not None and maker.op_type == "Constant" and not maker.domain)


def _stored(value: ir.Value | None) -> ir.TensorProtocol | None:
    """What an initializer or a Constant holds."""
    maker = None if value is None or not _is_held(value) else value.producer()
    if maker is None:
        return None if value is None else value.const_value
    tensor: ir.TensorProtocol | None = attribute(maker, "value")
    return tensor


def _array(value: ir.Value | None) -> Array | None:
    """The numbers of a constant."""
    tensor = _stored(value) if _is_held(value) else None
    return None if tensor is None else np.asarray(tensor.numpy())


def _dtype(value: ir.Value | None) -> ir.DataType | None:
    """The type of what is stored, rather than what is declared."""
    tensor = _stored(value)
    return tensor.dtype if tensor is not None else None if value is None else value.dtype


def _cast_type(node: ir.Node) -> ir.DataType:
    number = int(attribute(node, "to", 0))
    return ir.DataType(number) if number in _DATA_TYPES else ir.DataType.UNDEFINED


_DATA_TYPES: Sequence[int] = [each.value for each in ir.DataType]


def _name(node: ir.Node) -> str:
    """A node without a name is known by its output."""
    return node.name or next((str(value.name) for value in node.outputs if value.name), node.op_type)


def _layer(node: ir.Node) -> str:
    """The node of the float model that an operator on codes stands for; ONNX Runtime's quantizer says 'quant'."""
    return _stem(node.name, node.op_type) or _stem(node.name, "quant") or _name(node)


def _stem(name: str | None, suffix: str) -> str | None:
    """What a name was derived from by this suffix, also if a number made it unique.

    >>> _stem("w_quantized", "quantized"), _stem("w_quantized_1", "quantized"), _stem("w", "quantized")
    ('w', 'w', None)
    """
    found = re.fullmatch(rf"(.+)_{re.escape(suffix)}(?:_\d+)?", name or "", re.DOTALL)
    return None if found is None else found[1]


def _hint(node: ir.Node, position: int) -> str | None:
    """The tensor that scale and zero point are named after, where both agree."""
    scale, zero_point = input_value(node, position), input_value(node, position + 1)
    names = [_stem(None if scale is None else scale.name, "scale")]
    names.append(_stem(None if zero_point is None else zero_point.name, "zero_point"))
    return names[0] if names[0] == names[1] else None

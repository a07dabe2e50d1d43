"""The layers of a quantized network that the float network has too: nodes whose results have the same name in both.

Quantizers keep the names of activations, and a folded BatchNormalization leaves that of its output. A layer ends behind
the Relu or Clip that is computed with it, if nothing is quantized between the two: that is what the next layer sees,
and the runtime then computes both in one.

    shared   tensors of both graphs, at which the quantized one can be cut
    sites    the layers, in the order of the quantized graph
    lost     quantized nodes whose result the float network does not have: their error counts at the next layer

Operands are the quantized inputs of a layer, as `QuantizedGraph` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
import onnx_ir as ir

from quark.errors import QuarkError
from quark.formats.spec import BlockFormat
from quark.onnx.graph import constant, is_float, readers
from quark.onnx.plan_reader import (
    BLOCK,
    CODE_OPERATORS,
    QuantizedGraph,
    Quantizer,
    is_quantizer,
    is_quantizing,
    stored_tensor,
)
from quark.plan import BlockChoice

BY_CODES = frozenset({"QLinearConv", "QLinearMatMul", "QGemm"})
COMPUTING = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "MatMulNBits"}) | BY_CODES
ACTIVATIONS = frozenset({"Relu", "Clip", "LeakyRelu", "PRelu"})
WITH_BIAS = frozenset({"Conv", "ConvTranspose", "Gemm"})
LAST_AXIS = frozenset({"Gemm", "MatMul", "MatMulNBits", "LayerNormalization", "QLinearMatMul", "QGemm"})
MOVING = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
SCALE_BITS = 32


class Kind(str, Enum):
    """The meaning of an operand's numbers."""

    AFFINE = "affine"
    DYNAMIC = "dynamic"
    BLOCK = "block"
    FLOAT = "float"
    PACKED = "packed"  # computed from constants in a way that does not show the format


@dataclass(frozen=True, eq=False)
class Operand:
    """Input number `index` of a node. `source` is the tensor before it is quantized, or the constant that is stored;
    `value` is what the node reads. `limits` are where values saturate; `element_bits` are without scales, `bits` with
    them."""

    index: int
    kind: Kind
    format: str
    source: ir.Value
    value: ir.Value
    is_constant: bool
    element_bits: float
    bits: float
    limits: tuple[float, float] | None = None
    step: float | None = None
    has_one_scale: bool = False
    has_power_of_two: bool = False
    block: BlockFormat | None = None


@dataclass(frozen=True, eq=False)
class Site:
    """A layer: `node` of the quantized graph, whose result is `tensor` in both networks."""

    node: ir.Node
    tensor: str
    order: int
    operands: tuple[Operand, ...]
    is_result_rounded: bool = False  # its tensor is what comes out of a quantizer
    activation: str = ""  # the node of the Relu or Clip that is computed with it

    @property
    def nodes(self) -> tuple[str, ...]:
        return (self.name, self.activation) if self.activation else (self.name,)

    @property
    def name(self) -> str:
        return str(self.node.name)

    @property
    def weight(self) -> Operand | None:
        """Its weight, if that is quantized."""
        if self.node.op_type not in COMPUTING:
            return None
        return next((operand for operand in self.operands if operand.is_constant and not self.is_bias(operand)), None)

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """Its quantized activations."""
        return tuple(operand for operand in self.operands if not operand.is_constant)

    def is_bias(self, operand: Operand) -> bool:
        return operand.index == 2 and self.node.op_type in WITH_BIAS


@dataclass(frozen=True, eq=False)
class Sites:
    """`makers` are the operators that the shared tensors come from, as far as that is known."""

    shared: tuple[str, ...]
    sites: tuple[Site, ...]
    lost: tuple[str, ...]
    makers: Mapping[str, str]

    def channel_axis(self, tensor: str, rank: int) -> int:
        """The axis of a shared tensor that weights, and equalization, know channels by."""
        op_type = self.makers.get(tensor, "")
        if op_type in LAST_AXIS or (rank == 3 and op_type != "Conv"):
            return rank - 1
        return min(1, rank - 1)


def find_sites(exact: ir.Model, quantized: ir.Model, unusable: Collection[str] = ()) -> Sites:
    """Match the two graphs. Tensors of `unusable` do not match, for example because their shapes turned out to differ.

    A file without any quantizer has all its computing nodes as layers: whatever differs from float then is theirs.
    """
    exact_values, graph = _computed(exact), QuantizedGraph(quantized)
    values = {
        name: value
        for name, value in _computed(quantized).items()
        if name in exact_values and name not in unusable and not graph.is_fixed(value)
    }
    values = {name: value for name, value in values.items() if is_float(exact_values[name]) or is_float(value)}
    inner = {name for name, value in values.items() if _is_inner(value, values)}
    shared = [name for name in values if name not in inner]
    is_plain = not any(is_quantizing(node) for node in quantized.graph)
    sites, makers = [], {}
    for order, name in enumerate(shared):
        node = _maker(values[name], set(shared) - {name})
        read = () if node is None else operands(node, graph)
        makers[name] = "" if node is None else node.op_type
        is_layer = bool(read) or is_quantizer(values[name].producer())
        if node is not None and (is_layer or (is_plain and node.op_type in COMPUTING)):
            activation = _activation(values[name], node)
            sites.append(Site(node, name, order, read, is_quantizer(values[name].producer()), activation))
    made = {id(site.node) for site in sites}
    lost = [
        str(node.name)
        for node in quantized.graph
        if node.op_type in COMPUTING and id(node) not in made and operands(node, graph)
    ]
    return Sites(tuple(shared), tuple(sites), tuple(lost), makers)


def operands(node: ir.Node, graph: QuantizedGraph) -> tuple[Operand, ...]:
    """The quantized inputs of a node."""
    if node.op_type == "MatMulNBits":
        bits, group = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 32)
        value, name = node.inputs[1], f"int{bits} per group of {group}"
        assert value is not None
        return (Operand(1, Kind.PACKED, name, value, value, True, float(bits), bits + (SCALE_BITS + bits) / group),)
    form = CODE_OPERATORS.get(node.op_type)
    if form is not None and len(form.factors) > 1:
        factors = ((index, node.inputs[index], graph.factor(node, index)) for index in form.factors)
        return tuple(_affine(i, value, factor, graph) for i, value, factor in factors if value is not None and factor)
    candidates = (_operand(index, value, graph) for index, value in enumerate(node.inputs) if value is not None)
    return tuple(operand for operand in candidates if operand is not None)


def _operand(index: int, value: ir.Value, graph: QuantizedGraph) -> Operand | None:
    moved, writer = value, value.producer()
    while writer is not None and writer.op_type in MOVING and graph.is_fixed(value) and writer.inputs[0] is not None:
        moved = writer.inputs[0]
        writer = moved.producer()
    quantizer = graph.of(moved)
    if quantizer is None:
        if writer is None or not graph.is_fixed(value):
            return None
        bits = _narrowest_bits(value)
        return Operand(index, Kind.PACKED, "packed", value, value, True, bits, bits)
    source, is_fixed = quantizer.source, quantizer.is_constant or graph.is_fixed(quantizer.source)
    if quantizer.node.op_type == "Cast":
        return Operand(index, Kind.FLOAT, str(quantizer.choice), source, value, is_fixed, 16.0, 16.0)
    if quantizer.node.op_type not in BLOCK:
        return _affine(index, value, quantizer, graph)
    try:
        choice = quantizer.choice
    except QuarkError:
        return Operand(index, Kind.BLOCK, quantizer.node.op_type, source, value, is_fixed, math.nan, math.nan)
    assert isinstance(choice, BlockChoice)
    fmt = choice.quantizer.format
    bits = float(fmt.element.bits)
    return Operand(index, Kind.BLOCK, fmt.name, source, value, is_fixed, bits, fmt.bits_per_element, block=fmt)


def _affine(index: int, value: ir.Value, quantizer: Quantizer, graph: QuantizedGraph) -> Operand:
    """An operand of codes with scales."""
    codes, source, scale = quantizer.dtype or ir.DataType.UINT8, quantizer.source, constant(quantizer.scale)
    is_fixed = quantizer.is_constant or graph.is_fixed(source)
    name, bits = codes.name.lower().replace("float8", "fp8_").replace("float4", "fp4_"), float(codes.bitwidth)
    if scale is None:
        kind = Kind.PACKED if is_fixed else Kind.DYNAMIC
        return Operand(index, kind, f"{name} {kind.value}", source, value, is_fixed, bits, bits)
    group = int(quantizer.node.attributes.get_int("block_size", 0))
    per = "" if scale.size == 1 else f" per group of {group}" if group else " per channel"
    limits, step = None, None
    if scale.size == 1 and codes.is_integer() and (quantizer.is_stored or not is_fixed):
        step, zero_point = float(np.asarray(scale, np.float64).reshape(())), constant(quantizer.zero_point)
        zero = 0 if zero_point is None else int(zero_point.reshape(-1)[0])
        lowest = -(2 ** (codes.bitwidth - 1)) if codes.is_signed() else 0
        limits = (lowest - zero) * step, (lowest + 2**codes.bitwidth - 1 - zero) * step
    stored = stored_tensor(source)
    scale_bits = 0.0 if stored is None else scale.size * (SCALE_BITS + bits) / max(1, stored.size)
    return Operand(
        index,
        Kind.AFFINE,
        name + per,
        source,
        value,
        is_fixed,
        bits,
        bits + scale_bits,
        limits,
        step,
        has_one_scale=scale.size == 1,
        has_power_of_two=bool((np.frexp(np.asarray(scale, np.float64))[0] == 0.5).all()),
    )


def _narrowest_bits(value: ir.Value) -> float:
    """The width of the narrowest constant that a packed weight is unpacked from: tables and scales are wider."""
    widths, pending, seen = [], [value], 0
    while pending and seen < 4096:
        seen += 1
        current = pending.pop()
        node = current.producer()
        if node is not None:
            pending.extend(source for source in node.inputs if source is not None)
        elif current.const_value is not None:
            widths.append(current.const_value.dtype.bitwidth)
    return float(min(widths, default=32))


def _computed(model: ir.Model) -> dict[str, ir.Value]:
    return {str(value.name): value for node in model.graph for value in node.outputs if value.name}


def _is_inner(value: ir.Value, matched: Collection[str]) -> bool:
    """True if only an activation reads the value, whose result matches too."""
    uses = readers(value)
    if len(uses) != 1 or value.is_graph_output() or is_quantizer(value.producer()):
        return False
    node, index = uses[0]
    return index == 0 and node.op_type in ACTIVATIONS and not node.domain and str(node.outputs[0].name) in matched


def _maker(value: ir.Value, others: Collection[str]) -> ir.Node | None:
    """The node that computes a tensor, before its activation and quantizer. None if there is another shared tensor in
    between: then the tensor only comes from a quantizer, or from an activation by itself."""
    node = value.producer()
    is_first = True
    while node is not None and (is_quantizer(node) or (is_first and node.op_type in ACTIVATIONS)):
        before = node.inputs[0] if node.inputs else None
        if before is None:
            return None
        is_activation, maker = node.op_type in ACTIVATIONS, before.producer()
        # an activation that reads something quantized is a layer by itself
        if before.name in others or maker is None or (is_activation and is_quantizer(maker)):
            return node if is_activation else None
        is_first = is_first and is_quantizer(node)
        node = maker
    return node


def _activation(value: ir.Value, maker: ir.Node) -> str:
    """The name of the activation between a layer's node and its result."""
    node = value.producer()
    while node is not None and node is not maker:
        if node.op_type in ACTIVATIONS:
            return str(node.name)
        node = None if not node.inputs or node.inputs[0] is None else node.inputs[0].producer()
    return ""

"""What the nodes of a quantized file read: which quantizer stands before an input, and what it does.

QuantizeLinear, DequantizeLinear      integers, also of Extended*Linear; codes that are constant have the second alone
DynamicQuantizeLinear                 integers whose scale is found at run time
MX-, BFPQuantizeDequantize            blocks, and marks on constants that hold such numbers already
Cast and back                         float16, bfloat16
anything that only constants go into  a packed weight, whose format a mark tells where there is one
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
import onnx_ir as ir

from quark.errors import QuarkError
from quark.formats.spec import BlockFormat
from quark.onnx.graph import constant, input_value, is_constant
from quark.ops.constant_marks import CONSTANT_DOMAIN
from quark.ops.schema import DOMAIN, quantizer_of

QUANTIZE = frozenset({"QuantizeLinear", "ExtendedQuantizeLinear"})
DEQUANTIZE = frozenset({"DequantizeLinear", "ExtendedDequantizeLinear"})
DYNAMIC = "DynamicQuantizeLinear"
BLOCKS = frozenset({"MXQuantizeDequantize", "BFPQuantizeDequantize"})
SHORT_FLOATS = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}
MOVING = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
SCALE_BITS = 32
# operators on codes: the input numbers of their factors; scale and zero point follow each
BY_CODES = {"QLinearConv": (0, 3), "QLinearMatMul": (0, 3), "QGemm": (0, 3), "QLinearAdd": (0, 3), "QLinearMul": (0, 3)}
_DEPTH = 64  # of constants that are computed from others


class Kind(str, Enum):
    AFFINE = "affine"
    DYNAMIC = "dynamic"
    BLOCK = "block"
    FLOAT = "float"
    PACKED = "packed"  # some numbers that a subgraph of constants unpacks


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


class Constants:
    """Which values depend on constants alone; asking again costs nothing."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}

    def __contains__(self, value: ir.Value | None) -> bool:
        return value is not None and self._is_constant(value, _DEPTH)

    def _is_constant(self, value: ir.Value, depth: int) -> bool:
        if id(value) not in self._known:
            node = value.producer()
            self._known[id(value)] = is_constant(value) or (
                node is not None
                and depth > 0
                and all(each is None or self._is_constant(each, depth - 1) for each in node.inputs)
                and bool(node.inputs)
                and not node.op_type.startswith("Random")
            )
        return self._known[id(value)]


def is_quantizer(node: ir.Node | None) -> bool:
    """That the node stands for a quantizer, or half of one."""
    if node is None:
        return False
    if node.op_type in BLOCKS:
        return node.domain in (DOMAIN, CONSTANT_DOMAIN)
    return node.op_type in QUANTIZE or node.op_type in DEQUANTIZE or node.op_type == DYNAMIC or is_short_cast(node)


def is_short_cast(node: ir.Node) -> bool:
    """One of the two casts that float16 and bfloat16 are written as."""
    if node.op_type != "Cast" or node.domain:
        return False
    before = None if input_value(node, 0) is None else node.inputs[0]
    maker = None if before is None else before.producer()
    is_back = maker is not None and maker.op_type == "Cast" and _cast_type(maker) in SHORT_FLOATS
    return _cast_type(node) in SHORT_FLOATS or is_back


def is_quantizing(node: ir.Node) -> bool:
    """A quantizer, or an operator that computes with codes."""
    by_codes = node.op_type.startswith("QLinear") or node.op_type in ("ConvInteger", "MatMulInteger", "MatMulNBits")
    return by_codes or is_quantizer(node)


def operands(node: ir.Node, constants: Constants) -> tuple[Operand, ...]:
    """The quantized inputs of a node."""
    if node.op_type == "MatMulNBits":
        return (_of_matmul_nbits(node),)
    if node.op_type in BY_CODES:
        return tuple(_of_codes(node, index, constants) for index in BY_CODES[node.op_type])
    found = (_operand(index, value, constants) for index, value in enumerate(node.inputs) if value is not None)
    return tuple(each for each in found if each is not None)


def _operand(index: int, value: ir.Value, constants: Constants) -> Operand | None:
    writer = value.producer()
    moved = value
    while writer is not None and writer.op_type in MOVING and value in constants and writer.inputs[0] is not None:
        moved = writer.inputs[0]
        writer = moved.producer()
    if writer is None:
        return None
    if writer.op_type in DEQUANTIZE:
        return _affine(index, value, writer, constants)
    if writer.op_type in BLOCKS and writer.domain in (DOMAIN, CONSTANT_DOMAIN):
        return _block(index, value, writer, constants)
    if is_short_cast(writer):
        return _short_float(index, value, writer, constants)
    if value in constants:
        bits = _bits_of(_stored(value))
        return Operand(index, Kind.PACKED, "packed", value, value, True, bits, bits)
    return None


def _affine(index: int, value: ir.Value, node: ir.Node, constants: Constants) -> Operand | None:
    source = input_value(node, 0)
    if source is None:
        return None
    maker = source.producer()
    is_packed = source in constants and not is_constant(source)
    if maker is not None and maker.op_type in QUANTIZE | {DYNAMIC}:
        source, is_packed = maker.inputs[0] or source, False
    scale, zero_point = constant(input_value(node, 1)), constant(input_value(node, 2))
    codes = _type_of(input_value(node, 2)) or _type_of(input_value(node, 0)) or ir.DataType.UINT8
    name = codes.name.lower().replace("float8", "fp8_").replace("float4", "fp4_")
    element_bits = float(codes.bitwidth)
    if scale is None:
        kind = Kind.PACKED if source in constants else Kind.DYNAMIC
        return Operand(
            index, kind, f"{name} {kind.value}", source, value, source in constants, element_bits, element_bits
        )
    group = int(node.attributes.get_int("block_size", 0))
    per = "" if scale.size == 1 else f" per group of {group}" if group else " per channel"
    count = max(1, _size(input_value(node, 0)))
    limits, step = _limits(scale, zero_point, codes) if scale.size == 1 and not is_packed else (None, None)
    return Operand(
        index,
        Kind.AFFINE,
        name + per,
        source,
        value,
        source in constants,
        element_bits,
        element_bits + (scale.size * (SCALE_BITS + element_bits)) / count if source in constants else element_bits,
        limits,
        step,
        has_one_scale=scale.size == 1,
        has_power_of_two=bool((np.frexp(np.asarray(scale, np.float64))[0] == 0.5).all()),
    )


def _limits(
    scale: np.ndarray[tuple[int, ...], np.dtype[np.generic]],
    zero_point: np.ndarray[tuple[int, ...], np.dtype[np.generic]] | None,
    codes: ir.DataType,
) -> tuple[tuple[float, float] | None, float | None]:
    """What the lowest and the highest code stand for; None for codes that are floats."""
    if not codes.is_integer():
        return None, None
    step = float(np.asarray(scale, np.float64).reshape(()))
    zero = 0 if zero_point is None else int(zero_point.reshape(-1)[0])
    bits = codes.bitwidth
    lowest = -(2 ** (bits - 1)) if codes.is_signed() else 0
    return ((lowest - zero) * step, (lowest + 2**bits - 1 - zero) * step), step


def _block(index: int, value: ir.Value, node: ir.Node, constants: Constants) -> Operand | None:
    source = input_value(node, 0)
    if source is None:
        return None
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    try:
        fmt = quantizer_of(node.op_type, attributes)[0].format
    except (QuarkError, TypeError, ValueError):
        return Operand(index, Kind.BLOCK, node.op_type, source, value, source in constants, math.nan, math.nan)
    is_fixed = source in constants
    return Operand(
        index, Kind.BLOCK, fmt.name, source, value, is_fixed, float(fmt.element.bits), fmt.bits_per_element, block=fmt
    )


def _short_float(index: int, value: ir.Value, node: ir.Node, constants: Constants) -> Operand | None:
    source = input_value(node, 0)
    if source is None:
        return None
    name = SHORT_FLOATS.get(_cast_type(node))
    maker = source.producer()
    if name is None and maker is not None:
        name, source = SHORT_FLOATS[_cast_type(maker)], maker.inputs[0] or source
    return Operand(index, Kind.FLOAT, name or "float16", source, value, source in constants, 16.0, 16.0)


def _of_codes(node: ir.Node, index: int, constants: Constants) -> Operand:
    """A factor that is codes: what a QuantizeLinear before it makes them of, or a constant."""
    codes, scale = node.inputs[index], constant(input_value(node, index + 1))
    assert codes is not None
    maker = codes.producer()
    source = maker.inputs[0] or codes if maker is not None and maker.op_type in QUANTIZE else codes
    kind = _type_of(codes) or _type_of(input_value(node, index + 2)) or ir.DataType.UINT8
    is_single = scale is not None and scale.size == 1
    limits, step = (
        _limits(scale, constant(input_value(node, index + 2)), kind)
        if is_single and scale is not None
        else (None, None)
    )
    bits = float(kind.bitwidth)
    name = kind.name.lower() + ("" if scale is None or scale.size == 1 else " per channel")
    return Operand(
        index, Kind.AFFINE, name, source, codes, codes in constants, bits, bits, limits, step, has_one_scale=is_single
    )


def _of_matmul_nbits(node: ir.Node) -> Operand:
    bits, group = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 32)
    value = node.inputs[1]
    assert value is not None
    name = f"int{bits} per group of {group}"
    return Operand(1, Kind.PACKED, name, value, value, True, float(bits), bits + (SCALE_BITS + bits) / group)


def _stored(value: ir.Value) -> list[ir.Value]:
    """The constants that a packed weight is unpacked from."""
    found: dict[int, ir.Value] = {}
    pending, depth = [value], 0
    while pending and depth < 4096:
        depth += 1
        each = pending.pop()
        node = each.producer()
        if node is None:
            found[id(each)] = each
        else:
            pending.extend(one for one in node.inputs if one is not None)
    return list(found.values())


def _bits_of(stored: list[ir.Value]) -> float:
    """The width of the narrowest codes among them: tables and scales are wider."""
    widths = [each.const_value.dtype.bitwidth for each in stored if each.const_value is not None]
    return float(min(widths, default=32))


def _cast_type(node: ir.Node) -> ir.DataType:
    """What it casts to; a number that is no type is none."""
    number = node.attributes.get_int("to", 0)
    return ir.DataType(number) if number in {each.value for each in ir.DataType} else ir.DataType.UNDEFINED


def _type_of(value: ir.Value | None) -> ir.DataType | None:
    if value is None:
        return None
    return value.dtype if value.const_value is None else value.const_value.dtype


def _size(value: ir.Value | None) -> int:
    return 0 if value is None or value.const_value is None else int(value.const_value.size)

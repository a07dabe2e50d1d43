"""The number types that a spec can name, one row each.

    Int8.format            the name of the format in quark.formats; for block types only their family
    MXInt8.attributes      for block types the operator's attributes: block size, rounding, scale rule ...

The presets take their MXAttributes and BFPAttributes from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from onnx import TensorProto

from quark.errors import refuse_unknown_fields, unknown_name
from quark.formats.catalog import get_format
from quark.formats.spec import FloatFormat, IntFormat
from quark.onnx.quantization.config.quant_types import (
    BFP_FAMILY,
    MX_FAMILY,
    NVFP4_FAMILY,
    ExtendedQuantType,
    QuantType,
    format_of_type,
)
from quark.ops.schema import BFP_QUANTIZE_DEQUANTIZE, FLOAT_SCALE_QUANTIZE_DEQUANTIZE, MX_QUANTIZE_DEQUANTIZE


@refuse_unknown_fields
@dataclass(frozen=True)
class DataType:
    """A number type. `map_onnx_format` is the member that a QuantizationConfig uses; `attributes` is read-only."""

    name: str
    map_onnx_format: Any
    onnx_proto_dtype: int = TensorProto.UNDEFINED
    attributes: Mapping[str, int | str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "attributes", MappingProxyType(dict(self.attributes)))

    def __reduce__(self) -> str | tuple[Any, ...]:
        """A type of the table is copied and pickled by its name, any other by its fields."""
        if DATA_TYPES.get(self.name) is self:
            return self.name
        return DataType, (self.name, self.map_onnx_format, self.onnx_proto_dtype, dict(self.attributes))

    @property
    def format(self) -> str:
        """The name of the format; for block types that of the family, of which `attributes` select a member."""
        return format_of_type(self.map_onnx_format)

    @property
    def operator(self) -> str | None:
        """The operator that `attributes` belong to; None for types without blocks."""
        return BLOCK_OPERATORS.get(self.format)

    @property
    def __name__(self) -> str:
        """The name, for scripts that treat the type as a class."""
        return self.name

    @property
    def _element(self) -> IntFormat | FloatFormat | None:
        """The format of single numbers; None for blocks whose operator counts bits itself."""
        name = str(self.attributes.get("element_dtype", "")) or self.format
        fmt = None if name == BFP_FAMILY else get_format(name)
        return fmt if isinstance(fmt, (IntFormat, FloatFormat)) else None

    @property
    def bitwidth(self) -> int:
        """The bits of an element; for BFP and MX4 to MX9, which count those of the block, the operator's bit_width."""
        element = self._element
        return int(self.attributes["bit_width"]) if element is None else element.bits

    @property
    def max_value(self) -> int | float:
        """The largest element."""
        element = self._bounded
        return element.qmax if isinstance(element, IntFormat) else element.max

    @property
    def min_value(self) -> int | float:
        """The smallest element."""
        element = self._bounded
        return element.qmin if isinstance(element, IntFormat) else -element.max

    @property
    def _bounded(self) -> IntFormat | FloatFormat:
        if self._element is None:
            raise AttributeError(f"{self.name}: the range of an element is that of its block")
        return self._element

    def __call__(self) -> DataType:
        """Return itself: scripts that treat the type as a class write Int8()."""
        return self

    def __str__(self) -> str:
        return self.name


BLOCK_OPERATORS = {
    BFP_FAMILY: BFP_QUANTIZE_DEQUANTIZE.name,
    MX_FAMILY: MX_QUANTIZE_DEQUANTIZE.name,
    NVFP4_FAMILY: FLOAT_SCALE_QUANTIZE_DEQUANTIZE.name,
}

HALF_EVEN = 2  # numbered as in the attribute rounding_mode


def _microexponents(name: str, bit_width: int) -> DataType:
    attributes: dict[str, int | str] = {
        "bfp_method": "to_bfp_prime",
        "axis": 1,
        "bit_width": bit_width,
        "block_size": 16,
        "sub_block_size": 2,
        "sub_block_shift_bits": 1,
        "rounding_mode": HALF_EVEN,
    }
    return DataType(name, ExtendedQuantType.QBFP, attributes=attributes)


def _microscaling(name: str, element: str, scale_rule: str) -> DataType:
    attributes: dict[str, int | str] = {
        "element_dtype": element,
        "axis": 1,
        "block_size": 32,
        "rounding_mode": HALF_EVEN,
        "scale_rule": scale_rule,
    }
    return DataType(name, ExtendedQuantType.QMX, attributes=attributes)


Int8 = DataType("Int8", QuantType.QInt8, TensorProto.INT8)
UInt8 = DataType("UInt8", QuantType.QUInt8, TensorProto.UINT8)
Int16 = DataType("Int16", ExtendedQuantType.QInt16, TensorProto.INT16)
UInt16 = DataType("UInt16", ExtendedQuantType.QUInt16, TensorProto.UINT16)
Int32 = DataType("Int32", ExtendedQuantType.QInt32, TensorProto.INT32)
UInt32 = DataType("UInt32", ExtendedQuantType.QUInt32, TensorProto.UINT32)
Float16 = DataType("Float16", ExtendedQuantType.QFloat16, TensorProto.FLOAT16)
BFloat16 = DataType("BFloat16", ExtendedQuantType.QBFloat16, TensorProto.BFLOAT16)
Int4 = DataType("Int4", QuantType.QInt4, TensorProto.INT4)
UInt4 = DataType("UInt4", QuantType.QUInt4, TensorProto.UINT4)
FP8E4M3 = DataType("FP8E4M3", ExtendedQuantType.QFloat8E4M3FN, TensorProto.FLOAT8E4M3FN)
FP8E5M2 = DataType("FP8E5M2", ExtendedQuantType.QFloat8E5M2, TensorProto.FLOAT8E5M2)
BFP16 = DataType(
    "BFP16",
    ExtendedQuantType.QBFP,
    attributes={"bfp_method": "to_bfp", "axis": 1, "bit_width": 16, "block_size": 8, "rounding_mode": HALF_EVEN},
)
MX4 = _microexponents("MX4", bit_width=11)
MX6 = _microexponents("MX6", bit_width=13)
MX9 = _microexponents("MX9", bit_width=16)
MXFP8E5M2 = _microscaling("MXFP8E5M2", "fp8_e5m2", "rceil")
MXFP8E4M3 = _microscaling("MXFP8E4M3", "fp8_e4m3", "rceil")
MXFP6E3M2 = _microscaling("MXFP6E3M2", "fp6_e3m2", "rceil")
MXFP6E2M3 = _microscaling("MXFP6E2M3", "fp6_e2m3", "even")
MXFP4E2M1 = _microscaling("MXFP4E2M1", "fp4_e2m1", "even")
MXInt8 = _microscaling("MXInt8", "int8", "floor")
NVFP4 = DataType(
    "NVFP4",
    ExtendedQuantType.QNVFP4,
    attributes={
        "element_dtype": "fp4_e2m1",
        "scale_dtype": "fp8_e4m3",
        "axis": 1,
        "block_size": 16,
        "rounding_mode": HALF_EVEN,
    },
)

DATA_TYPES: Mapping[str, DataType] = MappingProxyType(
    {value.name: value for value in list(vars().values()) if isinstance(value, DataType)}
)


def parse_data_type(name: str) -> DataType:
    """The type of that name."""
    if not isinstance(name, str) or name not in DATA_TYPES:
        raise unknown_name("data type", name, DATA_TYPES)
    return DATA_TYPES[name]

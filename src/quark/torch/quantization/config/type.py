"""Enumerations that a configuration is written with."""

from __future__ import annotations

from enum import Enum
from typing import Any

from quark.errors import UnsupportedTypeError, unknown_name
from quark.formats.catalog import get_format
from quark.formats.spec import BlockFormat


class QSchemeType(Enum):
    """The part of a tensor that shares a scale: all of it, a channel, or a group of neighbours along an axis."""

    per_tensor = "per_tensor"
    per_channel = "per_channel"
    per_group = "per_group"


class ZeroPointType(Enum):
    """The type of zero points; they are integers."""

    int32 = "int32"
    float32 = "float32"


class Dtype(Enum):
    """The numbers that a tensor is quantized to.

    Integers of 2 to 8, 16 and 32 bits; float16 and bfloat16; and numbers that share a power of two in blocks: `mx` with
    an `mx_element_dtype`, or an element by itself (fp8, fp6, fp4) with groups; mx4, mx6, mx9; bfp16.
    """

    int2 = "int2"
    int3 = "int3"
    int4 = "int4"
    int5 = "int5"
    int6 = "int6"
    int7 = "int7"
    int8 = "int8"
    int16 = "int16"
    int32 = "int32"
    uint2 = "uint2"
    uint3 = "uint3"
    uint4 = "uint4"
    uint5 = "uint5"
    uint6 = "uint6"
    uint7 = "uint7"
    uint8 = "uint8"
    uint16 = "uint16"
    uint32 = "uint32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    fp8_e4m3 = "fp8_e4m3"
    fp8_e5m2 = "fp8_e5m2"
    fp6_e3m2 = "fp6_e3m2"
    fp6_e2m3 = "fp6_e2m3"
    fp4 = "fp4"
    mx = "mx"
    mx4 = "mx4"
    mx6 = "mx6"
    mx9 = "mx9"
    bfp16 = "bfp16"
    nvfp4 = "nvfp4"

    @staticmethod
    def from_str(s: str) -> Dtype:
        """Return the type of that name; case does not matter."""
        dtype: Dtype = parse(Dtype, s.lower() if isinstance(s, str) else s, "dtype")
        return dtype

    @staticmethod
    def from_torch_dtype(torch_dtype: Any) -> Dtype:
        """Return the type that corresponds to a torch.dtype.

        >>> import torch
        >>> Dtype.from_torch_dtype(torch.float8_e4m3fn)
        <Dtype.fp8_e4m3: 'fp8_e4m3'>
        """
        name = str(torch_dtype).removeprefix("torch.")
        return Dtype.from_str({"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}.get(name, name))

    def to_bitwidth(self) -> int:
        """Return the bits of an element, without its share of the block's scale. `mx` has none of its own."""
        if self is Dtype.mx:
            raise UnsupportedTypeError("dtype mx: the bits are those of its mx_element_dtype")
        fmt = get_format("fp4_e2m1" if self is Dtype.fp4 else self.value)
        return fmt.element.bits if isinstance(fmt, BlockFormat) else fmt.bits


class ScaleType(Enum):
    """The form of scales: float32 (`float`, `float32`), or powers of two (`pof2`)."""

    float = "float"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    pof2 = "pof2"


class RoundType(Enum):
    """The rounding of ties; `round` rounds them away from zero."""

    round = 2
    floor = 3
    half_even = 8


class QuantizationMode(Enum):
    """The mode of AMD Quark. Here, a model is always quantized on its graph, whichever name is given."""

    eager_mode = 1
    fx_graph_mode = 2


class QuantFlow(Enum):
    """How a model comes to memory: `standard` is whole. The other two are `ModelQuantizer.direct_quantize_checkpoint`,
    from folder to folder."""

    standard = 1
    file2file = 2
    per_block = 3


class TQTThresholdInitMeth(Enum):
    """The initial value of a trained threshold: three deviations, the least divergence, or the largest magnitude."""

    _3SD = "_3sd"
    _KL_J = "_kl_j"
    _MAX = "_max"


def parse(kind: type[Any], value: Any, what: str) -> Any:
    """Return the member of that name; a member is returned unchanged. Raises UnknownNameError for other values."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value in kind.__members__:
        return kind[value]
    raise unknown_name(what, value, kind.__members__)

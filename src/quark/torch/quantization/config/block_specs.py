"""Specs by name of casts and of numbers in blocks: `OCP_MXFP4Spec().to_quantization_spec()`.

    Float16Spec, Bfloat16Spec               casts
    OCP_MX...Spec                           blocks of OCP MX
    MX4Spec, MX6Spec, MX9Spec, BFP16Spec    other blocks

Blocks run along `ch_axis`; None: the axis that the layer sums over. `scale_calculation_mode` None: even for MX, floor
for the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from quark.errors import refuse_unknown_fields
from quark.torch.quantization.config.integer_specs import DataTypeSpec
from quark.torch.quantization.config.tensor_spec import QuantizationSpec
from quark.torch.quantization.config.type import Dtype, QSchemeType
from quark.torch.quantization.observer import PerBlockMXObserver


@refuse_unknown_fields
@dataclass(frozen=True)
class CastSpec(DataTypeSpec):
    """A small float by itself, without scale."""

    def to_quantization_spec(self) -> QuantizationSpec:
        return QuantizationSpec(self.dtype)


@refuse_unknown_fields
@dataclass(frozen=True)
class OCP_MXSpec(DataTypeSpec):  # noqa: N801 - as published
    """Blocks of 32."""

    ch_axis: int | None = None
    is_dynamic: bool | None = None
    scale_calculation_mode: str | None = None

    def to_quantization_spec(self) -> QuantizationSpec:
        return QuantizationSpec(
            Dtype.mx,
            PerBlockMXObserver,
            is_dynamic=self.is_dynamic,
            qscheme=QSchemeType.per_group,
            ch_axis=self.ch_axis,
            scale_calculation_mode=self.scale_calculation_mode,
            mx_element_dtype=self.dtype,
        )


@refuse_unknown_fields
@dataclass(frozen=True)
class BlocksSpec(DataTypeSpec):
    """`block_size` None: the format's own."""

    ch_axis: int | None = None
    block_size: int | None = None
    scale_calculation_mode: str | None = None

    def to_quantization_spec(self) -> QuantizationSpec:
        return QuantizationSpec(
            self.dtype,
            qscheme=QSchemeType.per_group,
            ch_axis=self.ch_axis,
            group_size=self.block_size,
            scale_calculation_mode=self.scale_calculation_mode,
        )


class Float16Spec(CastSpec):
    """Rounded to float16."""

    dtype = Dtype.float16


class Bfloat16Spec(CastSpec):
    """Rounded to bfloat16."""

    dtype = Dtype.bfloat16


class OCP_MXFP8E4M3Spec(OCP_MXSpec):  # noqa: N801
    """OCP microscaling: 8-bit floats with 4 exponent bits, a power of two for every 32."""

    dtype = Dtype.fp8_e4m3


class OCP_MXFP8E5M2Spec(OCP_MXSpec):  # noqa: N801
    """OCP microscaling: 8-bit floats with 5 exponent bits, a power of two for every 32."""

    dtype = Dtype.fp8_e5m2


class OCP_MXFP6E3M2Spec(OCP_MXSpec):  # noqa: N801
    """OCP microscaling: 6-bit floats with 3 exponent bits, a power of two for every 32."""

    dtype = Dtype.fp6_e3m2


class OCP_MXFP6E2M3Spec(OCP_MXSpec):  # noqa: N801
    """OCP microscaling: 6-bit floats with 2 exponent bits, a power of two for every 32."""

    dtype = Dtype.fp6_e2m3


class OCP_MXFP4Spec(OCP_MXSpec):  # noqa: N801
    """OCP microscaling: 4-bit floats, a power of two for every 32."""

    dtype = Dtype.fp4


class OCP_MXINT8Spec(OCP_MXSpec):  # noqa: N801
    """OCP microscaling: 8-bit integers, a power of two for every 32."""

    dtype = Dtype.int8


class MX4Spec(BlocksSpec):
    """Shared microexponents: 4 bits an element, 16 share an exponent and 2 a finer one."""

    dtype = Dtype.mx4


class MX6Spec(BlocksSpec):
    """Shared microexponents: 6 bits an element, 16 share an exponent and 2 a finer one."""

    dtype = Dtype.mx6


class MX9Spec(BlocksSpec):
    """Shared microexponents: 9 bits an element, 16 share an exponent and 2 a finer one."""

    dtype = Dtype.mx9


class BFP16Spec(BlocksSpec):
    """Block float: 8-bit integers, 8 share an exponent."""

    dtype = Dtype.bfp16


__all__ = [
    "BFP16Spec",
    "Bfloat16Spec",
    "Float16Spec",
    "MX4Spec",
    "MX6Spec",
    "MX9Spec",
    "OCP_MXFP4Spec",
    "OCP_MXFP6E2M3Spec",
    "OCP_MXFP6E3M2Spec",
    "OCP_MXFP8E4M3Spec",
    "OCP_MXFP8E5M2Spec",
    "OCP_MXINT8Spec",
]

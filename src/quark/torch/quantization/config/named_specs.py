"""Specs by name: `Int8PerChannelSpec(ch_axis=0).to_quantization_spec()` is the QuantizationSpec of that name.

    Int...Spec, Uint...Spec                 one scale for a tensor, for each channel of `ch_axis`, or for each
                                            `group_size` neighbours along it. `symmetric` is AMD's default for each
                                            name: False for unsigned types, but True for Uint8PerChannelSpec, and True
                                            for signed types, but False for Int3PerChannelSpec and Int8PerChannelSpec
    FP8...Spec                              8-bit floats with a scale; `is_dynamic` for language models
    FP...PerGroupSpec                       floats in blocks of any size, with scales of `scale_format` e8m0
    Float16Spec, Bfloat16Spec               casts
    OCP_MX...Spec                           blocks of OCP MX
    MX4Spec, MX6Spec, MX9Spec, BFP16Spec    other blocks

Blocks run along `ch_axis`; None: the axis that the layer sums over. `scale_calculation_mode` is even for MX; None is
floor for the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import new_class
from typing import Any, ClassVar

from quark.errors import refuse_unknown_fields, unknown_name
from quark.torch.quantization.config.tensor_spec import QuantizationSpec
from quark.torch.quantization.config.type import Dtype, QSchemeType, RoundType, ScaleType, parse
from quark.torch.quantization.observer import (
    PerBlockMXObserver,
    PerChannelMinMaxObserver,
    PerGroupMinMaxObserver,
    PerTensorHistogramObserver,
    PerTensorMinMaxObserver,
    PerTensorMSEObserver,
    PerTensorPercentileObserver,
)

_OBSERVERS = {
    "min_max": PerTensorMinMaxObserver,
    "histogram": PerTensorHistogramObserver,
    "MSE": PerTensorMSEObserver,
    "percentile": PerTensorPercentileObserver,
}


class DataTypeSpec(ABC):
    """A data type with some of the choices made."""

    dtype: ClassVar[Dtype]

    def to_dict(self) -> dict[str, Any]:
        """Return the choices as JSON can hold them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Any:
        """Read what `to_dict` wrote; missing choices get their defaults."""
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for key in data:
            if key not in known:
                raise unknown_name(f"field of {cls.__name__}", key, known)
        return cls(**data)

    def __init_subclass__(cls, dtype: Dtype | None = None) -> None:
        """`class Int8PerTensorSpec(PerTensorSpec, dtype=Dtype.int8)` sets the type."""
        if dtype is not None:
            cls.dtype = dtype

    @abstractmethod
    def to_quantization_spec(self) -> QuantizationSpec:
        """Return the spec that the name stands for."""


@refuse_unknown_fields
@dataclass(frozen=True)
class PerTensorSpec(DataTypeSpec):
    """Integers with one scale for a tensor."""

    observer_method: str = "min_max"
    symmetric: bool | None = None
    scale_type: str | None = "float"
    round_method: str | None = "half_even"
    is_dynamic: bool | None = False

    def to_quantization_spec(self) -> QuantizationSpec:
        if self.observer_method not in _OBSERVERS:
            raise unknown_name("observer_method", self.observer_method, _OBSERVERS)
        observer = _OBSERVERS[self.observer_method]
        return _scaled(self, observer_cls=observer, qscheme=QSchemeType.per_tensor)


@refuse_unknown_fields
@dataclass(frozen=True)
class PerChannelSpec(DataTypeSpec):
    """Integers with a scale for each channel of `ch_axis`."""

    ch_axis: int
    symmetric: bool | None = None
    scale_type: str | None = "float"
    round_method: str | None = "half_even"
    is_dynamic: bool | None = False

    def to_quantization_spec(self) -> QuantizationSpec:
        observer, scheme = PerChannelMinMaxObserver, QSchemeType.per_channel
        return _scaled(self, observer_cls=observer, qscheme=scheme, ch_axis=self.ch_axis)


@refuse_unknown_fields
@dataclass(frozen=True)
class PerGroupSpec(DataTypeSpec):
    """Integers with a scale for each `group_size` neighbours along `ch_axis`."""

    ch_axis: int
    group_size: int
    symmetric: bool | None = None
    scale_type: str | None = "float"
    round_method: str | None = "half_even"
    is_dynamic: bool | None = False

    def to_quantization_spec(self) -> QuantizationSpec:
        observer, scheme = PerGroupMinMaxObserver, QSchemeType.per_group
        return _scaled(self, observer_cls=observer, qscheme=scheme, ch_axis=self.ch_axis, group_size=self.group_size)


@refuse_unknown_fields
@dataclass(frozen=True)
class FourBitPerGroupSpec(DataTypeSpec):
    """The same for 4 bits, whose fields AMD has in another order."""

    ch_axis: int
    group_size: int
    symmetric: bool | None = None
    is_dynamic: bool | None = False
    scale_type: str | None = "float"
    round_method: str | None = "half_even"

    def to_quantization_spec(self) -> QuantizationSpec:
        return PerGroupSpec.to_quantization_spec(self)  # type: ignore[arg-type]


def _scaled(
    spec: PerTensorSpec | PerChannelSpec | PerGroupSpec | ScaledFloatPerTensorSpec | ScaledFloatPerChannelSpec,
    **choices: Any,
) -> QuantizationSpec:
    scale_type = "pof2" if spec.scale_type == "power_of_2" else spec.scale_type
    return QuantizationSpec(
        spec.dtype,
        symmetric=spec.symmetric,
        scale_type=None if scale_type is None else parse(ScaleType, scale_type, "scale_type"),
        round_method=None if spec.round_method is None else parse(RoundType, spec.round_method, "round_method"),
        is_dynamic=spec.is_dynamic,
        **choices,
    )


@refuse_unknown_fields
@dataclass(frozen=True)
class ScaledFloatPerTensorSpec(DataTypeSpec):
    """8-bit floats with one scale for a tensor."""

    observer_method: str = "min_max"
    symmetric: bool | None = True
    scale_type: str | None = "float"
    round_method: str | None = "half_even"
    is_dynamic: bool | None = False

    def to_quantization_spec(self) -> QuantizationSpec:
        if self.observer_method not in _OBSERVERS:
            raise unknown_name("observer_method", self.observer_method, _OBSERVERS)
        return _scaled(self, observer_cls=_OBSERVERS[self.observer_method], qscheme=QSchemeType.per_tensor)


@refuse_unknown_fields
@dataclass(frozen=True)
class ScaledFloatPerChannelSpec(DataTypeSpec):
    """8-bit floats with a scale for each channel of `ch_axis`; with `is_dynamic`, for each token."""

    ch_axis: int
    symmetric: bool | None = True
    scale_type: str | None = "float"
    round_method: str | None = "half_even"
    is_dynamic: bool | None = False

    def to_quantization_spec(self) -> QuantizationSpec:
        observer, scheme = PerChannelMinMaxObserver, QSchemeType.per_channel
        return _scaled(self, observer_cls=observer, qscheme=scheme, ch_axis=self.ch_axis)


@refuse_unknown_fields
@dataclass(frozen=True)
class CastSpec(DataTypeSpec):
    """A small float type, without a scale."""

    def to_quantization_spec(self) -> QuantizationSpec:
        return QuantizationSpec(self.dtype)


@refuse_unknown_fields
@dataclass(frozen=True)
class OCP_MXSpec(DataTypeSpec):  # noqa: N801 - as published
    """Blocks of 32."""

    ch_axis: int | None = None
    is_dynamic: bool | None = True
    scale_calculation_mode: str | None = "even"

    def to_quantization_spec(self) -> QuantizationSpec:
        choices: dict[str, Any] = {
            "is_dynamic": self.is_dynamic,
            "qscheme": QSchemeType.per_group,
            "ch_axis": self.ch_axis,
            "group_size": 32,
            "scale_calculation_mode": self.scale_calculation_mode,
        }
        if self.dtype is Dtype.int8:  # by itself a type without blocks
            return QuantizationSpec(Dtype.mx, PerBlockMXObserver, mx_element_dtype=self.dtype, **choices)
        choices.update(round_method=RoundType.half_even, scale_type=ScaleType.float, scale_format="e8m0")
        return QuantizationSpec(self.dtype, PerBlockMXObserver, **choices)


@refuse_unknown_fields
@dataclass(frozen=True)
class FloatPerGroupSpec(DataTypeSpec):
    """Floats in blocks of `group_size` along `ch_axis`. Only `scale_format` e8m0 is carried out."""

    ch_axis: int
    group_size: int
    scale_format: str | None = "float32"
    scale_calculation_mode: str | None = None
    is_dynamic: bool | None = True

    def to_quantization_spec(self) -> QuantizationSpec:
        return QuantizationSpec(
            self.dtype,
            PerBlockMXObserver,
            is_dynamic=self.is_dynamic,
            qscheme=QSchemeType.per_group,
            ch_axis=self.ch_axis,
            group_size=self.group_size,
            round_method=RoundType.half_even,
            scale_type=ScaleType.float,
            scale_format=self.scale_format,
            scale_calculation_mode=self.scale_calculation_mode,
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


# AMD's defaults where they are not those of the sign
_SYMMETRIC = {"Int3PerChannelSpec": False, "Int8PerChannelSpec": False, "Uint8PerChannelSpec": True}


def _integer_specs(dtype: Dtype) -> tuple[type[PerTensorSpec], type[PerChannelSpec], type[PerGroupSpec]]:
    """Return the specs of an integer type, which are named after it: Int8PerTensorSpec, Int8PerChannelSpec ..."""
    is_signed = not dtype.name.startswith("u")
    bits = dtype.to_bitwidth()

    def named(kind: type[Any], suffix: str, shares: str) -> type[Any]:
        name = f"{dtype.name.capitalize()}{suffix}"
        content = {
            "__doc__": f"{'Signed' if is_signed else 'Unsigned'} {bits}-bit integers, {shares}.",
            "__module__": __name__,
            "__annotations__": {"symmetric": "bool | None"},
            "symmetric": _SYMMETRIC.get(name, is_signed),
        }
        made = new_class(name, (kind,), {"dtype": dtype}, lambda namespace: namespace.update(content))
        return refuse_unknown_fields(dataclass(frozen=True)(made))

    return (
        named(PerTensorSpec, "PerTensorSpec", "one scale for a tensor"),
        named(PerChannelSpec, "PerChannelSpec", "a scale for each channel of `ch_axis`"),
        named(
            FourBitPerGroupSpec if bits == 4 else PerGroupSpec,
            "PerGroupSpec",
            "a scale for each `group_size` neighbours along `ch_axis`",
        ),
    )


Int2PerTensorSpec, Int2PerChannelSpec, Int2PerGroupSpec = _integer_specs(Dtype.int2)
Int3PerTensorSpec, Int3PerChannelSpec, Int3PerGroupSpec = _integer_specs(Dtype.int3)
Int4PerTensorSpec, Int4PerChannelSpec, Int4PerGroupSpec = _integer_specs(Dtype.int4)
Int8PerTensorSpec, Int8PerChannelSpec, Int8PerGroupSpec = _integer_specs(Dtype.int8)
Int16PerTensorSpec, Int16PerChannelSpec, Int16PerGroupSpec = _integer_specs(Dtype.int16)
Uint4PerTensorSpec, Uint4PerChannelSpec, Uint4PerGroupSpec = _integer_specs(Dtype.uint4)
Uint8PerTensorSpec, Uint8PerChannelSpec, Uint8PerGroupSpec = _integer_specs(Dtype.uint8)
Uint16PerTensorSpec, Uint16PerChannelSpec, Uint16PerGroupSpec = _integer_specs(Dtype.uint16)


@refuse_unknown_fields
@dataclass(frozen=True)
class FP8E4M3PerTensorSpec(DataTypeSpec, dtype=Dtype.fp8_e4m3):
    """8-bit floats with 4 exponent bits, one scale for a tensor."""

    observer_method: str = "min_max"
    scale_type: str | None = None
    is_dynamic: bool | None = False
    symmetric: bool | None = True
    round_method: str | None = "half_even"

    def to_quantization_spec(self) -> QuantizationSpec:
        return ScaledFloatPerTensorSpec.to_quantization_spec(self)  # type: ignore[arg-type]


class FP8E4M3PerChannelSpec(ScaledFloatPerChannelSpec, dtype=Dtype.fp8_e4m3):
    """8-bit floats with 4 exponent bits, a scale for each channel of `ch_axis` or each token."""


class FP8E5M2PerTensorSpec(ScaledFloatPerTensorSpec, dtype=Dtype.fp8_e5m2):
    """8-bit floats with 5 exponent bits, one scale for a tensor."""


class FP8E5M2PerChannelSpec(ScaledFloatPerChannelSpec, dtype=Dtype.fp8_e5m2):
    """8-bit floats with 5 exponent bits, a scale for each channel of `ch_axis` or each token."""


class FP8E4M3PerGroupSpec(FloatPerGroupSpec, dtype=Dtype.fp8_e4m3):
    """8-bit floats with 4 exponent bits, a power of two for each `group_size` neighbours."""


class FP8E5M2PerGroupSpec(FloatPerGroupSpec, dtype=Dtype.fp8_e5m2):
    """8-bit floats with 5 exponent bits, a power of two for each `group_size` neighbours."""


class FP6E3M2PerGroupSpec(FloatPerGroupSpec, dtype=Dtype.fp6_e3m2):
    """6-bit floats with 3 exponent bits, a power of two for each `group_size` neighbours."""


class FP6E2M3PerGroupSpec(FloatPerGroupSpec, dtype=Dtype.fp6_e2m3):
    """6-bit floats with 2 exponent bits, a power of two for each `group_size` neighbours."""


class FP4PerGroupSpec(FloatPerGroupSpec, dtype=Dtype.fp4):
    """4-bit floats, a power of two for each `group_size` neighbours."""


class Float16Spec(CastSpec, dtype=Dtype.float16):
    """Rounded to float16."""


class Bfloat16Spec(CastSpec, dtype=Dtype.bfloat16):
    """Rounded to bfloat16."""


class OCP_MXFP8E4M3Spec(OCP_MXSpec, dtype=Dtype.fp8_e4m3):  # noqa: N801
    """OCP microscaling: 8-bit floats with 4 exponent bits, a power of two for every 32."""


class OCP_MXFP8E5M2Spec(OCP_MXSpec, dtype=Dtype.fp8_e5m2):  # noqa: N801
    """OCP microscaling: 8-bit floats with 5 exponent bits, a power of two for every 32."""


class OCP_MXFP6E3M2Spec(OCP_MXSpec, dtype=Dtype.fp6_e3m2):  # noqa: N801
    """OCP microscaling: 6-bit floats with 3 exponent bits, a power of two for every 32."""


class OCP_MXFP6E2M3Spec(OCP_MXSpec, dtype=Dtype.fp6_e2m3):  # noqa: N801
    """OCP microscaling: 6-bit floats with 2 exponent bits, a power of two for every 32."""


class OCP_MXFP4Spec(OCP_MXSpec, dtype=Dtype.fp4):  # noqa: N801
    """OCP microscaling: 4-bit floats, a power of two for every 32."""


class OCP_MXINT8Spec(OCP_MXSpec, dtype=Dtype.int8):  # noqa: N801
    """OCP microscaling: 8-bit integers, a power of two for every 32."""


class MX4Spec(BlocksSpec, dtype=Dtype.mx4):
    """Shared microexponents: 4 bits an element, 16 share an exponent and 2 a finer one."""


class MX6Spec(BlocksSpec, dtype=Dtype.mx6):
    """Shared microexponents: 6 bits an element, 16 share an exponent and 2 a finer one."""


class MX9Spec(BlocksSpec, dtype=Dtype.mx9):
    """Shared microexponents: 9 bits an element, 16 share an exponent and 2 a finer one."""


class BFP16Spec(BlocksSpec, dtype=Dtype.bfp16):
    """Block float: 8-bit integers, 8 share an exponent."""


@refuse_unknown_fields
@dataclass(frozen=True)
class NVFP4Spec(BlocksSpec, dtype=Dtype.nvfp4):
    """4-bit floats, 16 share a scale of an 8-bit float (E4M3), and all blocks of a tensor one float32 scale.

    `is_dynamic` is about activations: None or True finds the tensor's scale at every run, False takes it from the
    calibrated range.
    """

    is_dynamic: bool | None = None

    def to_quantization_spec(self) -> QuantizationSpec:
        return replace(super().to_quantization_spec(), is_dynamic=self.is_dynamic)


__all__ = [
    "BFP16Spec",
    "Bfloat16Spec",
    "DataTypeSpec",
    "FP4PerGroupSpec",
    "FP6E2M3PerGroupSpec",
    "FP6E3M2PerGroupSpec",
    "FP8E4M3PerChannelSpec",
    "FP8E4M3PerGroupSpec",
    "FP8E4M3PerTensorSpec",
    "FP8E5M2PerChannelSpec",
    "FP8E5M2PerGroupSpec",
    "FP8E5M2PerTensorSpec",
    "Float16Spec",
    "Int2PerChannelSpec",
    "Int2PerGroupSpec",
    "Int2PerTensorSpec",
    "Int3PerChannelSpec",
    "Int3PerGroupSpec",
    "Int3PerTensorSpec",
    "Int4PerChannelSpec",
    "Int4PerGroupSpec",
    "Int4PerTensorSpec",
    "Int8PerChannelSpec",
    "Int8PerGroupSpec",
    "Int8PerTensorSpec",
    "Int16PerChannelSpec",
    "Int16PerGroupSpec",
    "Int16PerTensorSpec",
    "MX4Spec",
    "MX6Spec",
    "MX9Spec",
    "NVFP4Spec",
    "OCP_MXFP4Spec",
    "OCP_MXFP6E2M3Spec",
    "OCP_MXFP6E3M2Spec",
    "OCP_MXFP8E4M3Spec",
    "OCP_MXFP8E5M2Spec",
    "OCP_MXINT8Spec",
    "Uint4PerChannelSpec",
    "Uint4PerGroupSpec",
    "Uint4PerTensorSpec",
    "Uint8PerChannelSpec",
    "Uint8PerGroupSpec",
    "Uint8PerTensorSpec",
    "Uint16PerChannelSpec",
    "Uint16PerGroupSpec",
    "Uint16PerTensorSpec",
]

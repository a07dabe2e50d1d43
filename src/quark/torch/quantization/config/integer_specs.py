"""Specs by name: `Int8PerChannelSpec(ch_axis=0).to_quantization_spec()` is the QuantizationSpec that the name says.

It has one scale for a tensor, for each channel of `ch_axis`, or for each `group_size` neighbours along it. `symmetric`
None: for signed types.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from quark.errors import refuse_unknown_fields, unknown_name
from quark.torch.quantization.config.tensor_spec import QuantizationSpec
from quark.torch.quantization.config.type import Dtype, QSchemeType, RoundType, ScaleType, parse
from quark.torch.quantization.observer import (
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
    """A type with a few of the choices made."""

    dtype: ClassVar[Dtype]

    @abstractmethod
    def to_quantization_spec(self) -> QuantizationSpec:
        """The spec that the name stands for."""


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
        return _integers(self, observer_cls=observer, qscheme=QSchemeType.per_tensor)


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
        return _integers(self, observer_cls=observer, qscheme=scheme, ch_axis=self.ch_axis)


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
        return _integers(self, observer_cls=observer, qscheme=scheme, ch_axis=self.ch_axis, group_size=self.group_size)


def _integers(spec: PerTensorSpec | PerChannelSpec | PerGroupSpec, **choices: Any) -> QuantizationSpec:
    scale_type = "pof2" if spec.scale_type == "power_of_2" else spec.scale_type
    return QuantizationSpec(
        spec.dtype,
        symmetric=spec.symmetric,
        scale_type=None if scale_type is None else parse(ScaleType, scale_type, "scale_type"),
        round_method=None if spec.round_method is None else parse(RoundType, spec.round_method, "round_method"),
        is_dynamic=spec.is_dynamic,
        **choices,
    )


class Int2PerTensorSpec(PerTensorSpec):
    """Signed 2-bit integers, one scale for a tensor."""

    dtype = Dtype.int2


class Int2PerChannelSpec(PerChannelSpec):
    """Signed 2-bit integers, a scale for each channel of `ch_axis`."""

    dtype = Dtype.int2


class Int2PerGroupSpec(PerGroupSpec):
    """Signed 2-bit integers, a scale for each `group_size` neighbours along `ch_axis`."""

    dtype = Dtype.int2


class Int3PerTensorSpec(PerTensorSpec):
    """Signed 3-bit integers, one scale for a tensor."""

    dtype = Dtype.int3


class Int3PerChannelSpec(PerChannelSpec):
    """Signed 3-bit integers, a scale for each channel of `ch_axis`."""

    dtype = Dtype.int3


class Int3PerGroupSpec(PerGroupSpec):
    """Signed 3-bit integers, a scale for each `group_size` neighbours along `ch_axis`."""

    dtype = Dtype.int3


class Int4PerTensorSpec(PerTensorSpec):
    """Signed 4-bit integers, one scale for a tensor."""

    dtype = Dtype.int4


class Int4PerChannelSpec(PerChannelSpec):
    """Signed 4-bit integers, a scale for each channel of `ch_axis`."""

    dtype = Dtype.int4


class Int4PerGroupSpec(PerGroupSpec):
    """Signed 4-bit integers, a scale for each `group_size` neighbours along `ch_axis`."""

    dtype = Dtype.int4


class Int8PerTensorSpec(PerTensorSpec):
    """Signed 8-bit integers, one scale for a tensor."""

    dtype = Dtype.int8


class Int8PerChannelSpec(PerChannelSpec):
    """Signed 8-bit integers, a scale for each channel of `ch_axis`."""

    dtype = Dtype.int8


class Int8PerGroupSpec(PerGroupSpec):
    """Signed 8-bit integers, a scale for each `group_size` neighbours along `ch_axis`."""

    dtype = Dtype.int8


class Int16PerTensorSpec(PerTensorSpec):
    """Signed 16-bit integers, one scale for a tensor."""

    dtype = Dtype.int16


class Int16PerChannelSpec(PerChannelSpec):
    """Signed 16-bit integers, a scale for each channel of `ch_axis`."""

    dtype = Dtype.int16


class Int16PerGroupSpec(PerGroupSpec):
    """Signed 16-bit integers, a scale for each `group_size` neighbours along `ch_axis`."""

    dtype = Dtype.int16


class Uint4PerTensorSpec(PerTensorSpec):
    """Unsigned 4-bit integers, one scale for a tensor."""

    dtype = Dtype.uint4


class Uint4PerChannelSpec(PerChannelSpec):
    """Unsigned 4-bit integers, a scale for each channel of `ch_axis`."""

    dtype = Dtype.uint4


class Uint4PerGroupSpec(PerGroupSpec):
    """Unsigned 4-bit integers, a scale for each `group_size` neighbours along `ch_axis`."""

    dtype = Dtype.uint4


class Uint8PerTensorSpec(PerTensorSpec):
    """Unsigned 8-bit integers, one scale for a tensor."""

    dtype = Dtype.uint8


class Uint8PerChannelSpec(PerChannelSpec):
    """Unsigned 8-bit integers, a scale for each channel of `ch_axis`."""

    dtype = Dtype.uint8


class Uint8PerGroupSpec(PerGroupSpec):
    """Unsigned 8-bit integers, a scale for each `group_size` neighbours along `ch_axis`."""

    dtype = Dtype.uint8


class Uint16PerTensorSpec(PerTensorSpec):
    """Unsigned 16-bit integers, one scale for a tensor."""

    dtype = Dtype.uint16


class Uint16PerChannelSpec(PerChannelSpec):
    """Unsigned 16-bit integers, a scale for each channel of `ch_axis`."""

    dtype = Dtype.uint16


class Uint16PerGroupSpec(PerGroupSpec):
    """Unsigned 16-bit integers, a scale for each `group_size` neighbours along `ch_axis`."""

    dtype = Dtype.uint16


__all__ = [
    "DataTypeSpec",
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

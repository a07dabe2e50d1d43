"""What is wanted of tensors and layers, in the words of a QConfig.

A `QTensorConfig` says how one kind of tensor is quantized; the `*Spec` classes are the usual ones, by name. They are
ordinary objects to edit: `spec.set_symmetric(False)` or `spec.symmetric = False`. A `QLayerConfig` has one for each
place around a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from quark.errors import InvalidValueError, UnsupportedTypeError, refuse_unknown_fields, unknown_name
from quark.files.foreign import short
from quark.onnx.quantization.config.data_type import (
    BFP16,
    MX4,
    MX6,
    MX9,
    MXFP4E2M1,
    MXFP6E2M3,
    MXFP6E3M2,
    MXFP8E4M3,
    MXFP8E5M2,
    BFloat16,
    DataType,
    Float16,
    Int8,
    Int16,
    Int32,
    MXInt8,
    UInt8,
    UInt16,
    UInt32,
)
from quark.onnx.quantization.config.tensor_config import CalibMethod, QTensorConfig, QuantGranularity, ScaleType


@dataclass(eq=False)
class Int8Spec(QTensorConfig):
    """int8, any scale."""

    symmetric: bool = True
    scale_type: ScaleType = ScaleType.Float32
    calibration_method: CalibMethod = CalibMethod.Percentile
    quant_granularity: QuantGranularity = QuantGranularity.Tensor
    data_type: DataType = Int8


@dataclass(eq=False)
class UInt8Spec(Int8Spec):
    """uint8 with a zero point."""

    symmetric: bool = False
    data_type: DataType = UInt8


@dataclass(eq=False)
class XInt8Spec(Int8Spec):
    """int8 with power-of-two scales."""

    scale_type: ScaleType = ScaleType.PowerOf2
    calibration_method: CalibMethod = CalibMethod.MinMSE


@dataclass(eq=False)
class Int16Spec(Int8Spec):
    """int16, any scale."""

    data_type: DataType = Int16


@dataclass(eq=False)
class UInt16Spec(UInt8Spec):
    """uint16 with a zero point."""

    data_type: DataType = UInt16


@dataclass(eq=False)
class Int32Spec(Int8Spec):
    """int32, any scale."""

    data_type: DataType = Int32


@dataclass(eq=False)
class UInt32Spec(UInt8Spec):
    """uint32 with a zero point."""

    data_type: DataType = UInt32


@dataclass(eq=False)
class Float16Spec(Int8Spec):
    """float16."""

    calibration_method: CalibMethod = CalibMethod.MinMax
    data_type: DataType = Float16


@dataclass(eq=False)
class BFloat16Spec(Float16Spec):
    """bfloat16."""

    data_type: DataType = BFloat16


@dataclass(eq=False)
class BFP16Spec(Float16Spec):
    """Block float: eight 8-bit integers share an exponent."""

    data_type: DataType = BFP16


@dataclass(eq=False)
class MX4Spec(Float16Spec):
    """Shared microexponents, 4 bits an element."""

    data_type: DataType = MX4


@dataclass(eq=False)
class MX6Spec(Float16Spec):
    """Shared microexponents, 6 bits an element."""

    data_type: DataType = MX6


@dataclass(eq=False)
class MX9Spec(Float16Spec):
    """Shared microexponents, 9 bits an element."""

    data_type: DataType = MX9


@dataclass(eq=False)
class MXFP8E5M2Spec(Float16Spec):
    """OCP microscaling, 8-bit floats of 5 exponent bits."""

    data_type: DataType = MXFP8E5M2


@dataclass(eq=False)
class MXFP8E4M3Spec(Float16Spec):
    """OCP microscaling, 8-bit floats of 4 exponent bits."""

    data_type: DataType = MXFP8E4M3


@dataclass(eq=False)
class MXFP6E3M2Spec(Float16Spec):
    """OCP microscaling, 6-bit floats of 3 exponent bits."""

    data_type: DataType = MXFP6E3M2


@dataclass(eq=False)
class MXFP6E2M3Spec(Float16Spec):
    """OCP microscaling, 6-bit floats of 2 exponent bits."""

    data_type: DataType = MXFP6E2M3


@dataclass(eq=False)
class MXFP4E2M1Spec(Float16Spec):
    """OCP microscaling, 4-bit floats."""

    data_type: DataType = MXFP4E2M1


@dataclass(eq=False)
class MXInt8Spec(Float16Spec):
    """OCP microscaling, 8-bit integers."""

    data_type: DataType = MXInt8


@refuse_unknown_fields
@dataclass(eq=False)
class QLayerConfig:
    """What is wanted around a layer. `activation` and `input_tensors` are two names for one thing: give either.

    Two are equal if their fields are. As keys of QConfig's dictionaries they are told apart by identity: two entries
    that want the same stay two entries. None means: no wish of its own; the global config's holds.
    """

    input_tensors: QTensorConfig | None = None
    activation: QTensorConfig | None = None
    weight: QTensorConfig | None = None
    bias: QTensorConfig | None = None
    output_tensors: QTensorConfig | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QLayerConfig) and all(
            getattr(self, each.name) == getattr(other, each.name) for each in fields(QLayerConfig)
        )

    # By identity, although equality is by value: it can be edited while it is a key, and equal keys must not merge.
    __hash__ = object.__hash__

    @property
    def inputs(self) -> QTensorConfig | None:
        """`input_tensors` or `activation`, whichever is given."""
        if self.activation is not None and self.input_tensors is not None and self.activation != self.input_tensors:
            raise InvalidValueError("QLayerConfig with both input_tensors and activation, and they differ: give one")
        return self.input_tensors if self.input_tensors is not None else self.activation

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it, without the places that are None."""
        places = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: config.to_dict() for name, config in places.items() if config is not None}

    @staticmethod
    def from_dict(content: dict[str, Any]) -> QLayerConfig:
        """The layer config that `to_dict` wrote."""
        if not isinstance(content, dict):
            raise UnsupportedTypeError(f"layer config: expected a mapping, got {short(content)}")
        known = [each.name for each in fields(QLayerConfig)]
        for key in content:
            if key not in known:
                raise unknown_name("place of a layer config", key, known)
        given = {name: value for name, value in content.items() if value is not None}
        return QLayerConfig(**{name: QTensorConfig.from_dict(value) for name, value in given.items()})


__all__ = [
    "BFP16Spec",
    "BFloat16Spec",
    "CalibMethod",
    "Float16Spec",
    "Int8Spec",
    "Int16Spec",
    "Int32Spec",
    "MX4Spec",
    "MX6Spec",
    "MX9Spec",
    "MXFP4E2M1Spec",
    "MXFP6E2M3Spec",
    "MXFP6E3M2Spec",
    "MXFP8E4M3Spec",
    "MXFP8E5M2Spec",
    "MXInt8Spec",
    "QLayerConfig",
    "QTensorConfig",
    "QuantGranularity",
    "ScaleType",
    "UInt8Spec",
    "UInt16Spec",
    "UInt32Spec",
    "XInt8Spec",
]

"""The specs of tensors and layers, as a QConfig has them.

A `QTensorConfig` says how one kind of tensor is quantized; the `*Spec` classes are the usual ones, by name. They are
ordinary objects to edit: `spec.set_symmetric(False)` or `spec.symmetric = False`. A `QLayerConfig` has one for each
place around a layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from quark.errors import InvalidValueError, UnsupportedTypeError, refuse_unknown_fields, unknown_name
from quark.files.foreign import short
from quark.onnx.quantization.config.data_type import (
    BFP16,
    FP8E4M3,
    FP8E5M2,
    MX4,
    MX6,
    MX9,
    MXFP4E2M1,
    MXFP6E2M3,
    MXFP6E3M2,
    MXFP8E4M3,
    MXFP8E5M2,
    NVFP4,
    BFloat16,
    DataType,
    Float16,
    Int4,
    Int8,
    Int16,
    Int32,
    MXInt8,
    UInt4,
    UInt8,
    UInt16,
    UInt32,
    parse_data_type,
)


def refuse_unknown_keys(kind: str, content: Iterable[Any], cls: Any) -> None:
    """Raise an error for the first key that is not a field of the dataclass, with the nearest ones."""
    names = [field.name for field in fields(cls)]
    for key in content:
        if key not in names:
            raise unknown_name(kind, key, names)


class CalibMethod(Enum):
    """The method for the range of a tensor."""

    MinMax = 0
    MinMSE = 1
    Percentile = 2
    Entropy = 3
    LayerwisePercentile = 4
    Distribution = 5


class ScaleType(Enum):
    """The numbers that may be scales; Int16: a 16-bit integer over a power of two."""

    Float32 = 0
    PowerOf2 = 1
    Int16 = 2


class QuantGranularity(Enum):
    """The part of a tensor that shares a scale: all of it, each output channel of a weight, or each group of
    `group_size` elements of a weight along the axis that is summed over."""

    Tensor = 0
    Channel = 1
    Group = 2


@refuse_unknown_fields
@dataclass(eq=False)
class QTensorConfig:
    """How a tensor is quantized. For types without a scale (float16, bfloat16 and blocks) only `data_type` counts.
    `group_size` goes with QuantGranularity.Group, for weights of 4 or 8 bits.

    Two of them are equal if their fields are, whatever their class.
    """

    symmetric: bool
    scale_type: ScaleType
    calibration_method: CalibMethod
    quant_granularity: QuantGranularity
    data_type: DataType
    group_size: int | None = None

    def set_symmetric(self, symmetric: bool) -> None:
        """Set `symmetric`."""
        self.symmetric = symmetric

    def set_scale_type(self, scale_type: ScaleType) -> None:
        """Set `scale_type`."""
        self.scale_type = scale_type

    def set_calibration_method(self, calibration_method: CalibMethod) -> None:
        """Set `calibration_method`."""
        self.calibration_method = calibration_method

    def set_quant_granularity(self, quant_granularity: QuantGranularity) -> None:
        """Set `quant_granularity`."""
        self.quant_granularity = quant_granularity

    def set_data_type(self, data_type: DataType) -> None:
        """Set `data_type`."""
        self.data_type = data_type

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QTensorConfig) and all(
            getattr(self, field.name) == getattr(other, field.name) for field in fields(QTensorConfig)
        )

    __hash__ = None  # type: ignore[assignment]  # it can be edited

    def to_dict(self) -> dict[str, Any]:
        """The config as a dictionary for JSON.

        >>> QTensorConfig.from_dict({"data_type": "Int8"}).to_dict()["calibration_method"]
        'CalibMethod.Percentile'
        """
        values = {field.name: getattr(self, field.name) for field in fields(QTensorConfig)}
        group_size = values.pop("group_size")
        plain = {name: value if name == "symmetric" else str(value) for name, value in values.items()}
        return plain if group_size is None else {**plain, "group_size": group_size}

    @staticmethod
    def from_dict(content: dict[str, Any]) -> QTensorConfig:
        """The tensor config that `to_dict` wrote. Fields that are missing are those of the spec named after the type.

        >>> QTensorConfig.from_dict({"data_type": "MXInt8"}) == MXInt8Spec()
        True
        """
        if not isinstance(content, dict):
            raise UnsupportedTypeError(f"tensor config: expected a mapping, got {short(content)}")
        refuse_unknown_keys("key of a tensor config", content, QTensorConfig)
        if "data_type" not in content:
            raise InvalidValueError("tensor config without 'data_type'; it could be Int8, MXInt8 ...")
        usual: Any = globals()[f"{parse_data_type(content['data_type'])}Spec"]()
        parsed = dict(vars(usual))
        for key, value in content.items():
            if key == "data_type":
                parsed[key] = parse_data_type(value)
            elif key == "symmetric":
                if not isinstance(value, bool):
                    raise UnsupportedTypeError(f"{key} of a tensor config: {short(value)}, expected true or false")
                parsed[key] = value
            elif key == "group_size":
                if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                    raise UnsupportedTypeError(f"{key} of a tensor config: {short(value)}, expected an integer")
                parsed[key] = value
            else:
                by_text = {str(member): member for member in _ENUMS[key]}
                if not isinstance(value, str) or value not in by_text:
                    raise unknown_name(key, value, by_text)
                parsed[key] = by_text[value]
        return QTensorConfig(**parsed)


_ENUMS: dict[str, type[Enum]] = {
    "scale_type": ScaleType,
    "calibration_method": CalibMethod,
    "quant_granularity": QuantGranularity,
}


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
class Int4Spec(Int8Spec):
    """int4, for weights."""

    calibration_method: CalibMethod = CalibMethod.MinMax
    data_type: DataType = Int4


@dataclass(eq=False)
class UInt4Spec(UInt8Spec):
    """uint4 with a zero point, for weights."""

    calibration_method: CalibMethod = CalibMethod.MinMax
    data_type: DataType = UInt4


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
class FP8E4M3Spec(Float16Spec):
    """8-bit floats of 4 exponent bits with a scale."""

    data_type: DataType = FP8E4M3


@dataclass(eq=False)
class FP8E5M2Spec(Float16Spec):
    """8-bit floats of 5 exponent bits with a scale."""

    data_type: DataType = FP8E5M2


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


@dataclass(eq=False)
class NVFP4Spec(Float16Spec):
    """4-bit floats in blocks of 16, with scales of 8-bit floats (E4M3) and one float32 scale for the tensor."""

    data_type: DataType = NVFP4


@refuse_unknown_fields
@dataclass(eq=False)
class QLayerConfig:
    """What is wanted around a layer. `activation` and `input_tensors` are two names for one thing: set either.

    None in a place means that the global config's spec holds. Two are equal if their fields are. As keys of QConfig's
    dictionaries they are told apart by identity, so two entries with the same specs stay two entries.
    """

    input_tensors: QTensorConfig | None = None
    activation: QTensorConfig | None = None
    weight: QTensorConfig | None = None
    bias: QTensorConfig | None = None
    output_tensors: QTensorConfig | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QLayerConfig) and vars(self) == vars(other)

    # By identity, although equality is by value: it can be edited while it is a key, and equal keys must not merge.
    __hash__ = object.__hash__

    @property
    def inputs(self) -> QTensorConfig | None:
        """`input_tensors` or `activation`, whichever is set."""
        if self.activation is not None and self.input_tensors is not None and self.activation != self.input_tensors:
            raise InvalidValueError("QLayerConfig with both input_tensors and activation, and they differ: give one")
        return self.input_tensors if self.input_tensors is not None else self.activation

    def to_dict(self) -> dict[str, Any]:
        """The config as a dictionary for JSON, without the places that are None."""
        return {name: spec.to_dict() for name, spec in vars(self).items() if spec is not None}

    @staticmethod
    def from_dict(content: dict[str, Any]) -> QLayerConfig:
        """The layer config that `to_dict` wrote."""
        if not isinstance(content, dict):
            raise UnsupportedTypeError(f"layer config: expected a mapping, got {short(content)}")
        refuse_unknown_keys("place of a layer config", content, QLayerConfig)
        specs = {name: QTensorConfig.from_dict(value) for name, value in content.items() if value is not None}
        return QLayerConfig(**specs)

"""What is wanted of one kind of tensor, in the words of a QConfig: `QTensorConfig` and the choices in it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from quark.errors import InvalidValueError, UnsupportedTypeError, refuse_unknown_fields, unknown_name
from quark.files.foreign import short
from quark.onnx.quantization.config.data_type import DataType, parse_data_type


class CalibMethod(Enum):
    """How the range of a tensor is found."""

    MinMax = 0
    MinMSE = 1
    Percentile = 2
    Entropy = 3
    LayerwisePercentile = 4
    Distribution = 5


class ScaleType(Enum):
    """Which numbers may be scales. Int16 is known by name and refused when asked for."""

    Float32 = 0
    PowerOf2 = 1
    Int16 = 2


class QuantGranularity(Enum):
    """What has a scale of its own: the tensor, or each output channel of a weight. Group is refused when asked for."""

    Tensor = 0
    Channel = 1
    Group = 2


@refuse_unknown_fields
@dataclass(eq=False)
class QTensorConfig:
    """How a tensor is quantized. For types without a scale (floats and blocks) only `data_type` counts.

    Two of them are equal when they say the same, whatever their class.
    """

    symmetric: bool
    scale_type: ScaleType
    calibration_method: CalibMethod
    quant_granularity: QuantGranularity
    data_type: DataType

    def set_symmetric(self, symmetric: bool) -> None:
        self.symmetric = symmetric

    def set_scale_type(self, scale_type: ScaleType) -> None:
        self.scale_type = scale_type

    def set_calibration_method(self, calibration_method: CalibMethod) -> None:
        self.calibration_method = calibration_method

    def set_quant_granularity(self, quant_granularity: QuantGranularity) -> None:
        self.quant_granularity = quant_granularity

    def set_data_type(self, data_type: DataType) -> None:
        self.data_type = data_type

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QTensorConfig) and all(
            getattr(self, each.name) == getattr(other, each.name) for each in fields(QTensorConfig)
        )

    __hash__ = None  # type: ignore[assignment]  # it can be edited

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it.

        >>> QTensorConfig.from_dict({"data_type": "Int8"}).to_dict()["calibration_method"]
        'CalibMethod.Percentile'
        """
        return {
            "symmetric": self.symmetric,
            "scale_type": str(self.scale_type),
            "calibration_method": str(self.calibration_method),
            "quant_granularity": str(self.quant_granularity),
            "data_type": str(self.data_type),
        }

    @staticmethod
    def from_dict(content: dict[str, Any]) -> QTensorConfig:
        """The tensor config that `to_dict` wrote. A lone data type, or what differs from its usual spec, will do."""
        if not isinstance(content, dict):
            raise UnsupportedTypeError(f"tensor config: expected a mapping, got {short(content)}")
        known = [each.name for each in fields(QTensorConfig)]
        for key in content:
            if key not in known:
                raise unknown_name("key of a tensor config", key, known)
        if "data_type" not in content:
            raise InvalidValueError("tensor config without 'data_type'; it could be Int8, MXInt8 ...")
        data_type = parse_data_type(content["data_type"])
        values = {key: _parse(key, value) for key, value in content.items()}
        return QTensorConfig(**{**usual_choices(data_type), **values})


def usual_choices(data_type: DataType) -> dict[str, Any]:
    """The fields of the spec that is named after the type."""
    is_integer = data_type.operator is None and "float" not in data_type.format
    return {
        "symmetric": not data_type.format.startswith("uint"),
        "scale_type": ScaleType.Float32,
        "calibration_method": CalibMethod.Percentile if is_integer else CalibMethod.MinMax,
        "quant_granularity": QuantGranularity.Tensor,
        "data_type": data_type,
    }


_ENUMS: dict[str, type[Enum]] = {
    "scale_type": ScaleType,
    "calibration_method": CalibMethod,
    "quant_granularity": QuantGranularity,
}


def _parse(key: str, value: Any) -> Any:
    if key == "data_type":
        return parse_data_type(value)
    if key not in _ENUMS:
        if not isinstance(value, bool):
            raise UnsupportedTypeError(f"{key} of a tensor config: {short(value)}, expected true or false")
        return value
    by_text = {str(member): member for member in _ENUMS[key]}
    if not isinstance(value, str) or value not in by_text:
        raise unknown_name(key, value, by_text)
    return by_text[value]

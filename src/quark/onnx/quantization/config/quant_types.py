"""The enums of a config: calibration methods, number types, node formats.

Four classes are ONNX Runtime's own, so values from either import are the same objects. The others add members that it
lacks. In files, a member is written with its class: `PowerOfTwoMethod.MinMSE`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from quark.errors import InvalidValueError, unknown_name
from quark.onnx.runtime import require_onnxruntime

try:
    from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType
except ImportError:
    require_onnxruntime()  # says which distributions there are
    raise


class PowerOfTwoMethod(Enum):
    """Calibration for scales that are powers of two."""

    NonOverflow = 0  # the smallest that clips nothing
    MinMSE = 1  # the least squared error


class LayerWiseMethod(Enum):
    """Calibration that tries several percentiles for each tensor."""

    LayerWisePercentile = 0


class Int16Method(Enum):
    """Calibration for scales that are 16-bit integers over a power of two."""

    MinMax = 0


class ExtendedCalibrationMethod(Enum):
    """Calibration that ONNX Runtime has no name for: the least squared error, any scale."""

    MinMSE = 0


class _Named(Enum):
    """Prints as its member's name, as ONNX Runtime's own do."""

    def __str__(self) -> str:
        return self.name

    @classmethod
    def from_string(cls, name: str) -> _Named:
        """The member of that name."""
        if name not in cls.__members__:
            raise unknown_name(cls.__name__, name, cls.__members__)
        return cls[name]


class ExtendedQuantType(_Named):
    """The number types, with those that ONNX Runtime's QuantType lacks."""

    QInt8 = 1
    QUInt8 = 2
    QInt16 = 3
    QUInt16 = 4
    QInt32 = 5
    QUInt32 = 6
    QFloat16 = 7
    QBFloat16 = 8
    QBFP = 9  # block float and microexponents, as BFPAttributes say
    QMX = 10  # the OCP microscaling formats, as MXAttributes say
    QFloat8E4M3FN = 11
    QFloat8E5M2 = 12
    QNVFP4 = 21  # blocks with float scales, as NVFP4Attributes say


class VitisQuantType(_Named):
    """An older name for ExtendedQuantType; members of the same name mean the same."""

    QInt8 = 1
    QUInt8 = 2
    QInt16 = 3
    QUInt16 = 4
    QInt32 = 5
    QUInt32 = 6
    QFloat16 = 7
    QBFloat16 = 8
    QBFP = 9
    QMX = 10


class ExtendedQuantFormat(_Named):
    """The way in which quantized computation is written, for all number types."""

    QOperator = 0
    QDQ = 1


class VitisQuantFormat(_Named):
    """An older name for the node formats. The FixNeuron ones are written as QDQ; two of them also name a type."""

    QDQ = 2
    FixNeuron = 3
    BFPFixNeuron = 4
    MXFixNeuron = 5


CALIBRATION_METHODS = (CalibrationMethod, PowerOfTwoMethod, LayerWiseMethod, Int16Method, ExtendedCalibrationMethod)
QUANT_TYPES = (QuantType, ExtendedQuantType, VitisQuantType)
QUANT_FORMATS = (QuantFormat, ExtendedQuantFormat, VitisQuantFormat)

_FORMATS_OF_TYPES = {
    "QInt4": "int4",
    "QUInt4": "uint4",
    "QInt8": "int8",
    "QUInt8": "uint8",
    "QInt16": "int16",
    "QUInt16": "uint16",
    "QInt32": "int32",
    "QUInt32": "uint32",
    "QFloat16": "float16",
    "QBFloat16": "bfloat16",
    "QFLOAT8E4M3FN": "fp8_e4m3",  # ONNX Runtime's spelling
    "QFloat8E4M3FN": "fp8_e4m3",
    "QFloat8E5M2": "fp8_e5m2",
}
BFP_FAMILY, MX_FAMILY, NVFP4_FAMILY = "QBFP", "QMX", "QNVFP4"


def format_of_type(quant_type: Any) -> str:
    """The name of a quant type in quark.formats; for QBFP, QMX and QNVFP4, whose attributes say the format, that name
    itself.

    >>> format_of_type(ExtendedQuantType.QUInt16), format_of_type(ExtendedQuantType.QMX)
    ('uint16', 'QMX')
    """
    if not isinstance(quant_type, QUANT_TYPES):
        raise InvalidValueError(f"{quant_type!r}: expected a member of {' or '.join(c.__name__ for c in QUANT_TYPES)}")
    name = quant_type.name
    if name in (BFP_FAMILY, MX_FAMILY, NVFP4_FAMILY):
        return str(name)
    if name not in _FORMATS_OF_TYPES:
        raise InvalidValueError(
            f"{type(quant_type).__name__}.{name}: not a type that weights or activations are quantized to; expected "
            f"{', '.join(_FORMATS_OF_TYPES)}, {BFP_FAMILY} or {MX_FAMILY}"
        )
    return _FORMATS_OF_TYPES[name]


__all__ = [
    "CalibrationDataReader",
    "CalibrationMethod",
    "ExtendedCalibrationMethod",
    "ExtendedQuantFormat",
    "ExtendedQuantType",
    "Int16Method",
    "LayerWiseMethod",
    "PowerOfTwoMethod",
    "QuantFormat",
    "QuantType",
    "VitisQuantFormat",
    "VitisQuantType",
    "format_of_type",
]

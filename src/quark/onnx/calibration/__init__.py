"""Readers of calibration data and the methods of calibration, at the import path that existing scripts use."""

from quark.onnx.data import CachedDataReader, PathDataReader, RandomDataReader
from quark.onnx.quant_utils import (
    CalibrationDataReader,
    CalibrationMethod,
    ExtendedCalibrationMethod,
    Int16Method,
    LayerWiseMethod,
    PowerOfTwoMethod,
)

__all__ = [
    "CachedDataReader",
    "CalibrationDataReader",
    "CalibrationMethod",
    "ExtendedCalibrationMethod",
    "Int16Method",
    "LayerWiseMethod",
    "PathDataReader",
    "PowerOfTwoMethod",
    "RandomDataReader",
]

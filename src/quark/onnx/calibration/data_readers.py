"""Readers of calibration data, at the import path that existing scripts use."""

from quark.onnx.calibration.interface import get_data_reader
from quark.onnx.data import CachedDataReader, PathDataReader, RandomDataReader

__all__ = ["CachedDataReader", "PathDataReader", "RandomDataReader", "get_data_reader"]

"""The methods of calibration, at the import path that existing scripts use."""

from quark.onnx.quant_utils import ExtendedCalibrationMethod, Int16Method, LayerWiseMethod, PowerOfTwoMethod

__all__ = ["ExtendedCalibrationMethod", "Int16Method", "LayerWiseMethod", "PowerOfTwoMethod"]

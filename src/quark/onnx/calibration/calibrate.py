"""`calibrate_model` at the import path that existing scripts use."""

from quark.onnx.calibration.interface import calibrate_model

__all__ = ["calibrate_model"]

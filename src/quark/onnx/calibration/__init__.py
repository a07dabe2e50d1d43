"""Calibration at the import path that existing scripts use: readers, methods, calibrators and what they are made of.

create_calibrator_float_scale, create_calibrator_power_of_two     calibrators, with ONNX Runtime's interface
calibrate_model, run_calibration                                  ranges from a model and a reader in one call
fake_calibration                                                  0..1 for every tensor
"""

from quark.onnx.calibration.calibrators import create_calibrator_float_scale, create_calibrator_power_of_two
from quark.onnx.calibration.interface import (
    calibrate_model,
    fake_calibration,
    get_data_reader,
    nearest_non_passthrough_ancestor_mapping,
    run_calibration,
    save_tensor_hist_fig,
    update_tensors_range_with_dependencies,
)
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
    "calibrate_model",
    "create_calibrator_float_scale",
    "create_calibrator_power_of_two",
    "fake_calibration",
    "get_data_reader",
    "nearest_non_passthrough_ancestor_mapping",
    "run_calibration",
    "save_tensor_hist_fig",
    "update_tensors_range_with_dependencies",
]

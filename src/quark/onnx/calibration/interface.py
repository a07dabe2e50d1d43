"""Calibration as one call: from a model and a reader to the ranges of its tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization.calibrate import TensorData, TensorsData

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.onnx.calibration.calibrators import (
    OPTION_OF_SETTING,
    CalibrateMethod,
    Calibrater,
    Model,
    create_calibrator_float_scale,
    create_calibrator_power_of_two,
)
from quark.onnx.data import PathDataReader, RandomDataReader
from quark.onnx.data.sources import read_reader
from quark.onnx.file_graph import read_graph
from quark.onnx.quantization.config.quant_types import CalibrationMethod, PowerOfTwoMethod, QuantType
from quark.text import get_logger

__all__ = [
    "calibrate_model",
    "fake_calibration",
    "get_data_reader",
    "nearest_non_passthrough_ancestor_mapping",
    "run_calibration",
    "save_tensor_hist_fig",
    "update_tensors_range_with_dependencies",
]

HISTOGRAM_FOLDER = Path("tensor_hist")

_LOG = get_logger(__name__)
_SETTING_OF_OPTION = {
    **{option: setting for setting, option in OPTION_OF_SETTING.items()},
    "CalibTensorRangeSymmetric": "symmetric",
    "NumBins": "num_bins",
    "NumQuantizedBins": "num_quantized_bins",
    "Scenario": "scenario",
    "CalibOptimizeMem": "optimize_mem",
    "CalibWorkerNum": "worker_num",
}


def calibrate_model(  # noqa: PLR0913 - the arguments that scripts use
    model_input: Model,
    calib_data_reader: Any,
    op_types_to_calibrate: Sequence[str] | None = None,
    activation_type: Any = QuantType.QInt8,
    calibrate_method: CalibrateMethod = CalibrationMethod.MinMax,
    use_external_data_format: bool = False,
    execution_providers: list[str] | None = None,
    quantized_tensor_type: Mapping[str, Any] | None = None,
    calib_extra_options: Mapping[str, Any] | None = None,
) -> TensorsData:
    """Return the ranges that a method finds on the data of a reader. `calib_extra_options` are settings of a
    calibrator, see `create_calibrator_float_scale` and `create_calibrator_power_of_two`."""
    calibrator = _calibrator(
        *(model_input, op_types_to_calibrate, activation_type, calibrate_method, use_external_data_format),
        *(execution_providers, quantized_tensor_type, calib_extra_options),
    )
    calibrator.collect_data(calib_data_reader)
    return calibrator.compute_data()


def _calibrator(
    model_input: Model,
    op_types: Sequence[str] | None,
    activation_type: Any,
    method: CalibrateMethod,
    has_external_data: bool,
    providers: list[str] | None,
    types: Mapping[str, Any] | None,
    options: Mapping[str, Any] | None,
) -> Calibrater:
    settings = {name: value for name, value in (options or {}).items() if name != "data_size"}
    if has_external_data:
        _LOG.debug("use_external_data_format: weights of large models are always kept out of the message")
    if isinstance(method, PowerOfTwoMethod):
        return create_calibrator_power_of_two(
            *(model_input, op_types),
            activation_type=activation_type,
            calibrate_method=method,
            execution_providers=providers,
            quantized_tensor_type=types,
            extra_options=settings,
        )
    return create_calibrator_float_scale(
        *(model_input, op_types),
        activation_type=activation_type,
        calibrate_method=method,
        execution_providers=providers,
        extra_options=settings,
    )


def run_calibration(
    model_input: Model,
    data_reader: Any,
    op_types_to_calibrate: Sequence[str] | None = None,
    activation_type: Any = QuantType.QInt8,
    calibrate_method: CalibrateMethod = CalibrationMethod.MinMax,
    use_external_data_format: bool = False,
    execution_providers: list[str] | None = None,
    extra_options: Mapping[str, Any] | None = None,
) -> TensorsData:
    """Return the ranges that a method finds on the data of a reader. `extra_options` are those of a QuantizationConfig,
    of which only those about calibration are used, such as CalibDataSize, CalibTensorRangeSymmetric and Percentile."""
    options = dict(extra_options or {})
    types: dict[str, Any] = {}
    for tensor, overrides in (options.get("TensorQuantOverrides") or {}).items():
        if not isinstance(overrides, (list, tuple)) or not all(isinstance(override, Mapping) for override in overrides):
            raise UnsupportedTypeError(f"TensorQuantOverrides of tensor '{tensor}': expected a list of dictionaries")
        for override in overrides:
            types[tensor] = override.get("quant_type", types.get(tensor, activation_type))
    settings = {name: options[option] for option, name in _SETTING_OF_OPTION.items() if option in options}
    limit = options.get("CalibDataSize")
    reader = data_reader if limit is None else _First(data_reader, limit)
    calibrator = _calibrator(
        *(model_input, op_types_to_calibrate, activation_type, calibrate_method, use_external_data_format),
        *(execution_providers, types, settings),
    )
    if options.get("SaveTensorHistFig", False):
        calibrator.histogram_folder = HISTOGRAM_FOLDER
    calibrator.collect_data(reader)
    return calibrator.compute_data()


def save_tensor_hist_fig(
    model_input: Model,
    calib_data_reader: Any,
    op_types_to_calibrate: Sequence[str] | None = None,
    activation_type: Any = QuantType.QInt8,
    calibrate_method: CalibrateMethod = CalibrationMethod.Percentile,
    use_external_data_format: bool = False,
    execution_providers: list[str] | None = None,
    calib_extra_options: Mapping[str, Any] | None = None,
) -> None:
    """Calibrate, and write pictures of the tensors' histograms into the folder tensor_hist. A method that needs no
    histograms has none to draw, which is logged."""
    calibrator = _calibrator(
        *(model_input, op_types_to_calibrate, activation_type, calibrate_method, use_external_data_format),
        *(execution_providers, None, calib_extra_options),
    )
    calibrator.histogram_folder = HISTOGRAM_FOLDER
    calibrator.collect_data(calib_data_reader)
    calibrator.compute_data()


class _First:
    """The first `count` samples of a reader."""

    def __init__(self, reader: Any, count: int) -> None:
        if not isinstance(count, int) or count < 1:
            raise InvalidValueError(f"option 'CalibDataSize' = {count!r}: expected a positive number of samples")
        self._items: Iterator[Any] = islice(read_reader(reader), count)

    def get_next(self) -> Any:
        """Return the next sample, or None."""
        return next(self._items, None)


def fake_calibration(model_input: Model) -> TensorsData:
    """Return the range 0..1 for every tensor, for formats that need no calibration."""
    model = read_graph(model_input if isinstance(model_input, onnx.ModelProto) else os.fspath(model_input))
    values = (value for node in model.graph for value in (*node.inputs, *node.outputs))
    names = dict.fromkeys(str(value.name) for value in values if value is not None and not value.is_initializer())
    numbers = {"lowest": np.array([0], np.float32), "highest": np.array([1], np.float32)}
    return TensorsData(CalibrationMethod.MinMax, {name: TensorData(**numbers) for name in names if name})


def get_data_reader(
    model_input: Model,
    calibration_data_reader: Any = None,
    calibration_data_path: str | os.PathLike[str] | None = None,
    extra_options: Mapping[str, Any] | None = None,
) -> Any:
    """Return the given reader, else one for the folder, else one of random numbers if UseRandomData is set.

    RandomDataReaderInputShape and RandomDataReaderInputDataRange are the shapes and ranges of random numbers by input.
    """
    options = extra_options or {}
    model: Any = model_input
    if calibration_data_reader is not None:
        if calibration_data_path is not None:
            _LOG.warning("calibration_data_path is not used, because there is a calibration_data_reader")
        return calibration_data_reader
    if calibration_data_path is not None:
        return PathDataReader(model, os.fspath(calibration_data_path))
    if not options.get("UseRandomData", False):
        raise InvalidValueError(
            "calibration needs data, and there is none: give calibration_data_reader or calibration_data_path, or set "
            "the extra option UseRandomData"
        )
    shapes = options.get("RandomDataReaderInputShape") or None
    return RandomDataReader(model, shapes, options.get("RandomDataReaderInputDataRange"))


def nearest_non_passthrough_ancestor_mapping(
    model: onnx.ModelProto, passthrough_node_types: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Map each output of a node of these types to the nearest tensor before it that other operators compute.

    The second result has the types of nodes without such a tensor, because nothing goes into them.
    """
    producers = {name: node for node in model.graph.node for name in node.output}
    types = set(passthrough_node_types)
    nearest: dict[str, str] = {}
    missing: dict[str, None] = {}
    for node in model.graph.node:
        if node.op_type not in types:
            continue
        for output in node.output:
            source = _nearest(output, producers, types)
            if source is None:
                missing[node.op_type] = None
            else:
                nearest[output] = source
    return nearest, list(missing)


def _nearest(tensor: str, producers: Mapping[str, onnx.NodeProto], types: set[str]) -> str | None:
    """Follow the first inputs upstream, and the others where those lead nowhere."""
    waiting, seen = [tensor], set()
    while waiting:
        name = waiting.pop()
        node = producers.get(name)
        if node is None or node.op_type not in types:
            return name
        if name not in seen:
            seen.add(name)
            waiting.extend(reversed([name for name in node.input if name]))
    return None


def update_tensors_range_with_dependencies(tensors_range: TensorsData, dependencies: Mapping[str, str]) -> TensorsData:
    """Return ranges in which each key of `dependencies` has the range of its value; tensors without one stay."""
    ranges = {name: entry.range_value for name, entry in tensors_range.data.items()}
    ranges |= {target: ranges[source] for target, source in dependencies.items() if source in ranges}
    data = {
        name: TensorData(lowest=np.array(lowest, np.float32), highest=np.array(highest, np.float32))
        for name, (lowest, highest) in ranges.items()
    }
    return TensorsData(CalibrationMethod.MinMax, data)

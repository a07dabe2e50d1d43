"""Calibrators: objects that collect the activations of a model and compute the ranges of its tensors.

    calibrator = create_calibrator_float_scale("model.onnx", ["Conv"], calibrate_method=CalibrationMethod.Percentile)
    calibrator.collect_data(reader)
    ranges = calibrator.compute_data()          # onnxruntime's TensorsData

They have the interface of ONNX Runtime's own. Ranges are found as in a quantization, by `quark.onnx.calibrate`: samples
are kept, and the model runs over them in `compute_data`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
from onnxruntime.quantization.calibrate import CalibraterBase, TensorData, TensorsData

from quark.decide.specs import AffineSpec
from quark.errors import InvalidValueError, UnsupportedOptionError, unknown_name
from quark.formats.affine import integer_format
from quark.onnx.calibrate import CalibrationOptions, FloatRunner, Wanted, calibrate
from quark.onnx.data import Samples, input_infos
from quark.onnx.data.samples import SampleStore, as_sample
from quark.onnx.data.sources import read_reader
from quark.onnx.file_graph import read_graph
from quark.onnx.quantization.config.config import QuantizationConfig
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.quant_types import (
    CalibrationMethod,
    LayerWiseMethod,
    PowerOfTwoMethod,
    QuantType,
)
from quark.onnx.save import SaveOptions, check_output, write_model
from quark.onnx.session import open_session
from quark.ranges import TensorRange
from quark.text import get_logger

__all__ = [
    "DistributionCalibrater",
    "EntropyCalibrater",
    "LayerWisePercentileCalibrater",
    "MinMaxCalibrater",
    "PercentileCalibrater",
    "PowOfTwoCalibrater",
    "create_calibrator_float_scale",
    "create_calibrator_power_of_two",
]

Model = str | os.PathLike[str] | onnx.ModelProto
CalibrateMethod: TypeAlias = Any  # a member of CalibrationMethod, LayerWiseMethod or PowerOfTwoMethod

_LOG = get_logger(__name__)
_FLOATS = {ir.DataType.FLOAT: np.float32, ir.DataType.FLOAT16: np.float16}

# The settings of calibrators, and the extra options of a config that say the same.
OPTION_OF_SETTING: Mapping[str, str] = {
    "moving_average": "CalibMovingAverage",
    "averaging_constant": "CalibMovingAverageConstant",
    "percentile": "Percentile",
    "percentile_candidates": "PercentileCandidates",
    "lwp_metric": "LWPMetric",
    "lwp_use_histogram": "LWPUseHistogram",
    "minmse_mode": "MinMSEModePof2Scale",
}
# Settings that cannot change the ranges that are found here.
_WITHOUT_EFFECT: Mapping[str, str] = {
    "num_bins": "histograms have a fixed number of bins, between extremes that are known beforehand",
    "num_quantized_bins": "the number of codes follows from the type of the activations",
    "scenario": "it is for types of 8-bit floats",
    "optimize_mem": "calibration is a stream, which keeps no activations",
    "worker_num": "calibration is a stream, which keeps no activations",
}
_SYMMETRIC_BY_DEFAULT = (*PowerOfTwoMethod, CalibrationMethod.Percentile, LayerWiseMethod.LayerWisePercentile)


def wanted_for(
    method: CalibrateMethod, activation_type: Any, settings: Mapping[str, Any], *, symmetric: bool
) -> Wanted:
    """Return how the range of a tensor of that type is found; `settings` are those of `OPTION_OF_SETTING`."""
    options = {OPTION_OF_SETTING[name]: value for name, value in settings.items()}
    config = QuantizationConfig(calibrate_method=method, activation_type=activation_type, extra_options=options)
    spec = settings_of(config).choose.default.activation
    if not isinstance(spec, AffineSpec):
        raise UnsupportedOptionError(f"activation_type {activation_type}: it has no ranges; expected an integer")
    return Wanted(spec.method, integer_format(spec.format), symmetric)


class _AllSamples(Samples):
    """Samples, none of which is held out."""

    def __init__(self, store: SampleStore) -> None:
        super().__init__(store, "reader")
        self._indices = list(range(len(store)))


class Calibrater(CalibraterBase):  # type: ignore[misc] # ONNX Runtime has no types
    """A calibrator. `settings` are those of `OPTION_OF_SETTING`; None means the default."""

    def __init__(
        self,
        model_input: Model,
        op_types_to_calibrate: Sequence[str] | None,
        augmented_model_path: str | os.PathLike[str],
        use_external_data_format: bool,
        method: CalibrateMethod,
        symmetric: bool,
        activation_type: Any = QuantType.QInt8,
        tensor_types: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        # not that of the base, which reads a file without checking it
        self._graph = read_graph(model_input if isinstance(model_input, onnx.ModelProto) else os.fspath(model_input))
        self.op_types_to_calibrate = op_types_to_calibrate
        self.augmented_model_path = augmented_model_path
        self.use_external_data_format = use_external_data_format
        self.symmetric = symmetric
        self.method = method
        self.activation_type = activation_type
        self.quantized_tensor_type = dict(tensor_types or {})
        self.per_channel = False
        self.augment_model = None
        self.execution_providers: list[str] | None = ["CPUExecutionProvider"]
        self.tensors_to_calibrate: set[str] | None = None
        self.histogram_folder: Path | None = None  # folder for pictures of the histograms
        self._settings = {name: value for name, value in settings.items() if value is not None}
        self._inputs = input_infos(self._graph)
        self._store = SampleStore()
        self._session: Any = None
        self.model: onnx.ModelProto = ir.to_proto(self._graph)
        self.wanted(QuantType.QInt8 if activation_type is None else activation_type)  # refuses bad settings

    def wanted(self, activation_type: Any) -> Wanted:
        """Return how the range of a tensor of that type is found."""
        return wanted_for(self.method, activation_type, self._settings, symmetric=self.symmetric)

    def augment_graph(self) -> None:
        """Choose the tensors to calibrate: float inputs and outputs of nodes of the types asked for, or of all. They
        become outputs of `get_augment_model()`, which is written only if `use_external_data_format` is set."""
        types = set(self.op_types_to_calibrate or ())
        chosen: dict[str, ir.Value] = {}
        for node in self._graph.graph:
            if types and node.op_type not in types:
                continue
            for value in (*node.inputs, *node.outputs):
                if value is not None and value.name and value.dtype in _FLOATS and not value.is_initializer():
                    chosen[value.name] = value
        self.tensors_to_calibrate = set(chosen)
        known = {output.name for output in self.model.graph.output}
        self.model.graph.output.extend(
            ir.serde.serialize_value(value) for name, value in chosen.items() if name not in known
        )
        if self.use_external_data_format:
            target = check_output(self.augmented_model_path, has_report=False)
            write_model(self.model, target, SaveOptions(has_external_data=True))

    def create_inference_session(self) -> None:
        """Forget the session, so that the next one has the present `execution_providers`."""
        self._session = None

    @property
    def infer_session(self) -> Any:
        """An ONNX Runtime session of the model with the tensors to calibrate among its outputs."""
        if self._session is None:
            names = {input_.name for input_ in (*self._graph.graph.inputs, *self._graph.graph.outputs)}
            extra = [name for name in sorted(self.tensors_to_calibrate or ()) if name not in names]
            self._session = open_session(self._graph, extra_outputs=extra, providers=self._providers)
        return self._session

    @property
    def _providers(self) -> tuple[str, ...]:
        return tuple(self.execution_providers or ("CPUExecutionProvider",))

    def collect_data(self, data_reader: Any) -> None:
        """Keep the samples of a reader; those of further calls are added. A reader without any is an error."""
        count = len(self._store)
        for index, item in enumerate(read_reader(data_reader)):
            self._store.append(as_sample(item, self._inputs, count + index))
        if len(self._store) == count:
            raise InvalidValueError(f"reader {type(data_reader).__name__}: it has no samples")

    def clear_collected_data(self) -> None:
        """Forget all samples."""
        self._store = SampleStore()

    def compute_data(self) -> TensorsData:
        """Run the model over the samples, and return the range of every chosen tensor."""
        if not len(self._store):
            raise InvalidValueError("no data has been collected, so there are no ranges: call collect_data first")
        if self.tensors_to_calibrate is None:
            self.augment_graph()
        names = sorted(self.tensors_to_calibrate or ())
        usual = self.wanted(self.activation_type)
        others = {name: self.wanted(kind) for name, kind in self.quantized_tensor_type.items() if name in names}
        wanted = {name: others.get(name, usual) for name in names}
        options = CalibrationOptions(
            providers=self._providers,
            has_symmetric_ranges=self.symmetric,
            histogram_folder=self.histogram_folder,
        )
        with FloatRunner(self._graph, wanted, providers=self._providers) as runner:
            ranges = calibrate(runner, wanted, _AllSamples(self._store), options)
        method = CalibrationMethod.MinMax if isinstance(self.method, PowerOfTwoMethod) else self.method
        return TensorsData(method, {name: self._data(name, range_, wanted[name]) for name, range_ in ranges.items()})

    def _data(self, name: str, range_: TensorRange, wanted: Wanted) -> TensorData:
        lowest, highest = range_.lowest, range_.highest
        if self.method is PowerOfTwoMethod.MinMSE and range_.position is not None:
            # the range that symmetric codes with that scale cover
            highest = (2 ** (wanted.integer.bits - 1) - 1) * 2.0**-range_.position
            lowest = -highest
        dtype = _FLOATS[_value(self._graph, name).dtype or ir.DataType.FLOAT]
        has_axis = self.method in (CalibrationMethod.MinMax, PowerOfTwoMethod.NonOverflow)
        numbers = ([lowest], [highest]) if has_axis else (lowest, highest)
        return TensorData(lowest=np.array(numbers[0], dtype), highest=np.array(numbers[1], dtype))


def _value(model: ir.Model, name: str) -> ir.Value:
    values: Iterable[ir.Value] = (*model.graph.inputs, *(value for node in model.graph for value in node.outputs))
    return next(value for value in values if value.name == name)


def _note(**settings: tuple[Any, Any]) -> None:
    """Log the settings that are not at their default and cannot change the ranges: their value, and the default."""
    for name, (value, usual) in settings.items():
        if value != usual:
            _LOG.warning("%s has no effect on calibration: %s", name, _WITHOUT_EFFECT[name])


class MinMaxCalibrater(Calibrater):
    """Ranges from the smallest to the largest value, or with `moving_average` an average over the samples' ranges."""

    def __init__(
        self,
        model_input: Model,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str | os.PathLike[str] = "augmented_model.onnx",
        symmetric: bool = False,
        use_external_data_format: bool = False,
        moving_average: bool = False,
        averaging_constant: float = 0.01,
        optimize_mem: bool = True,
    ) -> None:
        super().__init__(
            *(model_input, op_types_to_calibrate, augmented_model_path, use_external_data_format),
            method=CalibrationMethod.MinMax,
            symmetric=symmetric,
            moving_average=moving_average or None,
            averaging_constant=averaging_constant if moving_average else None,
        )
        _note(optimize_mem=(optimize_mem, True))


class _HistogramCalibrater(Calibrater):
    """A calibrator whose former argument `method` is the name of what its class does."""

    def __init__(self, *model: Any, name: str, expected: str, **settings: Any) -> None:
        if name != expected:
            raise InvalidValueError(f"method {name!r}: {type(self).__name__} calibrates by {expected!r}; leave it out")
        super().__init__(*model, **settings)


class EntropyCalibrater(_HistogramCalibrater):
    """Ranges with the smallest loss of information."""

    def __init__(  # noqa: PLR0913 - the arguments that scripts use
        self,
        model_input: Model,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str | os.PathLike[str] = "augmented_model.onnx",
        use_external_data_format: bool = False,
        method: str = "entropy",
        symmetric: bool = False,
        num_bins: int = 128,
        num_quantized_bins: int = 128,
        optimize_mem: bool = True,
        worker_num: int = 1,
    ) -> None:
        super().__init__(
            *(model_input, op_types_to_calibrate, augmented_model_path, use_external_data_format),
            name=method,
            expected="entropy",
            method=CalibrationMethod.Entropy,
            symmetric=symmetric,
        )
        _note(num_bins=(num_bins, 128), num_quantized_bins=(num_quantized_bins, 128))
        _note(optimize_mem=(optimize_mem, True), worker_num=(worker_num, 1))


class PercentileCalibrater(_HistogramCalibrater):
    """Ranges that leave out the outermost values."""

    def __init__(  # noqa: PLR0913 - the arguments that scripts use
        self,
        model_input: Model,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str | os.PathLike[str] = "augmented_model.onnx",
        use_external_data_format: bool = False,
        method: str = "percentile",
        symmetric: bool = False,
        num_bins: int = 2048,
        percentile: float = 99.999,
        optimize_mem: bool = True,
        worker_num: int = 1,
    ) -> None:
        super().__init__(
            *(model_input, op_types_to_calibrate, augmented_model_path, use_external_data_format),
            name=method,
            expected="percentile",
            method=CalibrationMethod.Percentile,
            symmetric=symmetric,
            percentile=percentile,
        )
        _note(num_bins=(num_bins, 2048), optimize_mem=(optimize_mem, True), worker_num=(worker_num, 1))


class DistributionCalibrater(_HistogramCalibrater):
    """Ranges that suit a normal distribution with the same mean and deviation."""

    def __init__(  # noqa: PLR0913 - the arguments that scripts use
        self,
        model_input: Model,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str | os.PathLike[str] = "augmented_model.onnx",
        use_external_data_format: bool = False,
        method: str = "distribution",
        num_bins: int = 128,
        scenario: str = "same",
        optimize_mem: bool = True,
        worker_num: int = 1,
    ) -> None:
        super().__init__(
            *(model_input, op_types_to_calibrate, augmented_model_path, use_external_data_format),
            name=method,
            expected="distribution",
            method=CalibrationMethod.Distribution,
            symmetric=False,
        )
        _note(num_bins=(num_bins, 128), scenario=(scenario, "same"))
        _note(optimize_mem=(optimize_mem, True), worker_num=(worker_num, 1))


class LayerWisePercentileCalibrater(_HistogramCalibrater):
    """Ranges by the percentile that has the smallest error for each tensor."""

    def __init__(  # noqa: PLR0913 - the arguments that scripts use
        self,
        model_input: Model,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str | os.PathLike[str] = "augmented_model.onnx",
        use_external_data_format: bool = False,
        method: str = "percentile",
        symmetric: bool = False,
        num_bins: int = 2048,
        percentile: float = 99.999,
        worker_num: int = 1,
        lwp_metric: str | None = None,
        activation_type: Any = QuantType.QInt8,
        percentile_candidates: Sequence[float] | None = None,
        lwp_use_histogram: bool | None = None,
        optimize_mem: bool = True,
    ) -> None:
        super().__init__(
            *(model_input, op_types_to_calibrate, augmented_model_path, use_external_data_format),
            name=method,
            expected="percentile",
            method=LayerWiseMethod.LayerWisePercentile,
            symmetric=symmetric,
            activation_type=activation_type,
            lwp_metric=lwp_metric,
            percentile_candidates=None if percentile_candidates is None else list(percentile_candidates),
            lwp_use_histogram=lwp_use_histogram,
        )
        if percentile != 99.999:
            _LOG.warning("percentile has no effect on calibration: percentile_candidates are tried")
        _note(num_bins=(num_bins, 2048), worker_num=(worker_num, 1))


class PowOfTwoCalibrater(Calibrater):
    """Ranges of symmetric codes whose scale is a power of two: of the least squared error, or without clipping."""

    def __init__(  # noqa: PLR0913 - the arguments that scripts use
        self,
        model_input: Model,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str | os.PathLike[str] = "augmented_model.onnx",
        use_external_data_format: bool = False,
        activation_type: Any = QuantType.QInt8,
        method: PowerOfTwoMethod = PowerOfTwoMethod.MinMSE,
        symmetric: bool = True,
        minmse_mode: str | None = None,
        num_bins: int = 2048,
        percentile: float | None = None,
        optimize_mem: bool = True,
        worker_num: int = 1,
        quantized_tensor_type: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(method, PowerOfTwoMethod):
            raise unknown_name("power-of-two method", str(method), [method.name for method in PowerOfTwoMethod])
        is_min_mse = method is PowerOfTwoMethod.MinMSE
        super().__init__(
            *(model_input, op_types_to_calibrate, augmented_model_path, use_external_data_format),
            method=method,
            symmetric=symmetric,
            activation_type=activation_type,
            tensor_types=quantized_tensor_type,
            minmse_mode=minmse_mode if is_min_mse else None,
            percentile=percentile if is_min_mse and minmse_mode == "Percentile" else None,
        )
        _note(num_bins=(num_bins, 2048), optimize_mem=(optimize_mem, True), worker_num=(worker_num, 1))


_CLASSES: Mapping[CalibrateMethod, type[Calibrater]] = {
    CalibrationMethod.MinMax: MinMaxCalibrater,
    CalibrationMethod.Entropy: EntropyCalibrater,
    CalibrationMethod.Percentile: PercentileCalibrater,
    CalibrationMethod.Distribution: DistributionCalibrater,
    LayerWiseMethod.LayerWisePercentile: LayerWisePercentileCalibrater,
    PowerOfTwoMethod.NonOverflow: MinMaxCalibrater,
    PowerOfTwoMethod.MinMSE: PowOfTwoCalibrater,
}
_SETTINGS: Mapping[CalibrateMethod, tuple[str, ...]] = {
    CalibrationMethod.MinMax: ("symmetric", "moving_average", "averaging_constant", "optimize_mem"),
    CalibrationMethod.Entropy: ("symmetric", "num_bins", "num_quantized_bins", "optimize_mem", "worker_num"),
    CalibrationMethod.Percentile: ("symmetric", "percentile", "num_bins", "optimize_mem", "worker_num"),
    CalibrationMethod.Distribution: ("num_bins", "scenario", "optimize_mem", "worker_num"),
    LayerWiseMethod.LayerWisePercentile: (
        *("symmetric", "percentile", "num_bins", "worker_num", "lwp_metric", "percentile_candidates"),
        *("lwp_use_histogram", "optimize_mem"),
    ),
    PowerOfTwoMethod.NonOverflow: ("symmetric", "moving_average", "averaging_constant", "optimize_mem"),
    PowerOfTwoMethod.MinMSE: ("symmetric", "minmse_mode", "num_bins", "percentile", "optimize_mem", "worker_num"),
}
SETTINGS = tuple(dict.fromkeys(name for names in _SETTINGS.values() for name in names))


def create_calibrator_float_scale(
    model_input: Model,
    op_types_to_calibrate: Sequence[str] | None = None,
    augmented_model_path: str | os.PathLike[str] = "augmented_model.onnx",
    activation_type: Any = QuantType.QInt8,
    calibrate_method: CalibrationMethod | LayerWiseMethod = CalibrationMethod.MinMax,
    use_external_data_format: bool = False,
    execution_providers: list[str] | None = None,
    extra_options: Mapping[str, Any] | None = None,
) -> Calibrater:
    """Return a calibrator for scales that are floats.

    `op_types_to_calibrate` None calibrates all float tensors. `extra_options` are settings of the calibrator:
    symmetric, moving_average, averaging_constant, percentile, percentile_candidates, lwp_metric, lwp_use_histogram.
    """
    if not isinstance(calibrate_method, (CalibrationMethod, LayerWiseMethod)) or calibrate_method not in _CLASSES:
        known = [str(method) for method in _CLASSES if not isinstance(method, PowerOfTwoMethod)]
        raise unknown_name("calibration method for float scales", str(calibrate_method), known)
    has_type = calibrate_method is LayerWiseMethod.LayerWisePercentile
    return _made(
        *(model_input, op_types_to_calibrate, augmented_model_path, use_external_data_format),
        calibrate_method,
        execution_providers,
        extra_options,
        {"activation_type": activation_type} if has_type else {},
    )


def create_calibrator_power_of_two(  # noqa: PLR0913 - the arguments that scripts use
    model_input: Model,
    op_types_to_calibrate: Sequence[str] | None = None,
    augmented_model_path: str | os.PathLike[str] = "augmented_model.onnx",
    activation_type: Any = QuantType.QInt8,
    calibrate_method: PowerOfTwoMethod = PowerOfTwoMethod.NonOverflow,
    use_external_data_format: bool = False,
    execution_providers: list[str] | None = None,
    quantized_tensor_type: Mapping[str, Any] | None = None,
    extra_options: Mapping[str, Any] | None = None,
) -> Calibrater:
    """Return a calibrator for scales that are powers of two.

    With NonOverflow the ranges are the extremes of the data, from which the smallest scale without clipping follows;
    with MinMSE they are those that codes of the best scale cover. `quantized_tensor_type` has types of single tensors
    by name. `extra_options` are settings of the calibrator: symmetric, minmse_mode, percentile, moving_average,
    averaging_constant.
    """
    if not isinstance(calibrate_method, PowerOfTwoMethod):
        raise unknown_name("power-of-two method", str(calibrate_method), [method.name for method in PowerOfTwoMethod])
    is_min_mse = calibrate_method is PowerOfTwoMethod.MinMSE
    own = {"activation_type": activation_type, "quantized_tensor_type": quantized_tensor_type}
    return _made(
        *(model_input, op_types_to_calibrate, augmented_model_path, use_external_data_format),
        calibrate_method,
        execution_providers,
        extra_options,
        own if is_min_mse else {},
    )


def _made(
    model_input: Model,
    op_types: Sequence[str] | None,
    path: str | os.PathLike[str],
    has_external_data: bool,
    method: CalibrateMethod,
    providers: list[str] | None,
    extra_options: Mapping[str, Any] | None,
    own: Mapping[str, Any],
) -> Calibrater:
    settings: dict[str, Any] = {}
    if "symmetric" in _SETTINGS[method]:
        settings["symmetric"] = method in _SYMMETRIC_BY_DEFAULT
    for name, value in (extra_options or {}).items():
        if name not in SETTINGS:
            raise unknown_name("setting of a calibrator", name, SETTINGS)
        if name in _SETTINGS[method]:
            settings[name] = value
        else:
            _LOG.warning("%s has no effect on calibration by %s", name, method)
    kind: Any = _CLASSES[method]
    calibrator: Calibrater = kind(
        model_input, op_types, path, use_external_data_format=has_external_data, **settings, **own
    )
    calibrator.execution_providers = providers or ["CPUExecutionProvider"]
    calibrator.augment_graph()
    return calibrator

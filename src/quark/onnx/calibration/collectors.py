"""Collectors: histograms of tensors, batch by batch, and the ranges that follow from them.

ONNX Runtime's calibrators are made of such objects. Ours are not, see `quark.onnx.calibrate`; these are for scripts
that have the arrays already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnxruntime.quantization.calibrate import CalibrationDataCollector, HistogramCollector

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.formats.power_of_two import NON_OVERFLOW, position_of_range
from quark.onnx.calibrate import Wanted
from quark.onnx.calibration.calibrators import wanted_for
from quark.onnx.quantization.config.quant_types import QUANT_TYPES, ExtendedQuantType, PowerOfTwoMethod, QuantType
from quark.ranges import TensorRange

__all__ = ["OverridedHistogramCollector", "PowOfTwoCollector", "compute_minmse_from_histogram", "compute_minmse_worker"]

Array = NDArray[Any]
Histogram = tuple[Array, Array, Array, Array]  # counts, edges, smallest and largest number

_TYPE_OF_TENSOR = {
    onnx.TensorProto.INT8: ExtendedQuantType.QInt8,
    onnx.TensorProto.UINT8: ExtendedQuantType.QUInt8,
    onnx.TensorProto.INT16: ExtendedQuantType.QInt16,
    onnx.TensorProto.UINT16: ExtendedQuantType.QUInt16,
    onnx.TensorProto.INT32: ExtendedQuantType.QInt32,
    onnx.TensorProto.UINT32: ExtendedQuantType.QUInt32,
}


def _flat(samples: Any) -> Array:
    """The values of an array, or of a list of them, of any shapes."""
    return (
        np.concatenate([np.asarray(sample).reshape(-1) for sample in samples])
        if len(samples)
        else np.zeros(0, np.float32)
    )


class OverridedHistogramCollector(HistogramCollector):  # type: ignore[misc] # ONNX Runtime has no types
    """ONNX Runtime's collector, for samples of any shapes and for float16, whose histograms are counted in float32.

    With `layer_wise` and the method 'percentile', only the last sample of each call is counted. `optimize_mem` and
    `worker_num` make no difference.
    """

    def __init__(  # noqa: PLR0913 - the arguments that scripts use
        self,
        method: str,
        symmetric: bool,
        num_bins: int,
        num_quantized_bins: int,
        percentile: float,
        scenario: str = "same",
        optimize_mem: bool = True,
        worker_num: int = 1,
        layer_wise: bool = False,
    ) -> None:
        super().__init__(method, symmetric, num_bins, num_quantized_bins, percentile, scenario)
        self.optimize_mem, self.worker_num = optimize_mem, worker_num
        self.layerwise_percentile = method == "percentile" and layer_wise

    def collect_absolute_value(self, name_to_arr: Mapping[str, Any]) -> None:
        """Count magnitudes."""
        self._collect(name_to_arr, super().collect_absolute_value)

    def collect_value(self, name_to_arr: Mapping[str, Any]) -> None:
        """Count values, between the largest magnitude and its negative."""
        self._collect(name_to_arr, super().collect_value)

    def _collect(self, name_to_arr: Mapping[str, Any], count: Any) -> None:
        for name, samples in name_to_arr.items():
            values = _flat(samples[-1:] if self.layerwise_percentile else samples)
            is_half = values.dtype == np.float16
            count({name: values.astype(np.float32) if is_half else values})
            if is_half:  # keep the type of the data
                counts, edges, *seen = self.histogram_dict[name]
                self.histogram_dict[name] = (counts, edges, *(np.asarray(bound, np.float16) for bound in seen))


class PowOfTwoCollector(CalibrationDataCollector):  # type: ignore[misc] # ONNX Runtime has no types
    """Finds symmetric ranges with a power-of-two scale of the least squared error.

    With `minmse_mode` 'All', the scale is chosen from a histogram of `num_bins` bins, or more if later values exceed
    its range; with 0 bins, and in the other modes, samples are kept. 'MostCommon' takes the scale that is best for most
    samples, and 'Percentile' leaves the outermost values out.
    """

    def __init__(  # noqa: PLR0913 - the arguments that scripts use
        self,
        activation_type: Any = QuantType.QInt8,
        method: PowerOfTwoMethod = PowerOfTwoMethod.MinMSE,
        symmetric: bool = True,
        minmse_mode: str = "All",
        num_bins: int = 2048,
        percentile: float = 99.999,
        optimize_mem: bool = True,
        worker_num: int = 1,
        quantized_tensor_type: Mapping[str, Any] | None = None,
    ) -> None:
        if method is not PowerOfTwoMethod.MinMSE:
            raise InvalidValueError(f"method {method}: expected PowerOfTwoMethod.MinMSE")
        self.activation_type = activation_type
        self.method, self.symmetric, self.minmse_mode = method, symmetric, minmse_mode
        self.num_bins, self.percentile = num_bins, percentile
        self.optimize_mem, self.worker_num = optimize_mem, worker_num
        self.quantized_tensor_type = dict(quantized_tensor_type or {})
        self.histogram_dict: dict[str, Histogram] = {}
        self.name_to_arr: dict[str, list[Array]] = {}

    def collect(self, name_to_arr: Mapping[str, Sequence[Array]]) -> None:
        """Add samples of tensors by name."""
        if self.minmse_mode == "All" and self.num_bins > 0 and self.symmetric:
            self.collect_histogram_value(name_to_arr)
        else:
            self.collect_value(name_to_arr)

    def collect_value(self, name_to_arr: Mapping[str, Sequence[Array]]) -> None:
        """Keep the samples."""
        for name, samples in name_to_arr.items():
            self.name_to_arr.setdefault(name, []).extend(np.asarray(sample) for sample in samples)

    def collect_histogram_value(self, name_to_arr: Mapping[str, Sequence[Array]]) -> None:
        """Count the samples. The bins keep their width; bins are added for values beyond the last."""
        for name, samples in name_to_arr.items():
            values = _flat(samples)
            if values.dtype not in (np.float16, np.float32):
                raise UnsupportedTypeError(f"tensor '{name}': expected float16 or float32, got {values.dtype}")
            ends = (values.min(), values.max()) if values.size else (values.dtype.type(0), values.dtype.type(0))
            seen = (np.array(ends[0]), np.array(ends[1]))
            wide = values.astype(np.float64)
            if name not in self.histogram_dict:
                counts, edges = np.histogram(wide, bins=self.num_bins)
                self.histogram_dict[name] = (counts, edges, *seen)
                continue
            counts, edges, lowest, highest = self.histogram_dict[name]
            width = float(edges[1] - edges[0])
            before = max(0, int(np.ceil((edges[0] - float(seen[0])) / width)))
            behind = max(0, int(np.ceil((float(seen[1]) - edges[-1]) / width)))
            if before or behind:
                first, last = edges[0] - before * width, edges[-1] + behind * width
                edges = np.linspace(first, last, len(counts) + before + behind + 1)
                counts = np.pad(counts, (before, behind))
            counts = counts + np.histogram(wide, bins=edges)[0]
            self.histogram_dict[name] = (counts, edges, np.minimum(lowest, seen[0]), np.maximum(highest, seen[1]))

    def compute_collection_result(self) -> dict[str, tuple[Array, Array]]:
        """Return the range of every tensor."""
        if not self.histogram_dict and not self.name_to_arr:
            raise InvalidValueError("no data has been collected, so there are no ranges: call collect first")
        types = (self.quantized_tensor_type, self.activation_type, self.symmetric)
        results = dict(
            compute_minmse_from_histogram(name, histogram, *types) for name, histogram in self.histogram_dict.items()
        )
        for name, samples in self.name_to_arr.items():
            arguments = (types[0], self.minmse_mode, *types[1:], self.method, self.percentile)
            results.update([compute_minmse_worker(name, samples, *arguments)])
        return results


def compute_minmse_from_histogram(
    tensor_name: str,
    histogram: Histogram,
    quantized_tensor_type: Mapping[str, Any],
    activation_qType: Any,  # noqa: N803 - the name that scripts use
    symmetric: bool,
) -> tuple[str, tuple[Array, Array]]:
    """Return the name, and the range of the best power-of-two scale for a histogram: counts, edges, and extremes."""
    if not symmetric:
        raise InvalidValueError(
            f"tensor '{tensor_name}': power-of-two scales are symmetric; got symmetric={symmetric!r}"
        )
    counts, edges, lowest, highest = histogram
    if not np.sum(counts):
        raise InvalidValueError(f"tensor '{tensor_name}': its histogram is empty, no data has been collected")
    wanted = _wanted(tensor_name, quantized_tensor_type, activation_qType, {})
    bits = wanted.integer.bits
    centres = (np.asarray(edges[:-1], np.float64) + np.asarray(edges[1:], np.float64)) / 2
    first = int(position_of_range(np.float32(lowest), np.float32(highest), bits, NON_OVERFLOW))
    limit = 2 ** (bits - 1)

    def error(position: int) -> float:
        codes = np.clip(np.rint(centres * 2.0**position), -limit, limit - 1)
        return float((counts * (centres - codes * 2.0**-position) ** 2).sum())

    best = min((first + offset for offset in NON_OVERFLOW.offsets), key=error)
    return tensor_name, _reach(bits, best, np.asarray(lowest).dtype)


def compute_minmse_worker(
    tensor_name: str,
    tensor_data: Sequence[Array],
    quantized_tensor_type: Mapping[str, Any],
    minmse_mode: str,
    activation_qType: Any,  # noqa: N803 - the name that scripts use
    symmetric: bool,
    method: PowerOfTwoMethod,
    percentile: float,
) -> tuple[str, tuple[Array, Array]]:
    """Return the name, and the range of the best power-of-two scale for samples."""
    if not len(tensor_data):
        raise InvalidValueError(f"tensor '{tensor_name}': no data has been collected")
    if method is not PowerOfTwoMethod.MinMSE:
        raise InvalidValueError(f"method {method}: expected PowerOfTwoMethod.MinMSE")
    settings = {"minmse_mode": minmse_mode, **({"percentile": percentile} if minmse_mode == "Percentile" else {})}
    wanted = _wanted(tensor_name, quantized_tensor_type, activation_qType, settings)
    range_ = _observed(tensor_data, wanted)
    dtype = np.asarray(tensor_data[0]).dtype
    if range_.position is None:
        return tensor_name, (np.array(range_.lowest, dtype), np.array(range_.highest, dtype))
    return tensor_name, _reach(wanted.integer.bits, range_.position, dtype)


def _wanted(name: str, types: Mapping[str, Any], usual: Any, settings: Mapping[str, Any]) -> Wanted:
    kind = types.get(name, usual)
    kind = kind if isinstance(kind, QUANT_TYPES) else _TYPE_OF_TENSOR.get(kind)
    if kind is None:
        raise UnsupportedTypeError(
            f"tensor '{name}': type {usual!r}, expected a member of QuantType or an integer type"
        )
    return wanted_for(PowerOfTwoMethod.MinMSE, kind, settings, symmetric=True)


def _observed(samples: Sequence[Array], wanted: Wanted) -> TensorRange:
    """Show all samples to an observer, as often as it needs."""
    observer = wanted.observer()
    for sample in samples:
        observer.observe(sample)
        observer.end_of_sample()
    passes = [observer.observe_again] if observer.needs_second_pass else []
    passes += [observer.observe_finally] if observer.needs_second_pass and observer.needs_third_pass else []
    for show in passes:
        for sample in samples:
            show(sample)
    return observer.result()


def _reach(bits: int, position: int, dtype: Any) -> tuple[Array, Array]:
    """The range of symmetric codes with the scale 2^-position."""
    reach = (2 ** (bits - 1) - 1) * 2.0**-position
    return np.array(-reach, dtype), np.array(reach, dtype)

"""The distance between the outputs of a quantized model and those of the float model, as one number for a search."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.compare.measures import absolute_error, pair_sums, psnr_of, similarity_of_moments, squared_sums
from quark.errors import InvalidValueError
from quark.files.output import complete, writing
from quark.onnx.data import CachedDataReader, input_infos
from quark.onnx.data.samples import Sample, SampleStore, as_sample
from quark.onnx.data.sources import read_reader
from quark.onnx.load.reading import read_proto
from quark.onnx.session import open_session, running

Array = NDArray[Any]
Metric = Callable[[Array, Array], Any]

_PEAK = 255.0
_MOST_PSNR, _LEAST_ERROR = 100.0, 1e-10


def l2_metric(base_input: Array, ref_input: Array) -> float:
    """The mean of the squared differences."""
    return squared_sums(base_input, ref_input)[0] / max(np.size(base_input), 1)


def l1_metric(base_input: Array, ref_input: Array) -> float:
    """The mean of the absolute differences."""
    return absolute_error(base_input, ref_input) / max(np.size(base_input), 1)


def cos_metric(base_input: Array, ref_input: Array) -> float:
    """The cosine of the angle, from 0 (opposite) to 1 (the same direction); 0 if one is zero."""
    if not np.any(base_input) or not np.any(ref_input):
        return 0.0
    return 0.5 + 0.5 * float(pair_sums(base_input, ref_input).cosine or 0.0)


def psnr_metric(base_input: Array, ref_input: Array) -> float:
    """The peak signal-to-noise ratio in dB of numbers from 0 to 255, at most 100."""
    error = l2_metric(base_input, ref_input)
    return _MOST_PSNR if error < _LEAST_ERROR else psnr_of(error, _PEAK)


def ssim_metric(base_input: Array, ref_input: Array) -> float:
    """The structural similarity of both as a whole, for numbers from 0 to 255."""
    return similarity_of_moments(ref_input, base_input, _PEAK)


METRICS: dict[str, Metric] = {
    "L2": l2_metric,
    "L1": l1_metric,
    "cos": cos_metric,
    "psnr": psnr_metric,
    "ssim": ssim_metric,
}
# The values of equal outputs, for metrics that are larger for better: what is missing from them is the distance.
BEST = {"cos": 1.0, "psnr": _MOST_PSNR, "ssim": 1.0}


def feeds(model: str | Path, data: Any) -> SampleStore:
    """Return the samples of a reader, or of anything that can be iterated over, checked against the model."""
    inputs = input_infos(ir.from_proto(read_proto(Path(model))))
    store = SampleStore()
    items = read_reader(data) if hasattr(data, "get_next") else iter(data)
    for index, item in enumerate(items):
        store.append(as_sample(item, inputs, index))
    if not len(store):
        raise InvalidValueError("evaluation data: there are no samples in it")
    return store


class SpareReader:
    """The samples of a reader, and the last once more.

    A quantization holds samples out of calibration for its verdict. A search has its own measure, and calibrates with
    all: with CalibDataSize `count`, the spare one is held out.
    """

    def __init__(self, reader: CachedDataReader) -> None:
        reader.rewind()
        self.count = len(reader)
        self._items = read_reader(reader)
        self._last: Sample | None = None

    def limit(self, given: int | None) -> int:
        """Return the CalibDataSize for a wanted one."""
        return self.count if given is None else min(given, self.count)

    def get_next(self) -> Sample | None:
        """Return the next sample, or None."""
        sample: Sample | None = next(self._items, None)
        if sample is not None:
            self._last = sample
            return sample
        sample, self._last = self._last, None
        return sample


@dataclass(frozen=True, eq=False)
class FloatOutputs:
    """The outputs of the float model on all samples, one file each in `folder`, until `remove`."""

    samples: SampleStore
    folder: Path
    providers: Sequence[str]

    def measure(self, model: str | Path) -> None:
        """Run the float model, and write what it returns."""
        self.remove()
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        for number, output in enumerate(self._outputs(model)):
            with complete(self._file(number)) as unfinished, unfinished.open("r+b") as file:
                np.save(file, output)

    def distance(self, model: str | Path, metric: Metric) -> float:
        """Run another model, and return the mean of the metric over the samples."""
        outputs = self._outputs(model)
        values = [float(metric(np.load(self._file(i)), output)) for i, output in enumerate(outputs)]
        return float(np.mean(values))

    def remove(self) -> None:
        """Delete the files, and the folder if there is nothing else in it."""
        if self.folder.is_dir():
            for file in self.folder.glob("model_output*.npy"):
                file.unlink()
            with contextlib.suppress(OSError):  # it is not empty
                self.folder.rmdir()

    def _file(self, number: int) -> Path:
        return self.folder / f"model_output{number}.npy"

    def _outputs(self, model: str | Path) -> Iterator[Array]:
        session = open_session(model, providers=self.providers)
        for number in range(len(self.samples)):
            sample: Sample = self.samples[number]
            with running(f"'{Path(model).name}'"):
                outputs = session.run(None, dict(sample))
            yield np.concatenate([np.asarray(output, np.float32).reshape(-1) for output in outputs])

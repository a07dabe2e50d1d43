"""The data of a run: what the user has, and how images of it are to be read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from quark.errors import InvalidValueError, QuarkError
from quark.onnx.data import Preprocessing, RandomForm, Samples, input_infos, open_samples
from quark.onnx.settings import Settings


@dataclass(frozen=True, eq=False)
class Data:
    """`source` is anything that `open_samples` takes. `count` limits the samples, `batch_size` is for folders and
    arrays, and `preprocessing` for images. `is_random` is True if random numbers were asked for instead of data."""

    source: Any = None
    count: int | None = None
    batch_size: int = 1
    preprocessing: str | Path | Preprocessing = "auto"
    is_random: bool = False

    def open(self, model: ir.Model, settings: Settings) -> Samples:
        """The samples, checked against the model: as many as are of use, a few if only the verdict looks at them.

        Without data they are random numbers. If the result depends on samples, that has to be asked for, by `is_random`
        or by the option UseRandomData; it is an InvalidValueError otherwise, and always where weights alone are
        quantized by an algorithm that learns nothing from random numbers.
        """
        options, use = settings.calibrate, settings.sample_use
        source = None if options.has_random_data else self.source
        if source is None:
            if reasons := settings.data_reasons:
                raise InvalidValueError(
                    f"config '{settings.name}' needs calibration data, and none was given: {reasons[0]}, for which "
                    "random numbers are of no use. Give --calib (in Python: data), what the model will see, or take a "
                    "config without it, such as INT4_WEIGHT_ONLY or MATMUL_NBITS for weights alone"
                )
            if settings.needs_data and not (self.is_random or options.has_random_data):
                raise InvalidValueError(
                    f"config '{settings.name}' needs calibration data, and none was given: give --calib (in Python: "
                    "data), what the model will see, or ask for random numbers with --random (in Python: "
                    "use_random_data=True, or the option UseRandomData), by which accuracy is not to be judged"
                )
            use = None if settings.needs_data else 0
        samples = open_samples(
            source,
            input_infos(model),
            count=options.sample_limit if self.count is None else self.count,
            batch_size=self.batch_size,
            preprocessing=self.preprocessing,
            seed=options.seed,
            use=use,
            random=RandomForm(options.random_shapes, options.random_ranges),
        )
        samples.evaluated = _evaluated(model, samples, settings)
        return samples


def _evaluated(model: ir.Model, samples: Samples, settings: Settings) -> Samples | None:
    """The samples of EvalMetrics: those of EvalDataReader, else those of the run. None if it is not asked for."""
    options = settings.calibrate
    if not options.has_evaluation:
        return None
    if options.evaluation_data is None:
        return samples
    try:
        return open_samples(options.evaluation_data, input_infos(model))
    except QuarkError as error:
        raise type(error)(f"option 'EvalDataReader': {error}") from error

"""The data of a run: what the user has, and how images of it are to be read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from quark.onnx.data import Preprocessing, Samples, input_infos, open_samples
from quark.onnx.quantization.settings import Settings


@dataclass(frozen=True, eq=False)
class Data:
    """`source` is anything that `open_samples` takes. `count` and `batch_size` matter to folders and arrays, and
    `preprocessing` to images."""

    source: Any = None
    count: int | None = None
    batch_size: int = 1
    preprocessing: str | Path | Preprocessing = "imagenet"

    def open(self, model: ir.Model, settings: Settings) -> Samples:
        """The samples, checked against the model: as many as are of use, a few where only the verdict looks at them.
        Random numbers, and few, are made where there is nothing else and the result hangs on samples."""
        options, use = settings.calibrate, settings.sample_use
        source = None if options.has_random_data else self.source
        if source is None:
            use = None if settings.needs_data else 0
        return open_samples(
            source,
            input_infos(model),
            count=options.sample_limit if self.count is None else self.count,
            batch_size=self.batch_size,
            preprocessing=self.preprocessing,
            seed=options.seed,
            use=use,
        )

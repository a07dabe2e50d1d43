"""The cost of equalization and bias correction: quantization with a preset's recipe and without it, alternating.

    python -m bench.recipe_cost --models DIR --calib DIR [--presets XINT8 ...] [--images 128] [--repeat 5]

Everything runs in one process, from a model file to a quantized model in memory. The best time of each is shown,
followed by how much longer the median took. Presets without a recipe are left out, since there is nothing to compare.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.cells import times, with_spread
from bench.models import NamedModel, add_arguments, chosen_models, positive
from bench.record import Record, say
from bench.samples import write_samples
from bench.timing import Timing, take_turns
from quark.onnx import QuantizationConfig, get_default_config, quantize

HEADER = ["model", "preset", "without s", "CLE s", "bias correction s", "both s", "both / without"]
WITHOUT, CLE, CORRECTION, BOTH = "without", "CLE", "bias correction", "both"


@dataclass(frozen=True)
class Figure:
    """One row of the table; what a preset does not do has no time."""

    model: str
    preset: str
    timings: dict[str, Timing]

    def cells(self) -> list[str]:
        found = [with_spread(self.timings.get(value)) for value in (WITHOUT, CLE, CORRECTION, BOTH)]
        return [self.model, self.preset, *found, times(self.timings[BOTH].best, self.timings[WITHOUT].best)]

    def to_json(self) -> dict[str, Any]:
        return {"model": self.model, "preset": self.preset} | {k: asdict(v) for k, v in self.timings.items()}


def variants(preset: str) -> dict[str, QuantizationConfig]:
    """The preset with its recipe, with each part of it alone, and without."""
    whole = get_default_config(preset)
    has_cle, has_correction = whole.include_cle, bool(whole.extra_options.get("BiasCorrection"))
    found = {WITHOUT: _changed(preset, False, False), BOTH: whole}
    if has_cle:
        found[CLE] = _changed(preset, True, False)
    if has_correction:
        found[CORRECTION] = _changed(preset, False, True)
    return found if has_cle or has_correction else {}


def _changed(preset: str, has_cle: bool, has_correction: bool) -> QuantizationConfig:
    config = get_default_config(preset)
    config.include_cle = has_cle
    config.extra_options["BiasCorrection"] = has_correction
    return config


def measure(model: NamedModel, preset: str, images: np.ndarray, arguments: argparse.Namespace) -> Figure | None:
    def run(config: QuantizationConfig) -> Callable[[], object]:
        return lambda: quantize(str(model.path), images, config, num_samples=arguments.images)

    candidates = {name: run(config) for name, config in variants(preset).items()}
    if not candidates:
        return None
    say(f"{model.name} {preset}")
    return Figure(model.name, preset, take_turns(candidates, turns=arguments.repeat, seconds=0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--images", type=positive, default=128, help="to calibrate on (%(default)s)")
    parser.add_argument("--repeat", type=positive, default=5, help="runs of each; the best counts (%(default)s)")
    arguments = parser.parse_args()
    models = chosen_models(arguments)
    notes = [f"{arguments.images} images, best of {arguments.repeat}."]
    record = Record.begin("recipe_cost", arguments, HEADER, notes)
    for model in models:
        with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
            images = np.load(write_samples(model, arguments.calib, arguments.images, Path(folder)).path, mmap_mode="r")
            for preset in arguments.presets:
                figure = measure(model, preset, images, arguments)
                if figure is not None:
                    record.add([figure.cells()], figure.to_json())
    record.finish()


if __name__ == "__main__":
    main()

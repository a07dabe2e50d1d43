"""Presets that train, beside the presets they start from: on the same calibration images, and the same images after it.

    python -m bench.tuned --models DIR --calib DIR --val DIR [DIR ...] [--only NAME ...] [--presets finetuned]
                          [--cifar FILE.npz --cifar-model FILE.onnx] [--images 128] [--iterations N] [--steps N]
                          [--limit N] [--resume]

`--iterations` and `--steps` shorten finetuning (of each layer) and distillation; without them, a preset trains as it
does for users. `base` and `tuned` are top-1 in percent, and `gain` is their paired difference in points with its
standard error, which comes from the images that only one of the two gets right. Divergence is the mean of
sum p log(p / q) over the images, and needs no labels; `standard errors` is how many standard errors of the paired
difference it fell by: below -2, training made the network worse beyond chance. `kept` is how many layers or constants
the preset's own judge left changed, of how many; it sees held-out calibration images alone. `--resume` continues
today's record.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.accuracy import Source, sources
from bench.calibration_sets import scores_of
from bench.cells import number
from bench.child import OURS, ChildError, Interpreters, blank
from bench.models import add_arguments, positive
from bench.record import Blank, Record, say
from bench.samples import SampleFile
from bench.side_by_side import Score, score
from quark.compare.measures import mean_divergence
from quark.evaluate import Dataset
from quark.evaluate.evaluation import ranked
from quark.onnx.quantization.presets import PRESETS as ROWS

TRAINERS = ("AdaRound", "AdaQuant", "distillation")  # what reports call what trains
HEADER = ["model", "preset", "images", "float", "base", "tuned", "gain", "divergence", "standard errors", "kept"]
CHOOSING = ("presets", "only", "model", "models", "timeout", "threads")

Array = NDArray[Any]


def base_of(preset: str) -> str:
    """The preset that a trained one starts from.

    >>> base_of("XINT8_ADAROUND"), base_of("INT8_CNN_ACCURATE")
    ('XINT8', 'INT8_CNN_DEFAULT')
    """
    stem, _, suffix = preset.rpartition("_")
    found = f"{stem}_DEFAULT" if suffix == "ACCURATE" else stem
    if preset not in ROWS or not ROWS[preset].is_trained or found not in ROWS:
        raise SystemExit(f"--presets {preset}: expected presets that train, such as XINT8_ADAROUND")
    return found


@dataclass(frozen=True)
class Gain:
    """A trained preset beside its base. `fall` is the paired fall of divergence, in its standard errors."""

    model: str
    preset: str
    base: str
    images: int
    float_top1: float
    base_score: Score
    tuned_score: Score
    gain: Score
    divergence: tuple[float, float]
    fall: float
    kept: tuple[int, int]
    seconds: float

    def cells(self) -> list[str]:
        gain = f"{self.gain.difference:+.2f} ± {self.gain.standard_error:.2f}"
        before, after = (number(each, 4) for each in self.divergence)
        figures = [number(value, 2) for value in (self.float_top1, self.base_score.top1, self.tuned_score.top1)]
        last = [gain, f"{before}, {after}", f"{self.fall:+.1f}", f"{self.kept[0]} of {sum(self.kept)}"]
        return [self.model, self.preset, str(self.images), *figures, *last]


def standard_errors(before: Array, after: Array) -> float:
    """By how many standard errors of the paired differences the mean fell.

    >>> round(standard_errors(np.array([2.0, 3.0, 4.0]), np.array([1.0, 2.5, 3.0])), 1)
    5.0
    """
    fall = before - after
    error = float(fall.std(ddof=1)) / math.sqrt(len(fall))
    return float(fall.mean()) / error if error > 0 else 0.0


def kept_of(report: Path) -> tuple[int, int]:
    """How many layers or constants training changed, and how many it left."""
    content = json.loads(report.read_text(encoding="utf-8"))
    facts = [each for each in content["algorithms"] if each["name"] in TRAINERS]
    changed, left = (sum(len(fact[what]) for fact in facts) for what in ("changed", "left"))
    return changed, left


@dataclass
class Bench:
    """One model; its float scores and those of bases are kept for all presets that need them."""

    source: Source
    arguments: argparse.Namespace
    folder: Path

    def gains(self, presets: Sequence[str]) -> Iterator[Gain | Blank]:
        """One for each preset, those of a base after each other."""
        data = self.source.data(self.arguments.limit)
        samples = self.source.samples(self.arguments.images, self.folder)
        reference = scores_of(self.source.model.path, data, self.arguments.threads)
        for base in dict.fromkeys(base_of(preset) for preset in presets):
            try:
                _, path = self._quantized(base, samples)
                before = scores_of(path, data, self.arguments.threads)
            except ChildError as error:
                yield blank(OURS, self.source.model.name, base, str(error))
                continue
            for preset in [preset for preset in presets if base_of(preset) == base]:
                try:
                    seconds, path = self._quantized(preset, samples)
                except ChildError as error:
                    yield blank(OURS, self.source.model.name, preset, str(error))
                    continue
                after = scores_of(path, data, self.arguments.threads)
                kept = kept_of(path.with_suffix(".json"))
                yield self._gain(preset, data, (reference, before, after), kept, seconds)
                path.unlink()

    def _gain(
        self, preset: str, data: Dataset, scores: tuple[Array, Array, Array], kept: tuple[int, int], seconds: float
    ) -> Gain:
        assert data.labels is not None
        exact, base, tuned = (ranked(score) for score in scores)
        rows = [
            np.array([mean_divergence(scores[0][i : i + 1], some[i : i + 1]) for i in range(len(some))])
            for some in scores[1:]
        ]
        return Gain(
            model=self.source.model.name,
            preset=preset,
            base=base_of(preset),
            images=data.count,
            float_top1=100 * float((exact[:, 0] == data.labels).mean()),
            base_score=score(exact, base, data.labels),
            tuned_score=score(exact, tuned, data.labels),
            gain=score(base, tuned, data.labels),
            divergence=(float(rows[0].mean()), float(rows[1].mean())),
            fall=standard_errors(*rows),
            kept=kept,
            seconds=seconds,
        )

    def _quantized(self, preset: str, samples: SampleFile) -> tuple[float, Path]:
        """The seconds that it took, and the file."""
        path = self.folder / preset / "quantized.onnx"
        path.parent.mkdir()
        outcome = Interpreters(timeout_seconds=self.arguments.timeout).quantize(
            OURS, self.source.model, samples, preset, path, **shortened(preset, self.arguments)
        )
        say(f"{self.source.model.name} {preset}: quantized in {outcome.seconds:.1f} s")
        return outcome.seconds, path


def shortened(preset: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a quantization is asked for besides the preset."""
    row = ROWS[preset]
    if row.fields.get("include_fast_ft") and arguments.iterations:
        return {"finetune": {"NumIterations": arguments.iterations}}
    if row.options.get("Distillation") and arguments.steps:
        return {"extra_options": {"DistillationSteps": arguments.steps}}
    return {}


def resume(record: Record) -> set[tuple[str, str]]:
    """Put what today's record of the same name has into this one; its models and presets."""
    before = record.earlier(CHOOSING)
    if before is None:
        return set()
    record.rows, record.figures, record.blanks = before.rows, before.figures, before.blanks
    return {(figure["model"], figure["preset"]) for figure in before.figures}


def settle(record: Record, model: str, found: Gain | Blank) -> None:
    """Put a result into the record, in the place of what an earlier command failed at."""
    preset = found.what.removeprefix(f"{model} ") if isinstance(found, Blank) else found.preset
    settled = {f"{model} {preset}"}
    if ROWS[preset].is_trained:  # its base came to a result
        settled.add(f"{model} {base_of(preset)}")
    record.blanks = [blank for blank in record.blanks if blank.what not in settled]
    if isinstance(found, Blank):
        record.blanks.append(found)
        record.write()
    else:
        record.add([found.cells()], asdict(found))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, needs_calib=False)
    parser.set_defaults(presets=["finetuned"])
    parser.add_argument("--val", type=Path, nargs="+", metavar="DIR", help="images in class folders")
    parser.add_argument("--cifar", type=Path, metavar="FILE.npz", help="CIFAR-10, for --cifar-model")
    parser.add_argument("--cifar-model", type=Path, metavar="FILE.onnx", help="a network for it")
    parser.add_argument("--images", type=positive, default=128, help="to calibrate and train on (%(default)s)")
    parser.add_argument("--iterations", type=positive, metavar="N", help="of finetuning (as in the preset)")
    parser.add_argument("--steps", type=positive, metavar="N", help="of distillation (as in the preset)")
    parser.add_argument("--limit", type=positive, metavar="N", help="that many images of each --val (all)")
    parser.add_argument("--threads", type=positive, default=2, metavar="N", help="of ONNX Runtime (%(default)s)")
    parser.add_argument("--timeout", type=positive, default=3600, metavar="S", help="of a quantization (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with today's record")
    return parser.parse_args()


def notes_of(arguments: argparse.Namespace) -> list[str]:
    """What was judged, and how training was shortened."""
    folders = " and ".join(f"'{each.name}'" for each in arguments.val or ())
    notes = [f"On {f'the images of {folders}' if folders else 'CIFAR-10 test images'}, {arguments.images} to train on."]
    if arguments.iterations:
        notes.append(f"Finetuning was shortened to {arguments.iterations} iterations.")
    if arguments.steps:
        notes.append(f"Distillation was shortened to {arguments.steps} steps.")
    return notes


def main() -> None:
    arguments = parse_arguments()
    chosen = sources(arguments)
    for preset in arguments.presets:
        base_of(preset)
    record = Record.begin("tuned", arguments, HEADER, notes_of(arguments))
    done = resume(record) if arguments.resume else set()
    for source in chosen:
        presets = [preset for preset in arguments.presets if (source.model.name, preset) not in done]
        with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
            for gain in Bench(source, arguments, Path(folder)).gains(presets) if presets else ():
                settle(record, source.model.name, gain)
    record.finish()


if __name__ == "__main__":
    main()

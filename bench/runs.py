"""Repeated quantizations by several quantizers that take turns, and the cells that come of them.

Each run is a fresh process. The best counts, and behind it stands how much longer the median run took; memory is the
least that a run needed, of the whole process. After a failure there are no more runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.cells import number, times, with_spread
from bench.child import OURS, ChildError, Interpreters, Outcome, blank
from bench.models import NamedModel, label
from bench.record import Blank, say
from bench.samples import SampleFile
from bench.timing import Timing


@dataclass
class Runs:
    """The runs of one candidate."""

    outcomes: list[Outcome] = field(default_factory=list)
    error: str | None = None

    @property
    def seconds(self) -> Timing | None:
        return Timing.of([outcome.seconds for outcome in self.outcomes]) if self.outcomes else None

    @property
    def best(self) -> float | None:
        return min((outcome.seconds for outcome in self.outcomes), default=None)

    @property
    def processor_seconds(self) -> float | None:
        known = [outcome.processor_seconds for outcome in self.outcomes if outcome.processor_seconds is not None]
        return min(known, default=None)

    @property
    def peak_mb(self) -> float | None:
        return min((outcome.peak_mb for outcome in self.outcomes), default=None)

    @property
    def file_mb(self) -> float | None:
        return next((outcome.file_mb for outcome in self.outcomes), None)

    def run(self, measure: Callable[[], Outcome]) -> str:
        """Once more, unless it failed before; what came of it, for people."""
        if self.error is None:
            try:
                self.outcomes.append(measure())
            except ChildError as error:
                self.error = str(error)
        return self.error or f"{self.outcomes[-1].seconds:.2f} s, {self.outcomes[-1].peak_mb:.0f} MB"

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds": None if self.seconds is None else asdict(self.seconds),
            "processor_seconds": self.processor_seconds,
            "peak_mb": self.peak_mb,
            "file_mb": self.file_mb,
            "error": self.error,
            "runs": [asdict(outcome) for outcome in self.outcomes],
        }


def time_header(titles: Iterable[str]) -> list[str]:
    return [f"{OURS} s", *(cell for title in titles for cell in (f"{title} s", f"of {OURS}"))]


def memory_header(titles: Iterable[str]) -> list[str]:
    return [f"{OURS} peak MB", *(cell for title in titles for cell in (f"{title} peak MB", f"of {OURS}"))]


def time_cells(runs: Mapping[str, Runs], peers: Sequence[str]) -> list[str]:
    """Seconds of ours, then of each peer with the multiple of ours."""
    ours = runs[OURS]
    found = [(with_spread(runs[who].seconds), times(runs[who].best, ours.best, 1)) for who in peers]
    return [with_spread(ours.seconds), *(cell for pair in found for cell in pair)]


def processor_header(titles: Iterable[str]) -> list[str]:
    peers = (cell for title in titles for cell in (f"{title} processor s", f"of {OURS}"))
    return [f"{OURS} processor s", *peers]


def processor_cells(runs: Mapping[str, Runs], peers: Sequence[str]) -> list[str]:
    """Seconds of all processors together: what a run costs on a machine that others use too."""
    ours = runs[OURS].processor_seconds
    found = [(number(runs[who].processor_seconds, 1), times(runs[who].processor_seconds, ours, 1)) for who in peers]
    return [number(ours, 1), *(cell for pair in found for cell in pair)]


def memory_cells(runs: Mapping[str, Runs], peers: Sequence[str]) -> list[str]:
    ours = runs[OURS]
    found = [(number(runs[who].peak_mb, 0), times(runs[who].peak_mb, ours.peak_mb)) for who in peers]
    return [number(ours.peak_mb, 0), *(cell for pair in found for cell in pair)]


def blanks(runs: Mapping[str, Runs], model: str, preset: str) -> list[Blank]:
    """Those who failed, and why."""
    return [blank(who, model, label(preset), run.error) for who, run in runs.items() if run.error is not None]


@dataclass(frozen=True)
class Quantizers:
    """All quantizers on one model; every result is gone when its size is known."""

    interpreters: Interpreters
    model: NamedModel
    samples: SampleFile
    folder: Path
    finetune: dict[str, Any] | None = None

    def once(self, who: str, preset: str) -> Outcome:
        with tempfile.TemporaryDirectory(dir=self.folder) as output:
            target = Path(output, "quantized.onnx")
            return self.interpreters.quantize(who, self.model, self.samples, preset, target, self.finetune)

    def take_turns(self, preset: str, repeat: int, floor: Runs | None = None) -> dict[str, Runs]:
        """The runs of everyone; `floor` takes plain passes of the float model between them."""
        runs = {who: Runs() for who in self.interpreters.quantizers}
        for turn in range(repeat):
            if floor is not None:
                floor.run(lambda: self.interpreters.run_float(self.model, self.samples))
            for who, run in runs.items():
                what = run.run(partial(self.once, who, preset))
                say(f"{self.model.name} {label(preset)} {who}, run {turn + 1} of {repeat}: {what}")
        return runs

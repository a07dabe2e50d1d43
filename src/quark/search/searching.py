"""The search: one candidate after the other; each result is saved before the next trial."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from quark.card import samples_digest
from quark.compare import Verdict
from quark.errors import InvalidValueError
from quark.measures import Measure
from quark.onnx.data import Samples, input_infos, open_samples
from quark.onnx.load import LoadedModel, load
from quark.onnx.quantization.data import Data
from quark.onnx.quantization.targets import Target
from quark.onnx.versions import versions
from quark.search.attempt import PROFILE, Bench
from quark.search.candidates import Candidate, Situation, Traits, in_order, ladder, ladder_for, named, reason_to_skip
from quark.search.journal import Journal, Keep
from quark.search.judging import Judge, judge_on_folder, judge_on_held_out
from quark.search.page import page
from quark.search.trial import Budget, Limits, Trial, excess, is_within, pareto_front, ranked
from quark.text import printable

ALIKE_IN_SPEED = 1.03  # times float's latency: what measuring it twice may differ by
PathLikeOrStr = str | PathLike[str]


@dataclass(frozen=True)
class Wanted:
    """What to search for, and among what: only these `presets`, or only weights in these `formats`.

    `limit` and `labels` apply to the data that networks are judged on. Configurations by which `target` gains nothing
    are ranked behind the others: on a CPU those slower than float, for an NPU or a GPU those in formats that it does
    not compute, for the size those that are not ok.
    """

    budget: Budget = field(default_factory=Budget)
    presets: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    limit: int | None = None
    labels: Path | None = None
    keep: Keep = Keep.BEST
    target: Target = Target.CPU

    def __post_init__(self) -> None:
        if self.presets and self.formats:
            raise InvalidValueError("presets and formats: give one of them")


@dataclass(frozen=True)
class FloatFacts:
    """The float network. `top1` is None without labels, `metric` and `value` are None without a metric."""

    name: str
    size_bytes: int
    latency_ms: float
    judged_on: str
    top1: float | None = None
    metric: str | None = None
    value: float | None = None


@dataclass(frozen=True)
class SearchResult:
    """`trials` are ranked, the best first; `front` contains those that none beats, the smallest first.

    `skipped` are pairs of a candidate and the reason. `reused` counts trials of an earlier search.
    """

    folder: Path
    source: FloatFacts
    limits: Limits
    trials: tuple[Trial, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    reused: int = 0
    command: str = ""  # makes the best model

    @property
    def front(self) -> tuple[Trial, ...]:
        return pareto_front(self.trials)

    @property
    def best(self) -> Trial | None:
        """The first trial within all budgets, or None."""
        return self.trials[0] if self.trials and is_within(self.trials[0], self.limits) else None

    @property
    def nearest(self) -> Trial | None:
        """The first trial that did not fail, within the budgets or not."""
        return self.trials[0] if self.trials and self.trials[0].measured is not None else None

    def recommendation(self) -> str:
        """Return the best configuration and its command as one line."""
        if self.best is not None:
            return f"{self.best.name}: {self.command}"
        if self.nearest is None or self.nearest.measured is None:
            return "all configurations failed: see the reasons"
        over = 100 * excess(self.nearest.measured, self.limits)
        return f"nothing is within the budgets; {self.nearest.name} is nearest, {over:.0f} % beyond: {self.command}"

    def to_dict(self) -> dict[str, Any]:
        finite = {name: None if limit == math.inf else limit for name, limit in vars(self.limits).items()}
        return {
            "float": {name: "inf" if figure == math.inf else figure for name, figure in vars(self.source).items()},
            "limits": finite,
            "best": None if self.best is None else self.best.name,
            "nearest": None if self.nearest is None else self.nearest.name,
            "recommendation": self.recommendation(),
            "command": self.command,
            "front": [trial.name for trial in self.front],
            "trials": [{**trial.to_dict(), "within": is_within(trial, self.limits)} for trial in self.trials],
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped],
            "notes": list(self.notes),
        }


def search(  # noqa: PLR0913 - options of the public interface, by keyword
    model: PathLikeOrStr,
    calib: Any,
    wanted: Wanted | None = None,
    *,
    data: PathLikeOrStr | None = None,
    folder: PathLikeOrStr | None = None,
    num_samples: int | None = None,
    preprocessing: str = "auto",
    metric: str | Measure | Callable[[Any], Any] | None = None,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> SearchResult:
    """Try configurations of a model, cheapest first, and rank them: `search("in.onnx", images).best`.

    `calib` is calibration data, as for `quark.onnx.quantize`. Networks are judged on `data`, labelled or not; without
    it, on the samples held out from calibration, at most 16, which is a coarse measure. With a `metric`, as for
    `quark.onnx.quantize`, networks are ranked by that, and a budget for the drop is in percent of it. The results are
    written to `folder`, by default MODEL_search, from which the next call resumes. `on_trial` is called after every
    trial that was run.
    """
    wanted = Wanted() if wanted is None else wanted
    measure = None if metric is None else Measure.of(metric)
    if calib is None:
        raise InvalidValueError("search needs data to judge by: give --calib (in Python: calib)")
    path = Path(model)
    start = time.monotonic()
    loaded = load(path)
    traits = Traits(frozenset(node.op_type for node in loaded.model.graph))
    candidates = named(wanted.presets) if wanted.presets else ladder(traits, wanted.formats)
    source = Data(fspath(calib) if isinstance(calib, PathLike) else calib, num_samples, 1, preprocessing)
    judge, basis, _ = prepare(path, loaded, source, wanted, None if data is None else Path(data), measure)
    target = path.with_name(f"{path.stem}_search") if folder is None else Path(folder)
    journal = Journal(target, basis, wanted.keep)
    name = None if measure is None else measure.name
    facts = FloatFacts(path.name, loaded.bytes, judge.latency_ms, judge.source, judge.top1, name, judge.float_value)
    budget = wanted.budget
    has_small_first = budget.size is not None or budget.drop is not None
    run = _Run(
        journal=journal,
        bench=Bench(path, source, judge),
        facts=facts,
        limits=budget.resolved(loaded.bytes, judge.latency_ms),
        weights=weight_count(loaded),
        end=math.inf if budget.time is None else start + budget.time,
        on_trial=on_trial,
        metric=metric if isinstance(metric, str) else None,
        target=wanted.target,
    )
    del loaded
    with contextlib.closing(journal):
        journal.open()
        return run.over(in_order(candidates, has_small_first))


def prepare(
    path: Path,
    loaded: LoadedModel,
    source: Data,
    wanted: Wanted,
    data: Path | None,
    measure: Measure | None,
    threads: int | None = None,
) -> tuple[Judge, dict[str, str], Samples]:
    """Return the judge, what the results depend on, and the calibration data. `threads` are for latencies."""
    preprocessing = source.preprocessing
    inputs = input_infos(loaded.model)
    samples = open_samples(
        source.source, inputs, count=source.count, batch_size=source.batch_size, preprocessing=preprocessing
    )
    if data is None:
        judge = judge_on_held_out(path, samples, measure, threads)
    else:
        judge = judge_on_folder(path, data, str(preprocessing), wanted.limit, wanted.labels, measure, threads)
    digest = samples_digest(samples, samples.held_out)
    packages = versions()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        packages["torch"] = importlib.metadata.version("torch")  # finetuning depends on it
    basis = {
        "model": loaded.sha256,
        "calibration": f"{source.count} {source.batch_size} {preprocessing} {digest}",
        "data": judge.digest(),
        "metric": "" if measure is None else measure.fingerprint,
        "versions": json.dumps(packages, sort_keys=True),
        "packing": PROFILE,
    }
    return judge, basis, samples


def weight_count(loaded: LoadedModel) -> int:
    """Return the number of weights. Vectors are biases, which no format makes smaller."""
    tensors = (value.const_value for value in loaded.model.graph.initializers.values())
    return sum(int(tensor.size) for tensor in tensors if tensor is not None and len(tensor.shape) >= 2)


@dataclass(frozen=True, eq=False)
class _Run:
    """A search over candidates, with what all trials share."""

    journal: Journal
    bench: Bench
    facts: FloatFacts
    limits: Limits
    weights: int
    end: float
    on_trial: Callable[[Trial], None]
    metric: str | None = None  # the value of --metric
    target: Target = Target.CPU

    def over(self, candidates: Sequence[Candidate]) -> SearchResult:
        trials: list[Trial] = []
        skipped: list[tuple[str, str]] = []
        reused = 0
        try:
            for candidate in candidates:
                trial = self.journal.finished(candidate)
                if trial is not None:
                    trials.append(trial)
                    reused += 1
                    continue
                now = Situation(trials, self.limits, self.weights, self.end - time.monotonic())
                reason = reason_to_skip(candidate, now)
                if reason is not None:
                    skipped.append((candidate.name, reason))
                    continue
                with self.journal.workplace() as folder:
                    trial, model = self.bench.attempt(candidate, folder)
                    trial = self.journal.save(trial, candidate, model, trials)
                trials = self.journal.drop_beaten([*trials, trial])
                self._written(trials, skipped, reused)
                self.on_trial(trials[-1])
        except KeyboardInterrupt as error:
            folder = self.journal.folder
            text = f"interrupted: {len(trials)} trials are in '{folder}'; the same command resumes"
            raise KeyboardInterrupt(printable(text)) from error
        return self._written(trials, skipped, reused)

    def _gains(self, trial: Trial) -> bool:
        """True if the target gains something by this configuration."""
        figures = trial.figures
        if self.target is Target.CPU:
            ratio = figures.latency_ratio
            ratio = figures.latency_ms / self.facts.latency_ms if ratio is None else ratio
            return ratio <= ALIKE_IN_SPEED
        if self.target is Target.SIZE:
            return figures.verdict in ("", Verdict.OK.value)
        ladders = (ladder_for(self.target, is_transformer, True, False) for is_transformer in (False, True))
        return trial.preset in {candidate.preset for candidates in ladders for candidate in candidates}

    def _written(self, trials: Iterable[Trial], skipped: Iterable[tuple[str, str]], reused: int) -> SearchResult:
        order = ranked(tuple(trials), self.limits, self._gains)
        notes = tuple(dict.fromkeys(self.journal.notes))
        result = SearchResult(self.journal.folder, self.facts, self.limits, order, tuple(skipped), notes, reused)
        if result.nearest is not None:
            output = Path(f"{self.bench.model.stem}_{result.nearest.name}.onnx")
            result = replace(result, command=self.bench.command(result.nearest, output, self.metric))
        self.journal.write_result(result.to_dict(), page(result))
        return result

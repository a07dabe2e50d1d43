"""`--config auto`: try presets that suit a network and its target, and return the best that is close enough to float.

    cpu        the fastest file on this machine; of files within 3 % of it, the smallest
    npu, gpu   the first that is close enough, in the order of the speed of the formats there
    size       the smallest file

Close enough is a verdict of ok and, if there is a measure (a metric, or labelled data), at most 1 % of it lost. A bound
given by the user replaces both.

The search takes at most ten times as long as INT8_CNN_DEFAULT on the same data. Every trial is written to the folder
OUT.auto before the next begins, so that the same call resumes after an interruption; the folder is removed when the
file is written.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from quark.compare import Verdict
from quark.errors import InvalidValueError
from quark.files.output import scratch_folder
from quark.measures import Measure, MeasureResult
from quark.onnx.calibrate import FloatRunner
from quark.onnx.data import Sample
from quark.onnx.load import LoadedModel, load
from quark.onnx.macs import layer_macs, tensors_to_size
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.data import Data
from quark.onnx.quantization.quantizer import QuantizedModel
from quark.onnx.quantization.targets import Target
from quark.onnx.save import check_output
from quark.report.quantities import count_of, size_text
from quark.search.attempt import PROFILE, Bench
from quark.search.candidates import COSTS, Candidate, Traits, ladder_for
from quark.search.journal import Journal, Keep
from quark.search.judging import Judge
from quark.search.searching import PathLikeOrStr, Wanted, prepare, weight_count
from quark.search.trial import Measurement, Stage, Trial
from quark.text import json_value, printable

DEFAULT_DROP = 1.0  # percent of the measure
TIME_FACTOR = 10.0  # times that of BASELINE
_START = 1.0  # seconds that every command takes to start
_USABLE = 0.9  # share of that time: a trial may take longer than expected, and the file has to be written
BASELINE = "INT8_CNN_DEFAULT"
ALIKE_IN_SPEED = 1.03
LINTED = ("XINT8",)  # the presets whose rules `quark.onnx.lint` knows
_STATIC = ("INT8_CNN_DEFAULT", "INT8_TRANSFORMER_DEFAULT")
_REMEASURED = 1.15  # times the latency of the fastest: closer candidates are measured once more, together
_MOSTLY_PRODUCTS = 0.5  # share of the multiply-accumulates from which on a network is a transformer
_FEW_PRODUCTS = 0.05


@dataclass(frozen=True)
class Bound:
    """The bound on the distance from float. `max_drop` is the user's own bound, in percent of the measure or, without
    one, in the points of `--max-drop`. None is a verdict of ok and 1 % of the measure."""

    has_measure: bool
    max_drop: float | None = None

    def reason_against(self, figures: Measurement) -> str:
        """Return why a network is not close enough; empty if it is."""
        most = self.max_drop
        if most is None:
            is_unchecked = figures.verdict == Verdict.UNCHECKED.value and self.has_measure
            if figures.verdict != Verdict.OK.value and not is_unchecked:
                return f"{figures.verdict}: {figures.worst}"
            if not self.has_measure:
                return ""
            most = DEFAULT_DROP
        return "" if figures.drop <= most else f"{figures.measure} lost {figures.drop:.2f}, more than {most:g}"

    def __str__(self) -> str:
        if self.max_drop is not None:
            return f"at most {self.max_drop:g} {'% of the measure' if self.has_measure else 'points'} lost"
        return f"verdict ok{f' and at most {DEFAULT_DROP:g} % of the measure lost' if self.has_measure else ''}"


@dataclass(frozen=True)
class Row:
    """A candidate and its result.

    `outcome` is taken, passed, rejected, failed or not tried; `latency` is a share of float's, None if not measured.
    """

    name: str
    preset: str
    changes: tuple[tuple[str, Any], ...]
    outcome: str
    reason: str = ""
    trial: Trial | None = None
    latency: float | None = None

    @property
    def figures(self) -> Measurement | None:
        return None if self.trial is None else self.trial.measured


@dataclass(frozen=True)
class AutoResult:
    """`model` is the quantized model, None if nothing was close enough; `rows` are all candidates, as they were tried.

    `statement` says in a sentence what was taken and why, or why nothing was.
    """

    model: QuantizedModel | None
    rows: tuple[Row, ...]
    statement: str
    target: Target
    bound: Bound
    float_bytes: int
    float_ms: float
    judged_on: str
    float_value: float | None
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def taken(self) -> Row | None:
        return next((row for row in self.rows if row.outcome == "taken"), None)

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the model as JSON, for the report."""
        return {
            "target": self.target.value,
            "bound": str(self.bound),
            "taken": None if self.taken is None else self.taken.name,
            "statement": self.statement,
            "judged_on": self.judged_on,
            "float": {"bytes": self.float_bytes, "latency_ms": self.float_ms, "value": json_value(self.float_value)},
            "seconds": round(self.seconds, 1),
            "candidates": [self._row(row) for row in self.rows],
        }

    def _row(self, row: Row) -> dict[str, Any]:
        content: dict[str, Any] = {
            "name": row.name,
            "preset": row.preset,
            "changes": [list(change) for change in row.changes],
        }
        content |= {"outcome": row.outcome, "reason": row.reason}
        figures = row.figures
        if figures is not None and row.trial is not None:
            content |= {
                "verdict": figures.verdict,
                "worst": figures.worst,
                "measure": figures.measure,
                "value": json_value(figures.value),
                "drop": json_value(figures.drop),
                "latency_ratio": row.latency,
                "bytes": figures.size_bytes,
                "size_ratio": figures.size_bytes / self.float_bytes,
                "is_packed": figures.is_packed,
                "float_mac_share": figures.float_mac_share,
                "seconds": round(row.trial.seconds, 1),
            }
        return content


def auto_quantize(  # noqa: PLR0913 - options of the public interface, by keyword
    model: PathLikeOrStr,
    data: Any,
    output: PathLikeOrStr | None = None,
    *,
    target: str = Target.CPU.value,
    metric: str | Measure | Callable[[Any], Any] | None = None,
    max_drop: float | None = None,
    labelled: PathLikeOrStr | None = None,
    num_samples: int | None = None,
    batch_size: int = 1,
    preprocessing: Any = "auto",
    on_progress: Callable[[str], None] = lambda text: None,
) -> AutoResult:
    """Find and make the best quantized model for a target: `auto_quantize("in.onnx", images, "out.onnx")`.

    `model` is a file, `data` is typical data, as for `quantize`. `target` is 'cpu' (the fastest file), 'npu',
    'gpu' or 'size' (the smallest file). A model is accepted if its verdict is ok and, with a `metric` as for `quantize`
    or with `labelled` images, if at most 1 % of the measure is lost. `max_drop`, in percent, replaces both conditions.

    With an `output`, the model and its report are written there, and the same call resumes after an interruption.
    `on_progress` gets a line before and after each trial.
    """
    wanted_target = Target.of(target)
    if data is None:
        raise InvalidValueError(
            "config 'auto' needs data to judge by: give --calib (in Python: data), what the model will see; without "
            "data, name a preset"
        )
    if not isinstance(model, (str, PathLike)):
        raise InvalidValueError("config 'auto' needs the model as a file: save it, and give the path")
    if max_drop is not None and not max_drop >= 0:
        raise InvalidValueError(f"max_drop {max_drop}: expected 0 or more percent")
    if metric is not None and labelled is not None:
        raise InvalidValueError("metric and labelled data are two measures: give one of them")
    start = time.monotonic()
    path = Path(model)
    function = metric.rpartition(":")[0] if isinstance(metric, str) else None  # FILE.py:FUNCTION
    destination = None if output is None else check_output(output, path, data, labelled, preprocessing, function)
    measure = None if metric is None else Measure.of(metric)
    source = Data(_repeatable(data), num_samples, batch_size, preprocessing)
    loaded = load(path)
    on_progress(f"{path.name}: running the float network")
    judge, basis, samples = prepare(
        path, loaded, source, Wanted(), None if labelled is None else Path(labelled), measure, threads=1
    )
    is_packing = wanted_target is not Target.NPU
    basis |= {"packing": PROFILE if is_packing else "none", "target": wanted_target.value}
    traits = Traits(frozenset(node.op_type for node in loaded.model.graph))
    share = _product_share(loaded, samples.held_out[0] if samples.held_out else next(iter(samples)), traits)
    bound = Bound(measure is not None or judge.has_labels, max_drop)
    candidates = ladder_for(wanted_target, share > _MOSTLY_PRODUCTS, traits.has_products, bound.has_measure)
    with contextlib.ExitStack() as stack:
        if destination is None:
            folder = stack.enter_context(scratch_folder())
        else:
            folder = destination.with_name(f"{destination.name}.auto")
        journal = Journal(folder, basis, Keep.ALL, remedy="choose another OUT")
        stack.enter_context(contextlib.closing(journal))
        journal.open()
        search = _Search(
            journal=journal,
            model=path,
            data=source,
            judge=judge,
            target=wanted_target,
            bound=bound,
            measure=measure,
            metric=metric if isinstance(metric, str) else None,
            output=destination,
            float_bytes=loaded.bytes,
            weights=weight_count(loaded),
            product_share=share,
            preparation=time.monotonic() - start,
            on_progress=on_progress,
        )
        del loaded
        try:
            result = search.run(candidates)
            if result.model is not None and destination is not None:
                result.model.save(destination, PROFILE if _figures(result.taken).is_packed else None)
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(search.interruption()) from error
        if result.model is not None:
            journal.remove()
    return result


@dataclass(eq=False)
class _Search:
    """The trials of one call, and what they share."""

    journal: Journal
    model: Path
    data: Data
    judge: Judge
    target: Target
    bound: Bound
    measure: Measure | None
    metric: str | None
    output: Path | None
    float_bytes: int
    weights: int
    product_share: float
    preparation: float
    on_progress: Callable[[str], None]
    trials: dict[str, Trial] = field(default_factory=dict)
    bits: dict[str, float] = field(default_factory=dict)  # bits of a weight, by the name of the candidate
    rows: list[Row] = field(default_factory=list)
    latest: QuantizedModel | None = None
    leader: tuple[str, QuantizedModel] | None = None  # the best so far, which need not be made again

    def __post_init__(self) -> None:
        def remember(_: Candidate, model: QuantizedModel) -> None:
            self.latest = model

        self.bench = Bench(
            self.model,
            self.data,
            self.judge,
            is_packing=self.target is not Target.NPU,
            linted=LINTED if self.target is Target.NPU else (),
            on_quantized=remember,
        )

    def run(self, candidates: Sequence[Candidate]) -> AutoResult:
        begin = time.monotonic()
        spent = 0.0  # on trials of an earlier call
        for number, candidate in enumerate(candidates):
            trial = self.journal.finished(candidate)
            if trial is not None:
                spent += trial.seconds
            else:
                elapsed = self.preparation + spent + time.monotonic() - begin
                reason = self._reason_to_skip(candidate) or self._reason_of_time(candidate, elapsed)
                if reason:
                    self.rows.append(Row(candidate.name, candidate.preset, candidate.changes, "not tried", reason))
                    continue
                seconds = min(sum(map(self._expected, candidates[number:])), self._limit() - elapsed)
                left = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < math.inf else ""
                left = f"; at most {left} left" if left and seconds > 0 else ""
                self.on_progress(f"trying {candidate.name}, {number + 1} of at most {len(candidates)}{left}")
                trial = self._tried(candidate)
            self.trials[candidate.name] = trial
            self.bits[candidate.name] = candidate.bits
            outcome, reason = "failed", trial.failure
            latency: float | None = None
            if trial.measured is not None:
                if self.target in (Target.CPU, Target.SIZE):  # for other targets, this machine's time is irrelevant
                    latency = trial.measured.latency_ratio
                    if latency is None:
                        latency = trial.measured.latency_ms / self.judge.latency_ms
                reason = self._reason_against(trial.measured)
                outcome = "rejected" if reason else "passed"
            row = Row(candidate.name, candidate.preset, candidate.changes, outcome, reason, trial, latency)
            self.rows.append(row)
            if self.latest is not None and self._best() is row:  # the best so far
                self.leader = candidate.name, self.latest
            self.latest = None
            self.on_progress(f"  {candidate.name}: {row_text(row, self.float_bytes)}")
        passed = [row for row in self.rows if row.outcome == "passed"]
        if self.target is Target.CPU:
            self._measure_together(passed)
        taken = self._best()
        made: QuantizedModel | None = None
        if taken is not None and self.leader is not None and self.leader[0] == taken.name:
            made = self.leader[1]
        elif taken is not None:  # after an interruption
            self.on_progress(f"making {taken.name}")
            made = self.bench.quantized(next(candidate for candidate in candidates if candidate.name == taken.name))
        return self._result(taken, made, self.preparation + spent + time.monotonic() - begin)

    def _tried(self, candidate: Candidate) -> Trial:
        with self.journal.workplace() as folder:
            trial, model = self.bench.attempt(candidate, folder)
            # only files that may be measured again are kept
            has_passed = trial.measured is not None and not self._reason_against(trial.measured)
            saved = self.journal.save(trial, candidate, model if has_passed else None, list(self.trials.values()))
        self.journal.write_result({"trials": [*self.trials, candidate.name]})
        return saved

    def _reason_against(self, figures: Measurement) -> str:
        return self.bound.reason_against(figures) or figures.lint

    def _best(self) -> Row | None:
        """Return the best row that passed, by the rule of the target."""
        passed = [row for row in self.rows if row.outcome == "passed"]
        if not passed:
            return None
        if self.target is Target.SIZE:
            return min(passed, key=lambda row: _figures(row).size_bytes)
        if self.target is Target.CPU:
            most = ALIKE_IN_SPEED * min(_latency(row) for row in passed)
            return min((row for row in passed if _latency(row) <= most), key=lambda row: _figures(row).size_bytes)
        return passed[0]

    def _measure_together(self, passed: Sequence[Row]) -> None:
        """Measure the fastest rows once more, in turns: their latencies were measured at different times."""
        nearest = min((_latency(row) for row in passed), default=math.inf)
        close = [row for row in passed if _latency(row) <= _REMEASURED * nearest]
        files = [
            (row, file)
            for row in close
            if row.trial is not None and (file := self.journal.model_of(row.trial)) is not None
        ]
        if len(files) < 2:
            return
        self.on_progress(f"measuring the {len(files)} fastest together")
        for (row, _), latency in zip(files, self.judge.compared_latencies([file for _, file in files]), strict=True):
            self.rows[self.rows.index(row)] = replace(row, latency=latency)

    def _reason_to_skip(self, candidate: Candidate) -> str:
        """Return why a candidate cannot be the best, given what was tried; empty if it may be."""
        best = self._best()
        if self.target is Target.SIZE:
            # the rest of a file hardly shrinks; in a small network, the unpacking of weights also takes space
            rest = [self.float_bytes - 4.0 * self.weights]
            for name, trial in self.trials.items():
                if trial.measured is not None:
                    rest.append(trial.measured.size_bytes - self.weights * self.bits[name] / 8)
            least = self.weights * candidate.bits / 8 + max(min(rest), 0.0)
            if best is not None and least >= _figures(best).size_bytes:
                return f"its file would take {size_text(int(least))} at least, and {best.name} is smaller"
            return ""
        if best is not None and self.target is not Target.CPU:
            return f"{best.name} passed, and ranks higher"
        if candidate.preset in ("FP16", "BF16"):
            return f"{best.name} passed and is smaller" if best is not None else ""
        if candidate.base:
            return self._reason_of_base(candidate)
        if candidate.preset == "INT8_TRANSFORMER_DEFAULT" and self.product_share < _FEW_PRODUCTS:
            return "the network has hardly any MatMul"
        if best is None:
            return ""
        if "WeightsOnly" in dict(candidate.changes) and _latency(best) < 1 / ALIKE_IN_SPEED:
            return f"it has the speed of float, and {best.name} is faster"
        return ""

    def _reason_of_base(self, candidate: Candidate) -> str:
        """Return why a variant of another candidate cannot be the best, given how that one went."""
        base = next((row for row in self.rows if row.name == candidate.base), None)
        if base is None or base.figures is None:
            return f"{candidate.base} failed"
        if base.figures.float_mac_share is None:
            return f"nothing was protected in {candidate.base}"
        if "ProtectBudget" in dict(candidate.changes):
            if base.figures.verdict == Verdict.OK.value and base.outcome != "passed":
                return f"protection depends on the verdict, which is already ok for {candidate.base}"
            passed = next((row for row in self.rows if row.outcome == "passed" and row.preset in _STATIC), None)
            return f"{passed.name} passed with less in float" if passed is not None else ""
        return "" if base.outcome == "passed" else f"{candidate.base} did not pass with protection"

    def _reason_of_time(self, candidate: Candidate, elapsed: float) -> str:
        left = self._limit() * _USABLE - elapsed
        if not _is_light(candidate) and self._best() is None:
            left -= self._light_seconds()  # reserved for a format that loses next to nothing
        expected = self._expected(candidate)
        if expected <= left:
            return ""
        return f"it would take about {expected:.0f} s, and {max(left, 0):.0f} s of the time are left"

    def _limit(self) -> float:
        """Return the seconds for everything: ten times what INT8_CNN_DEFAULT takes, with the measure of both networks.

        Until that preset has been tried, the slowest preset replaces it.
        """
        direct = [trial for trial in self.trials.values() if trial.stage is Stage.DIRECT and trial.measured is not None]
        if not direct:
            return math.inf
        baseline = next((trial for trial in direct if trial.name == BASELINE), None)
        seconds = max(trial.quantizing_seconds for trial in direct if baseline is None or trial is baseline)
        return TIME_FACTOR * (_START + seconds + (2 * self.judge.seconds if self.bound.has_measure else 0.0))

    def _expected(self, candidate: Candidate) -> float:
        if _is_light(candidate):
            return self._light_seconds()
        direct = [trial.seconds for trial in self.trials.values() if trial.stage is Stage.DIRECT]
        return COSTS[candidate.stage] * max(direct, default=0.0)

    def _light_seconds(self) -> float:
        """Return the seconds for a candidate without calibration: at most those of the shortest trial so far."""
        return min((trial.seconds for trial in self.trials.values()), default=0.0)

    def _result(self, taken: Row | None, made: QuantizedModel | None, seconds: float) -> AutoResult:
        rows = list(self.rows)
        measured: MeasureResult | None = None
        if taken is None:
            statement = f"no configuration keeps to the bound ({self.bound}): keep the float file"
            if tried := [row for row in rows if row.figures is not None]:
                nearest = min(tried, key=lambda row: _figures(row).drop)
                statement += f". {nearest.name} is nearest: {nearest.reason}"
            statement += ". --max-drop sets another bound"
        else:
            better = f"the {'smallest' if self.target is Target.SIZE else 'fastest'} of those that passed"
            if self.target in (Target.NPU, Target.GPU):
                better = f"the first that passed, in the order of speed on the {self.target.value}"
            statement = f"{taken.name}: {better}; {row_text(taken, self.float_bytes)}"
            if self.target is Target.CPU and _latency(taken) > ALIKE_IN_SPEED:
                statement += ". It is slower than float on this machine: take it for its size, or keep the float file"
            for i, row in enumerate(rows):
                if row.outcome == "passed" and row.name == taken.name:
                    rows[i] = replace(row, outcome="taken", reason="")
                elif row.outcome == "passed":
                    is_slower = self.target is Target.CPU and _latency(row) > _latency(taken)
                    rows[i] = replace(row, reason=f"{'slower' if is_slower else 'larger'} than {taken.name}")
            value, float_value = _figures(taken).value, self.judge.float_value
            if self.measure is not None and value is not None and float_value is not None:
                measured = self.measure.result(float_value, value)
        result = AutoResult(
            model=None,
            rows=tuple(rows),
            statement=statement,
            target=self.target,
            bound=self.bound,
            float_bytes=self.float_bytes,
            float_ms=self.judge.latency_ms,
            judged_on=self.judge.source,
            float_value=self.judge.top1 if self.judge.float_value is None else self.judge.float_value,
            seconds=seconds,
            notes=tuple(dict.fromkeys((*self.journal.notes, *self._doubts()))),
        )
        return result if made is None else replace(result, model=made.with_search(result.to_dict(), measured))

    def _doubts(self) -> Iterator[str]:
        """Yield what is said of a bound that a single changed prediction exceeds."""
        most, count = self.bound.max_drop, self.judge.count
        is_counted = any(row.figures is not None and row.figures.agreement is not None for row in self.rows)
        if most is not None and is_counted and not self.bound.has_measure and 100 / count > most:
            yield (
                f"{count_of(count, 'sample')} cannot show a loss of {most:g} points: one changed prediction that is no "
                f"near tie is {100 / count:.3g}. Give more samples, or labelled ones (--data)"
            )

    def interruption(self) -> str:
        """Return the message for a search that the user stops: the best so far, and how to resume."""
        best = self._best()
        lines = [f"interrupted after {count_of(len(self.trials), 'trial')}; "]
        if best is None:
            lines[0] += "none has passed so far"
        else:
            lines[0] += f"best so far: {best.name} ({row_text(best, self.float_bytes)})"
            assert best.trial is not None
            command = self.bench.command(best.trial, self.output or "OUT.onnx", self.metric)
            lines.append(f"this makes it: {command}")
        if self.output is not None:
            lines.append(f"the same command resumes from '{self.journal.folder}'")
        return "\n".join(map(printable, lines))


def row_text(row: Row, float_bytes: int) -> str:
    """Return the result of a candidate as one line."""
    figures = row.figures
    if figures is None:
        return f"{row.outcome}: {row.reason}"
    value = "" if figures.value is None else f", {figures.measure} {figures.value:.4g}"
    speed = "" if row.latency is None else f", {row.latency:.2f} x the time"
    size = f"{100 * figures.size_bytes / float_bytes:.0f} % of the size of float"
    text = f"{figures.verdict}{value}{speed}{' and' if speed else ','} {size}"
    return f"{text}; {row.outcome}: {row.reason}" if row.outcome == "rejected" else text


def _product_share(loaded: LoadedModel, sample: Sample, traits: Traits) -> float:
    """Return the share of multiply-accumulates in MatMul or attention."""
    if not traits.has_products:
        return 0.0
    if "Attention" in traits.op_types:
        return 1.0
    names = tensors_to_size(loaded.model)
    with FloatRunner(loaded.model, names) as runner:
        shapes = {name: tuple(tensor.array.shape) for name, tensor in runner.tensors(sample, names).items()}
    shapes |= {name: array.shape for name, array in sample.items()}
    macs = layer_macs(loaded.model, shapes)
    op_types = {str(node.name): node.op_type for node in loaded.model.graph}
    total = sum(macs.values())
    if not total:
        return 0.0 if traits.has_convolutions else 1.0
    return sum(count for name, count in macs.items() if op_types[name] == "MatMul") / total


def _is_light(candidate: Candidate) -> bool:
    """True if a candidate needs no calibration."""
    return candidate.stage is Stage.DIRECT and not settings_of(candidate.config()).needs_data


def _repeatable(data: Any) -> Any:
    """Return the data in a form that can be read more than once."""
    if isinstance(data, PathLike):
        return fspath(data)
    if isinstance(data, (str, Mapping)) or hasattr(data, "shape"):
        return data
    if callable(getattr(data, "get_next", None)):
        return list(iter(data.get_next, None))
    return list(data) if isinstance(data, Iterable) else data


def _figures(row: Row | None) -> Measurement:
    assert row is not None
    assert row.figures is not None
    return row.figures


def _latency(row: Row) -> float:
    assert row.latency is not None
    return row.latency

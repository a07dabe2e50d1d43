"""One pass of the float model over the samples, each of which is shown to the observers.

Worker w takes the samples w, w + workers, ... and has observers of its own, which are merged in the order of the
workers, so every run has the same result. Observers that cannot be merged are shared, and see the samples in order: one
worker may show the first of them its sample while another still shows the rest the sample before.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quark.errors import InvalidValueError, ModelError, QuarkError
from quark.onnx.calibrate.range_files import StoredRange
from quark.onnx.calibrate.runner import FloatRunner, Tensor
from quark.onnx.progress import Advance
from quark.ranges import Observer

Feeds: TypeAlias = Mapping[str, npt.NDArray[Any]]
Observers: TypeAlias = dict[str, Observer]
Show: TypeAlias = Callable[[Observer, Any], None]  # Observer.observe or Observer.observe_again


@dataclass(frozen=True)
class Watch:
    """An observer of a tensor. `samples` are the numbers of those that it is shown, in the order of the pass; None: all
    of them."""

    tensor: str
    observer: Observer
    samples: frozenset[int] | None = None

    def sees(self, number: int) -> bool:
        return self.samples is None or number in self.samples

    def end_of_sample(self, number: int) -> None:
        if self.sees(number):
            self.observer.end_of_sample()


@dataclass(frozen=True)
class CalibrationOptions:
    """`sample_limit` None uses all samples. `cache` is a folder that keeps ranges by model, data and settings; None for
    no cache. Models with more weights than `verdict_limit_bytes` do not run for the verdict; None decides by the free
    memory.

    `random_shapes` and `random_ranges` are those of random data, by input. `ranges_file` is read for ranges that are
    known, and written with those that were measured. Outputs of `passthrough_op_types` have the range of the nearest
    tensor before them that other operators compute. `histogram_folder` gets a picture of each histogram. With
    `has_evaluation` the outputs of both models are compared on `evaluation_data`, or on the calibration data if None.
    """

    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    sample_limit: int | None = None
    has_random_data: bool = False
    has_symmetric_ranges: bool = False  # every range is widened to be symmetric about zero
    memory_limit_bytes: int = 1 << 28  # for activations; larger batches are split if the model allows it
    verdict_limit_bytes: int | None = None
    cache: Path | None = None
    seed: int = 0
    random_shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    random_ranges: tuple[tuple[str, tuple[float, float]], ...] | None = None
    ranges_file: Path | None = None
    known_ranges: tuple[tuple[str, StoredRange], ...] | None = None  # from that file; None: not read yet
    histogram_bins: int | None = None  # None: as many as methods usually have
    passthrough_op_types: frozenset[str] = frozenset()
    histogram_folder: Path | None = None
    has_evaluation: bool = False
    evaluation_data: Any = field(default=None, repr=False, compare=False)


class Pass:
    """A pass over `samples` that calls `show` for every tensor with an observer; `run` returns the merged observers."""

    def __init__(
        self, runner: FloatRunner, samples: Iterator[Feeds], memory_limit_bytes: int, show: Show, advance: Advance
    ) -> None:
        self._runner = runner
        self._samples = samples
        self._limit = memory_limit_bytes // runner.workers
        self._show = show
        self._advance = advance
        self._turns: list[Turns] = []
        self._reading = self._new_turns()

    def run(self, observers: Observers) -> Observers:
        self.show_to([Watch(name, observer) for name, observer in observers.items()])
        return observers

    def show_to(self, watches: Sequence[Watch]) -> None:
        """Show the samples to observers, several of which may watch one tensor. The observers that were given hold the
        result."""
        shared = [(watch, self._new_turns()) for watch in watches if not watch.observer.is_mergeable]
        own = [watch for watch in watches if watch.observer.is_mergeable]
        parts = [own] + [copy.deepcopy(own) for _ in range(1, self._runner.workers)]
        with ThreadPoolExecutor(self._runner.workers) as pool:
            futures = [pool.submit(self._work, number, part, shared) for number, part in enumerate(parts)]
            try:
                wait(futures)
            except BaseException:  # interrupted by the user: the workers stop after their present sample
                self._give_up()
                raise
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, TurnsBroken))  # the reason, not its consequence
        for part in parts[1:]:
            for mine, others in zip(own, part, strict=True):
                mine.observer.merge(others.observer)

    def _work(self, number: int, own: Sequence[Watch], shared: Sequence[tuple[Watch, Turns]]) -> None:
        """Take every sample of one worker, beginning with `number`."""
        cutter = Cutter(self._runner.input_shapes, self._limit, has_batch_first=not self._runner.may_have_time_first)
        try:
            while True:
                with self._reading.take(number):
                    sample = next(self._samples, None)
                if sample is None:
                    return
                self._take(sample, number, cutter, own, shared)
                self._advance()
                number += self._runner.workers
        except BaseException:
            self._give_up()
            raise

    def _take(
        self,
        sample: Feeds,
        number: int,
        cutter: Cutter,
        own: Sequence[Watch],
        shared: Sequence[tuple[Watch, Turns]],
    ) -> None:
        """Show a sample to the observers, piece by piece. A shared one sees all pieces before those of the next sample;
        if there is only one, it is free for the next sample at once."""
        watches = [watch for watch in (*own, *(watch for watch, _ in shared)) if watch.sees(number)]
        last = {watch.tensor: watch for watch in watches}
        piece: Feeds | None = None
        for index, piece in enumerate(cutter.cut(sample)):
            try:
                tensors = self._runner.tensors(piece, list(last))
            except ModelError as error:
                raise ModelError(f"calibration sample {number}: {error}") from error
            if cutter.row_bytes is None:
                cutter.row_bytes = sum(tensor.array.nbytes for tensor in tensors.values()) // rows_of(piece)
            for watch in own:
                self._observe(watch, tensors, last, number)
            for watch, turns in shared:
                if index == 0:
                    turns.begin(number)
                self._observe(watch, tensors, last, number)
                if piece is sample:
                    watch.end_of_sample(number)
                    turns.end()
        for watch in own:
            watch.end_of_sample(number)
        for watch, turns in shared if piece is not sample else ():
            watch.end_of_sample(number)
            turns.end()

    def _observe(self, watch: Watch, tensors: dict[str, Tensor], last: Mapping[str, Watch], number: int) -> None:
        """Show an observer its tensor, and free that after the last one: the other worker's run can take the memory at
        once."""
        if not watch.sees(number):
            return
        name = watch.tensor
        tensor = tensors.pop(name) if watch is last[name] else tensors[name]
        try:
            self._show(watch.observer, tensor.array)
        except QuarkError as error:
            what = f"tensor '{name}' of the float model, calibration sample {number}"
            hint = "where the model means that, as in a mask, leave the nodes around it in float (nodes_to_exclude)"
            weight = self._runner.nonfinite_weight()
            if weight is not None:
                hint = f"weight '{weight}' holds NaN or Inf: look at how it was trained, or {hint}"
            raise InvalidValueError(f"{what}: {error}; {hint}") from error

    def _new_turns(self) -> Turns:
        self._turns.append(Turns())
        return self._turns[-1]

    def _give_up(self) -> None:
        for turns in self._turns:
            turns.give_up()


class Cutter:
    """Cuts large batches into pieces whose activations fit into the memory limit.

    If the batch axis of every input is free, a piece has as many rows as fit. `row_bytes`, what one row takes, is set
    after the first piece; until then pieces are single rows. A model with a fixed batch size gets several batches one
    after the other. Anything else runs as it is. So do networks with a recurrence whose first axis may be time
    (`has_batch_first` is False): a piece of that would be another input.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int | str | None, ...]], limit_bytes: int, *, has_batch_first: bool = True
    ) -> None:
        self._shapes = shapes
        self._limit = limit_bytes
        self._has_batch_first = has_batch_first
        self.row_bytes: int | None = None

    def cut(self, sample: Feeds) -> Iterator[Feeds]:
        fixed = {name: shape[0] for name, shape in self._shapes.items() if shape and isinstance(shape[0], int)}
        if not fixed:
            rows = {len(array) if array.ndim else 0 for array in sample.values()} if self._has_batch_first else set()
            if len(rows) != 1 or rows <= {0, 1}:
                yield sample
                return
            total, start = rows.pop(), 0
            while start < total:
                step = 1 if self.row_bytes is None else max(1, self._limit // max(1, self.row_bytes))
                yield {name: array[start : start + step] for name, array in sample.items()}
                start += step
            return
        counts = {name: len(sample[name]) // size for name, size in fixed.items() if size}
        if set(counts.values()) <= {1}:
            yield sample
        elif len(counts) == len(self._shapes) == len(sample) and len(set(counts.values())) == 1:
            for i in range(next(iter(counts.values()))):
                yield {name: array[i * fixed[name] : (i + 1) * fixed[name]] for name, array in sample.items()}
        else:
            raise InvalidValueError(f"inputs of different numbers of batches: {counts}; feed one batch at a time")


def rows_of(piece: Feeds) -> int:
    """The rows of its batch; 1 if there is no batch axis."""
    return max((len(array) for array in piece.values() if np.ndim(array)), default=1) or 1


class TurnsBroken(Exception):  # noqa: N818 - not a mistake of its own: another thread has failed
    """Some other thread will not take its turn."""


class Turns:
    """Threads that take turns: `with turns.take(i):` waits until all numbers below i have had theirs. After `give_up`
    nobody waits."""

    def __init__(self) -> None:
        self._next = 0
        self._is_broken = False
        self._changed = threading.Condition()

    @contextmanager
    def take(self, number: int) -> Iterator[None]:
        self.begin(number)
        yield
        self.end()

    def begin(self, number: int) -> None:
        """Wait for the turn of this number."""
        with self._changed:
            self._changed.wait_for(lambda: self._next == number or self._is_broken)
            if self._is_broken:
                raise TurnsBroken

    def end(self) -> None:
        """Give the turn to the next number."""
        with self._changed:
            self._next += 1
            self._changed.notify_all()

    def give_up(self) -> None:
        with self._changed:
            self._is_broken = True
            self._changed.notify_all()

"""One pass of the float model over the samples, each of which is shown to the observers.

Worker w takes the samples w, w + workers, ... and has observers of its own, which are merged in the order of the
workers: the result is the same in every run. Observers that cannot be merged are shared, and see the samples in order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any, TypeAlias

from quark.errors import InvalidValueError, ModelError, QuarkError
from quark.onnx.calibrate.pieces import Cutter, Feeds, rows_of
from quark.onnx.calibrate.runner import FloatRunner, Tensor
from quark.onnx.calibrate.turns import Turns, TurnsBroken
from quark.onnx.progress import Advance
from quark.ranges import Observer

Observers: TypeAlias = dict[str, Observer]
Show: TypeAlias = Callable[[Observer, Any], None]  # Observer.observe or Observer.observe_again


class Pass:
    """A pass over `samples` that calls `show` for every tensor that has an observer; `run` gives the merged ones."""

    def __init__(
        self, runner: FloatRunner, samples: Iterator[Feeds], memory_limit_bytes: int, show: Show, advance: Advance
    ) -> None:
        self._runner = runner
        self._samples = samples
        self._limit = memory_limit_bytes // runner.workers
        self._show = show
        self._advance = advance
        self._reading = Turns()
        self._observing = Turns()

    def run(self, observers: Observers) -> Observers:
        shared = {name: each for name, each in observers.items() if not each.is_mergeable}
        own = {name: each for name, each in observers.items() if each.is_mergeable}
        parts = [own] + [copy.deepcopy(own) for _ in range(1, self._runner.workers)]
        with ThreadPoolExecutor(self._runner.workers) as pool:
            futures = [pool.submit(self._work, number, part, shared) for number, part in enumerate(parts)]
            try:
                wait(futures)
            except BaseException:  # the user has had enough: the workers stop after their present sample
                self._give_up()
                raise
        errors = [error for error in (each.exception() for each in futures) if error is not None]
        if errors:
            raise min(errors, key=lambda each: isinstance(each, TurnsBroken))  # the reason, not its consequence
        return {**_merge(parts), **shared}

    def _work(self, number: int, own: Observers, shared: Observers) -> None:
        cutter = Cutter(self._runner.input_shapes, self._limit, has_batch_first=not self._runner.may_have_time_first)
        try:
            while True:
                with self._reading.take(number):
                    sample = next(self._samples, None)
                if sample is None:
                    return
                self._process(number, cutter, sample, own, shared)
                self._advance()
                number += self._runner.workers
        except BaseException:
            self._give_up()
            raise

    def _process(self, number: int, cutter: Cutter, sample: Feeds, own: Observers, shared: Observers) -> None:
        with ExitStack() as turn:
            has_turn = not shared
            for piece in cutter.cut(sample):
                tensors = self._tensors(number, piece, [*own, *shared])
                if cutter.row_bytes is None:
                    cutter.row_bytes = sum(each.array.nbytes for each in tensors.values()) // rows_of(piece)
                self._observe(tensors, own, number)
                if not has_turn:
                    turn.enter_context(self._observing.take(number))
                    has_turn = True
                self._observe(tensors, shared, number)
            for observer in (*own.values(), *shared.values()):
                observer.end_of_sample()

    def _tensors(self, number: int, piece: Feeds, names: Sequence[str]) -> dict[str, Tensor]:
        try:
            return self._runner.tensors(piece, names)
        except ModelError as error:
            raise ModelError(f"calibration sample {number}: {error}") from error

    def _observe(self, tensors: dict[str, Tensor], observers: Observers, number: int) -> None:
        """Show each observer its tensor, and free that: the other worker's run can take the memory at once."""
        name = ""
        try:
            for name, observer in observers.items():
                self._show(observer, tensors.pop(name).array)
        except QuarkError as error:
            what = f"tensor '{name}' of the float model, calibration sample {number}"
            hint = "where the model means that, as in a mask, leave the nodes around it in float (nodes_to_exclude)"
            weight = self._runner.nonfinite_weight()
            if weight is not None:
                hint = f"weight '{weight}' holds NaN or Inf: look at how it was trained, or {hint}"
            raise InvalidValueError(f"{what}: {error}; {hint}") from error

    def _give_up(self) -> None:
        self._reading.give_up()
        self._observing.give_up()


def _merge(parts: list[Observers]) -> Observers:
    for part in parts[1:]:
        for name, observer in part.items():
            parts[0][name].merge(observer)
    return parts[0]

"""The samples of a run: those to calibrate on, and a few held out from it for the verdict.

Where the data have more than the number asked for, the held-out samples come from the rest, and all that were asked for
are calibrated on. Otherwise every eighth is held out; of fewer than eight the last; a lone one serves both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from quark.onnx.data.check_sample import Sample
from quark.onnx.data.store import SampleStore

HELD_OUT_EVERY = 8
HELD_OUT_LIMIT = 16
HELD_OUT_BYTES = 256 << 20


def held_out_count(count: int) -> int:
    """How many to hold out beside `count` samples to calibrate on."""
    return min(HELD_OUT_LIMIT, max(1, count // HELD_OUT_EVERY))


class Samples:
    """Iterates over the samples to calibrate on, as often as wanted; each is a dict of the model's inputs.

    `source` says where they come from, `is_random` that they are made up. `is_held_out_shared`: there was one sample
    only, and `held_out` is that.
    """

    def __init__(self, store: SampleStore, source: str, *, spare: int = 0, is_random: bool = False) -> None:
        """The last `spare` samples of the store are beyond those asked for."""
        self.source = source
        self.is_random = is_random
        self._store = store
        total = len(store)
        self._in_order = total - spare or total  # where all are for the verdict alone, those
        self.is_held_out_shared = total == 1 and not spare
        held = self._within_memory(_held_out(total, spare))
        self._indices = [i for i in range(total - spare) if i not in held or self.is_held_out_shared]
        self.held_out: list[Sample] = [store[i] for i in held]

    @property
    def count(self) -> int:
        return len(self._indices)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Sample]:
        return (self._store[i] for i in self._indices)

    def in_order(self) -> Iterator[Sample]:
        """All that were asked for, those held out among them, in the order in which they came."""
        return (self._store[i] for i in range(self._in_order))

    def hold_none_out(self) -> None:
        """There is no verdict to come. What is calibrated on stays the same."""
        self.held_out, self.is_held_out_shared = [], False

    def digest(self) -> str:
        """A hash of every value of the samples to calibrate on."""
        state = hashlib.sha256()
        for sample in self:
            for name, array in sorted(sample.items()):
                state.update(f"{name}:{array.dtype}:{array.shape};".encode())
                state.update(array.tobytes())
        return state.hexdigest()

    def _within_memory(self, indices: Iterable[int]) -> list[int]:
        """As many of them as may be held, at least one."""
        kept: list[int] = []
        held = 0
        for i in indices:
            held += sum(array.nbytes for array in self._store[i].values())
            if kept and held > HELD_OUT_BYTES:
                break
            kept.append(i)
        return kept


def _held_out(total: int, spare: int) -> Iterable[int]:
    if spare:
        return range(total - spare, total)[:HELD_OUT_LIMIT]
    if total < HELD_OUT_EVERY:
        return [total - 1]
    return range(HELD_OUT_EVERY - 1, total, HELD_OUT_EVERY)[:HELD_OUT_LIMIT]

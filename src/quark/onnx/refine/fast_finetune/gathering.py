"""What a layer is fitted to: rows of what the quantized network hands it, and what the float network computes there.

Every eighth sample is held out from training; of a lone sample, every eighth row. Rows of training samples are shuffled
while they are gathered, so that any neighbours make a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.onnx.refine.fast_finetune.trained_layers import TrainedLayer
from quark.onnx.refine.fast_finetune.walk import Walk
from quark.onnx.refine.options import FinetuneOptions
from quark.reconstruction.problem import Rows

Array = NDArray[Any]
HELD_OUT_EVERY = 8


@dataclass(frozen=True, eq=False)
class Targets:
    """For each sample, the positions that were chosen and what the float network computes there."""

    picks: list[Array]
    values: list[Array]


class Gatherer:
    """`place` numbers a layer among all, and with the seed decides which rows are chosen and how they are shuffled."""

    def __init__(self, float_walk: Walk, quantized_walk: Walk, count: int, options: FinetuneOptions) -> None:
        self._float, self._quantized = float_walk, quantized_walk
        self._count, self._options = count, options

    def targets(self, stage: Mapping[int, TrainedLayer], outputs: Mapping[str, str]) -> dict[str, Targets]:
        """Of several layers at once; `outputs` are the tensors of the float network by layer."""
        nothing = [np.zeros(0)] * self._count
        found = {each.name: Targets(nothing.copy(), nothing.copy()) for each in stage.values()}

        def see(index: int, values: Mapping[str, Array]) -> None:
            for place, layer in stage.items():
                y = values[outputs[layer.name]]
                picks = self._picks(layer, place, index, layer.source.count(y.shape))
                found[layer.name].picks[index] = picks
                found[layer.name].values[index] = layer.source.outputs(y, picks)

        self._float.visit(list(dict.fromkeys(outputs[each.name] for each in stage.values())), see)
        return found

    def rows(self, layer: TrainedLayer, place: int, targets: Targets, seen: str, exact: str) -> tuple[Rows, Rows]:
        """To train on, and held out. The layer reads `seen` in the quantized network, `exact` in the float one."""
        split = _Split(layer, targets, np.random.default_rng([self._options.fit.seed, place]))
        quantized = self._gathered(self._quantized, seen, layer, targets, split)
        floats = None
        if self._options.fit.drop_ratio < 1:
            floats = self._gathered(self._float, exact, layer, targets, split)
        wanted = split.empty(layer.output_numbers)
        for index, values in enumerate(targets.values):
            split.put(wanted, index, values[:, None])
        return tuple(  # type: ignore[return-value]
            Rows(
                quantized[part].transpose(1, 0, 2),
                wanted[part][0],
                None if floats is None else floats[part].transpose(1, 0, 2),
            )
            for part in (0, 1)
        )

    def _gathered(
        self, walk: Walk, tensor: str, layer: TrainedLayer, targets: Targets, split: _Split
    ) -> tuple[Array, Array]:
        groups, _, length = layer.layout.matrices
        buffers = split.empty(length, groups)

        def see(index: int, values: Mapping[str, Array]) -> None:
            split.put(buffers, index, layer.source.inputs(values[tensor], targets.picks[index]))

        walk.visit([tensor], see)
        return buffers

    def _picks(self, layer: TrainedLayer, place: int, sample: int, count: int) -> Array:
        wanted = self._options.rows_per_sample(layer.row_numbers, self._count)
        if count <= wanted:
            return np.arange(count)
        generator = np.random.default_rng([self._options.fit.seed, place, sample])
        return np.sort(generator.choice(count, wanted, replace=False))


class _Split:
    """Where the rows of each sample go: part 0 is trained on, part 1 held out."""

    def __init__(self, layer: TrainedLayer, targets: Targets, generator: np.random.Generator) -> None:
        sizes = [len(each) for each in targets.picks]
        held = held_out(len(sizes))
        is_held = [np.full(size, index in held) for index, size in enumerate(sizes)]
        if len(sizes) == 1:
            every = min(sizes[0], HELD_OUT_EVERY)
            is_held = [np.arange(sizes[0]) % every == every - 1]
        flat = np.concatenate(is_held)
        self._starts = np.cumsum([0, *sizes])
        self._is_held = flat
        self._counts = (int((~flat).sum()), int(flat.sum()))
        self._places = np.empty(len(flat), np.int64)
        self._places[~flat] = generator.permutation(self._counts[0])
        self._places[flat] = np.arange(self._counts[1])

    def empty(self, length: int, groups: int = 1) -> tuple[Array, Array]:
        """Room for the rows of both parts, [groups, rows, length]."""
        first, second = (np.zeros((groups, count, length), np.float32) for count in self._counts)
        return first, second

    def put(self, buffers: tuple[Array, Array], sample: int, rows: Array) -> None:
        """Write the rows of a sample, [rows, groups, length], to their places."""
        span = slice(self._starts[sample], self._starts[sample + 1])
        is_held, places = self._is_held[span], self._places[span]
        for buffer, chosen in zip(buffers, (~is_held, is_held), strict=True):
            if chosen.any():
                buffer[:, places[chosen]] = rows[chosen].transpose(1, 0, 2)


def held_out(count: int) -> frozenset[int]:
    """The samples that are not trained on."""
    chosen = [index for index in range(count) if index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    return frozenset(chosen or [count - 1])


def are_enough(picks: Sequence[Array]) -> bool:
    """That there is a row to train on and one to hold out."""
    return sum(len(each) for each in picks) > 1

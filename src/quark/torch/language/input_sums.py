"""Correlations of the inputs of linear layers, for the algorithms that need them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quark.errors import InvalidValueError
from quark.torch.language.pipeline import InputGroup, LayerWork

Array = NDArray[Any]
_ONE_HELD_OF = 8  # batches
_MOST_HELD = 2048  # rows, after which no more batches are held


@dataclass(frozen=True, eq=False)
class InputSums:
    """Means over rows, with x the input of linear layers in the float network and z what they compute with.

    `inner` is E[z z'] and `cross` E[x z'], which is `inner` itself if x is z. `magnitudes` are E |z|, `largest` is
    max |z|, for each channel. `held` are the x and z [rows, inputs] of a few whole batches, to judge weights that were
    fitted to the others; None if x is z, or for a single batch. The means include them.
    """

    inner: Array
    cross: Array
    magnitudes: Array
    largest: Array
    count: int
    held: tuple[Array, Array] | None = None

    def without_held(self) -> InputSums:
        """The same for the other rows."""
        if self.held is None:
            return self
        exact, seen = (array.astype(np.float64) for array in self.held)
        left = self.count - len(seen)
        inner, cross = (
            (total * self.count - product) / left
            for total, product in ((self.inner, seen.T @ seen), (self.cross, exact.T @ seen))
        )
        return replace(self, inner=inner, cross=cross, count=left, held=None)


def input_sums(
    work: LayerWork,
    paths: Sequence[str],
    sample_limit: int = sys.maxsize,
    *,
    is_quantized: bool = True,
    is_exact: bool = True,
) -> dict[str, InputSums]:
    """The sums of what linear layers get, over at most so many sequences, in one run of the data.

    x comes from the float network if it is followed and `is_exact`. z is rounded by the layer's quantizer if
    `is_quantized`. Products are computed in float32 and added up in float64.
    """
    assert work.streams is not None
    sums: dict[str, _Sums] = {}
    sequences = 0
    last_of_few = min(_ONE_HELD_OF, len(work.streams)) - 1
    for number, batch in enumerate(work.inputs(paths)):
        if sequences >= sample_limit:
            break
        sequences += work.streams.seen[number].shape[0]
        is_held = number > 0 and number % _ONE_HELD_OF == last_of_few
        for path, (exact, seen) in batch.items():
            used = work.quantized_input(path, seen) if is_quantized else seen
            target = exact if exact is not None and is_exact else seen
            sums.setdefault(path, _Sums()).add(used.float(), None if target is used else target.float(), is_held)
    for path, of_path in sums.items():
        if not of_path.is_finite:
            raise InvalidValueError(
                f"'{work.full_name(path)}' gets NaN or Inf, or numbers whose squares overflow, on the calibration data"
            )
    return {path: of_path.means() for path, of_path in sums.items()}


class _Sums:
    """Sums over rows, kept on the device where the rows are."""

    def __init__(self) -> None:
        self.count = 0
        self.parts: list[torch.Tensor] = []
        self.held: list[tuple[Array, Array]] = []

    def add(self, used: torch.Tensor, target: torch.Tensor | None, is_held: bool) -> None:
        """`target` is None if it is the same."""
        if is_held and target is not None and sum(len(array) for array, _ in self.held) < _MOST_HELD:
            self.held.append((target.cpu().numpy(), used.cpu().numpy()))
        if not self.parts:
            size = used.shape[1]
            shapes: list[tuple[int, ...]] = [(size, size), (size, size), (size,), (size,)]
            self.parts = [torch.zeros(shape, dtype=torch.float64, device=used.device) for shape in shapes]
        inner, cross, magnitudes, largest = self.parts
        product = used.T @ used
        inner += product
        cross += product if target is None else target.T @ used
        if len(used):
            magnitudes += used.abs().sum(dim=0)
            torch.maximum(largest, used.abs().amax(dim=0).double(), out=largest)
        self.count += len(used)

    @property
    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(part).all()) for part in self.parts)

    def means(self) -> InputSums:
        inner, cross, magnitudes, largest = (part.cpu().numpy() for part in self.parts)
        count = max(self.count, 1)
        held = None
        if self.held:
            exact, seen = (np.concatenate(arrays) for arrays in zip(*self.held, strict=True))
            held = (exact, seen)
        return InputSums(inner / count, cross / count, magnitudes / count, largest, self.count, held)


def alike(work: LayerWork, group: InputGroup) -> list[list[str]]:
    """The linear layers of a group in parts that compute with the same numbers: rotation and quantizer are the same."""
    parts: dict[Any, list[str]] = {}
    for path in group.linears:
        rotation = getattr(work.linear(path), "rotation", None)
        parts.setdefault((id(rotation), work.targets[path].activation), []).append(path)
    return list(parts.values())


def matrix(work: LayerWork, path: str) -> Array:
    """The weight of a linear layer [outputs, inputs] in float64."""
    return np.asarray(work.linear(path).weight.detach().double().cpu().numpy())

"""What a trainer asks of data. Each process of a run has its own part of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeAlias

from torch import Tensor

Batch: TypeAlias = tuple[Tensor, Tensor]  # images [n, ...], classes [n]


class TrainingData(Protocol):
    """Batches in an order that depends on the number of the epoch and on nothing that went before: a run that is
    resumed sees what it would have seen."""

    def __len__(self) -> int:
        """The batches of an epoch, as many for every process."""
        ...

    def epoch(self, number: int) -> Iterator[Batch]: ...


class HeldOutData(Protocol):
    """Batches of this process's part: of all samples in order, every `count`-th from its rank on."""

    def __iter__(self) -> Iterator[Batch]: ...

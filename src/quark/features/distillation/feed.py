"""Samples as batches on the device that trains.

Where the network computes several samples together as it does one by one, batches are stacked, and a sample that is
itself a batch counts as its rows. On a GPU with room for all samples, they are copied there once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from quark.features.finetuning.network import Sample, Tensors, stacked
from quark.text import get_logger

_LOG = get_logger(__name__)

SHARE_OF_MEMORY = 0.25  # share of the free GPU memory for samples
_ALMOST = 1e-2  # relative: a batch that differs so little from its samples one by one only rounds differently


class Feed:
    """`can_stack` is what `can_stack` below found."""

    def __init__(self, samples: Sequence[Sample], device: torch.device, *, can_stack: bool) -> None:
        self._device, self._can_stack = device, can_stack
        self._samples = [row for sample in samples for row in rows_of(sample)] if can_stack else list(samples)
        self._whole: Tensors | None = None
        size = sum(np.asarray(array).nbytes for sample in self._samples for array in sample.values())
        if can_stack and device.type == "cuda" and size < SHARE_OF_MEMORY * torch.cuda.mem_get_info(device)[0]:
            self._whole = stacked(self._samples, device)

    def __len__(self) -> int:
        return len(self._samples)

    def batches(self, numbers: Sequence[int], size: int) -> Iterator[tuple[Tensors, int]]:
        """The samples of these numbers as batches of that size, each with the number of samples in it."""
        step = size if self._can_stack else 1
        for start in range(0, len(numbers), step):
            indices = numbers[start : start + step]
            if self._whole is None:
                batch = stacked([self._samples[i] for i in indices], self._device)
            else:
                index = torch.tensor(indices, device=self._device)
                batch = {name: x.index_select(0, index) for name, x in self._whole.items()}
            yield batch, len(indices)


def rows_of(sample: Sample) -> list[Sample]:
    """The rows of a batch as samples; the sample itself if its inputs have different numbers of rows."""
    counts = {np.shape(array)[0] if np.ndim(array) else 0 for array in sample.values()}
    (count, *others) = counts
    if others or count < 2:
        return [sample]
    return [{name: np.asarray(array)[row : row + 1] for name, array in sample.items()} for row in range(count)]


@torch.no_grad()
def can_stack(network: Callable[..., Any], samples: Sequence[Sample], device: torch.device) -> bool:
    """True if all samples fit into one batch, and the network computes two of them together as it does one by one."""
    first_samples = samples[:2]
    shapes = [{name: np.shape(array) for name, array in sample.items()} for sample in first_samples]
    if len(first_samples) < 2 or shapes[0] != shapes[1] or any(not shape for shape in shapes[0].values()):
        return False
    if any(np.shape(array)[1:] != shapes[0][name][1:] for sample in samples for name, array in sample.items()):
        return False
    try:
        both = network(**stacked(first_samples, device))
    except Exception as error:  # noqa: BLE001 - whatever torch says of a shape that is written into the network
        _LOG.info("samples are computed one by one: %s", error)
        return False
    alone = [network(**stacked([sample], device)) for sample in first_samples]
    pairs = zip(both, zip(*alone, strict=True), strict=True) if isinstance(both, tuple) else [(both, alone)]
    for together, parts in pairs:
        joined = torch.cat(list(parts))
        if joined.shape != together.shape:
            return False
        difference = (joined.float() - together.float()).norm()
        if float(difference) > _ALMOST * float(joined.float().norm()):
            return False
    return True

"""The least and greatest value of every channel of a tensor, over all data and all processes that see a part of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from quark.torch.observe.watching import Watching
from quark.torch.processes import gathered

Extremes = tuple[NDArray[Any], NDArray[Any]]


def channel_extremes(
    network: fx.GraphModule, axes: Mapping[str, int], batches: Iterable[tuple[torch.Tensor, ...]]
) -> dict[str, Extremes]:
    """For each node of `axes`, (lowest, highest) of the channels of that axis."""
    found: dict[str, Extremes] = {}

    def see(name: str, value: torch.Tensor) -> None:
        others = [axis for axis in range(value.dim()) if axis != axes[name] % value.dim()]
        low, high = (each(value, dim=others).double().cpu().numpy() for each in (torch.amin, torch.amax))
        before = found.get(name)
        found[name] = (low, high) if before is None else (np.minimum(before[0], low), np.maximum(before[1], high))

    if not axes:
        return found
    watching = Watching(network, axes, see)
    for batch in batches:
        watching.over(batch)
    return {name: _of_all_ranks(each) for name, each in found.items()}


def _of_all_ranks(extremes: Extremes) -> Extremes:
    lows, highs = zip(*gathered(extremes), strict=True)
    return np.min(lows, axis=0), np.max(highs, axis=0)

"""Steps of training on a GPU, recorded once as a CUDA graph and replayed.

A step is some dozens of small kernels, and launching them from Python takes ten times as long as running them. What
changes from step to step must be in tensors that are written before a replay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

import torch

from quark.text import get_logger

_LOG = get_logger(__name__)

REPLAYED_ON = ("cuda",)  # devices
ORDINARY_STEPS = 2  # before a recording: kernels are compiled and loaded, and buffers made


class Replay:
    """`step` computes one step, without reading a number back from the GPU. If it cannot be recorded, its steps stay
    ordinary ones."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._done: Counter[Hashable] = Counter()
        self._can_record = True

    def run(self, kind: Hashable) -> None:
        """Do a step. Those of one kind launch the same kernels."""
        if kind not in self._graphs and self._can_record and self._done[kind] >= ORDINARY_STEPS:
            self._record(kind)
        if kind in self._graphs:
            self._graphs[kind].replay()
            return
        self._step()
        self._done[kind] += 1

    def _record(self, kind: Hashable) -> None:
        """Recording computes nothing."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            # other threads, such as those of the walk through the network, go on using the GPU
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step()
        except RuntimeError as error:
            _LOG.info("steps are not replayed as a CUDA graph, which is slower: %s", error)
            self._can_record = False
            return
        self._graphs[kind] = graph

"""Where the walk through a network stops to remember: stages of a few layers that end where little has to be kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from quark.onnx.graph import dimensions
from quark.onnx.refine.fast_finetune.trained_layers import TrainedLayer
from quark.onnx.refine.fast_finetune.walk import Walk

LONGEST = 6


def stages(walk: Walk, layers: Sequence[TrainedLayer]) -> Iterator[list[TrainedLayer]]:
    """The layers in order, cut behind the one, among the next few, where the least has to be remembered; the last of
    equals, since remembering costs as well."""
    start = 0
    while start < len(layers):
        ends = range(start + 1, min(start + LONGEST, len(layers)) + 1)
        sizes = {end: _remembered(walk, layers, end) for end in ends}
        end = min(ends, key=lambda each: (sizes[each], -each))
        yield list(layers[start:end])
        start = end


def _remembered(walk: Walk, layers: Sequence[TrainedLayer], end: int) -> int:
    """The numbers of a sample that the layers from `end` on need of what is before."""
    if end == len(layers):
        return 0
    live = walk.live([each.name for each in layers[:end]], [each.name for each in layers[end:]])
    return sum(math.prod(size or 1 for size in dimensions(walk.value(name)) or ()) for name in live)

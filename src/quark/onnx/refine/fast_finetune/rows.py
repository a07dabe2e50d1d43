"""A layer's computation as rows times weights: which numbers of its input go into which number of its output.

A sample has far more positions than training needs, and neighbours say the same: a few of each sample, chosen at
random, make the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.onnx.graph import attribute, dimensions
from quark.onnx.refine.taps import Window, taps_of
from quark.reconstruction.problem import WeightLayout

Array = NDArray[Any]


class RowSource(Protocol):
    """`picks` are numbers of positions, as `outputs` counts them."""

    def count(self, output_shape: tuple[int, ...]) -> int:
        """How many positions an output of that shape has."""

    def inputs(self, x: Array, picks: Array) -> Array:
        """The rows, [picks, groups, weights of an output]."""

    def outputs(self, y: Array, picks: Array) -> Array:
        """What is computed there, [picks, outputs]."""


@dataclass(frozen=True)
class ConvolutionRows:
    windows: tuple[Window, ...]
    groups: int

    def count(self, output_shape: tuple[int, ...]) -> int:
        return output_shape[0] * math.prod(output_shape[2:])

    def inputs(self, x: Array, picks: Array) -> Array:
        sources = [window.sources(size) for window, size in zip(self.windows, x.shape[2:], strict=True)]
        batch, *places = np.unravel_index(picks, (x.shape[0], *(len(each) for each in sources)))
        index: list[Any] = [batch.reshape(-1, *[1] * len(sources)), slice(None)]
        is_inside: Any = True
        for axis, (source, place) in enumerate(zip(sources, places, strict=True)):
            shape = [len(picks)] + [1] * len(sources)
            shape[axis + 1] = source.shape[1]
            chosen = source[place].reshape(shape)
            is_inside = is_inside & (chosen >= 0)
            index.append(chosen)
        patches = x[tuple(index)]  # [picks, *kernel, channels]: the slice stands between indices
        if not np.all(is_inside):
            patches = np.where(is_inside[..., None], patches, patches.dtype.type(0))
        rows = np.moveaxis(patches, -1, 1).reshape(len(picks), self.groups, -1)
        return np.asarray(rows, np.float32)

    def outputs(self, y: Array, picks: Array) -> Array:
        batch, *places = np.unravel_index(picks, (y.shape[0], *y.shape[2:]))
        index: tuple[Any, ...] = (batch, slice(None), *places)
        return np.asarray(y[index], np.float32)


@dataclass(frozen=True)
class MatrixRows:
    """The rows of a matrix product: along the last axis of its input, or the first of a transposed one."""

    is_transposed: bool = False
    factor: float = 1.0

    def count(self, output_shape: tuple[int, ...]) -> int:
        return math.prod(output_shape[:-1])

    def inputs(self, x: Array, picks: Array) -> Array:
        matrix = x.T if self.is_transposed else x.reshape(-1, x.shape[-1])
        rows = matrix[picks].astype(np.float32, copy=False)
        return (rows if self.factor == 1.0 else rows * np.float32(self.factor))[:, None]

    def outputs(self, y: Array, picks: Array) -> Array:
        return np.asarray(y.reshape(-1, y.shape[-1])[picks], np.float32)


@dataclass(frozen=True)
class NormalizedRows:
    """A normalization before its scale. `first` is the first axis that is normalized over; a channel of the scale is
    along `channel`, or, where that is None, all of the normalized axes."""

    first: int
    epsilon: float
    channel: int | None = None

    def count(self, output_shape: tuple[int, ...]) -> int:
        kept = output_shape[: self.first] if self.channel is None else (output_shape[0], *output_shape[2:])
        return math.prod(kept)

    def inputs(self, x: Array, picks: Array) -> Array:
        wide = x.astype(np.float64)
        axes = tuple(range(self.first % x.ndim, x.ndim))
        centred = wide - wide.mean(axes, keepdims=True)
        normal = centred / np.sqrt(np.square(centred).mean(axes, keepdims=True) + self.epsilon)
        return self._lines(normal.astype(np.float32))[picks][..., None]

    def outputs(self, y: Array, picks: Array) -> Array:
        return self._lines(np.asarray(y, np.float32))[picks]

    def _lines(self, values: Array) -> Array:
        if self.channel is not None:
            return np.moveaxis(values, self.channel, -1).reshape(-1, values.shape[self.channel])
        first = self.first % values.ndim
        return values.reshape(math.prod(values.shape[:first]), -1)


def row_source(node: ir.Node, weight: Array) -> tuple[RowSource, WeightLayout] | str:
    """How the rows of a layer are found, and how its weight goes with them; or why not."""
    if node.op_type in ("Conv", "ConvTranspose"):
        return _convolution(node, weight)
    if node.op_type == "Gemm":
        shape = (1, *weight.shape)
        order = (0, 1, 2) if attribute(node, "transB", 0) else (0, 2, 1)
        is_transposed = bool(attribute(node, "transA", 0))
        rows = MatrixRows(is_transposed, float(attribute(node, "alpha", 1.0)))
        return rows, WeightLayout(weight.shape, shape, order)
    if node.op_type == "MatMul":
        if weight.ndim != 2:
            return "its weight is not one matrix"
        return MatrixRows(), WeightLayout(weight.shape, (1, *weight.shape), (0, 2, 1))
    return _normalization(node, weight)


def _convolution(node: ir.Node, weight: Array) -> tuple[RowSource, WeightLayout] | str:
    taps = taps_of(node, weight)
    if taps is None:
        return "the shape of its output is given, not computed"
    groups = int(attribute(node, "group", 1))
    split = (groups, weight.shape[0] // groups, *weight.shape[1:])
    order = tuple(range(len(split)))
    if node.op_type == "ConvTranspose":  # its weights are [inputs, outputs of a group, *kernel]
        order = (0, 2, 1, *order[3:])
    return ConvolutionRows(taps.windows, groups), WeightLayout(weight.shape, split, order)


def _normalization(node: ir.Node, weight: Array) -> tuple[RowSource, WeightLayout] | str:
    epsilon = float(attribute(node, "epsilon", 1e-5))
    layout = WeightLayout(weight.shape, (weight.size, 1, 1), (0, 1, 2))
    if node.op_type == "InstanceNormalization":
        return NormalizedRows(2, epsilon, channel=1), layout
    if node.op_type == "LayerNormalization":
        first = int(attribute(node, "axis", -1))
        sizes = dimensions(node.inputs[0])
        if sizes is None:
            return "the rank of its input is not known"
        first %= len(sizes)
        if not _is_one_for_each(weight.shape, sizes[first:]):
            return "its scale is broadcast"
        return NormalizedRows(first, epsilon), layout
    return f"{node.op_type} has no weights that are known how to train"


def _is_one_for_each(shape: tuple[int, ...], sizes: tuple[int | None, ...]) -> bool:
    """That a scale of that shape has a number for each element of axes of those sizes; None is a size not known."""
    more = len(sizes) - len(shape)
    own = (1,) * more + shape[max(0, -more) :]
    is_covered = all(count > 1 or size == 1 for count, size in zip(own, sizes, strict=True))
    return is_covered and all(count == 1 for count in shape[: max(0, -more)])

"""The rounding of a layer's weights for a Gram matrix: the grid of its format, and groups with scales of their own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.decide.searched_scales import searched_parameters
from quark.features.compensation.fixed_scales import FixedScales
from quark.features.compensation.grids import block_grid, independent, rounded_alone, spread
from quark.features.compensation.options import CompensationOptions
from quark.features.compensation.rounding import Grid, Root, compensated, descended
from quark.features.finetuning.layers import TrainedLayer
from quark.formats.affine import integer_format
from quark.formats.catalog import get_format
from quark.plan import AffineChoice, BlockChoice, FloatChoice
from quark.rounded import float_scale, parameters_of, rounded

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Rounding:
    """Rounded weights, those that the network would have without rounding, and the groups whose scales were chosen."""

    values: Array
    best: Array
    groups: Groups | None


def rounded_matrices(
    layer: TrainedLayer, weight: Array, inner: Array, cross: Array | None, options: CompensationOptions, sweeps: int
) -> Rounding | str:
    """The rounded weights; or why there are none. With `cross`, they make up for the rounding of inputs as well."""
    groups = Groups.of(layer, weight, inner)
    grid = _grid(layer, weight) if groups is None else groups.grid()
    if isinstance(grid, str):
        return grid
    if options.has_activation_order:
        grid = grid.in_order_of(np.einsum("gii->i", inner))
    root = Root.of(inner, grid.order, options.damping)
    matrices = layer.layout.to_matrices(weight.astype(inner.dtype))
    best = matrices if cross is None else root.best_weights(matrices, cross)
    values = compensated(best, root, grid)
    del root
    if not grid.is_joint:
        values = descended(best, values, inner, grid.quantize, sweeps)
    if groups is None:
        # as the network will see them: the scale of a block is that of the stored values
        stored = layer.layout.from_matrices(values).astype(np.float32)
        values = layer.layout.to_matrices(rounded(stored, layer.weight).astype(inner.dtype))
    return Rounding(values, best, groups)


def _grid(layer: TrainedLayer, weight: Array) -> Grid | str:
    """The rounding of columns, and the columns that have their turn together; or the reason against it."""
    choice, layout = layer.weight, layer.layout
    columns = layout.matrices[2]
    if isinstance(choice, AffineChoice):
        scale, zero_point = spread(parameters_of(choice, weight.shape), weight.shape)
        fmt = integer_format(choice.format)
        return independent(FixedScales(layout.to_matrices(scale), layout.to_matrices(zero_point), fmt), columns)
    if isinstance(choice, BlockChoice):
        units = _blocks(choice.axis, choice.quantizer.format.block_size, layer, weight.shape)
        return "its blocks go across outputs" if units is None else block_grid(choice, units)
    if isinstance(choice, FloatChoice) and choice.is_scaled:
        scale = np.broadcast_to(float_scale(choice, weight.ndim), weight.shape).astype(np.float64)
        element: Any = get_format(choice.format)
        return independent(FixedScales(layout.to_matrices(scale), None, element), columns)
    return independent(rounded_alone(choice), columns)


class Groups:
    """Groups of a matrix whose scales are chosen for the values that they have when their turn comes."""

    def __init__(self, layer: TrainedLayer, weight: Array, planned: AffineChoice, units: list[Array], gram: Array):
        self._layout, self._shape, self._planned, self._gram = layer.layout, weight.shape, planned, gram
        self._before = [
            self._layout.to_matrices(numbers) for numbers in spread(parameters_of(planned, self._shape), self._shape)
        ]
        self._scale, self._zero_point = (numbers.copy() for numbers in self._before)
        self._units = units

    @classmethod
    def of(cls, layer: TrainedLayer, weight: Array, inner: Array) -> Groups | None:
        """The groups of a layer; None if it has none."""
        choice = layer.weight
        if not isinstance(choice, AffineChoice) or choice.group_size is None or layer.layout.matrices[0] != 1:
            return None
        units = _blocks(choice.axis or 0, choice.group_size, layer, weight.shape)
        return None if units is None else cls(layer, weight, choice, units, inner[0])

    def grid(self) -> Grid:
        """The rounding of columns. It refers to this object, which must not refer to it: matrices in a cycle stay in
        memory until the garbage collector runs."""
        scales = FixedScales(self._scale, self._zero_point, integer_format(self._planned.format))
        return Grid(scales, self._units, at_turn=self._begin)

    def _begin(self, values: Array, columns: Array) -> None:
        part = self._gram[np.ix_(columns, columns)].astype(np.float32)[None]
        is_symmetric = integer_format(self._planned.format).signed
        searched = searched_parameters(self._planned.format, values[0][:, None], part, is_symmetric=is_symmetric)
        self._scale[0][:, columns], self._zero_point[0][:, columns] = searched

    def choice(self, is_changed: Array) -> AffineChoice:
        """The choice with the scales of the outputs that changed, and the planned ones of the others."""
        axis, parameters = self._planned.axis or 0, []
        for now, planned in zip((self._scale, self._zero_point), self._before, strict=True):
            whole = self._layout.from_matrices(np.where(is_changed[:, :, None], now, planned))
            parameters.append(np.take(whole, np.arange(0, whole.shape[axis], self._planned.group_size), axis).ravel())
        scale, zero_point = parameters[0].astype(np.float32).astype(np.float64), parameters[1].astype(int)
        return replace(self._planned, scale=tuple(scale.tolist()), zero_point=tuple(zero_point.tolist()))


def _blocks(axis: int, size: int, layer: TrainedLayer, shape: tuple[int, ...]) -> list[Array] | None:
    """The columns of each block of `size` along an axis; None if a block has weights of several outputs."""
    places = layer.layout.to_matrices(np.arange(math.prod(shape)).reshape(shape))
    axis %= len(shape)
    index = np.array(np.unravel_index(places, shape))  # [axes, groups, outputs, columns]
    along = index[axis]
    if (along != along[:1, :1]).any():
        return None
    others = [index[other_axis][0, 0] for other_axis in range(len(shape)) if other_axis != axis]
    keys = np.stack([*others, along[0, 0] // size])
    _, inverse = np.unique(keys, axis=1, return_inverse=True)
    flat = inverse.reshape(-1)
    units = [np.flatnonzero(flat == number) for number in range(int(flat.max()) + 1)]
    return [unit[np.argsort(along[0, 0][unit], kind="stable")] for unit in units]

"""Scales of groups for the least squared error, of weights or of what a layer computes with them.

A group starts from the scale that its range gives. Shares of that scale clip the largest values and round the others
more finely. Every candidate is rounded once, its scale is fitted to the codes by least squares, and the numbers are
rounded again with the fitted scale. A group keeps the best of all, so it is never worse than where it started.

Blocks of small floats whose scale is a power of two have three candidates: the usual power, and its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quark.decide.view import Array
from quark.formats.affine import integer_format
from quark.formats.block import BlockQuantizer
from quark.formats.quantize import quantize_dequantize
from quark.formats.spec import BlockFormat, IntFormat
from quark.plan import AffineChoice

# shares of the scale from a range, by bits
_SHARES = {2: (1.0, 0.86, 0.74, 0.64, 0.55), 4: (1.0, 0.96, 0.92, 0.87, 0.81), 8: (1.0, 0.997, 0.994, 0.99)}
# in addition for 4 bits and more than _LONG weights: the largest of many weights is an outlier, and clipping it pays
# off. Two of five channels of SmolLM2 have their least squared error below 0.81, one of twenty below 0.65
_LONG = 256
_SHARES_OF_LONG = (0.75, 0.68, 0.6, 0.52)
_CHUNK = 1 << 17  # weights per chunk
_TINY = np.float32(np.finfo(np.float32).tiny)


def searched(choice: AffineChoice, weight: Array, gram: Array | None = None) -> AffineChoice:
    """Search better scales, and zero points if the codes are unsigned, for groups or channels of a constant.

    `gram` is E[x x'] of the inputs that the weights along the groups' axis are multiplied with. If it is given, the
    error of a group is that of the outputs, d' G d with the group's part of it; otherwise all weights count the same.
    Its diagonal alone can be given as well: the weights of a squared error.
    """
    grid = _Grid(integer_format(choice.format))
    lines, size = _lines(choice, weight)
    scale, zero_point = (_by_line(choice, numbers, weight.shape) for numbers in (choice.scale, choice.zero_point))
    scale = scale.astype(np.float32)
    blocks = None
    if gram is not None:
        numbers = np.asarray(gram, np.float32)
        blocks = gram_blocks(numbers, size) if numbers.ndim == 2 else _padded(numbers[None], size)[0]
    for part in _parts(lines):
        groups = _padded(lines[part].astype(np.float32), size)
        scale[part], zero_point[part] = grid.search(groups, scale[part], zero_point[part], blocks)
    scales, zeros = (_from_lines(choice, numbers, weight.shape) for numbers in (scale, zero_point))
    return AffineChoice(
        choice.format,
        tuple(scales.astype(np.float64).tolist()),
        tuple(zeros.astype(int).tolist()),
        choice.axis,
        choice.group_size,
    )


def searched_parameters(format: str, groups: Array, gram: Array | None, *, is_symmetric: bool) -> tuple[Array, Array]:
    """Search scales and zero points [lines, groups] for numbers [lines, groups, size], starting from their ranges.
    `gram` has the part of each group, [groups, size, size]."""
    integer = integer_format(format)
    values = groups.astype(np.float32)
    low, high = values.min(axis=2), values.max(axis=2)
    if is_symmetric:
        extreme = np.where(np.abs(high) > np.abs(low), high, low)
        scale, zero_point = extreme / np.float32(integer.qmin), np.zeros(extreme.shape)
    else:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scale = (high - low) / np.float32(integer.qmax - integer.qmin)
        safe = np.where(np.abs(scale) < _TINY, 1, scale)
        zero_point = np.clip(np.rint(integer.qmin - low / safe), integer.qmin, integer.qmax).astype(np.float64)
    scale = np.where(np.abs(scale) < _TINY, np.float32(1), scale).astype(np.float32)
    return _Grid(integer).search(values, scale, zero_point, gram)


def has_searchable_blocks(fmt: BlockFormat) -> bool:
    """True if a block has one scale, any power of two."""
    return fmt.sub_blocks is None and not fmt.carry and fmt.scale is None


def searched_powers(values: Array, importance: Array, quantizer: BlockQuantizer) -> Array:
    """For every number of [lines, length], the power of two that its block is divided by for the least squared error.
    Errors count by `importance`, one number for each place along the lines.

    The rules `floor` and `even` may find another scale for the rounded numbers. With elements of 4 or 6 bits they leave
    them as they are: twice an element is an element, as far as the range reaches.
    """
    fmt = quantizer.format
    lines, length = values.shape
    size = fmt.block_size
    padded = np.pad(values, [(0, 0), (0, -length % size)]).reshape(lines, -1, size)
    weights = np.pad(importance, (0, -length % size)).reshape(1, -1, size)
    largest = np.abs(padded).max(axis=2)
    first = np.floor(np.log2(np.where(largest > 0, largest, 1.0))) - fmt.element.emax
    best, least = np.exp2(first), np.full(first.shape, np.inf)
    for shift in (0, 1, -1):
        scale = np.exp2(first + shift)
        steps = (padded / scale[:, :, None]).astype(np.float32)
        tried = quantize_dequantize(steps, fmt.element).astype(np.float64) * scale[:, :, None]
        error = (np.square(tried - padded) * weights).sum(axis=2)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return np.repeat(best, size, axis=1)[:, :length]


def gram_blocks(gram: Array, size: int) -> Array:
    """The diagonal parts of a Gram matrix, [groups, size, size]; the last one is padded with zeros.

    >>> gram_blocks(np.arange(9).reshape(3, 3), 2).tolist()
    [[[0, 1], [3, 4]], [[8, 0], [0, 0]]]
    """
    inputs = gram.shape[0]
    count = -(-inputs // size)
    full = np.pad(gram, [(0, count * size - inputs)] * 2)
    places = np.arange(count)
    return np.asarray(full.reshape(count, size, count, size)[places, :, places])


class _Grid:
    """The codes of an integer format. Zero points may change if it is unsigned."""

    def __init__(self, integer: IntFormat) -> None:
        self.qmin, self.qmax, self.bits = integer.qmin, integer.qmax, integer.bits
        self.is_free = not integer.signed

    def search(self, groups: Array, scale: Array, zero_point: Array, gram: Array | None) -> tuple[Array, Array]:
        """The best scales and zero points, [lines, groups], of numbers [lines, groups, size]."""
        best_scale, best_zero = scale.copy(), zero_point.copy()
        least = np.full(scale.shape, np.inf)
        steps, error, spread = (np.empty_like(groups) for _ in range(3))
        for share in _shares(self.bits, groups.shape[2]):
            tried, zero = scale * np.float32(share), zero_point
            if self.is_free and share != 1.0:
                # keep the middle of the range, as far as codes allow
                middle = (self.qmin + self.qmax) / 2
                zero = np.clip(np.rint(middle - (middle - zero_point) / share), self.qmin, self.qmax)
            # if all zero points are 0, adding and subtracting them changes nothing
            shift = zero[..., None].astype(np.float32) if zero.any() else None
            for is_last in (False, True):
                # once, because numpy broadcasts at less than half of its usual speed
                np.copyto(spread, tried[..., None])
                np.divide(groups, spread, out=steps)
                np.rint(steps, out=steps)
                if shift is not None:
                    steps += shift
                np.clip(steps, self.qmin, self.qmax, out=steps)
                if shift is not None:
                    steps -= shift
                np.multiply(steps, spread, out=error)
                np.subtract(groups, error, out=error)
                loss = _product(error, error, gram)
                is_better = loss < least
                np.copyto(best_scale, tried, where=is_better)
                np.copyto(best_zero, zero, where=is_better)
                np.copyto(least, loss, where=is_better)
                if is_last:
                    break
                energy = _product(steps, steps, gram)
                fitted = (_product(groups, steps, gram) / np.where(energy > 0, energy, 1)).astype(np.float32)
                is_sound = (energy > 0) & (fitted * tried > 0) & (np.abs(fitted) >= _TINY)
                tried = np.where(is_sound, fitted, tried)
        return best_scale, best_zero


def _product(first: Array, second: Array, gram: Array | None) -> Array:
    """a' G b of each group, [lines, groups]."""
    if gram is not None:
        is_diagonal = gram.ndim == 2  # [groups, size]
        second = second * gram if is_diagonal else np.matmul(second.swapaxes(0, 1), gram).swapaxes(0, 1)
    return np.asarray(np.einsum("lgs,lgs->lg", first, second))


def _shares(bits: int, size: int) -> tuple[float, ...]:
    if bits > max(_SHARES):
        return (1.0,)
    row = min(width for width in _SHARES if width >= bits)
    return _SHARES[row] + (_SHARES_OF_LONG if row == 4 and size > _LONG else ())


def _lines(choice: AffineChoice, weight: Array) -> tuple[Array, int]:
    """The constant as lines of groups, [lines, length], and the length of a group. A channel is a line."""
    assert choice.axis is not None
    axis = choice.axis % weight.ndim
    if choice.group_size is None:
        lines = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1)
        return lines, lines.shape[1]
    moved = np.moveaxis(weight, axis, -1)  # a view of a matrix: the pieces are copied one by one
    return (moved if moved.ndim == 2 else moved.reshape(-1, moved.shape[-1])), choice.group_size


def _by_line(choice: AffineChoice, values: tuple[float, ...] | tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """Reorder parameters from the order of a choice to [lines, groups of a line]."""
    numbers = np.array(values, np.float64)
    if choice.group_size is None:
        return numbers.reshape(-1, 1)
    assert choice.axis is not None
    axis, sizes = choice.axis % len(shape), [*shape]
    sizes[axis] = -(-sizes[axis] // choice.group_size)
    return np.ascontiguousarray(np.moveaxis(numbers.reshape(sizes), axis, -1)).reshape(-1, sizes[axis])


def _from_lines(choice: AffineChoice, values: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `_by_line`, flat."""
    if choice.group_size is None:
        return values.reshape(-1)
    assert choice.axis is not None
    axis = choice.axis % len(shape)
    others = [size for index, size in enumerate(shape) if index != axis]
    return np.moveaxis(values.reshape(*others, -1), -1, axis).reshape(-1)


def _padded(lines: Array, size: int) -> Array:
    """[lines, groups, size]; the last group is padded with zeros, which are exact at any scale."""
    missing = -lines.shape[1] % size
    full = np.pad(lines, [(0, 0), (0, missing)]) if missing else lines
    return np.ascontiguousarray(full).reshape(len(lines), -1, size)


def _parts(lines: Array) -> Iterator[slice]:
    count = max(1, _CHUNK // max(1, lines.shape[1]))
    for start in range(0, len(lines), count):
        yield slice(start, start + count)

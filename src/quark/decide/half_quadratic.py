"""Scales of groups for the least sum of |error|^p with p below 1, by half-quadratic splitting.

With a squared error, a few outliers decide the scale of their group; with a power below 1, most weights do. Two steps
alternate: shrinking gives the errors that should remain, and least squares gives the scale for them (and, if it is
asymmetric, the zero point, which stays an integer). Each group keeps its best parameters.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quark.decide.view import Array
from quark.formats.affine import integer_format
from quark.plan import AffineChoice

POWER = 0.7
_ROUNDS = 20
_FIRST_PENALTY, _PENALTY_GROWTH = 10.0, 1.01
_TINY = 1e-8
_CHUNK = 1 << 21  # weights per chunk


def refined(choice: AffineChoice, weight: Array) -> AffineChoice:
    """Improve scales and zero points for groups or channels of a constant. No group gets worse by this measure."""
    assert choice.axis is not None
    if choice.group_size is None:  # a channel is a group
        lines = np.moveaxis(weight, choice.axis, 0).reshape(weight.shape[choice.axis], -1)
        whole = refined(replace(choice, axis=1, group_size=lines.shape[1]), lines)
        return replace(whole, axis=choice.axis, group_size=None)
    groups = _groups(weight, choice.axis % weight.ndim, choice.group_size)
    integer = integer_format(choice.format)
    scale, zero_point = (np.array(numbers, np.float32).reshape(-1, 1) for numbers in (choice.scale, choice.zero_point))
    scale, zero_point = (_in_order_of_groups(numbers, weight, choice) for numbers in (scale, zero_point))
    is_free = not integer.signed
    count = max(1, _CHUNK // choice.group_size)
    for start in range(0, len(groups), count):
        part = slice(start, start + count)
        refined_part = _refine(groups[part], scale[part], zero_point[part], integer.qmin, integer.qmax, is_free)
        scale[part], zero_point[part] = refined_part
    scale, zero_point = (_in_order_of_groups(numbers, weight, choice, is_back=True) for numbers in (scale, zero_point))
    scales, zero_points = scale.astype(np.float64).ravel().tolist(), zero_point.astype(int).ravel().tolist()
    return AffineChoice(choice.format, tuple(scales), tuple(zero_points), choice.axis, choice.group_size)


def _groups(weight: Array, axis: int, size: int) -> Array:
    """[groups, size] with the groups of one line next to each other; what is missing in the last one is NaN."""
    lines = np.moveaxis(weight.astype(np.float32), axis, -1)
    missing = -lines.shape[-1] % size
    padded = np.pad(lines, [(0, 0)] * (lines.ndim - 1) + [(0, missing)], constant_values=np.nan)
    return padded.reshape(-1, size)


def _in_order_of_groups(values: Array, weight: Array, choice: AffineChoice, *, is_back: bool = False) -> Array:
    """Reorder parameters from the order of a choice, which is the shape of the weight with groups in place of the axis,
    to that of `_groups`, or back."""
    assert choice.axis is not None
    assert choice.group_size is not None
    axis = choice.axis % weight.ndim
    shape = [*weight.shape]
    shape[axis] = -(-shape[axis] // choice.group_size)
    if is_back:
        shape.append(shape.pop(axis))
        return np.moveaxis(values.reshape(shape), -1, axis)
    return np.ascontiguousarray(np.moveaxis(values.reshape(shape), axis, -1)).reshape(-1, 1)


def _refine(groups: Array, scale: Array, zero_point: Array, qmin: int, qmax: int, is_free: bool) -> tuple[Array, Array]:
    """The best scale and zero point of every group; the zero point changes only if it `is_free`."""
    is_there = ~np.isnan(groups)
    values = np.where(is_there, groups, 0.0)

    def coded(scale: Array, zero_point: Array) -> Array:
        steps = np.clip(np.rint(values / scale + zero_point), qmin, qmax) - zero_point
        return np.where(is_there, steps, 0.0)

    def loss(scale: Array, zero_point: Array) -> Array:
        errors: Array = np.abs(values - scale * coded(scale, zero_point)) ** POWER
        total: Array = errors.sum(axis=1, keepdims=True)
        return total

    best = (scale.copy(), zero_point.copy())
    least = loss(scale, zero_point)
    penalty = _FIRST_PENALTY
    for _ in range(_ROUNDS):
        steps = coded(scale, zero_point)
        error = (values - scale * steps) / np.abs(scale)  # in steps, so that the penalty means the same for every scale
        shrunk = np.maximum(np.abs(error) - (np.abs(error) + _TINY) ** (POWER - 1) / penalty, 0.0)
        target = values - np.sign(error) * shrunk * np.abs(scale)
        if is_free:
            count = is_there.sum(axis=1, keepdims=True)
            shift = ((target / scale - steps) * is_there).sum(axis=1, keepdims=True) / count
            zero_point = np.clip(np.rint(zero_point - shift), qmin, qmax)
            steps = coded(scale, zero_point)
        energy = (steps * steps).sum(axis=1, keepdims=True)
        fitted = (target * steps).sum(axis=1, keepdims=True) / np.where(energy > 0, energy, 1.0)
        scale = np.where((energy > 0) & (fitted * scale > 0), fitted, scale).astype(np.float32)
        current = loss(scale, zero_point)
        is_better = current < least
        best = (np.where(is_better, scale, best[0]), np.where(is_better, zero_point, best[1]))
        least = np.where(is_better, current, least)
        penalty *= _PENALTY_GROWTH
    return best

"""Scale and zero point from a range: of activations that were measured, and of weights and biases that are known.

A bias of 32 bits is added to the sum of products, so that its scale is the product of theirs:

    bias_scale = activation_scale * weight_scale        (for each channel, where the weight has one for each)

Where the bias does not fit into 32 bits at that scale, the weight's scale is raised until it does: the weight loses a
fraction of a bit, where a saturated bias would lose everything. A channel whose weights are all zero has no scale of
its own; it gets one at which its bias is exact to 24 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.errors import ModelError
from quark.formats.affine import choose_affine
from quark.formats.catalog import get_format
from quark.formats.power_of_two import scale_of_position
from quark.formats.spec import IntFormat
from quark.onnx.choose.options import TensorOverride
from quark.onnx.choose.overrides import overridden
from quark.onnx.choose.specs import AffineSpec
from quark.onnx.choose.weight_ranges import weight_extremes
from quark.onnx.large_tensors import pieces, whole
from quark.plan import AffineChoice
from quark.ranges import MinMax, NonOverflow, TensorRange, range_of, ranges_of_channels

Array = NDArray[Any]

MAX_BIAS_CODE = 2.0**31 * (1 - 2.0**-20)  # with room for the rounding of scales
_ZERO_CHANNEL_BITS = 24
_SMALLEST_FITTED_SCALE = 2.0**-100


@dataclass(frozen=True)
class ChannelAxis:
    """The axis of a weight that has a scale for each channel, or for each group along it."""

    axis: int
    group_size: int | None = None


def choice_of_range(
    spec: AffineSpec, found: TensorRange, override: TensorOverride | None = None, has_unsigned_relu: bool = False
) -> AffineChoice:
    """The choice for a tensor with that range. `has_unsigned_relu`: a symmetric unsigned tensor that is never negative
    has no code to lose below zero, so that its zero point is 0 and its scale half as large."""
    if override is not None and override.range is not None:
        found = _fixed_range(spec, override.range)
    if has_unsigned_relu and found.lowest >= 0 and spec.is_symmetric and not spec.integer.signed:
        if found.position is not None:
            choice = AffineChoice(spec.format, (scale_of_position(found.position + 1),), (0,))
            return overridden(choice, override)
        spec = replace(spec, is_symmetric=False)
    if spec.is_power_of_two and found.position is not None:
        return overridden(_of_position(spec.integer, found.position), override)
    low, high = np.array([found.lowest]), np.array([found.highest])
    return overridden(_of_ranges(spec, low, high, None), override)


def choice_of_weight(
    spec: AffineSpec, weight: ir.TensorProtocol, channels: ChannelAxis | None, override: TensorOverride | None = None
) -> AffineChoice:
    """The choice for a constant: one scale, or one for each channel."""
    has_extremes = spec.method == MinMax()
    if channels is None or spec.is_power_of_two:
        if has_extremes:
            (low,), (high,) = weight_extremes(weight)
            return choice_of_range(spec, TensorRange(float(low), float(high)), override)
        return choice_of_range(spec, range_of(whole(weight), spec.method, spec.integer, spec.is_symmetric), override)
    if channels.group_size is not None:
        return _of_ranges(spec, *weight_extremes(weight, channels.axis, channels.group_size), channels)
    if has_extremes:
        low, high = weight_extremes(weight, channels.axis)
    else:
        low, high = ranges_of_channels(whole(weight), channels.axis, spec.method, spec.integer, spec.is_symmetric)
    return overridden(_of_ranges(spec, low, high, channels), override)


def combine_ranges(ranges: Sequence[TensorRange]) -> TensorRange:
    """One range for tensors that share a scale: nothing that one of them needs is clipped."""
    positions = [each.position for each in ranges if each.position is not None]
    return TensorRange(
        min(each.lowest for each in ranges),
        max(each.highest for each in ranges),
        min(positions) if len(positions) == len(ranges) else None,
    )


def fit_weight_to_bias(weight: AffineChoice, values: Array, activation_scale: float, bias: Array) -> AffineChoice:
    """The weight's choice with scales raised where the bias would overflow 32 bits, and chosen for the bias where a
    channel of the weight is all zeros."""
    scale = np.array(weight.scale)
    wanted = np.abs(bias.astype(np.float64).ravel()) / activation_scale
    if wanted.size != scale.size:
        wanted = np.full(scale.shape, wanted.max(initial=0.0))
    fine = np.maximum(wanted * 2.0**-_ZERO_CHANNEL_BITS, _SMALLEST_FITTED_SCALE)
    is_free = _zero_channels(values, weight.axis) & (wanted > 0)
    fitted = _as_float32(np.where(is_free, fine, np.maximum(scale, wanted / MAX_BIAS_CODE)))
    if (fitted == scale).all():
        return weight
    return AffineChoice(weight.format, _floats(fitted), weight.zero_point, weight.axis, weight.group_size)


def _zero_channels(values: Array, axis: int | None) -> Array:
    """Which channels, or whether all of it where there is no axis, are zeros."""
    if axis is None:
        return np.array([not values.any()])
    others = tuple(i for i in range(values.ndim) if i != axis % values.ndim)
    return np.asarray(~values.any(axis=others))


def derived_bias(spec: AffineSpec, activation: AffineChoice, weight: AffineChoice) -> AffineChoice:
    """A bias whose scale is the product of the activation's and the weight's."""
    scale = _as_float32(np.array(weight.scale, np.float32) * np.float32(activation.scale[0]))
    scale = np.maximum(scale, np.finfo(np.float32).tiny)
    axis = None if scale.size == 1 else 0
    return AffineChoice(spec.format, _floats(scale), (0,) * scale.size, axis)


def own_bias(spec: AffineSpec, bias: Array, override: TensorOverride | None = None) -> AffineChoice:
    """A bias with a range of its own, symmetric."""
    return choice_of_weight(spec, ir.Tensor(bias), None, override)


def check_finite(name: str, values: Array | ir.TensorProtocol) -> None:
    """A constant with NaN or Inf has no scale."""
    arrays = [values] if isinstance(values, np.ndarray) else (piece.array for piece in pieces(values))
    if not all(_is_finite(array) for array in arrays):
        raise ModelError(f"tensor '{name}' holds NaN or Inf: expected finite weights; look at how it was trained")


def _is_finite(array: Array) -> bool:
    """A finite sum has finite terms, and is found in half the time; large terms may have an infinite one."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(array.sum()) or np.isfinite(array).all())


def _fixed_range(spec: AffineSpec, bounds: tuple[float, float]) -> TensorRange:
    """A range that a user gives; with power-of-two scales, the smallest of those that clips nothing of it."""
    method = NonOverflow() if spec.is_power_of_two else MinMax()
    return range_of(np.array(bounds, np.float32), method, spec.integer, spec.is_symmetric)


def _of_position(integer: IntFormat, position: int) -> AffineChoice:
    middle = 0 if integer.signed else 1 << (integer.bits - 1)
    return AffineChoice(integer.name, (scale_of_position(position),), (middle,))


def _of_ranges(spec: AffineSpec, low: Array, high: Array, channels: ChannelAxis | None) -> AffineChoice:
    integer = spec.integer
    narrow = get_format(f"{'' if integer.signed else 'u'}int{integer.bits - spec.has_reduced_range}")
    low, high = np.asarray(low, np.float32), np.asarray(high, np.float32)
    scale, zero_point = choose_affine(low, high, narrow, symmetric=spec.is_symmetric)
    axis, group_size = (None, None) if channels is None else (channels.axis, channels.group_size)
    return AffineChoice(integer.name, _floats(scale), tuple(np.asarray(zero_point).tolist()), axis, group_size)


def _as_float32(values: Array) -> Array:
    return values.astype(np.float32)


def _floats(values: Array) -> tuple[float, ...]:
    return tuple(np.asarray(values, np.float64).tolist())

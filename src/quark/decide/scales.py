"""Scale and zero point from a range: of activations that were measured, and of weights and biases that are known.

A bias of 32 bits is added to the sum of products, so that its scale is the product of theirs:

    bias_scale = activation_scale * weight_scale        (for each channel, where the weight has one for each)

Where the bias does not fit into 32 bits at that scale, the weight's scale is raised until it does: the weight loses a
fraction of a bit, where a saturated bias would lose everything (`ChoiceOptions.has_fitted_weights` turns this off). A
channel whose weights are all zero has no scale of its own; it gets one at which its bias is exact to 24 bits. Scales of
8-bit floats are fitted alike, although their biases stay float: ONNX Runtime rounds those by itself in the same way.

A scale that is trained starts from zero point 0 and uses all codes. A scale that a user fixes for a tensor by name
(`TensorOverride`) goes before all of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from quark.decide.half_quadratic import refined
from quark.decide.options import TensorOverride
from quark.decide.searched_scales import searched
from quark.decide.specs import AffineSpec, Algorithm, GroupRule
from quark.decide.view import Array, ArrayConstant, Constant
from quark.errors import InvalidValueError
from quark.formats.affine import choose_affine
from quark.formats.catalog import get_format
from quark.formats.power_of_two import scale_of_position
from quark.formats.quantize import quantize_dequantize
from quark.plan import AffineChoice, FloatChoice
from quark.ranges import MinMax, NonOverflow, TensorRange, range_of, ranges_of_channels
from quark.rounded import rounded

MAX_BIAS_CODE = 2.0**31 * (1 - 2.0**-20)  # leaves room for the rounding of scales
# ONNX Runtime does not saturate, and correction and finetuning change biases later; a wider scale costs floats nothing.
MAX_FLOAT8_BIAS_CODE = 2.0**24
_ZERO_CHANNEL_BITS = 24
_FEW_BITS = 4
Scaled = TypeVar("Scaled", AffineChoice, FloatChoice)
_SMALLEST_FITTED_SCALE = 2.0**-100
_SMALLEST_THRESHOLD = 2.0**-100
_OCTAVE = tuple(2.0 ** (i / 16) for i in range(16))
_STEP_SHARES = tuple(0.96**i for i in range(1, 57))  # down to a tenth
_MAX_INT16, _MAX_INT16_SHIFT, _SMALLEST_INT16_SCALE = 2.0**15 - 1, 16, 2.0**-14


@dataclass(frozen=True)
class ChannelAxis:
    """The axis of a weight that has a scale for each channel, or for each group along it."""

    axis: int
    group_size: int | None = None


def choice_of_range(
    spec: AffineSpec, tensor_range: TensorRange, override: TensorOverride | None = None, has_unsigned_relu: bool = False
) -> AffineChoice:
    """The choice for a tensor with that range. `has_unsigned_relu`: a symmetric unsigned tensor that is never negative
    needs no codes below zero, so its zero point is 0 and its scale half as large."""
    integer = spec.integer
    if spec.learning is not None and spec.learning.algorithm is Algorithm.TQT:
        threshold = max(-tensor_range.lowest, tensor_range.highest, _SMALLEST_THRESHOLD)
        scale = math.ldexp(1.0, math.ceil(math.log2(threshold)) - integer.qmax.bit_length())
        return AffineChoice(integer.name, (scale,), (0,))
    if spec.learning is not None:
        step = max(tensor_range.highest / integer.qmax, float(np.finfo(np.float32).tiny))
        return AffineChoice(integer.name, (step,), (0,))
    # with powers of two, the smallest that does not clip the range
    if override is not None and override.range is not None:
        method = NonOverflow() if spec.is_power_of_two else MinMax()
        tensor_range = range_of(np.array(override.range, np.float32), method, integer, spec.is_symmetric)
    if has_unsigned_relu and tensor_range.lowest >= 0 and spec.is_symmetric and not integer.signed:
        if tensor_range.position is not None:
            return _overridden(
                AffineChoice(spec.format, (scale_of_position(tensor_range.position + 1),), (0,)), override
            )
        spec = replace(spec, is_symmetric=False)
    if spec.is_power_of_two and tensor_range.position is not None:
        middle = 0 if integer.signed else 1 << (integer.bits - 1)
        return _overridden(AffineChoice(integer.name, (scale_of_position(tensor_range.position),), (middle,)), override)
    low, high = np.array([tensor_range.lowest]), np.array([tensor_range.highest])
    return _overridden(_of_ranges(spec, low, high, None), override)


def choice_of_weight(
    spec: AffineSpec, weight: Constant, channels: ChannelAxis | None, override: TensorOverride | None = None
) -> AffineChoice:
    """The choice for a constant: one scale, or one for each channel or group."""
    integer, method = spec.integer, spec.method
    if spec.learning is not None and spec.learning.algorithm is Algorithm.LSQ:
        return _start_of_lsq(spec, weight.array(), channels)
    if spec.learning is not None:
        channels, method = None, spec.observed_method(is_weight=True)
    if channels is None:
        if method == MinMax():
            (low,), (high,) = weight.extremes()
            return choice_of_range(spec, TensorRange(float(low), float(high)), override)
        return choice_of_range(spec, range_of(weight.array(), method, integer, spec.is_symmetric), override)
    if channels.group_size is not None:
        low, high = weight.extremes(channels.axis, channels.group_size)
        if spec.group_rule is GroupRule.RANGE or not spec.is_symmetric:
            choice = _of_ranges(spec, low, high, channels)
        else:
            choice = _of_lowest_code(spec, low, high, channels)
        return _improved(choice, spec, weight)
    if method == MinMax():
        low, high = weight.extremes(channels.axis)
        if spec.group_rule is not GroupRule.RANGE:
            whole = _of_lowest_code if spec.is_symmetric else _of_ranges
            return _improved(whole(spec, low, high, channels), spec, weight)
    else:
        low, high = ranges_of_channels(weight.array(), channels.axis, method, integer, spec.is_symmetric)
    return _overridden(_of_ranges(spec, low, high, channels), override)


def with_lowest_code(choice: AffineChoice, spec: AffineSpec, weight: Constant) -> AffineChoice:
    """The choice with scales at which a symmetric signed type also uses its lowest code, if that has the smaller
    squared error over the weight. Otherwise the choice itself, and for more than 4 bits, where one code matters little.

        scale = max(-lowest / 2^(bits - 1), highest / (2^(bits - 1) - 1))          nothing is clipped
    """
    is_even = spec.is_symmetric and spec.integer.signed and spec.method == MinMax() and spec.learning is None
    if not is_even or spec.integer.bits > _FEW_BITS or spec.is_power_of_two or spec.group_rule is not GroupRule.RANGE:
        return choice
    low, high = weight.extremes(choice.axis, choice.group_size)
    scale = np.maximum(low / np.float32(spec.integer.qmin), high / np.float32(spec.integer.qmax))
    scale = np.where(scale < np.finfo(np.float32).tiny, np.array(choice.scale, np.float32), scale)
    full = replace(choice, scale=_floats(scale.astype(np.float32)))
    values = weight.array()
    errors = [
        float(np.square(rounded(values, candidate) - values, dtype=np.float64).sum()) for candidate in (choice, full)
    ]
    return full if errors[1] < errors[0] else choice


def _improved(choice: AffineChoice, spec: AffineSpec, weight: Constant) -> AffineChoice:
    """The choice with scales found by the search that the spec's rule requests."""
    if spec.group_rule is GroupRule.SEARCHED:
        return searched(choice, weight.array())
    return refined(choice, weight.array()) if spec.group_rule is GroupRule.HALF_QUADRATIC else choice


def _start_of_lsq(spec: AffineSpec, values: Array, channels: ChannelAxis | None) -> AffineChoice:
    """The step with the least squared error, of the tensor or of each channel; never below the smallest normal number.

    Shares of the step that clips nothing are tried; the step is then fitted to the codes of the best one by least
    squares, and kept if it is better.
    """
    axis = None if channels is None else channels.axis
    lines = values.reshape(1, -1) if axis is None else np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)
    lines = lines.astype(np.float32)
    integer, tiny = spec.integer, np.finfo(np.float32).tiny
    widest = np.maximum(np.abs(lines).max(axis=1, keepdims=True, initial=0) / integer.qmax, tiny)

    def codes_and_errors(steps: Array) -> tuple[Array, Array]:
        codes = np.clip(np.rint(lines / steps), integer.qmin, integer.qmax)
        return codes, np.square(codes * steps - lines).sum(axis=1, keepdims=True)

    best, least = widest, codes_and_errors(widest)[1]
    for share in _STEP_SHARES:
        errors = codes_and_errors(widest * share)[1]
        best, least = np.where(errors < least, widest * share, best), np.minimum(errors, least)
    codes, _ = codes_and_errors(best)
    fitted = (codes * lines).sum(axis=1, keepdims=True) / np.maximum(np.square(codes).sum(axis=1, keepdims=True), 1)
    fitted = np.maximum(fitted, tiny)
    best = np.where(codes_and_errors(fitted)[1] < least, fitted, best)
    scales = np.maximum(best.astype(np.float32), tiny).reshape(-1)
    return AffineChoice(spec.format, _floats(scales), (0,) * scales.size, axis)


def combine_ranges(ranges: Sequence[TensorRange]) -> TensorRange:
    """One range for tensors that share a scale; it clips none of them."""
    positions = [tensor_range.position for tensor_range in ranges if tensor_range.position is not None]
    return TensorRange(
        min(tensor_range.lowest for tensor_range in ranges),
        max(tensor_range.highest for tensor_range in ranges),
        min(positions) if len(positions) == len(ranges) else None,
    )


def searched_float_scales(values: Array, scale: Array, axis: int | None, format: str) -> Array:
    """Search scales from `scale` up to twice that for those at which 8-bit floats round the values with the least
    squared error; the smallest of equal ones. `scale` has one number, or one for each channel along the axis.

    The relative spacing of floats is the same in every binade, so a wider range costs nothing, and another octave would
    only repeat the errors of this one. It matters where the large values lie between two codes.
    """
    channels = values.reshape(1, -1) if axis is None else np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)
    wide = channels.astype(np.float32)
    best, least = scale, np.full(len(wide), np.inf)
    for share in _OCTAVE:
        tried = (scale * share).astype(np.float32)
        rounded = np.asarray(quantize_dequantize(wide / tried[:, None], format)) * tried[:, None]
        error = np.square(rounded - wide).sum(axis=1, dtype=np.float64)
        best, least = np.where(error < least, tried, best), np.minimum(error, least)
    return best


def fit_weight_to_bias(
    weight: Scaled, values: Array, activation_scale: float, bias: Array, *, is_raised: bool = True
) -> Scaled:
    """Raise the scales of a weight whose bias would overflow 32 bits, unless `is_raised` is False, and choose scales
    for the bias where a channel of the weight is all zeros."""
    most = MAX_BIAS_CODE if isinstance(weight, AffineChoice) else MAX_FLOAT8_BIAS_CODE
    scale = np.array(weight.scale)
    wanted = np.abs(bias.astype(np.float64).ravel()) / activation_scale
    if wanted.size != scale.size:
        wanted = np.full(scale.shape, wanted.max(initial=0.0))
    fine = np.maximum(wanted * 2.0**-_ZERO_CHANNEL_BITS, _SMALLEST_FITTED_SCALE)
    is_zero = np.array([not values.any()])
    if weight.axis is not None:
        others = tuple(i for i in range(values.ndim) if i != weight.axis % values.ndim)
        is_zero = np.asarray(~values.any(axis=others))
    is_free = is_zero & (wanted > 0)
    fitting = np.maximum(scale, wanted / most) if is_raised else scale
    if isinstance(weight, FloatChoice):  # by powers of two, which keep the rounding the same
        fitting = scale * np.exp2(np.ceil(np.log2(fitting / scale)))
    fitted = np.where(is_free, fine, fitting).astype(np.float32)
    if (fitted == scale).all():
        return weight
    return replace(weight, scale=_floats(fitted))


def derived_bias(format: str, activation: AffineChoice, weight: AffineChoice) -> AffineChoice:
    """A bias whose scale is the product of the activation's and the weight's scales."""
    scale = np.array(weight.scale, np.float32) * np.float32(activation.scale[0])
    scale = np.maximum(scale.astype(np.float32), np.finfo(np.float32).tiny)
    axis = None if scale.size == 1 else 0
    return AffineChoice(format, _floats(scale), (0,) * scale.size, axis)


def own_bias(spec: AffineSpec, bias: Array, override: TensorOverride | None = None) -> AffineChoice:
    """A symmetric bias with a range of its own."""
    return choice_of_weight(spec, ArrayConstant(bias), None, override)


def _of_ranges(spec: AffineSpec, low: Array, high: Array, channels: ChannelAxis | None) -> AffineChoice:
    """The choice for these ranges. Powers of two are rounded up, so that nothing more is clipped."""
    integer = spec.integer
    narrow = get_format(f"{'' if integer.signed else 'u'}int{integer.bits - spec.has_reduced_range}")
    low, high = np.asarray(low, np.float32), np.asarray(high, np.float32)
    scale, zero_point = choose_affine(low, high, narrow, symmetric=spec.is_symmetric)
    axis, group_size = (None, None) if channels is None else (channels.axis, channels.group_size)
    scales = _floats(scale)
    if spec.has_int16_scale:
        scales = tuple(int16_scale(number) for number in scales)
    elif spec.is_power_of_two:
        scales = tuple(math.ldexp(1.0, math.ceil(math.log2(number))) for number in scales)
    return AffineChoice(integer.name, scales, tuple(np.asarray(zero_point).tolist()), axis, group_size)


def _of_lowest_code(spec: AffineSpec, low: Array, high: Array, channels: ChannelAxis) -> AffineChoice:
    """Scales at which the lowest code stands for the largest magnitude, since no other code is as far from zero. The
    scale is negative if that number is positive, which ONNX Runtime supports in MatMulNBits."""
    integer = spec.integer
    extreme = np.where(np.abs(high) > np.abs(low), high, low).astype(np.float32)
    scale = extreme / np.float32(integer.qmin)
    scale = np.where(np.abs(scale) < np.finfo(np.float32).tiny, np.float32(1.0), scale)
    zero_point = (0,) * scale.size
    return AffineChoice(integer.name, _floats(scale), zero_point, channels.axis, channels.group_size)


def int16_scale(scale: float, *, is_upward: bool = False) -> float:
    """Round `scale` to an integer of at most 15 bits over a power of two from 1 to 2^16; with `is_upward`, to one that
    is no smaller. A scale that rounds to zero becomes 2^-14, and one beyond 2^15 - 1 becomes 2^15 - 1.

    >>> int16_scale(0.3) * 2**16
    19661.0
    """
    best, distance = 0.0, math.inf
    if scale > _MAX_INT16:
        return _MAX_INT16
    for exponent in range(_MAX_INT16_SHIFT + 1):
        wide = math.ldexp(scale, exponent)
        if wide > _MAX_INT16:
            break
        for integer in (math.floor(wide), math.ceil(wide)):
            number = math.ldexp(integer, -exponent)
            is_low = is_upward and number < scale
            if not is_low and abs(number - scale) < distance:
                best, distance = number, abs(number - scale)
    return best or _SMALLEST_INT16_SCALE


def _overridden(choice: AffineChoice, override: TensorOverride | None) -> AffineChoice:
    """The choice with the scale and zero point fixed by the override."""
    if override is None or (override.scale is None and override.zero_point is None):
        return choice
    scale = choice.scale if override.scale is None else override.scale
    scale = tuple(float(number) for number in np.array(scale, np.float32))
    zero_point = choice.zero_point if override.zero_point is None else override.zero_point
    subject, count = f"TensorQuantOverrides of '{override.tensor}'", len(choice.scale)
    if len(scale) != count or len(zero_point) != count:
        raise InvalidValueError(
            f"{subject}: {len(scale)} scales and {len(zero_point)} zero points, expected {count} of each"
        )
    if not all(0 < number < np.inf for number in scale):
        raise InvalidValueError(f"{subject}: scale {scale}, expected finite numbers above zero")
    fmt = AffineSpec(choice.format).integer
    if not all(fmt.qmin <= code <= fmt.qmax for code in zero_point):
        raise InvalidValueError(f"{subject}: zero point {zero_point}, {fmt.name} has {fmt.qmin} to {fmt.qmax}")
    return replace(choice, scale=scale, zero_point=zero_point)


def _floats(values: Array) -> tuple[float, ...]:
    return tuple(np.asarray(values, np.float64).tolist())

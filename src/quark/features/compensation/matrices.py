"""Round the weight matrix of a linear layer, knowing how its inputs vary together.

Several ways are tried: rounding to nearest with the scales of the spec, the same with searched scales, and compensated
rounding. Each output keeps the way with the least squared error, so that none is worse than rounding to nearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quark.decide.searched_scales import has_searchable_blocks, searched, searched_powers
from quark.decide.specs import AffineSpec, FloatSpec, TensorSpec
from quark.features.compensation.fixed_scales import FixedScales
from quark.features.compensation.grids import block_grid, independent, rounded_alone, spread
from quark.features.compensation.options import LanguageCompensationOptions
from quark.features.compensation.rounding import (
    Grid,
    Root,
    compensated,
    compensated_power,
    descended,
    fitted_scales,
    runs,
    squared_error,
)
from quark.formats.affine import AffineParameters, dequantize_affine, quantize_affine
from quark.formats.catalog import get_format
from quark.formats.spec import FloatFormat
from quark.plan import BlockChoice
from quark.rounded import parameters_of, rounded
from quark.torch.language.linear import (
    RoundedWeight,
    affine_choice,
    can_search,
    choice_without_scales,
    grid_of,
    round_to_nearest,
)

Array = NDArray[Any]
_ITERATIONS = 30  # steps of the power iteration


@dataclass(frozen=True, eq=False)
class MatrixRounding:
    """A rounded weight, and its squared error as a share of what rounding to nearest has."""

    weight: RoundedWeight
    ratio: float


def round_matrices(
    weights: Sequence[Array],
    best: Sequence[Array],
    inner: Array,
    spec: TensorSpec,
    damping: float,
    options: LanguageCompensationOptions,
) -> list[MatrixRounding]:
    """Round weights [outputs, inputs] that read the same input and have the same spec."""
    if not _is_by_row(spec):
        return [round_matrix(*pair, inner, spec, damping, options) for pair in zip(weights, best, strict=True)]
    whole = round_matrix(np.concatenate(weights), np.concatenate(best), inner, spec, damping, options)
    result, start = [], 0
    for weight in weights:
        part = slice(start, start + len(weight))
        start = part.stop
        parameters = whole.weight.parameters
        if parameters is not None:
            own = (parameters.scale[part], parameters.zero_point[part])
            parameters = AffineParameters(*own, parameters.format, parameters.axis, parameters.group_size)
        scale = None if whole.weight.scale is None else whole.weight.scale[part]
        result.append(MatrixRounding(RoundedWeight(whole.weight.values[part], parameters, scale), whole.ratio))
    return result


def _is_by_row(spec: TensorSpec) -> bool:
    """True if every output is rounded by itself, whatever the others are."""
    if isinstance(spec, AffineSpec):
        return spec.group_size is not None or (spec.is_per_channel and (spec.axis or 0) % 2 == 0)
    return not (isinstance(spec, FloatSpec) and spec.is_scaled and not spec.is_per_channel)


def round_matrix(
    weight: Array, best: Array, inner: Array, spec: TensorSpec, damping: float, options: LanguageCompensationOptions
) -> MatrixRounding:
    """Round a weight [outputs, inputs]. `best` is what its outputs should be like with the inputs that it will get,
    and `inner` their Gram matrix. `damping` is a share of the mean of its diagonal."""
    inner = inner + damping * _mean(inner) * np.eye(len(inner))  # damped from here on
    if isinstance(spec, AffineSpec):
        tries = _integers(weight, best, inner, spec, options)
    else:
        tries = _others(weight, best, inner, spec, options)
    single = inner.astype(np.float32)[None]
    errors = np.stack([squared_error((best - attempt.values).astype(np.float32)[None], single)[0] for attempt in tries])
    if not all(attempt.is_by_row for attempt in tries):
        errors = np.broadcast_to(errors.sum(axis=1, keepdims=True), errors.shape)
    chosen = errors.argmin(axis=0)
    values = tries[0].values
    parameters = tries[0].parameters
    for number, attempt in enumerate(tries):
        is_it = chosen == number
        values = np.where(is_it[:, None], attempt.values, values)
        parameters = _mixed(is_it, attempt.parameters, parameters)
    before = float(errors[0].sum())
    after = float(np.take_along_axis(errors, chosen[None], 0).sum())
    result = RoundedWeight(torch.from_numpy(values.astype(np.float32)), parameters, tries[0].scale)
    return MatrixRounding(result, after / before if before > 0 else 1.0)


def effective_damping(inner: Array, options: LanguageCompensationOptions) -> float:
    """The damping as a share of the mean of the diagonal."""
    if not options.is_damping_of_largest:
        return options.damping
    return options.damping * _largest_eigenvalue(inner) / _mean(inner)


def _largest_eigenvalue(inner: Array) -> float:
    """Estimate it by power iteration, which is close enough for damping."""
    vector = np.ones(len(inner))
    for _ in range(_ITERATIONS):
        product = inner @ vector
        length = float(np.linalg.norm(product))
        if length == 0:
            return 0.0
        vector = product / length
    return float(vector @ inner @ vector)


@dataclass(frozen=True, eq=False)
class _Try:
    values: Array
    parameters: AffineParameters | None = None
    scale: torch.Tensor | None = None

    @property
    def is_by_row(self) -> bool:
        """True if every output has scales of its own, so that it can choose for itself."""
        parameters = self.parameters
        return parameters is None or parameters.axis == 0 or parameters.group_size is not None


def _integers(
    weight: Array, best: Array, inner: Array, spec: AffineSpec, options: LanguageCompensationOptions
) -> list[_Try]:
    shape = weight.shape
    tries = [_nearest(weight, grid_of(weight, spec))]
    power = np.diagonal(inner)
    choice = affine_choice(weight, spec)
    weights = compensated_power(inner[None])[0] if options.has_compensation and can_search(spec) else power
    if options.searches_scales and can_search(spec):
        is_diagonal = options.has_compensation or spec.group_size is None
        choice = searched(affine_choice(best, spec), best.astype(np.float32), weights if is_diagonal else inner)
        tries.append(_nearest(best, parameters_of(choice, shape)))
    if not options.has_compensation:
        return tries
    scale, zero_point = (numbers.copy()[None] for numbers in spread(parameters_of(choice, shape), shape))
    scales = FixedScales(scale, zero_point, spec.integer)
    grid = independent(scales, shape[1], options.block_size)
    if options.has_activation_order:
        grid = grid.in_order_of(power, options.block_size)
    elif not options.has_static_groups and spec.group_size is not None:
        units = runs(np.arange(shape[1]), spec.group_size)
        grid = Grid(scales, units, at_turn=_group_scales(scales, spec, weights, options))
    rounded_values = compensated(best[None], Root.of(inner[None], grid.order, 0.0), grid)
    for _ in range(options.sweeps):
        rounded_values = descended(best[None], rounded_values, inner[None], scales, 1)
        if can_search(spec) and options.searches_scales:
            rounded_values = _refit(scales, rounded_values, best, inner, spec)
    rounded_values = descended(best[None], rounded_values, inner[None], scales, 1) if options.sweeps else rounded_values
    tries.append(_nearest(rounded_values[0], _collected(scales, parameters_of(choice, shape))))
    return tries


def _refit(scales: FixedScales, values: Array, best: Array, inner: Array, spec: AffineSpec) -> Array:
    """Fit the scales to the codes that weights have, in place, and return the values of these codes."""
    size = spec.group_size or best.shape[1]
    codes = np.rint(values[0] / scales.scale[0])
    fitted = fitted_scales(best, codes, inner, size).astype(np.float32)
    before = scales.scale[0][:, ::size]
    is_sound = np.isfinite(fitted) & (fitted * before > 0) & (np.abs(fitted) > np.finfo(np.float32).tiny)
    fitted = np.where(is_sound, fitted, before)
    scales.scale[0] = np.repeat(fitted, size, axis=1)[:, : best.shape[1]]
    return np.asarray(codes * scales.scale[0])[None]


def _group_scales(scales: FixedScales, spec: AffineSpec, power: Array, options: LanguageCompensationOptions) -> Any:
    """Gives a group the scale of the values that it has when its turn comes."""

    def at_turn(values: Array, unit: Array) -> None:
        choice = affine_choice(values[0], spec)
        if options.searches_scales and can_search(spec):
            choice = searched(choice, values[0].astype(np.float32), power[unit])
        scale, zero_point = spread(parameters_of(choice, values[0].shape), values[0].shape)
        assert scales.zero_point is not None
        scales.scale[0][:, unit], scales.zero_point[0][:, unit] = scale, zero_point

    return at_turn


def _collected(scales: FixedScales, like: AffineParameters) -> AffineParameters:
    """The scales that every weight has ended with, in the shape of parameters."""
    if like.axis is None or (like.axis == 1 and like.group_size is None):
        return like
    assert scales.zero_point is not None
    first = slice(None, None, like.group_size or scales.scale.shape[2])
    shape = like.scale.shape
    scale, zero_point = (parameter[0][:, first].reshape(shape) for parameter in (scales.scale, scales.zero_point))
    codes = zero_point.astype(like.zero_point.dtype)
    return AffineParameters(scale.astype(np.float32), codes, like.format, like.axis, like.group_size)


def _nearest(values: Array, parameters: AffineParameters) -> _Try:
    codes = quantize_affine(values.astype(np.float32), parameters)
    return _Try(np.asarray(dequantize_affine(codes, parameters), np.float64), parameters)


def _mixed(is_first: Array, first: AffineParameters | None, second: AffineParameters | None) -> AffineParameters | None:
    """The parameters of some outputs from one, and of the others from another."""
    if first is None or second is None or first is second:
        return first
    if first.axis is None or (first.axis == 1 and first.group_size is None):
        return first if is_first.all() else second
    mask = is_first.reshape(-1, *(1,) * (first.scale.ndim - 1))
    scale, zero_point = (np.where(mask, getattr(first, n), getattr(second, n)) for n in ("scale", "zero_point"))
    return AffineParameters(scale, zero_point, first.format, first.axis, first.group_size)


def _others(
    weight: Array, best: Array, inner: Array, spec: TensorSpec, options: LanguageCompensationOptions
) -> list[_Try]:
    if isinstance(spec, FloatSpec) and spec.is_eight_bits:
        return _eight_bit_floats(weight, best, inner, spec, options)
    choice = choice_without_scales(spec)
    if isinstance(choice, BlockChoice):
        choice = replace(choice, quantizer=choice.quantizer.fixed(weight.astype(np.float32)))
    tries = [_Try(rounded(weight, choice).astype(np.float64))]
    power = np.diagonal(inner)
    scales = None
    if isinstance(choice, BlockChoice) and has_searchable_blocks(choice.quantizer.format):
        weights = compensated_power(inner[None])[0] if options.has_compensation else power
        scales = FixedScales(
            searched_powers(best, weights, choice.quantizer)[None], None, choice.quantizer.format.element
        )
        if options.searches_scales:
            tries.append(_stored(scales(best[None], np.arange(best.shape[1]))[0], choice))
    if not options.has_compensation:
        return tries
    columns = weight.shape[1]
    if scales is not None:
        grid = independent(scales, columns, options.block_size)
    elif isinstance(choice, BlockChoice):
        grid = block_grid(choice, runs(np.arange(columns), choice.quantizer.format.block_size))
    else:
        grid = independent(rounded_alone(choice), columns, options.block_size)
    if options.has_activation_order:
        grid = grid.in_order_of(power, options.block_size)
    rounded_values = compensated(best[None], Root.of(inner[None], grid.order, 0.0), grid)
    if not grid.is_joint:
        rounded_values = descended(best[None], rounded_values, inner[None], grid.quantize, options.sweeps)
    tries.append(_stored(rounded_values[0], choice))
    return tries


def _eight_bit_floats(
    weight: Array, best: Array, inner: Array, spec: FloatSpec, options: LanguageCompensationOptions
) -> list[_Try]:
    plain = round_to_nearest(torch.from_numpy(weight), spec)
    assert plain.scale is not None
    tries = [_Try(plain.values.double().numpy(), scale=plain.scale)]
    if not options.has_compensation:
        return tries
    scale = np.broadcast_to(plain.scale.double().numpy(), weight.shape)[None]
    element = get_format(spec.format)
    assert isinstance(element, FloatFormat)
    scales = FixedScales(scale, None, element)
    grid = independent(scales, weight.shape[1], options.block_size)
    if options.has_activation_order:
        grid = grid.in_order_of(np.diagonal(inner), options.block_size)
    rounded_values = compensated(best[None], Root.of(inner[None], grid.order, 0.0), grid)
    rounded_values = descended(best[None], rounded_values, inner[None], scales, options.sweeps)[0]
    return [*tries, _Try(rounded_values, scale=plain.scale)]


def _stored(values: Array, choice: Any) -> _Try:
    """The values as the file will have them: the scale of a block is that of the stored values."""
    return _Try(rounded(values, choice).astype(np.float64))


def _mean(inner: Array) -> float:
    return float(np.diagonal(inner).mean()) or 1.0

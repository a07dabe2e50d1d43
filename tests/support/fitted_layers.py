"""Layers to fit: rows, weights and choices of all kinds, and the error of a layer computed without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quark.features.finetuning.problem import Activation, Bounds, Fitted, Problem, Rows, WeightLayout
from quark.features.finetuning.training import are_outputs_separate
from quark.formats.affine import Granularity, integer_format
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import FORMATS
from quark.formats.spec import BlockFormat
from quark.plan import AffineChoice, BlockChoice, Choice, FloatChoice
from quark.rounded import rounded

Array = np.ndarray[Any, Any]


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def affine(
    weight: Array, name: str, axis: int | None = None, group_size: int | None = None, *, reach: float = 1.0
) -> AffineChoice:
    """Codes that reach `reach` times as far as the weight does; unsigned ones have their zero in the middle."""
    fmt = integer_format(name)
    groups = 1
    if axis is not None:
        groups = int(np.prod(Granularity(axis, group_size).parameter_shape(weight.shape)))
    scale = np.float32(np.abs(weight).max() * reach / ((fmt.qmax - fmt.qmin) // 2))
    scales = scale * (1 + np.arange(groups, dtype=np.float32) / groups)
    zero = 0 if fmt.signed else (fmt.qmax + 1) // 2
    return AffineChoice(name, tuple(float(scale) for scale in scales), (zero,) * groups, axis, group_size)


def blocks(name: str, axis: int, *, to_bfloat16_first: bool = False) -> BlockChoice:
    fmt = FORMATS[name]
    assert isinstance(fmt, BlockFormat)
    return BlockChoice(BlockQuantizer(fmt), axis, to_bfloat16_first)


BLOCKS = tuple(name for name, fmt in FORMATS.items() if isinstance(fmt, BlockFormat))


def choices_of(weight: Array) -> Iterator[tuple[str, Choice]]:
    """Every way in which a weight [outputs, inputs, ...] is rounded."""
    for name in ("int8", "uint8", "int4", "int16"):
        yield name, affine(weight, name)
        yield f"{name} per channel", affine(weight, name, 0)
    yield "int8 saturating", affine(weight, "int8", reach=0.5)
    yield "int4 per group", affine(weight, "int4", 1, 4)
    yield "uint4 per group", affine(weight, "uint4", 1, 5)  # the last group is shorter
    for name in BLOCKS:
        yield name, blocks(name, 1)
    yield "bfp16 of bfloat16", blocks("bfp16", 1, to_bfloat16_first=True)
    yield "mx6 along outputs", blocks("mx6", 0)
    yield "float16", FloatChoice("float16")
    yield "bfloat16", FloatChoice("bfloat16")
    yield "float16 scaled", FloatChoice("float16", scale=(0.37,))


def dense(outputs: int, length: int) -> WeightLayout:
    """The layout of a weight [outputs, length]."""
    return WeightLayout((outputs, length), (1, outputs, length), (0, 1, 2))


def depthwise(channels: int, kernel: int) -> WeightLayout:
    """The layout of a weight [channels, 1, kernel]."""
    return WeightLayout((channels, 1, kernel), (channels, 1, 1, kernel), (0, 1, 2, 3))


def outputs_of(problem: Problem, rows: Rows, weight: Array, bias: Array | None) -> Array:
    """What the layer gives, by numpy: [rows, outputs] behind bounds, if there are any."""
    matrices = problem.layout.to_matrices(weight.astype(np.float64))
    product = np.einsum("rgk,gok->rgo", rows.quantized.astype(np.float64), matrices).reshape(len(rows), -1)
    product = product if bias is None else product + bias
    return bounded(problem, product)


def bounded(problem: Problem, outputs: Array) -> Array:
    assert problem.activation is None or isinstance(problem.activation, Bounds)
    if problem.activation is None:
        return outputs
    return np.clip(outputs, problem.activation.lowest, problem.activation.highest)


def held_out_errors(problem: Problem, weight: Array, bias: Array | None) -> Array:
    """The mean squared error of each output over held-out rows, with weight and bias rounded as the plan says."""
    weight = rounded(weight, problem.weight_choice)
    bias = problem.bias if bias is None else bias
    if bias is not None and problem.bias_choice is not None:
        bias = rounded(bias, problem.bias_choice)
    rows = problem.held_out
    error = outputs_of(problem, rows, weight, bias) - bounded(problem, rows.targets.astype(np.float64))
    result: Array = np.square(error).mean(axis=0)
    return result


def correlated(seed: int, rows: int, groups: int, length: int, noise: float = 0.1) -> Array:
    """Rows whose inputs go up and down together: the case that rounding each weight to its nearest gets wrong."""
    level = normal(seed, rows, 1, 1)
    return (level + noise * normal(seed + 1, rows, groups, length)).astype(np.float32)


def layer(
    weight: Array,
    layout: WeightLayout,
    choice: Choice,
    *,
    activation: Activation = None,
    bias: Array | None = None,
    bias_choice: Choice | None = None,
    noise: float = 0.1,
) -> Problem:
    """A layer that should compute from slightly wrong inputs what its float weights compute from the right ones."""
    groups, _, length = layout.matrices

    def rows(seed: int, count: int) -> Rows:
        right = correlated(seed, count, groups, length, noise)
        targets = np.einsum("rgk,gok->rgo", right, layout.to_matrices(weight)).reshape(count, -1)
        wrong = (right + 0.01 * normal(seed + 2, *right.shape)).astype(np.float32)
        return Rows(wrong, (targets if bias is None else targets + bias).astype(np.float32), right)

    return Problem("layer", rows(10, 256), rows(20, 64), weight, layout, bias, choice, bias_choice, activation)


def relative(problem: Problem, errors: Array) -> float:
    targets = bounded(problem, problem.held_out.targets.astype(np.float64))
    return float(errors.sum() / np.square(targets).mean(axis=0).sum())


def assert_honest(problem: Problem, fitted: Fitted) -> None:
    """The errors that are told are those of the weights, and no output got worse."""
    before = held_out_errors(problem, problem.weight, problem.bias)
    assert fitted.error_before == pytest.approx(relative(problem, before), rel=2e-3, abs=1e-9)
    if fitted.weight is None:
        assert fitted.bias is None
        assert fitted.error_after == fitted.error_before
        return
    assert fitted.weight.shape == problem.weight.shape
    after = held_out_errors(problem, fitted.weight, fitted.bias)
    assert fitted.error_after == pytest.approx(relative(problem, after), rel=2e-3, abs=1e-9)
    assert fitted.error_after < fitted.error_before
    if are_outputs_separate(problem.layout, problem.weight_choice):
        assert (after <= before * 1.001 + 1e-9).all()

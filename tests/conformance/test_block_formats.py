"""What every block format promises, in every form, compared with definitions that share no code with it."""

from __future__ import annotations

import functools
import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS
from golden import same

from quark.formats.block import BlockQuantizer
from quark.formats.catalog import BLOCK_FORMATS
from quark.formats.spec import BlockFormat, FloatFormat, NonFinite, Rounding, ScaleRule

Array = np.ndarray[Any, Any]

each_format = pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=str)
each_backend = pytest.mark.parametrize("backend", BACKENDS)
# scales are powers of two, and nothing else is special
PLAIN_POWERS = [fmt for fmt in BLOCK_FORMATS if fmt.sub_blocks is None and not fmt.carry and fmt.scale is None]
OTHERS = [name for name in BACKENDS if name != "numpy"]


def element_values(fmt: BlockFormat) -> list[Fraction]:
    """All numbers of the element type, listed code by code from the definition of the encoding."""
    element = fmt.element
    if not isinstance(element, FloatFormat):
        return [Fraction(code, 2**element.fraction_bits) for code in range(element.qmin, element.qmax + 1)]
    values = set()
    for code in range(2 ** (element.bits - 1)):
        exponent, mantissa = divmod(code, 2**element.mantissa_bits)
        significand = Fraction(mantissa, 2**element.mantissa_bits) + (1 if exponent else 0)
        value = significand * Fraction(2) ** (max(exponent, 1) - element.bias)
        if value <= Fraction(element.max):
            values |= {value, -value}
    return sorted(values)


def unscaled(fmt: BlockFormat, rounding: Rounding = Rounding.HALF_EVEN) -> BlockQuantizer:
    """The format's quantizer with a tensor scale of 1, if it has one."""
    return BlockQuantizer(fmt, rounding=rounding, tensor_scale=1.0 if fmt.has_tensor_scale else None)


def scaled_block(fmt: BlockFormat, values: list[Fraction]) -> Array:
    """Rows of one block each; the first element is the largest power of two, or the largest number where scales are
    floats, which fixes the scale at 1."""
    room = fmt.block_size - (fmt.sub_blocks.size if fmt.sub_blocks else 1)
    rows = math.ceil(len(values) / room)
    block = np.zeros((rows, fmt.block_size), np.float32)
    block[:, 0] = 2.0**fmt.element.emax if fmt.scale is None else fmt.element.max
    numbers = np.array([float(value) for value in values], np.float32)
    for row in range(rows):
        part = numbers[row * room : (row + 1) * room]
        block[row, fmt.block_size - len(part) :] = part
    return block


@each_backend
@each_format
def test_every_code_is_a_fixed_point(fmt: BlockFormat, backend: str) -> None:
    # At scale 1 the block's own element covers |v| < 2^(emax + 1); the lowest code of two's complement lies on it.
    values = [v for v in element_values(fmt) if abs(v) < 2 ** (fmt.element.emax + 1)]
    x = scaled_block(fmt, values)
    y = BACKENDS[backend](x, unscaled(fmt), 1)
    assert np.array_equal(x, y)


@each_backend
@pytest.mark.parametrize("fmt", [f for f in BLOCK_FORMATS if f.sub_blocks is None], ids=str)
@pytest.mark.parametrize("rounding", Rounding)
def test_midpoints_go_where_the_mode_says(fmt: BlockFormat, rounding: Rounding, backend: str) -> None:
    numbers = element_values(fmt)
    pairs = [(a, b) for a, b in itertools.pairwise(numbers) if -(2**fmt.element.emax) < a]
    pairs = [(a, b) for a, b in pairs if b < 2**fmt.element.emax]
    x = scaled_block(fmt, [(a + b) / 2 for a, b in pairs])
    expected = x.copy()
    spacing = {(a + b) / 2: (a, b) for a, b in pairs}
    for index in np.ndindex(*x.shape):
        middle = Fraction(float(x[index]))
        if middle not in spacing:
            continue
        low, high = spacing[middle]
        if rounding is Rounding.HALF_UP:
            choice = high
        elif rounding is Rounding.HALF_AWAY:
            choice = high if middle > 0 else low
        else:
            step = high - low
            choice = low if (low / step) % 2 == 0 else high
        expected[index] = float(choice)
    assert np.array_equal(BACKENDS[backend](x, unscaled(fmt, rounding), 1), expected)


@each_backend
@each_format
def test_idempotent(fmt: BlockFormat, backend: str) -> None:
    y = np.random.default_rng(1).standard_normal((40, 3 * fmt.block_size + 1)).astype(np.float32)
    # The lowest code of two's complement is a binade above all others: a block that has it gets the next exponent when
    # it is quantized again, and keeps that one.
    reaches_next_binade = fmt.element.grid.lowest <= -(2.0 ** (fmt.element.emax + 1))
    for _ in range(2 if reaches_next_binade else 1):
        y = BACKENDS[backend](y, unscaled(fmt), 1)
    assert np.array_equal(BACKENDS[backend](y, unscaled(fmt), 1), y)


@each_backend
@each_format
def test_monotone_within_a_scale(fmt: BlockFormat, backend: str) -> None:
    if fmt.sub_blocks is not None:
        pytest.skip("neighbours in different sub-blocks have different spacings")
    ramp = np.linspace(-1.999, 1.999, 997, dtype=np.float32)
    rows = np.zeros((997, fmt.block_size), np.float32)
    rows[:, 0] = -1.0 if fmt.carry else 1.0
    rows[:, 1] = ramp
    y = BACKENDS[backend](rows, BlockQuantizer(fmt), 1)[:, 1]
    with_own_scale = np.abs(ramp) <= 1.0
    assert (np.diff(y[with_own_scale]) >= 0).all()


@functools.cache
def hard_numbers(fmt: BlockFormat, rule: ScaleRule) -> tuple[Array, dict[tuple[BlockQuantizer, int], Array]]:
    """Numbers of every magnitude, and what they become by numpy for every policy, rounding and axis."""
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 2**32, (6, 2, 50), dtype=np.uint64).astype(np.uint32).view(np.float32)
    wide = (rng.standard_normal((6, 2, 50)) * 2.0 ** rng.integers(-149, 128, (6, 2, 50))).astype(np.float32)
    tiny = (rng.standard_normal((6, 2, 50)) * 1e-43).astype(np.float32)
    plain = rng.standard_normal((6, 2, 50)).astype(np.float32)
    x = np.concatenate([bits, wide, tiny, plain], axis=1)
    quantizers = [BlockQuantizer(fmt, rule, rounding, policy) for policy in NonFinite for rounding in Rounding]
    return x, {
        (quantizer, axis): BACKENDS["numpy"](x, quantizer, axis) for quantizer in quantizers for axis in (0, 1, -1)
    }


@each_format
@pytest.mark.parametrize("rule", ScaleRule)
# One after the other, so that they share what is expected. tests/ops has quick tests of the portable functions.
@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=pytest.mark.slow if name == "portable" else ()) for name in OTHERS]
)
def test_all_forms_agree_on_hard_numbers(fmt: BlockFormat, rule: ScaleRule, backend: str) -> None:
    if rule not in fmt.scale_rules:
        pytest.skip("refused: the format has a rule of its own")
    x, expected = hard_numbers(fmt, rule)
    for (quantizer, axis), values in expected.items():
        assert same(BACKENDS[backend](x, quantizer, axis), values).all(), (quantizer, axis)


@each_backend
@pytest.mark.parametrize("fmt", PLAIN_POWERS, ids=str)
@pytest.mark.parametrize("rule", [ScaleRule.FLOOR, ScaleRule.CEIL, ScaleRule.EVEN, ScaleRule.RCEIL])
def test_scales_at_both_ends_of_float32(fmt: BlockFormat, rule: ScaleRule, backend: str) -> None:
    """In the first and last binades, where exponents are confined and powers of two leave float32."""
    significands = [Fraction(1), 1 + Fraction(1, 2**23), Fraction(3, 2), Fraction(7, 4), 2 - Fraction(1, 2**23)]
    significands += [2 - Fraction(1, 2**k) + side for k in range(2, 9) for side in (Fraction(-1, 2**23), Fraction(0))]
    peaks = [float(s * Fraction(2) ** e) for e in (127, 126, 1, -125, -126) for s in significands]
    peaks += [2.0**-127, 2.0**-127 * 1.5, 2.0**-126 - 2.0**-149, 2.0**-149]
    x = np.zeros((len(peaks), fmt.block_size), np.float32)
    x[:, 0] = peaks
    x[:, 1] = [peak * 0.3 for peak in peaks]
    expected = np.array([[float(v) for v in exact_block(row[:2], fmt, rule)] for row in x])
    y = BACKENDS[backend](x, BlockQuantizer(fmt, rule), 1)
    with np.errstate(over="ignore"):
        assert np.array_equal(y[:, :2], expected.astype(np.float32))


def exact_block(block: Array, fmt: BlockFormat, rule: ScaleRule) -> list[Fraction]:
    """The definition in rational numbers: OCP MX with its scale rules, half to even."""
    grid = fmt.element.grid
    amax = Fraction(float(np.abs(block).max()))
    floor = max(-200, math.frexp(float(amax))[1] - 1)
    significand = amax / Fraction(2) ** floor
    bump = {
        ScaleRule.FLOOR: False,
        ScaleRule.CEIL: significand > 1,
        ScaleRule.EVEN: significand >= 2 - Fraction(1, 2 ** (grid.mantissa_bits + 1)),
        ScaleRule.RCEIL: significand > Fraction(grid.highest) / Fraction(2) ** grid.max_exponent,
    }[rule]
    scale = Fraction(2) ** min(127, max(-127, floor + bump - grid.max_exponent))
    values = []
    for v in block:
        y = Fraction(float(v)) / scale
        exponent = max(grid.min_exponent, math.frexp(float(abs(y)))[1] - 1 if y else grid.min_exponent)
        spacing = Fraction(2) ** (exponent - grid.mantissa_bits)
        rounded = round(y / spacing) * spacing
        values.append(min(Fraction(grid.highest), max(Fraction(grid.lowest), rounded)) * scale)
    return values


@pytest.mark.parametrize("backend", OTHERS)
@each_format
def test_float16_tensors(fmt: BlockFormat, backend: str) -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((3, 70)) * 2.0 ** rng.integers(-24, 15, (3, 70))).astype(np.float16)
    y = BACKENDS[backend](x, BlockQuantizer(fmt), -1)
    assert y.dtype == np.float16
    wide = BACKENDS["numpy"](x.astype(np.float32), BlockQuantizer(fmt), -1)
    with np.errstate(over="ignore"):
        assert same(y, wide.astype(np.float16)).all()


@each_backend
@each_format
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (5,), (3, 1), (2, 0, 3), (0,)], ids=str)
def test_odd_shapes(fmt: BlockFormat, shape: tuple[int, ...], backend: str) -> None:
    x = np.full(shape, 1.3, np.float32)
    y = BACKENDS[backend](x, BlockQuantizer(fmt), 0)
    assert y.shape == shape
    assert np.isfinite(y).all()
    # a single element is quantized like any other: 1.3 is no number of any format whose scales are powers of two
    assert fmt.scale is not None or not (y == x).any()
    assert np.allclose(y, x, rtol=0.25)


@each_backend
@each_format
def test_non_finite_policies(fmt: BlockFormat, backend: str) -> None:
    x = np.ones((4, 2 * fmt.block_size), np.float32)
    x[0, 1], x[1, 0], x[2, -1] = np.nan, np.inf, -np.inf
    bad_blocks = np.zeros(x.shape, bool)
    bad_blocks[:2, : fmt.block_size] = True
    bad_blocks[2, fmt.block_size :] = True
    y = BACKENDS[backend](x, BlockQuantizer(fmt, nonfinite=NonFinite.BLOCK_NAN), 1)
    assert np.array_equal(np.isnan(y), bad_blocks)
    assert (y[~bad_blocks] == 1).all()
    y = BACKENDS[backend](x, BlockQuantizer(fmt, nonfinite=NonFinite.PASSTHROUGH), 1)
    assert same(y, x).all()


def exact_mse_exponent(block: Array, fmt: BlockFormat) -> int:
    """The exponent with the least squared error, in exact arithmetic: the definition, and nothing else."""
    amax = Fraction(float(np.abs(block).max()))
    floor = math.frexp(float(amax))[1] - 1 - fmt.element.emax
    numbers = element_values(fmt)
    errors = {}
    for exponent in (floor - 1, floor, floor + 1):
        scale = Fraction(2) ** exponent
        errors[exponent] = sum(min((n * scale - Fraction(float(v))) ** 2 for n in numbers) for v in block)
    return min(errors, key=lambda exponent: (errors[exponent], exponent))


@pytest.mark.parametrize("name", ["mxfp4_e2m1", "mxfp6_e2m3", "mxfp6_e3m2"])
def test_mse_rule_finds_the_least_error(name: str) -> None:
    fmt = next(f for f in BLOCK_FORMATS if f.name == name)
    x = np.random.default_rng(4).standard_t(3, (25, fmt.block_size)).astype(np.float32)
    y = BACKENDS["numpy"](x, BlockQuantizer(fmt, ScaleRule.MSE), 1)
    numbers = np.array([float(v) for v in element_values(fmt)])
    for row, out in zip(x, y, strict=True):
        scale = 2.0 ** exact_mse_exponent(row, fmt)
        best = ((numbers[None] * scale - row[:, None].astype(np.float64)) ** 2).min(1).sum()
        assert math.isclose(((out.astype(np.float64) - row) ** 2).sum(), best, rel_tol=1e-12)


@pytest.mark.parametrize("fmt", [f for f in BLOCK_FORMATS if not f.carry], ids=str)
def test_mse_rule_is_never_worse_than_floor(fmt: BlockFormat) -> None:
    x = np.random.default_rng(5).standard_t(3, (200, fmt.block_size)).astype(np.float32)

    def errors(rule: ScaleRule) -> Array:
        y = BACKENDS["numpy"](x, BlockQuantizer(fmt, rule), 1)
        return ((y.astype(np.float64) - x) ** 2).sum(1)

    assert (errors(ScaleRule.MSE) <= errors(ScaleRule.FLOOR)).all()


@pytest.mark.parametrize("fmt", PLAIN_POWERS, ids=str)
@pytest.mark.parametrize("rule", [ScaleRule.CEIL, ScaleRule.RCEIL])
def test_ceiling_rules_never_saturate(fmt: BlockFormat, rule: ScaleRule) -> None:
    rng = np.random.default_rng(6)
    x = (rng.standard_normal((500, fmt.block_size)) * 2.0 ** rng.integers(-100, 100, (500, 1))).astype(np.float32)
    y = BACKENDS["numpy"](x, BlockQuantizer(fmt, rule), 1)
    peak = np.abs(x).argmax(1)[:, None]
    relative = np.abs(np.take_along_axis(y, peak, 1) / np.take_along_axis(x, peak, 1) - 1)
    # half a spacing at the bottom of the binade that the peak falls into, one lower where ceil left room
    assert relative.max() <= 2.0 ** -(fmt.element.grid.mantissa_bits + (0 if rule is ScaleRule.CEIL else 1))

"""The numbers that a value lies between: rounding to the nearest takes one of them, and each of them stays as it is."""

from __future__ import annotations

import numpy as np
import pytest

from quark.formats import quantize_dequantize
from quark.formats.affine import AffineParameters, integer_format, quantize_dequantize_affine
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import FORMATS
from quark.formats.quantize import affine_neighbours, block_neighbours, element_neighbours
from quark.formats.spec import BlockFormat, ScaleRule

BLOCKS = [name for name, fmt in FORMATS.items() if isinstance(fmt, BlockFormat)]


def _values(seed: int, shape: tuple[int, ...] = (6, 96)) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(shape) * 10.0 ** generator.uniform(-3, 3, (shape[0], 1))).astype(np.float32)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("rule", list(ScaleRule))
def test_rounding_to_the_nearest_takes_a_neighbour_of_a_block(name: str, rule: ScaleRule) -> None:
    fmt = FORMATS[name]
    assert isinstance(fmt, BlockFormat)
    if rule not in fmt.scale_rules:
        pytest.skip("the format has a rule of its own")
    x = _values(3)
    lower, upper = block_neighbours(x, 1, BlockQuantizer(fmt, rule))
    nearest = quantize_dequantize(x, fmt, 1, scale_rule=rule)
    assert ((nearest == lower) | (nearest == upper)).all()
    assert (lower <= upper).all()
    inside = (lower != upper) | (x == lower)
    assert (inside | (x >= upper) | (x <= lower)).all()
    assert ((lower <= x) & (x <= upper))[inside].all()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("rule", [ScaleRule.FLOOR, ScaleRule.RCEIL, ScaleRule.EVEN, ScaleRule.MSE])
def test_any_mixture_of_neighbours_of_a_block_is_kept_as_it_is(name: str, rule: ScaleRule) -> None:
    fmt = FORMATS[name]
    assert isinstance(fmt, BlockFormat)
    if rule not in fmt.scale_rules:
        pytest.skip("the format has a rule of its own")
    x = _values(4)
    if fmt.scale is not None:  # with rows too far apart, scales are subnormal and not found again
        x /= np.abs(x).max(axis=1, keepdims=True)
    quantizer = BlockQuantizer(fmt, rule).fixed(x)
    lower, upper = block_neighbours(x, 1, quantizer)
    for seed in range(4):
        mixed = np.where(np.random.default_rng(seed).random(x.shape) < 0.5, lower, upper)
        again = quantize_dequantize(mixed, fmt, 1, scale_rule=rule, tensor_scale=quantizer.tensor_scale)
        np.testing.assert_array_equal(again, mixed)


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "int4"])
def test_neighbours_among_codes(name: str) -> None:
    x = _values(5)
    fmt = integer_format(name)
    scale = (np.abs(x).max(axis=1) / fmt.qmax * 0.7).astype(np.float32)  # some values are beyond
    parameters = AffineParameters(
        scale, np.full(6, max(0, fmt.qmin + 3), np.dtype(name if "4" not in name else "int8")), fmt, 0
    )
    lower, upper = affine_neighbours(x, parameters)
    nearest = quantize_dequantize_affine(x, parameters)
    assert ((nearest == lower) | (nearest == upper)).all()
    for value in (lower, upper):
        np.testing.assert_array_equal(quantize_dequantize_affine(value, parameters), value)
    width = (upper - lower) / scale[:, None]
    assert np.isclose(width, 0, atol=1e-3).any()
    assert np.isclose(width, 1, atol=1e-2).any()


@pytest.mark.parametrize("name", ["bfloat16", "float16", "fp8_e4m3", "fp4_e2m1"])
def test_neighbours_among_small_floats(name: str) -> None:
    fmt = FORMATS[name]
    x = _values(6)
    lower, upper = element_neighbours(x, fmt)
    nearest = quantize_dequantize(x, fmt)
    assert ((nearest == lower) | (nearest == upper)).all()
    for value in (lower, upper):
        np.testing.assert_array_equal(quantize_dequantize(value, fmt), value)

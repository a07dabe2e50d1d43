"""Blocks with float scales, compared with a definition that is written with ml_dtypes and shares no code with it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from backends import BACKENDS
from golden import same

from quark.errors import InvalidValueError
from quark.formats import quantize_dequantize
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import FORMATS, FP4_E2M1, FP8_E4M3, FP8_E5M2
from quark.formats.spec import BlockFormat, FloatFormat, NonFinite, Rounding, ScaleRule

Array = np.ndarray[Any, Any]

NVFP4 = FORMATS["nvfp4"]
NUMBERS = {
    "fp4_e2m1": (ml_dtypes.float4_e2m1fn, 6.0),
    "fp6_e2m3": (ml_dtypes.float6_e2m3fn, 7.5),
    "fp8_e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "fp8_e5m2": (ml_dtypes.float8_e5m2, 57344.0),
}


def reference(x: Array, fmt: BlockFormat, tensor_scale: float | None = None) -> Array:
    """x quantized along its last axis, half to even; a block with NaN or Inf is NaN."""
    element, most = NUMBERS[str(fmt.element)]
    scale, most_scale = NUMBERS[str(fmt.scale)]
    size = fmt.block_size
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)]).reshape(-1, size)
    is_finite = np.isfinite(padded)
    blocks = np.where(is_finite, padded, np.float32(0))
    with np.errstate(all="ignore"):
        found = np.abs(blocks).max(initial=0) / np.float32(most * most_scale)
        t = np.float32(found if tensor_scale is None else tensor_scale)
        wanted = np.abs(blocks).max(1, keepdims=True) / np.float32(most) / t
        # NaN and Inf come from a tensor scale of 0, where everything is 0
        s = np.where(t == 0, 0, np.minimum(wanted, np.float32(most_scale))).astype(scale).astype(np.float32)
        d = t * s
        y = np.where(d == 0, 0, np.clip(blocks / d, -most, most)).astype(element).astype(np.float32)
        values = np.where(is_finite.all(1, keepdims=True), d * y, np.float32(np.nan))
    return values.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]


def hard_numbers() -> dict[str, Array]:
    """A million numbers, among them every kind that could go wrong."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((700, 1000))
    rows = {
        "normal": normal,
        "blocks far apart": rng.standard_normal((2000, 32)) * 2.0 ** rng.integers(-22, 0, (2000, 1)),
        "all of float32": rng.standard_normal((400, 200)) * 2.0 ** rng.integers(-149, 127, (400, 200)),
        "any bits": rng.integers(0, 2**32, (300, 300), dtype=np.uint64).astype(np.uint32).view(np.float32),
        "near the top": rng.standard_normal((100, 33)) * 1e38,
        "subnormal": rng.standard_normal((100, 100)) * 1e-42,
        "below every scale": np.full((2, 40), 1e-44),
        "zeros": np.zeros((3, 40)),
        "halves": np.tile(np.arange(-6, 6.25, 0.25), (40, 1)) * rng.integers(1, 9, (40, 1)),
        "with NaN": np.where(rng.random((200, 160)) < 0.01, np.nan, normal[:200, :160]),
        "with Inf": np.where(rng.random((200, 160)) < 0.01, -np.inf, normal[:200, :160]),
        "nothing finite": np.full((2, 20), np.inf),
    }
    with np.errstate(all="ignore"):
        return {name: x.astype(np.float32) for name, x in rows.items()}


HARD = hard_numbers()


def test_there_are_a_million_numbers() -> None:
    assert sum(x.size for x in HARD.values()) >= 10**6 - 100_000


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", HARD)
def test_every_backend_computes_the_definition(name: str, backend: str) -> None:
    x = HARD[name]
    for scale in (None, 1e-3, 3e-41, 1e20, 0.0):  # saturating, subnormal, too large, nothing
        expected = reference(x, NVFP4, scale)
        found = BACKENDS[backend](x, BlockQuantizer(NVFP4, tensor_scale=scale), 1)
        assert same(found, expected).all(), scale
        # along the other axis, where neighbours in memory belong to different blocks
        turned = BACKENDS[backend](np.ascontiguousarray(x.T), BlockQuantizer(NVFP4, tensor_scale=scale), 0)
        assert same(turned.T, expected).all(), scale


QUICKLY_COMPILED = ("normal", "any bits")  # compiling takes seconds, and every shape is compiled anew


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICKLY_COMPILED else pytest.mark.slow) for name in HARD]
)
def test_a_compiled_graph_computes_the_definition(name: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: quantize_dequantize(x, "nvfp4", 1), fullgraph=True)
    assert same(compiled(torch.from_numpy(HARD[name])).numpy(), reference(HARD[name], NVFP4)).all()


@pytest.mark.parametrize("scale", [FP8_E4M3, FP8_E5M2], ids=str)
@pytest.mark.parametrize("element", ["fp4_e2m1", "fp6_e2m3", "fp8_e4m3"])
def test_other_elements_and_scales(element: str, scale: FloatFormat) -> None:
    numbers = FORMATS[element]
    assert isinstance(numbers, FloatFormat)
    fmt = BlockFormat("other", numbers, 24, scale=scale, has_tensor_scale=True)
    for x in (HARD["blocks far apart"][:200], HARD["any bits"][:30]):
        for backend in BACKENDS.values():
            assert same(backend(x, BlockQuantizer(fmt), 1), reference(x, fmt)).all()


def test_without_a_tensor_scale_it_counts_as_one() -> None:
    fmt = BlockFormat("one_level", FP4_E2M1, 16, scale=FP8_E4M3)
    x = HARD["normal"][:20]
    for name, backend in BACKENDS.items():
        assert same(backend(x, BlockQuantizer(fmt), 1), reference(x, NVFP4, 1.0)).all(), name


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("policy", NonFinite)
def test_float64_is_close_to_float32(rounding: Rounding, policy: NonFinite) -> None:
    x = HARD["blocks far apart"]
    narrow = quantize_dequantize(x, "nvfp4", 1, rounding=rounding, nonfinite=policy)
    wide = quantize_dequantize(x.astype(np.float64), "nvfp4", 1, rounding=rounding, nonfinite=policy)
    assert wide.dtype == np.float64
    is_close = np.isclose(narrow, wide, rtol=1e-6)
    assert is_close.mean() > 0.999  # a quotient next to a tie may be rounded to the other side


def test_mse_tries_scales_around_the_usual_one() -> None:
    x = np.random.default_rng(1).standard_normal((400, 16)).astype(np.float32)

    def error(**options: Any) -> float:
        return float(((quantize_dequantize(x, "nvfp4", 1, **options) - x).astype(np.float64) ** 2).sum())

    assert error(scale_rule="mse") < 0.78 * error()  # 1.2 dB for normal numbers


def test_the_tensor_scale_of_an_array_can_be_fixed() -> None:
    x = HARD["normal"]
    fixed = BlockQuantizer(NVFP4).fixed(x)
    assert fixed.tensor_scale == float(np.abs(x).max() / np.float32(2688))
    parts = [quantize_dequantize(part, "nvfp4", 1, tensor_scale=fixed.tensor_scale) for part in (x[:100], x[100:])]
    assert np.array_equal(np.concatenate(parts), quantize_dequantize(x, "nvfp4", 1))
    assert BlockQuantizer(NVFP4).fixed(np.zeros((0, 3), np.float32)).tensor_scale == 0.0


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), 1e37])
def test_a_tensor_scale_must_leave_scales_in_float32(scale: float) -> None:
    with pytest.raises(InvalidValueError, match="expected a number from 0 to"):
        BlockQuantizer(NVFP4, tensor_scale=scale)


@pytest.mark.parametrize("rule", [ScaleRule.CEIL, ScaleRule.EVEN, ScaleRule.RCEIL])
def test_rules_for_powers_of_two_are_refused(rule: ScaleRule) -> None:
    with pytest.raises(InvalidValueError, match=r"'floor', the nearest number, or 'mse'"):
        BlockQuantizer(NVFP4, rule)


def test_a_tensor_scale_is_for_formats_that_have_one() -> None:
    for name in ("mxfp4_e2m1", "fp8_e4m3"):
        with pytest.raises(InvalidValueError, match="tensor_scale"):
            quantize_dequantize(np.ones(4, np.float32), name, tensor_scale=1.0)

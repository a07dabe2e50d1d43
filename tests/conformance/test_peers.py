"""Other people's implementations of the same standards agree, where they claim to."""

from __future__ import annotations

from typing import Any

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
from peer_types import ML_DTYPES

from quark.formats import FORMATS, quantize_dequantize
from quark.formats.catalog import PLAIN_FLOATS
from quark.formats.spec import FloatFormat

Array = np.ndarray[Any, Any]

GFLOAT = {
    "float16": gfloat.formats.format_info_binary16,
    "bfloat16": gfloat.formats.format_info_bfloat16,
    "fp8_e5m2": gfloat.formats.format_info_ocp_e5m2,
    "fp8_e4m3": gfloat.formats.format_info_ocp_e4m3,
    "fp6_e3m2": gfloat.formats.format_info_ocp_e3m2,
    "fp6_e2m3": gfloat.formats.format_info_ocp_e2m3,
    "fp4_e2m1": gfloat.formats.format_info_ocp_e2m1,
}
GFLOAT_BLOCKS = {
    "mxfp8_e5m2": gfloat.formats.format_info_mxfp8_e5m2,
    "mxfp8_e4m3": gfloat.formats.format_info_mxfp8_e4m3,
    "mxfp6_e3m2": gfloat.formats.format_info_mxfp6_e3m2,
    "mxfp6_e2m3": gfloat.formats.format_info_mxfp6_e2m3,
    "mxfp4_e2m1": gfloat.formats.format_info_mxfp4_e2m1,
    "mxint8": gfloat.formats.format_info_mxint8,
}
each_float = pytest.mark.parametrize("fmt", PLAIN_FLOATS, ids=str)


def hard_values(fmt: FloatFormat) -> Array:
    """Every number of a small format, every midpoint, their float32 neighbours, and random bits."""
    rng = np.random.default_rng(0)
    random = rng.integers(0, 2**32, 20_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    random = random[np.isfinite(random)]
    if fmt.bits <= 8:
        codes = np.arange(2**fmt.bits).astype(np.uint8).view(ML_DTYPES[fmt.name]).astype(np.float64)
    else:
        codes = np.arange(0, 2**16, 7).astype(np.uint16).view(ML_DTYPES[fmt.name]).astype(np.float64)
    codes = np.unique(codes[np.isfinite(codes)])
    middles = (codes[1:] + codes[:-1]) / 2
    exact = np.concatenate([codes, middles]).astype(np.float32)
    return np.concatenate([exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(9e9)), random])


@each_float
def test_ml_dtypes_round_alike(fmt: FloatFormat) -> None:
    x = hard_values(fmt)
    x = x[np.abs(x) <= fmt.max]  # beyond, ml_dtypes goes to Inf or NaN where we saturate
    assert np.array_equal(quantize_dequantize(x, fmt.name), x.astype(ML_DTYPES[fmt.name]).astype(np.float32))


@each_float
def test_ml_dtypes_has_the_same_limits(fmt: FloatFormat) -> None:
    info = ml_dtypes.finfo(ML_DTYPES[fmt.name])
    assert fmt.max == float(info.max)
    assert fmt.min_normal == float(info.smallest_normal)
    assert fmt.min_subnormal == float(info.smallest_subnormal)
    assert fmt.bits == info.bits


@each_float
@pytest.mark.parametrize("rounding", ["half_even", "half_away"])
def test_gfloat_rounds_alike(fmt: FloatFormat, rounding: str) -> None:
    modes = {"half_even": gfloat.RoundMode.TiesToEven, "half_away": gfloat.RoundMode.TiesToAway}
    x = hard_values(fmt)
    expected = gfloat.round_ndarray(GFLOAT[fmt.name], x.astype(np.float64), modes[rounding], sat=True)
    assert np.array_equal(quantize_dequantize(x, fmt.name, rounding=rounding).astype(np.float64), expected)


@pytest.mark.parametrize("name", GFLOAT_BLOCKS)
def test_gfloat_blocks_alike(name: str) -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((300, 32)) * 2.0 ** rng.integers(-60, 60, (300, 1))).astype(np.float32)
    info = GFLOAT_BLOCKS[name]
    expected = np.stack([gfloat.quantize_block(info, row.astype(np.float64), gfloat.compute_scale_amax) for row in x])
    assert np.array_equal(quantize_dequantize(x, name).astype(np.float64), expected)


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_numpy_has_the_same_integers(name: str) -> None:
    info = np.iinfo(name)
    fmt = FORMATS[name]
    assert (fmt.qmin, fmt.qmax) == (info.min, info.max)

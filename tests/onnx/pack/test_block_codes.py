"""Codes of weights that are rounded already: exact for every format, whatever rule they were rounded by."""

import numpy as np
import onnx_ir as ir
import pytest
from packed_models import SHAPES, rounded, tensor_scale_of

from quark.formats.catalog import BLOCK_FORMATS, get_format
from quark.formats.spec import ScaleRule
from quark.onnx.pack.block_codes import encode, obstacle


def decoded(codes):
    geometry = codes.geometry
    return codes.values(slice(0, geometry.outer), slice(0, geometry.length)).reshape(geometry.shape)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=str)
@pytest.mark.parametrize("rule", ScaleRule, ids=lambda rule: rule.value)
def test_codes_stand_for_exactly_the_weight(fmt, rule):
    if rule not in fmt.scale_rules:
        pytest.skip("the format has its own rule")
    for seed, (shape, axis) in enumerate(SHAPES):
        weight = rounded(shape, axis, fmt, rule.value, seed)
        codes = encode(ir.Tensor(weight), fmt, axis, tensor_scale_of(fmt))
        assert decoded(codes).tobytes() == weight.tobytes()


def test_a_number_that_the_floor_rule_would_saturate():
    """1.875 * 2^8 is a number of E4M3 only at twice the scale that floor gives."""
    weight = np.zeros((1, 32), np.float32)
    weight[0, :2] = 1.875 * 2**8, 2.0**-5
    assert decoded(encode(ir.Tensor(weight), get_format("mxfp8_e4m3"), 1)).tobytes() == weight.tobytes()


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-126, 2.0**127])
def test_the_ends_of_float32(scale):
    weight = np.full((4, 32), scale, np.float32)
    weight[0] = 0
    weight[1, 0] = -0.0
    codes = encode(ir.Tensor(weight), get_format("mxfp8_e5m2"), 1)
    assert codes is None or decoded(codes).tobytes() == weight.tobytes()
    assert codes is not None or scale < 2.0**-140  # below the smallest element at the smallest scale


@pytest.mark.parametrize("fmt", ["mxfp4_e2m1", "mx6", "mx9", "bfp16", "mxint8"])
def test_minus_zero_is_kept_or_refused(fmt):
    weight = rounded((4, 64), 1, fmt)
    weight[weight == weight.max()] = -0.0
    codes = encode(ir.Tensor(weight), get_format(fmt), 1)
    if fmt == "mxint8":
        assert codes is None  # two's complement has no -0
    else:
        assert decoded(codes).tobytes() == weight.tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.3])
@pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=str)
def test_what_is_not_in_the_format_is_refused(fmt, value):
    weight = rounded((4, 64), 1, fmt)
    weight[2, 5] = value
    assert encode(ir.Tensor(weight), fmt, 1, tensor_scale_of(fmt)) is None


def test_shapes_and_formats_that_have_no_codes():
    fmt = get_format("mxfp4_e2m1")
    assert "no elements" in obstacle(fmt, (4, 0))
    assert "single number" in obstacle(fmt, ())
    assert not obstacle(fmt, (4, 4))

"""Affine quantization: bit for bit what ONNX Runtime computes, and what the formulas promise at every edge."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.formats.affine import (
    AffineParameters,
    Granularity,
    choose_affine,
    dequantize_affine,
    find_ranges,
    integer_format,
    is_in_range,
    quantize_affine,
    quantize_dequantize_affine,
)
from quark.formats.catalog import PLAIN_INTEGERS

KINDS = {"numpy": lambda x: x, "torch": lambda x: torch.from_numpy(np.asarray(x).copy())}
ONNX_TYPES = {
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int16": TensorProto.INT16,
    "uint16": TensorProto.UINT16,
    "int4": TensorProto.INT4,
    "uint4": TensorProto.UINT4,
}
FLT_MAX = float(np.finfo(np.float32).max)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def parameters_for(x, name, *, symmetric=False, axis=None, group_size=None):
    fmt = integer_format(name)
    scale, zero_point = choose_affine(*find_ranges(x, axis, group_size), fmt, symmetric=symmetric)
    return AffineParameters(scale, zero_point, fmt, axis, group_size)


def run_onnxruntime(x, parameters):
    """(codes as int32, dequantized) of QuantizeLinear and DequantizeLinear."""
    elem_type = ONNX_TYPES[str(parameters.format)]
    zero_point = np.asarray(parameters.zero_point)
    attributes = {} if parameters.axis is None else {"axis": parameters.axis}
    if parameters.group_size is not None:
        attributes["block_size"] = parameters.group_size
    inits = [
        numpy_helper.from_array(np.asarray(parameters.scale), "s"),
        helper.make_tensor("z", elem_type, zero_point.shape, zero_point.reshape(-1).tolist()),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], **attributes),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], **attributes),
        helper.make_node("Cast", ["q"], ["c"], to=TensorProto.INT32),
    ]
    infos = [
        helper.make_tensor_value_info(n, t, x.shape) for n, t in (("c", TensorProto.INT32), ("y", TensorProto.FLOAT))
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, infos, inits), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})


def awkward_values(shape):
    """Ordinary numbers, exact ties, random bits, infinities and numbers next to nothing."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal(math.prod(shape)).astype(np.float32) * 3
    bits = rng.integers(0, 2**32, x.size, dtype=np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        wild = (rng.random(x.size) < 0.3) & np.isfinite(bits)
    x[wild] = bits[wild]
    x[:6] = [np.inf, -np.inf, 0.0, -0.0, FLT_MAX, 1e-45]
    return rng.permutation(x).reshape(shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("axis", "group_size"), [(None, None), (0, None), (2, None), (1, 8), (2, 16)])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ONNX_TYPES)
def test_codes_and_values_are_those_of_onnxruntime(name, symmetric, axis, group_size, kind):
    x = awkward_values((6, 16, 48))
    if name.endswith("int4") or (group_size is not None and axis != 2):
        x = np.clip(x, -1e3, 1e3)  # these kernels go through int32 and turn what is beyond it around
    ordinary = np.random.default_rng(3).standard_normal(x.shape).astype(np.float32) - np.float32(0.4)
    parameters = parameters_for(ordinary, name, symmetric=symmetric, axis=axis, group_size=group_size)
    codes, values = run_onnxruntime(x, parameters)
    convert = KINDS[kind]
    # torch has no uint16: its zero points travel as int32
    zero_point = parameters.zero_point if kind == "numpy" else np.asarray(parameters.zero_point, np.int32)
    own = AffineParameters(convert(parameters.scale), convert(zero_point), parameters.format, axis, group_size)
    ours = quantize_affine(convert(x), own)
    np.testing.assert_array_equal(np.asarray(ours, np.int64), codes)
    np.testing.assert_array_equal(np.asarray(dequantize_affine(ours, own)), values)
    direct = np.asarray(quantize_dequantize_affine(convert(x), own))
    np.testing.assert_array_equal(direct.view(np.int32), values.view(np.int32))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("group_size", [1, 3, 7, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_is_quantized_as_an_array_of_its_own(kind, group_size, axis):
    x = np.random.default_rng(1).standard_normal((5, 7, 11)).astype(np.float32)
    whole = quantize_affine(KINDS[kind](x), parameters_for(KINDS[kind](x), "int6", axis=axis, group_size=group_size))
    moved, expected = np.moveaxis(x, axis, 0), np.moveaxis(np.empty(x.shape, np.int8), axis, 0)
    for start in range(0, moved.shape[0], group_size):
        for index in np.ndindex(moved.shape[1:]):
            place = (slice(start, start + group_size), *index)
            part = moved[place].copy()
            expected[place] = quantize_affine(part, parameters_for(part, "int6"))
    np.testing.assert_array_equal(np.moveaxis(np.asarray(whole), axis, 0), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_ranges_of_tensor_channels_and_groups(kind):
    x = KINDS[kind](np.array([[1.0, -2.0, 3.0], [4.0, 5.0, 6.0]], np.float32))
    as_lists = [[bound.tolist() for bound in find_ranges(x, *where)] for where in ((), (0,), (-1,), (1, 2))]
    assert as_lists == [
        [-2.0, 6.0],
        [[-2.0, 4.0], [3.0, 6.0]],
        [[1.0, -2.0, 3.0], [4.0, 5.0, 6.0]],
        [[[-2.0, 3.0], [4.0, 6.0]], [[1.0, 3.0], [5.0, 6.0]]],
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "axis", "group_size"), [((0,), None, None), ((0, 3), 1, None), ((3, 0), 1, 2), ((), 0, None)]
)
def test_arrays_with_few_or_no_elements(shape, axis, group_size, kind):
    x = KINDS[kind](np.zeros(shape, np.float32))
    parameters = parameters_for(x, "int8", axis=axis, group_size=group_size)
    assert tuple(parameters.scale.shape) == Granularity(axis, group_size).parameter_shape(shape)
    assert tuple(quantize_affine(x, parameters).shape) == shape


@pytest.mark.parametrize("fmt", PLAIN_INTEGERS, ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_ends_of_a_range_get_the_codes_at_the_ends(kind, symmetric, fmt):
    ends = KINDS[kind](np.array([-3.0 if symmetric else 0.0, 3.0]))
    scale, zero_point = choose_affine(*find_ranges(ends), fmt, symmetric=symmetric)
    codes = quantize_affine(ends, AffineParameters(scale, zero_point, fmt))
    middle = 0 if fmt.signed else 1 << (fmt.bits - 1)
    assert int(zero_point) == (middle if symmetric else fmt.qmin)
    # unsigned and symmetric, the ends lie half way between two codes
    assert codes[0] - (-fmt.qmax if fmt.signed and symmetric else fmt.qmin) in ((0, 1) if not fmt.signed else (0,))
    assert codes[1] == fmt.qmax


def test_known_scales():
    low, high = np.float32([-2.0]), np.float32([1.0])
    assert choose_affine(low, high, "int8", symmetric=True)[0] == np.float32(2 / 127)
    assert choose_affine(low, high, "int8", symmetric=True, full_range=True)[0] == np.float32(4 / 255)
    assert choose_affine(low, high, "uint8", symmetric=True) == (np.float32(4 / 255), 128)
    assert choose_affine(low, high, "uint8") == (np.float32(3 / 255), 170)
    assert choose_affine(low, high, "int8") == (np.float32(3 / 255), 42)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["int8", "uint8", "int2", "uint16", "int32", "uint32"])
@settings(max_examples=80, deadline=None, derandomize=True)
@given(bounds=st.tuples(FINITE, FINITE), inside=st.floats(0, 1))
def test_any_range_has_a_usable_scale(name, symmetric, bounds, inside):
    low, high = (np.array([bound], np.float32) for bound in sorted(bounds))
    fmt = integer_format(name)
    parameters = AffineParameters(*choose_affine(low, high, fmt, symmetric=symmetric), fmt, axis=0)
    scale = float(parameters.scale[0])
    assert np.finfo(np.float32).tiny <= scale <= FLT_MAX
    assert fmt.qmin <= int(parameters.zero_point[0]) <= fmt.qmax
    assert quantize_dequantize_affine(np.zeros(1, np.float32), parameters) == 0
    x = np.float32([float(low[0]) * (1 - inside) + float(high[0]) * inside])
    error = abs(Fraction(float(quantize_dequantize_affine(x, parameters)[0])) - Fraction(float(x[0])))
    # half a step, and what float32 loses in x / scale and in the product
    assert error <= Fraction(scale) / 2 * Fraction(1.0001) + abs(Fraction(float(x[0]))) / 2**22


@pytest.mark.parametrize("width", [0.0, 1e-45, 1e-40, 1.4e-36])
@pytest.mark.parametrize(
    ("name", "symmetric", "zero_point"), [("uint8", False, 0), ("uint8", True, 128), ("int8", False, 0)]
)
def test_a_range_too_narrow_for_a_scale_gets_one(name, symmetric, zero_point, width):
    assert choose_affine(np.float32([0]), np.float32([width]), name, symmetric=symmetric) == (1.0, zero_point)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_widest_ranges_do_not_overflow(dtype):
    largest = np.array([np.finfo(dtype).max], dtype)
    for fmt in PLAIN_INTEGERS:
        for symmetric in (True, False):
            scale, _ = choose_affine(-largest, largest, fmt, symmetric=symmetric)
            assert scale.dtype == dtype
            assert 0 < scale[0] <= largest[0]


@pytest.mark.parametrize("kind", KINDS)
def test_not_a_number_becomes_zero_and_infinity_saturates(kind):
    x = KINDS[kind](np.array([np.nan, np.inf, -np.inf, 0.3], np.float32))
    parameters = AffineParameters(
        KINDS[kind](np.float32(0.1)), KINDS[kind](np.array(100, np.uint8)), integer_format("uint8")
    )
    assert quantize_affine(x, parameters).tolist() == [100, 255, 0, 103]
    assert is_in_range(x, parameters).tolist() == [False, False, False, True]
    assert quantize_dequantize_affine(x, parameters)[0] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        ("half_away", [1, 2, 3, -1, -2, -3]),
        ("half_up", [1, 2, 3, 0, -1, -2]),
        ("half_even", [0, 2, 2, 0, -2, -2]),
    ],
)
def test_ties(rounding, expected, kind):
    x = KINDS[kind](np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5], np.float32))
    parameters = AffineParameters(KINDS[kind](np.float32(1)), KINDS[kind](np.int8(0)), integer_format("int8"))
    assert quantize_affine(x, parameters, rounding).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["int32", "uint32", "int24", "uint31"])
def test_wide_codes_are_exact(name, kind):
    fmt = integer_format(name)
    x = np.array([0.0, 1.0, -1.0, 2.0**24, -(2.0**31), 2.0**31 - 128, 2.0**32, 1e30, -1e30], np.float32)
    zero_point = KINDS[kind](np.array(fmt.qmax // 3, np.int64))
    parameters = AffineParameters(KINDS[kind](np.float32(1)), zero_point, fmt)
    codes = quantize_affine(KINDS[kind](x), parameters)
    assert codes.tolist() == [min(max(int(v) + fmt.qmax // 3, fmt.qmin), fmt.qmax) for v in x.tolist()]
    expected = np.float32([code - fmt.qmax // 3 for code in codes.tolist()])
    np.testing.assert_array_equal(np.asarray(dequantize_affine(codes, parameters)), expected)


@pytest.mark.parametrize("fmt", PLAIN_INTEGERS, ids=str)
def test_codes_come_in_the_narrowest_type(fmt):
    width = next(width for width in (8, 16, 32) if fmt.bits <= width)
    name = f"{'' if fmt.signed else 'u'}int{width}"
    numpy_codes = quantize_affine(np.ones(1, np.float32), AffineParameters(np.float32(1), np.int64(0), fmt))
    torch_codes = quantize_affine(torch.ones(1), AffineParameters(torch.tensor(1.0), torch.tensor(0), fmt))
    assert numpy_codes.dtype == name
    assert str(torch_codes.dtype) == "torch." + {"uint16": "int32", "uint32": "int64"}.get(name, name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_keep_their_type(dtype):
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    parameters = parameters_for(x, "int8", symmetric=True)
    values = quantize_dequantize_affine(x, parameters)
    wide = quantize_dequantize_affine(x.double() if dtype == torch.float64 else x.float(), parameters)
    assert values.dtype == dtype
    assert torch.equal(values, wide.to(dtype))


def test_what_is_refused_says_why():
    one, zero, int8 = np.float32(1), np.int8(0), integer_format("int8")
    with pytest.raises(InvalidValueError, match=r"mxint8.*expected a plain integer"):
        integer_format("mxint8")
    with pytest.raises(InvalidValueError, match="without axis"):
        AffineParameters(one, zero, int8, group_size=4)
    with pytest.raises(InvalidValueError, match="expected one element"):
        AffineParameters(np.ones(3, np.float32), np.zeros(3, np.int8), int8)
    with pytest.raises(InvalidValueError, match="other than 0"):
        AffineParameters(np.float32(0), zero, int8)
    with pytest.raises(InvalidValueError, match=r"-128\.\.127"):
        AffineParameters(one, np.int16(200), int8)
    with pytest.raises(UnsupportedTypeError, match="zero_point: expected an integer"):
        AffineParameters(one, np.float32(0), int8)
    channels = AffineParameters(np.ones(3, np.float32), np.zeros(3, np.int8), int8, axis=1)
    with pytest.raises(InvalidValueError, match=r"expected \(5,\)"):
        quantize_affine(np.zeros((2, 5), np.float32), channels)
    with pytest.raises(InvalidValueError, match=r"nan\.\.3\.0 at \(1,\).*NaN"):
        choose_affine(np.float32([0, np.nan]), np.float32([1, 3]), int8)
    with pytest.raises(InvalidValueError, match="in order"):
        choose_affine(torch.tensor([2.0]), torch.tensor([1.0]), int8)
    with pytest.raises(UnsupportedTypeError, match="codes: expected integers"):
        dequantize_affine(np.zeros(3, np.float32), AffineParameters(one, zero, int8))

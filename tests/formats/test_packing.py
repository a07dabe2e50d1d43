"""Packing: the bytes of every format, and what they give back."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_types import ML_DTYPES

from quark.errors import InvalidValueError, UnknownNameError, UnsupportedTypeError
from quark.formats.catalog import BLOCK_FORMATS, FORMATS, PLAIN_FLOATS, PLAIN_INTEGERS
from quark.formats.packing import PackedArray, decode_elements, encode_elements, pack, pack_bits, unpack, unpack_bits
from quark.formats.quantize import quantize_dequantize
from quark.formats.spec import IntFormat

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "golden.npz")
META = json.loads(bytes(GOLDEN["meta_json"]))
AXES = {name: case["axis"] for name, case in META["cases"].items()}
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
MX_FLOATS = [fmt for fmt in BLOCK_FORMATS if fmt.name.startswith("mxfp")]


def assert_same(actual, expected):
    """The same numbers, NaN for NaN; the sign of zero is free."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    a, b = (np.asarray(x.float() if isinstance(x, torch.Tensor) else x, np.float64) for x in (actual, expected))
    np.testing.assert_array_equal(a, b)


def sample(shape=(5, 3, 70), dtype=np.float32, seed=0):
    """Numbers of all sizes, from zero and subnormal ones up."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 15, shape)
    x[rng.random(shape) < 0.05] = 0.0
    x[rng.random(shape) < 0.02] = -1e-41
    return x.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("name", FORMATS)
def test_unpack_gives_what_quantize_dequantize_gives(name, dtype):
    x = sample(dtype=dtype)
    for axis in (-1, 0, 1):
        assert_same(unpack(pack(x, name, axis)), quantize_dequantize(x, name, axis))


@pytest.mark.parametrize("fmt", [*BLOCK_FORMATS, *PLAIN_FLOATS], ids=str)
def test_golden_inputs(fmt):
    for case, axis in AXES.items():
        x = GOLDEN[f"in__{case}"]
        assert_same(unpack(pack(x, fmt, axis)), quantize_dequantize(x, fmt, axis))


@pytest.mark.parametrize("fmt", [fmt for fmt in BLOCK_FORMATS if not fmt.carry], ids=str)
def test_a_block_with_nan_is_stored_as_such(fmt):
    for case in META["nan_cases"]:
        x, axis = GOLDEN[f"in__{case}"], META["nan_cases"][case]["axis"]
        packed = pack(x, fmt, axis, nonfinite="block_nan")
        assert (packed.scales == (255 if fmt.scale is None else 0x7F)).any()  # NaN in E8M0 and in E4M3
        assert_same(unpack(packed), quantize_dequantize(x, fmt, axis, nonfinite="block_nan"))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["mxfp6_e3m2", "mx6", "bfp16c", "fp8_e4m3", "int5", "bfloat16"])
def test_a_tensor_comes_back_as_a_tensor(name, dtype):
    x = torch.from_numpy(sample()).to(getattr(torch, dtype)).transpose(0, 1).requires_grad_()
    packed = pack(x, name, 1)
    assert packed.dtype == x.dtype
    assert_same(unpack(packed), quantize_dequantize(x.detach(), name, 1))


@pytest.mark.parametrize("rounding", ["half_away", "half_up"])
@pytest.mark.parametrize("scale_rule", ["ceil", "even", "rceil", "mse"])
@pytest.mark.parametrize("name", ["mxfp4_e2m1", "mxint8", "mx4", "mx9"])
def test_options_are_those_of_quantize_dequantize(name, scale_rule, rounding):
    x = sample()
    for block_size in (12, 1, 33, 100):
        options = {"scale_rule": scale_rule, "rounding": rounding, "block_size": block_size}
        assert_same(unpack(pack(x, name, **options)), quantize_dequantize(x, name, **options))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (0, 5), (2, 1, 3)])
def test_few_or_no_elements(shape, name):
    x = np.ones(shape, np.float32)
    assert_same(unpack(pack(x, name, 0)), quantize_dequantize(x, name, 0))


@pytest.mark.parametrize("name", FORMATS)
def test_whole_blocks_take_the_bits_that_the_format_says(name):
    packed = pack(np.zeros((3, 96), np.float32), name)
    shared = 0 if packed.tensor_scale is None else 4  # bytes for the whole tensor
    assert (packed.nbytes - shared) * 8 == 3 * 96 * FORMATS[name].bits_per_element
    assert packed.bits_per_element == 8 * packed.nbytes / (3 * 96)


def test_known_sizes():
    x = np.zeros((2, 64), np.float32)
    sizes = {name: pack(x, name).bits_per_element for name in ("mxfp4_e2m1", "mxfp6_e2m3", "mxint8", "mx4", "mx6")}
    assert sizes == {"mxfp4_e2m1": 4.25, "mxfp6_e2m3": 6.25, "mxint8": 8.25, "mx4": 4, "mx6": 6}
    assert pack(x, "nvfp4").nbytes * 8 == x.size * 4.5 + 32
    assert [pack(x, name).bits_per_element for name in ("mx9", "bfp16", "bfp16c", "int3")] == [9, 9, 9, 3]


def test_a_short_last_block_is_not_filled_up():
    packed = pack(np.ones((2, 35), np.float32), "mxfp6_e2m3")
    assert packed.codes.shape == (2, 27)  # 35 * 6 bits are 26.25 bytes
    assert packed.scales.shape == (2, 2)


def test_the_packed_axis_is_moved_last():
    x = sample((4, 64, 3))
    packed, moved = pack(x, "mxfp4_e2m1", 1), pack(np.moveaxis(x, 1, -1).copy(), "mxfp4_e2m1")
    np.testing.assert_array_equal(packed.codes, moved.codes)
    np.testing.assert_array_equal(packed.scales, moved.scales)
    assert (packed.axis, packed.shape, packed.codes.shape, packed.scales.shape) == (
        1,
        (4, 64, 3),
        (4, 3, 32),
        (4, 3, 2),
    )


def test_bytes_of_fp4():
    packed = pack(np.array([0.5, -6.0, 1.0, 4.0, 3.0], np.float32), "mxfp4_e2m1")
    # codes 1, 15, 2, 6, 5, the first in the low half of its byte; the scale is 2^0
    assert packed.codes.tolist() == [0xF1, 0x62, 0x05]
    assert packed.scales.tolist() == [127]


def test_bytes_of_microexponents():
    x = np.zeros(16, np.float32)
    x[:6] = [3.0, -1.0, 0.5, 1.0, -0.75, 0.0]
    packed = pack(x, "mx6")
    # 2^1 over 4 bits of magnitude: the quantum is 1/4, and 1/8 in all sub-blocks but the first
    assert packed.scales.tolist() == [[128, 0b11111110]]
    codes = unpack_bits(packed.codes, 5, 16)
    assert codes[:6].tolist() == [12, 16 + 4, 4, 8, 16 + 6, 0]


def test_bytes_of_block_floats():
    x = np.array([1.9999, 0.01, -0.3], np.float32)
    plain, carried = pack(x, "bfp16"), pack(x, "bfp16c")
    assert plain.codes.tolist() == [127, 1, 128 + 19]  # sign and magnitude
    assert carried.codes.tolist() == [64, 0, 256 - 10]  # two's complement, exponent raised by one
    assert [plain.scales.tolist(), carried.scales.tolist()] == [[127], [128]]


def test_the_carrying_format_reaches_two_to_the_128():
    largest = np.array([np.finfo(np.float32).max, 1e38], np.float32)
    packed = pack(largest, "bfp16c")
    assert packed.scales.tolist() == [255]
    assert_same(unpack(packed), quantize_dequantize(largest, "bfp16c"))


@pytest.mark.parametrize("fmt", PLAIN_FLOATS, ids=str)
def test_float_codes_are_those_of_ml_dtypes(fmt):
    codes = np.arange(1 << fmt.bits, dtype=np.uint16 if fmt.bits > 8 else np.uint8)
    with np.errstate(invalid="ignore"):
        values = codes.view(ML_DTYPES[fmt.name]).astype(np.float64)
    np.testing.assert_array_equal(decode_elements(fmt, codes, np.dtype(np.float64)), values)
    numbers = ~np.isnan(values)
    for dtype in (np.float32, np.float64):
        np.testing.assert_array_equal(encode_elements(fmt, values[numbers].astype(dtype)), codes[numbers])
    if fmt.has_nan:
        assert np.isnan(encode_elements(fmt, np.array([np.nan])).view(ML_DTYPES[fmt.name]).astype(np.float32)).all()


@pytest.mark.parametrize("fmt", MX_FLOATS, ids=str)
def test_any_reader_of_the_types_can_read_the_blocks(fmt):
    x = sample((4, 96))
    packed = pack(x, fmt)
    elements = unpack_bits(packed.codes, fmt.element.bits, 96).view(ML_DTYPES[fmt.element.name]).astype(np.float32)
    scales = packed.scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(elements * np.repeat(scales, 32, axis=1), quantize_dequantize(x, fmt))


@pytest.mark.parametrize("fmt", [*PLAIN_FLOATS, *(fmt.element for fmt in BLOCK_FORMATS)], ids=str)
def test_zero_has_a_sign_where_the_codes_have_one(fmt):
    decoded = decode_elements(fmt, encode_elements(fmt, np.float32([0.0, -0.0])), np.dtype(np.float32))
    has_sign = not isinstance(fmt, IntFormat) or fmt.symmetric
    assert np.signbit(decoded).tolist() == [False, has_sign]


@pytest.mark.parametrize("fmt", PLAIN_INTEGERS, ids=str)
def test_integers_are_twos_complement(fmt):
    ends = np.array([fmt.qmin, -1 if fmt.signed else 1, 0, fmt.qmax], np.float64)
    codes = encode_elements(fmt, ends)
    assert codes.tolist() == [int(value) % (1 << fmt.bits) for value in ends]
    assert decode_elements(fmt, codes, np.dtype(np.float64)).tolist() == ends.tolist()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(bits=st.integers(1, 32), count=st.integers(0, 40), seed=st.integers(0, 1000))
def test_rows_of_bits(bits, count, seed):
    dtype = np.dtype(f"uint{next(width for width in (8, 16, 32) if bits <= width)}")
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (3, count), dtype=np.uint64).astype(dtype)
    packed = pack_bits(codes, bits)
    every_bit = np.unpackbits(codes.astype("<u4")[..., None].view(np.uint8), axis=-1, bitorder="little")[..., :bits]
    np.testing.assert_array_equal(packed, np.packbits(every_bit.reshape(3, -1), axis=-1, bitorder="little"))
    np.testing.assert_array_equal(unpack_bits(packed, bits, count), codes)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "fp8_e5m2", "fp8_e4m3"])
def test_plain_floats_store_what_they_have_codes_for(name):
    x = np.array([1.0, np.nan, np.inf, -np.inf], np.float32)
    assert_same(unpack(pack(x, name)), quantize_dequantize(x, name))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bfp16", {}, r"x\[0, 1\] is nan: format 'bfp16' has no code for it; pass nonfinite='block_nan'"),
        ("mxfp8_e5m2", {"nonfinite": "passthrough"}, r"x\[0, 1\] is nan.*pass nonfinite='block_nan'"),
        ("bfp16c", {"nonfinite": "block_nan"}, r"x\[0, 1\] is nan.*replace it first"),
        ("fp6_e2m3", {}, r"x\[0, 1\] is nan.*replace it first"),
        ("int8", {}, r"x\[0, 1\] is nan.*replace it first"),
        ("fp8_e4m3", {"nonfinite": "passthrough"}, r"x\[1, 0\] is inf.*pass nonfinite='block_nan'"),
    ],
)
def test_what_has_no_code_is_refused(name, options, message):
    x = np.array([[1.0, np.nan], [np.inf, 2.0]], np.float32)
    with pytest.raises(InvalidValueError, match=message):
        pack(x, name, **options)


def test_other_refusals():
    x = np.ones((2, 3), np.float32)
    with pytest.raises(UnsupportedTypeError, match="got int64"):
        pack(x.astype(np.int64), "mxint8")
    with pytest.raises(UnknownNameError, match="mxint8"):
        pack(x, "mxint9")
    with pytest.raises(InvalidValueError, match="axis 2 is out of range"):
        pack(x, "mxint8", 2)
    with pytest.raises(InvalidValueError, match="has no blocks"):
        pack(x, "int8", block_size=4)
    packed = pack(x, "mxint8")
    with pytest.raises(InvalidValueError, match=r"codes: expected uint8 of shape \(2, 3\)"):
        PackedArray(packed.codes[:1], packed.scales, packed.format, packed.shape, packed.axis, packed.dtype)

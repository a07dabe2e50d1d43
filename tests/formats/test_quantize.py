"""`quantize_dequantize`: kinds of arrays, plain formats, options, and what it says to nonsense."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from golden import same
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quark.errors import InvalidValueError, QuarkError, UnknownNameError, UnsupportedTypeError
from quark.formats import FORMATS, get_format, pack, quantize_dequantize, unpack
from quark.formats.catalog import BLOCK_FORMATS, PLAIN_FLOATS, PLAIN_INTEGERS
from quark.formats.spec import BlockFormat, Format, IntFormat, SubBlocks

Array = np.ndarray[Any, Any]

each_format = pytest.mark.parametrize("name", [n for n in FORMATS if n.strip("uint") not in map(str, range(9, 32))])


@each_format
def test_numpy_and_torch_agree_in_every_type(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((5, 70)).astype(np.float32) * 3
    for numpy_type, torch_type in (
        (np.float32, torch.float32),
        (np.float16, torch.float16),
        (ml_dtypes.bfloat16, torch.bfloat16),
        (np.float64, torch.float64),
    ):
        array = x.astype(numpy_type)
        tensor = torch.from_numpy(x).to(torch_type)
        ours, theirs = quantize_dequantize(array, name, 0), quantize_dequantize(tensor, name, 0)
        assert ours.dtype == array.dtype
        assert theirs.dtype == torch_type
        assert np.array_equal(ours.astype(np.float64), theirs.to(torch.float64).numpy())


@each_format
def test_layout_does_not_matter(name: str) -> None:
    x = np.random.default_rng(1).standard_normal((4, 33, 6)).astype(np.float32)
    expected = quantize_dequantize(x, name, 1)
    assert np.array_equal(quantize_dequantize(np.asfortranarray(x), name, 1), expected)
    assert np.array_equal(quantize_dequantize(x.transpose(1, 2, 0), name, 0), expected.transpose(1, 2, 0))
    assert np.array_equal(quantize_dequantize(x[::-1, ::-1], name, 1)[::-1], quantize_dequantize(x[:, ::-1], name, 1))
    tensor = torch.from_numpy(x).permute(2, 0, 1)
    assert np.array_equal(quantize_dequantize(tensor, name, 2).permute(1, 2, 0).numpy(), expected)


@each_format
def test_the_input_is_not_written_to_and_not_returned(name: str) -> None:
    x = np.random.default_rng(2).standard_normal((3, 40)).astype(np.float32)
    x.setflags(write=False)
    before = x.copy()
    y = quantize_dequantize(x, name)
    assert np.array_equal(x, before)
    assert not np.shares_memory(x, y)
    empty = np.zeros((0, 3), np.float32)
    assert quantize_dequantize(empty, name).shape == (0, 3)
    assert quantize_dequantize(np.float32(0.3), name).shape == ()


@pytest.mark.parametrize("fmt", [f for f in PLAIN_INTEGERS if f.bits in (2, 3, 4, 8, 16)], ids=str)
def test_every_integer_is_a_fixed_point(fmt: IntFormat) -> None:
    codes = np.arange(fmt.qmin, fmt.qmax + 1).astype(np.float32)
    assert np.array_equal(quantize_dequantize(codes, fmt.name), codes)
    beyond = np.array([fmt.qmin - 1, fmt.qmin - 0.51, fmt.qmax + 0.5, 3e38, -3e38], np.float32)
    expected = [fmt.qmin, fmt.qmin, fmt.qmax, fmt.qmax, fmt.qmin]
    assert quantize_dequantize(beyond, fmt.name).tolist() == expected


def test_ties_of_integers() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5], np.float32)
    assert quantize_dequantize(x, "int8").tolist() == [0, 2, 2, 0, -2, -2]
    assert quantize_dequantize(x, "int8", rounding="half_away").tolist() == [1, 2, 3, -1, -2, -3]
    assert quantize_dequantize(x, "int8", rounding="half_up").tolist() == [1, 2, 3, 0, -1, -2]


@pytest.mark.parametrize("name", ["int32", "uint32", "int25", "uint31"])
def test_wide_integers_stay_in_range(name: str) -> None:
    x = np.array([3e38, 2.0**33, -3e38, 8388607.5, 16777215.0, 0.5, 1.5], np.float32)
    fmt = get_format(name)
    assert isinstance(fmt, IntFormat)
    for y in (quantize_dequantize(x, name), quantize_dequantize(torch.from_numpy(x), name).numpy()):
        assert float(y.max()) <= fmt.qmax
        assert float(y.min()) >= fmt.qmin
        assert y[3:].tolist() == [8388608.0, 16777215.0, 0.0, 2.0]


@pytest.mark.parametrize("fmt", PLAIN_FLOATS, ids=str)
def test_plain_floats_saturate(fmt: Format) -> None:
    x = np.array([3.4e38, -3.4e38], np.float32)
    assert quantize_dequantize(x, fmt.name).tolist() == [fmt.max, -fmt.max]


@each_format
def test_non_finite_values(name: str) -> None:
    x = np.array([np.nan, np.inf, -np.inf], np.float32)
    fmt = get_format(name)
    passed = quantize_dequantize(x, name, nonfinite="passthrough")
    assert same(passed, x).all()
    assert np.isnan(quantize_dequantize(x, name, nonfinite="block_nan")).all()
    default = quantize_dequantize(x, name)
    assert same(default, quantize_dequantize(x, name, nonfinite=fmt.default_nonfinite)).all()


def test_defaults_of_the_policies() -> None:
    passing = {name for name, fmt in FORMATS.items() if fmt.default_nonfinite.value == "passthrough"}
    assert passing == {"bfp16", "bfp16c", "float16", "bfloat16", "fp8_e5m2"}


def test_block_size_option() -> None:
    x = np.array([[1.0, 0.011, 100.0, 0.013]], np.float32)
    coarse = quantize_dequantize(x, "mxfp4_e2m1")
    fine = quantize_dequantize(x, "mxfp4_e2m1", block_size=1)
    assert coarse.tolist() == [[0.0, 0.0, 96.0, 0.0]]
    assert (fine != 0).all()


def test_gradients_do_not_flow() -> None:
    x = torch.randn(3, 40, requires_grad=True)
    y = quantize_dequantize(x, "mxfp8_e4m3")
    assert not y.requires_grad


def test_tracing_records_the_work_and_not_its_result() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(4, 40)
    traced = make_fx(lambda t: quantize_dequantize(t, "mxfp4_e2m1"))(x)
    assert torch.equal(traced(8.25 * x), quantize_dequantize(8.25 * x, "mxfp4_e2m1"))


def test_flushed_subnormals_make_no_nan() -> None:
    torch.set_flush_denormal(True)
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            assert (quantize_dequantize(torch.zeros(64, dtype=dtype), "mxfp4_e2m1") == 0).all()
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("block_size", [2**40, 2**63, 2**64 + 32])
def test_a_block_longer_than_the_axis_is_one_of_its_length(block_size: int) -> None:
    x = np.random.default_rng(6).standard_normal((3, 40)).astype(np.float32)
    for name in ("mxint8", "mx6"):
        expected = quantize_dequantize(x, name, block_size=40)
        assert np.array_equal(quantize_dequantize(x, name, block_size=block_size), expected)
        assert np.array_equal(quantize_dequantize(x.astype(np.float64), name, block_size=block_size), expected)
        assert np.array_equal(unpack(pack(x, name, block_size=block_size)), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: BlockFormat("b", get_format("bfloat16"), 32),
        lambda: BlockFormat("b", IntFormat("i24", 24, True, 22, True), 32),
        lambda: BlockFormat("b", get_format("fp8_e4m3"), 16, carry=True),
        lambda: BlockFormat("b", IntFormat("i8", 8, True, 9), 16),
        lambda: BlockFormat("b", get_format("fp8_e4m3"), 16, SubBlocks(2, 1)),
        lambda: SubBlocks(0, 1),
        lambda: SubBlocks(2, 9),
    ],
)
def test_impossible_formats_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidValueError):
        make()


@pytest.mark.parametrize("name", ["mxint8", "int4", "fp8_e4m3"])
def test_subclasses_with_arithmetic_of_their_own_are_refused(name: str) -> None:
    x = np.ones((4, 4), np.float32)
    for odd in (x.view(np.recarray), np.ma.masked_array(x, mask=x > 0)):
        with pytest.raises(UnsupportedTypeError, match="np.asarray"):
            quantize_dequantize(odd, name)


def test_torch_compile_gives_the_same_bits() -> None:
    x = torch.randn(6, 96)
    for name in ("mxfp8_e4m3", "mx6", "bfp16c"):
        compiled = torch.compile(lambda t, name=name: quantize_dequantize(t, name), backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), quantize_dequantize(x, name))


def test_without_native_code_the_same_bits() -> None:
    program = (
        "import numpy as np, hashlib\n"
        "from quark.formats import FORMATS, quantize_dequantize\n"
        "from quark.formats.native import instruction_set\n"
        "x = np.random.default_rng(3).standard_normal((64, 200)).astype(np.float32)\n"
        "digest = hashlib.sha256()\n"
        "for name in FORMATS:\n"
        "    for axis in (0, 1): digest.update((quantize_dequantize(x, name, axis) + 0.0).tobytes())\n"
        "print(instruction_set(), digest.hexdigest())\n"
    )
    found = []
    for value in ("0", "1"):
        result = subprocess.run(
            [sys.executable, "-c", program], env={"QUARK_NO_NATIVE": value}, capture_output=True, text=True, check=True
        )
        found.append(result.stdout.split())
    assert found[0][0] != "None"
    assert found[1][0] == "None"
    assert found[0][1] == found[1][1]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    x=hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=3, max_side=40), elements=st.floats(width=32)),
    fmt=st.sampled_from(BLOCK_FORMATS),
    block_size=st.integers(1, 70),
    data=st.data(),
)
def test_any_array_any_block(x: Array, fmt: BlockFormat, block_size: int, data: st.DataObject) -> None:
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    y = quantize_dequantize(x, fmt, axis, block_size=block_size)
    tensor = torch.from_numpy(x.copy())
    # products with scales that are not powers of two have more digits in float64
    wide = tensor.double() if fmt.scale is None else tensor
    again = quantize_dequantize(wide, fmt, axis, block_size=block_size)
    with np.errstate(over="ignore"):
        assert same(y, again.numpy().astype(np.float32)).all()
    # each block's error is at most its largest magnitude, and signs survive
    finite = np.isfinite(x) & np.isfinite(y)
    assert ((y[finite] * np.sign(x[finite])) >= 0).all()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("mxfp4",), {}, UnknownNameError, "no format 'mxfp4'. Did you mean mxfp4_e2m1"),
        (("MXFP8_E4M3",), {}, UnknownNameError, "Did you mean mxfp8_e4m3"),
        ((4,), {}, UnsupportedTypeError, "format: expected a name or a format, got int"),
        (("mx6", 2), {}, InvalidValueError, "axis 2 is out of range for an array of rank 2: expected -2..1"),
        (("mx6", -3), {}, InvalidValueError, "axis -3 is out of range"),
        (("mx6", 1.0), {}, UnsupportedTypeError, "axis: expected an integer, got 1.0"),
        (("mx6", True), {}, UnsupportedTypeError, "axis: expected an integer"),
        (("mx6",), {"block_size": 0}, InvalidValueError, "block_size 0 of format 'mx6': expected an integer of at"),
        (("mx6",), {"block_size": -1}, InvalidValueError, "block_size -1"),
        (("mx6",), {"block_size": 2.5}, UnsupportedTypeError, "block_size: expected an integer, got 2.5"),
        (("mx6",), {"scale_rule": "flor"}, UnknownNameError, "no scale rule 'flor'. Did you mean floor?"),
        (("mx6",), {"rounding": "even"}, UnknownNameError, "no rounding mode 'even'. Did you mean half_even?"),
        (("mx6",), {"rounding": 2}, UnknownNameError, "no rounding mode 2. Known: half_away, half_up, half_even."),
        (("mx6",), {"nonfinite": "nan"}, UnknownNameError, "no non-finite policy 'nan'"),
        (("int8",), {"block_size": 32}, InvalidValueError, "block_size: format 'int8' has no blocks"),
        (("fp8_e4m3",), {"scale_rule": "mse"}, InvalidValueError, "scale_rule 'mse': format 'fp8_e4m3' has no scale"),
        (("bfp16c",), {"scale_rule": "ceil"}, InvalidValueError, "scale_rule must be 'floor', not 'ceil'"),
    ],
)
def test_nonsense_options(arguments: Any, options: Any, error: type[QuarkError], message: str) -> None:
    with pytest.raises(error) as caught:
        quantize_dequantize(np.ones((2, 3), np.float32), *arguments, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "x",
    [
        np.ones(3, np.int32),
        np.ones(3, bool),
        np.array([1.0, None], object),
        np.ones(3, np.complex64),
        np.array(["1"]),
        torch.ones(3, dtype=torch.int64),
        [1.0, 2.0],
        1.0,
        None,
    ],
    ids=lambda x: str(getattr(x, "dtype", type(x).__name__)),
)
def test_nonsense_arrays(x: object) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"x: expected"):
        quantize_dequantize(x, "mxint8")

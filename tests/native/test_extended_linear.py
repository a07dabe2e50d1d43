"""ExtendedQuantizeLinear and ExtendedDequantizeLinear against their definition. Also run on the oldest runtime."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from backends import open_session
from golden import same
from onnx import helper

from quark.ops.onnx_nodes import make_extended_dequantize_node, make_extended_quantize_node

Array = np.ndarray[Any, Any]

INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32]
SMALL_FLOATS = [np.float16, ml_dtypes.bfloat16]
HARD = np.array(
    [0.0, -0.0, 0.25, 0.75, -0.25, -0.75, 1.25, 1e-3, -1e-3, 127.25, 65504, 65520, 7e4, -7e4, 2e9, -2e9, 3e38, -3.4e38]
    + [np.inf, -np.inf, np.nan, 1e-45, 8388607.5, 8388608.5, 4194303.75],
    np.float32,
)


def linear_model(x: Array, scale: Array, zero_point: Array, axis: int, whole: bool) -> onnx.ModelProto:
    """Quantize; and dequantize again if `whole`."""
    nodes = [make_extended_quantize_node("x", "scale", "zero", "q", axis, "the_quantizer")]
    if whole:
        nodes.append(make_extended_dequantize_node("q", "scale", "zero", "y", axis, "the_dequantizer"))
    # onnx 1.17 makes no bfloat16 out of arrays, onnx_ir does
    inits = [ir.to_proto(ir.tensor(array, name=name)) for name, array in (("scale", scale), ("zero", zero_point))]
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    out = kind if whole else inits[1].data_type
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, [None] * x.ndim)],
        [helper.make_tensor_value_info("y" if whole else "q", out, None)],
        inits,
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.amd.quark", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def run(x: Array, scale: Any, zero_point: Array, axis: int = 0, whole: bool = True) -> Array:
    model = linear_model(x, np.asarray(scale, x.dtype), zero_point, axis, whole)
    return open_session(model, native=True).run(None, {"x": x})[0]


def expected_codes(x: Array, scale: float, zero_point: int, dtype: Any) -> Array:
    limits = np.iinfo(dtype)
    with np.errstate(all="ignore"):
        quotient = x.astype(np.float32) / np.float32(scale)
    rounded = np.where(np.isnan(quotient), 0.0, np.rint(quotient).astype(np.float64))
    return np.clip(rounded + zero_point, limits.min, limits.max).astype(dtype)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("scale", [0.5, 1.0, 0.1, 3e-7, 1e30])
def test_integers(dtype: Any, scale: float) -> None:
    for zero_point in (0, 3, np.iinfo(dtype).min, np.iinfo(dtype).max):
        zero = np.array(zero_point, dtype)
        codes = expected_codes(HARD, scale, int(zero_point), dtype)
        assert np.array_equal(run(HARD, scale, zero, whole=False), codes)
        with np.errstate(over="ignore"):
            values = (codes.astype(np.int64) - int(zero_point)).astype(np.float32) * np.float32(scale)
        assert np.array_equal(run(HARD, scale, zero), values)


@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_small_floats_saturate(dtype: Any) -> None:
    limit = float(ml_dtypes.finfo(dtype).max)
    with np.errstate(all="ignore"):
        expected = np.where(np.isinf(HARD), HARD, np.clip(HARD, -limit, limit)).astype(dtype).astype(np.float32)
    assert same(run(HARD, 1.0, np.zeros((), dtype)), expected).all()


@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_every_16_bit_code_is_a_fixed_point(dtype: Any) -> None:
    codes = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
    assert same(run(codes, 1.0, np.zeros((), dtype)), codes).all()


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_per_channel(dtype: Any, axis: int) -> None:
    x = np.random.default_rng(0).standard_normal((4, 5, 6)).astype(np.float32) * 100
    channels = x.shape[axis]
    scale = (np.arange(channels) + 1).astype(np.float32) / 7
    zero = np.arange(channels).astype(dtype)
    shape = [-1 if i == axis % 3 else 1 for i in range(3)]
    codes = np.rint(x / scale.reshape(shape)) + zero.reshape(shape)
    assert np.array_equal(run(x, scale, zero, axis, whole=False), codes.astype(dtype))


def test_float16_tensors() -> None:
    x = np.random.default_rng(1).standard_normal((3, 40)).astype(np.float16)
    y = run(x, 0.25, np.array(2, np.int16))
    assert y.dtype == np.float16
    assert np.array_equal(y, np.rint(x.astype(np.float32) / 0.25).astype(np.float16) * np.float16(0.25))


def test_a_scale_of_zero_is_no_crash() -> None:
    x = np.array([-1.0, 0.0, 1.0, np.nan], np.float32)
    assert run(x, 0.0, np.array(0, np.int32), whole=False).tolist() == [-(2**31), 0, 2**31 - 1, 0]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3)], ids=str)
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    assert np.array_equal(run(np.full(shape, 1.3, np.float32), 0.5, np.array(0, np.int16)), np.full(shape, 1.5))


def test_wrong_shapes_are_errors() -> None:
    x = np.ones((2, 3), np.float32)
    with pytest.raises(Exception, match=r"the_quantizer.*expected scalars or \[3\], one for each index of axis 1"):
        run(x, [0.5, 0.25], np.zeros(2, np.int32), axis=1)
    with pytest.raises(Exception, match=r"the_quantizer.*one scale, but zero points of shape \[3\]"):
        run(x, 0.5, np.zeros(3, np.int32), axis=1)
    with pytest.raises(Exception, match=r"the_quantizer.*'axis' is 5; expected -2..1"):
        run(x, [0.5, 0.25], np.zeros(2, np.int32), axis=5)


def test_a_zero_point_of_another_type_is_an_error() -> None:
    with pytest.raises(Exception, match="the zero point must be int8, uint8"):
        run(np.ones((2, 3), np.float32), 0.5, np.array(0, np.int64), whole=False)


def test_the_output_type_is_inferred() -> None:
    model = linear_model(np.ones((2, 3), np.float32), np.ones((), np.float32), np.array(0, np.int32), 0, False)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    session = open_session(model, native=True)
    assert session.get_outputs()[0].type == "tensor(int32)"

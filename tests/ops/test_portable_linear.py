"""ExtendedQuantizeLinear and ExtendedDequantizeLinear as functions of ordinary ONNX operators, against numpy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.errors import ModelError
from quark.ops.onnx_nodes import make_extended_dequantize_node, make_extended_quantize_node
from quark.ops.portable_functions import add_portable_functions
from quark.ops.schema import DOMAIN, QUANTIZED_TYPES

Array = np.ndarray[Any, Any]

DTYPES = {name: np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name) for name in QUANTIZED_TYPES}
FLOATS = ("float16", "bfloat16")


def run(nodes: list[onnx.NodeProto], x: Array, scale: Array, zero_point: Array, out: int, opset: int) -> Array:
    """The result y as an array of type `out`; by way of float32, for numpy and ONNX Runtime share no bfloat16."""
    tensors = [numpy_helper.from_array(scale, "scale"), numpy_helper.from_array(zero_point, "zero_point")]
    given = helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), [None] * x.ndim)
    shown = TensorProto.FLOAT if out == TensorProto.BFLOAT16 else out
    nodes = [*nodes, helper.make_node("Cast", ["y"], ["shown"], to=shown)]
    graph = helper.make_graph(nodes, "g", [given], [helper.make_tensor_value_info("shown", shown, None)], tensors)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    model = add_portable_functions(helper.make_model(graph, opset_imports=imports, ir_version=8))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    with np.errstate(invalid="ignore"):
        return session.run(None, {"x": x})[0].astype(helper.tensor_dtype_to_np_dtype(out))


def quantize(x: Array, scale: Array, zero_point: Array, axis: int = 0, opset: int = 17) -> Array:
    out = helper.np_dtype_to_tensor_dtype(zero_point.dtype)
    node = make_extended_quantize_node("x", "scale", "zero_point", "y", axis)
    return run([node], x, scale, zero_point, out, opset)


def round_trip(x: Array, scale: Array, zero_point: Array, axis: int, opset: int) -> Array:
    nodes = [
        make_extended_quantize_node("x", "scale", "zero_point", "q", axis),
        make_extended_dequantize_node("q", "scale", "zero_point", "y", axis),
    ]
    return run(nodes, x, scale, zero_point, helper.np_dtype_to_tensor_dtype(scale.dtype), opset)


def along(axis: int, parameter: Array, x: Array) -> Array:
    shape = [1] * x.ndim
    if parameter.size > 1:
        shape[axis] = parameter.size
    return parameter.reshape(shape)


def expected_codes(x: Array, scale: Array, zero_point: Array, axis: int = 0) -> Array:
    """The definition, in float32 and then float64."""
    dtype, scale, zero_point = zero_point.dtype, along(axis, scale, x), along(axis, zero_point, x)
    with np.errstate(all="ignore"):
        quotient = x.astype(np.float32) / scale.astype(np.float32)
        if dtype.name in FLOATS:
            limit = np.float32(ml_dtypes.finfo(dtype).max)
            value = quotient + zero_point.astype(np.float32)
            return np.where(np.isfinite(value), np.clip(value, -limit, limit), value).astype(dtype)
        rounded = np.where(np.isnan(quotient), 0.0, np.rint(quotient.astype(np.float64)))
        info = np.iinfo(dtype)
        return np.clip(rounded + zero_point.astype(np.float64), info.min, info.max).astype(dtype)


def expected_values(codes: Array, scale: Array, zero_point: Array, axis: int = 0) -> Array:
    scale, zero_point = along(axis, scale, codes), along(axis, zero_point, codes)
    difference = codes.astype(np.float64) - zero_point.astype(np.float64)
    with np.errstate(all="ignore"):
        return difference.astype(np.float32) * scale.astype(np.float32)


def bits_equal(a: Array, b: Array) -> bool:
    """Equal codes; NaN is equal to NaN."""
    same = a == b
    if a.dtype.kind not in "iu":
        same |= np.isnan(a.astype(np.float32)) & np.isnan(b.astype(np.float32))
    return a.dtype == b.dtype and a.shape == b.shape and bool(same.all())


def hard_values(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 33, shape)
    x = np.where(rng.random(shape) < 0.3, rng.integers(-300, 300, shape) * 0.25, x).astype(np.float32)
    special = np.float32([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 65519, 65520, 1e-45])
    return np.where(rng.random(shape) < 0.05, rng.choice(special, shape), x)


def zero_points(name: str, count: int, rng: np.random.Generator) -> Array:
    if name in FLOATS:
        return np.zeros(count, DTYPES[name])
    info = np.iinfo(DTYPES[name])
    return rng.integers(info.min, info.max, count, endpoint=True, dtype=DTYPES[name])


@pytest.mark.parametrize("opset", [13, 14, 15, 17, 18, 21])
@pytest.mark.parametrize("name", QUANTIZED_TYPES)
def test_every_type_per_tensor_and_per_channel(name: str, opset: int) -> None:
    rng = np.random.default_rng(opset)
    for shape, axis, count in (((4, 5, 6), 1, 5), ((4, 5, 6), -3, 4), ((400,), 0, 1), ((), 0, 1)):
        x = hard_values(rng, shape)
        scale = (rng.random(count) + 0.5).astype(np.float32) * np.float32(0.5)
        zero_point = zero_points(name, count, rng)
        if count == 1:
            scale, zero_point = scale.reshape(()), zero_point.reshape(())
        codes = expected_codes(x, scale, zero_point, axis)
        assert bits_equal(quantize(x, scale, zero_point, axis, opset), codes)
        expected = expected_values(codes, scale, zero_point, axis)
        assert bits_equal(round_trip(x, scale, zero_point, axis, opset), expected)


@pytest.mark.parametrize("name", ["int32", "uint32"])
def test_thirty_two_bits_are_exact(name: str) -> None:
    info = np.iinfo(DTYPES[name])
    x = np.float32([0, 1, -1, 0.5, 1.5, 2.5, 16777215, 2147483520, -2147483648, 4294967040, 1e10, -1e10])
    for zero_point in (info.min, info.min + 1, 0, 12345679, info.max - 1, info.max):
        point = np.array(zero_point, DTYPES[name])
        assert bits_equal(quantize(x, np.float32(1), point), expected_codes(x, np.float32(1), point))


@pytest.mark.parametrize("name", ["int16", "float16"])
def test_float16_inputs_and_scales(name: str) -> None:
    rng = np.random.default_rng(0)
    with np.errstate(over="ignore"):
        x, scale = hard_values(rng, (3, 50)).astype(np.float16), np.float16(0.25)
    zero_point = zero_points(name, 1, rng).reshape(())
    codes = expected_codes(x, scale, zero_point)
    assert bits_equal(quantize(x, scale, zero_point), codes)
    wide = expected_values(codes, scale, zero_point)
    limit = np.float32(np.finfo(np.float16).max)
    narrow = np.where(np.isfinite(wide), np.clip(wide, -limit, limit), wide).astype(np.float16)
    assert bits_equal(round_trip(x, scale, zero_point, 0, 17), narrow)


def two_types_model(opset: int) -> onnx.ModelProto:
    nodes = [make_extended_quantize_node("x", "scale", f"zero_{i}", f"y{i}", name=f"quantizer_{i}") for i in (0, 1)]
    types = (TensorProto.INT16, TensorProto.INT32)
    tensors = [helper.make_tensor(f"zero_{i}", type, [], [3]) for i, type in enumerate(types)]
    tensors.append(numpy_helper.from_array(np.float32(1), "scale"))
    outputs = [helper.make_tensor_value_info(f"y{i}", type, ["n"]) for i, type in enumerate(types)]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(helper.make_graph(nodes, "g", [x], outputs, tensors), opset_imports=imports, ir_version=8)


def test_two_types_in_a_model_need_opset_15() -> None:
    model = add_portable_functions(two_types_model(15))
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for y, dtype in zip(session.run(None, {"x": np.float32([1, 1e9])}), (np.int16, np.int32), strict=True):
        assert y.tolist() == [4, min(10**9 + 3, np.iinfo(dtype).max)]
    with pytest.raises(ModelError, match="INT16 at node 'quantizer_0'.*INT32 at node 'quantizer_1'.*opset 15"):
        add_portable_functions(two_types_model(14))


def test_a_missing_zero_point_is_named() -> None:
    model = two_types_model(17)
    del model.graph.node[1].input[2]
    with pytest.raises(ModelError, match=r"node 'quantizer_1' \(ExtendedQuantizeLinear\) has 2 inputs.*zero_point"):
        add_portable_functions(model)

"""Constants computed in pieces are, to the last bit, what they are when computed as a whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from quark.formats.affine import find_ranges, quantize_affine
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import BLOCK_FORMATS, get_format
from quark.formats.quantize import quantize_dequantize
from quark.formats.spec import ScaleRule
from quark.onnx import large_tensors
from quark.onnx.insert.pairs import block_numbers, codes, small_floats, stored, turned
from quark.onnx.insert.weight_only import _Matrix, _packed, pack_columns
from quark.onnx.large_tensors import ComputedTensor
from quark.plan import AffineChoice, BlockChoice, FloatChoice
from quark.rounded import parameters_of

SHAPES = [(70, 96), (6, 40, 3, 3), (1, 130, 5), (3, 64, 17), (300,), (2, 3, 4, 33)]
SMALL = 700  # bytes of a piece


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_tensors, "PIECE_BYTES", SMALL)


def weights(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, shape))).astype(dtype)


def part_count(tensor: ComputedTensor) -> int:
    return len(list(tensor.compute()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=str)
def test_blocks(fmt, shape):
    array, parts = weights(shape), []
    for axis in range(len(shape)):
        for rule in (ScaleRule.FLOOR,) if fmt.carry else (ScaleRule.FLOOR, ScaleRule.MSE):
            quantizer = BlockQuantizer(fmt, rule).fixed(array)  # a plan has the tensor's scale
            choice = BlockChoice(quantizer, axis - len(shape) if axis % 2 else axis)
            tensor = block_numbers(ir.Tensor(array), choice)
            expected = quantize_dequantize(array, fmt, axis, scale_rule=rule)
            np.testing.assert_array_equal(tensor.numpy(), expected)
            assert tensor.nbytes == array.nbytes
            parts.append(part_count(tensor))
    assert max(parts) > 1


def test_blocks_of_float16_through_bfloat16():
    array = weights((96, 70), np.float16)
    choice = BlockChoice(BlockQuantizer(get_format("mxint8")), 0, to_bfloat16_first=True)
    expected = quantize_dequantize(quantize_dequantize(array, "bfloat16"), "mxint8", 0)
    tensor = block_numbers(ir.Tensor(array), choice)
    assert tensor.dtype is ir.DataType.FLOAT16
    np.testing.assert_array_equal(tensor.numpy(), expected)


def affine(array: np.ndarray, axis: int | None, group_size: int | None, fmt: str) -> AffineChoice:
    low, high = find_ranges(array.astype(np.float32), axis, group_size) if axis is not None else (-3.0, 5.0)
    scale = np.ravel((np.asarray(high, np.float32) - np.asarray(low, np.float32)) / np.float32(15)) + np.float32(1e-3)
    zero_point = tuple(int(i) % 3 for i in range(scale.size))
    return AffineChoice(fmt, tuple(scale.tolist()), zero_point, axis, group_size)


@pytest.mark.parametrize("fmt", ["int8", "uint8", "int4", "int16"])
@pytest.mark.parametrize("group_size", [None, 32, 7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes(shape, group_size, fmt):
    array, parts = weights(shape), []
    for axis in [*range(len(shape)), *([None] if group_size is None else [])]:
        choice = affine(array, axis, group_size, fmt)
        found = codes(ir.Tensor(array), choice)
        expected = quantize_affine(array, parameters_of(choice, shape))
        np.testing.assert_array_equal(found.numpy().astype(np.int32), expected.astype(np.int32))
        parts.append(part_count(found))
    assert max(parts) > 1
    assert found.dtype is ir.DataType[fmt.upper()]


@pytest.mark.parametrize("has_float32_scale", [True, False])
def test_codes_of_float16_are_for_the_scale_as_it_is_stored(has_float32_scale):
    array = weights((60, 30), np.float16)
    choice = AffineChoice("int8", (0.0123,), (0,))
    scale = 0.0123 if has_float32_scale else float(np.float16(0.0123))
    expected = quantize_affine(array.astype(np.float32), parameters_of(replace(choice, scale=(scale,)), array.shape))
    found = codes(ir.Tensor(array), choice, has_float32_scale=has_float32_scale)
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("fmt", ["float16", "bfloat16"])
def test_small_floats(fmt):
    array = weights((40, 50))
    array[0, :3] = 1e30, -1e30, 1e-30
    tensor = small_floats(ir.Tensor(array), FloatChoice(fmt))
    kind = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[fmt]
    highest = float(get_format(fmt).max)
    np.testing.assert_array_equal(tensor.numpy(), np.clip(array, -highest, highest).astype(kind))
    assert part_count(tensor) > 1


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("k", [128, 130])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_columns(bits, k, is_turned):
    array = weights((k, 20))
    choice = affine(array, 0, 32, f"uint{bits}")
    whole = quantize_affine(array, parameters_of(choice, array.shape))
    source, used = array, choice
    if is_turned:
        source = np.ascontiguousarray(array.T)
        groups = np.array(choice.scale).reshape(-1, 20).T, np.array(choice.zero_point).reshape(-1, 20).T
        used = AffineChoice(choice.format, tuple(groups[0].ravel()), tuple(groups[1].ravel().tolist()), 1, 32)
    tensor = _packed(_Matrix("w", ir.Tensor(source), used, is_turned))
    np.testing.assert_array_equal(tensor.numpy(), pack_columns(whole, bits, 32))


def test_a_turned_matrix():
    choice = AffineChoice("int8", (0.1,), (0,))
    found = turned(codes(ir.Tensor(weights((20, 30))), choice))
    assert found.shape.numpy() == (30, 20)
    np.testing.assert_array_equal(found.numpy(), codes(ir.Tensor(weights((20, 30))), choice).numpy().T)
    assert found.tobytes() == np.ascontiguousarray(found.numpy()).tobytes()


def test_only_large_models_keep_the_recipe(monkeypatch):
    tensor = small_floats(ir.Tensor(weights((40, 50))), FloatChoice("bfloat16"))
    for limit, kind in ((1 << 20, ir.Tensor), (-1, ComputedTensor)):
        monkeypatch.setattr(large_tensors, "LARGE_MODEL_BYTES", limit)
        monkeypatch.setattr(large_tensors, "LARGE_TENSOR_BYTES", 64)
        model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 21}), ir_version=10)
        assert isinstance(stored(model, tensor), kind)

"""Extremes found in pieces are those of the whole."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from quark.decide.view import ArrayConstant
from quark.formats.affine import find_ranges
from quark.onnx import large_tensors
from quark.onnx.view import TensorConstant


def held(array):
    return TensorConstant(ir.Value(name="w", const_value=ir.Tensor(array)))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_tensors, "PIECE_BYTES", 300)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("group_size", [None, 1, 7, 32])
@pytest.mark.parametrize("shape", [(70, 20), (5, 33, 3, 3), (1, 64, 9), (40,), (), (0, 4)], ids=str)
def test_they_are_those_of_the_whole(shape, group_size, dtype):
    array = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    for axis in [*range(len(shape)), *([] if group_size else [None])]:
        found = held(array).extremes(axis, group_size)
        expected = find_ranges(array.astype(np.float32), axis, group_size)
        for each, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(each, np.ravel(other))
            assert each.dtype == np.float32


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_found(bad):
    array = np.full((40, 30), 3e38, np.float32)
    array[::2] *= -1
    assert held(array).is_finite()
    assert ArrayConstant(np.abs(array)).is_finite()  # whose sum is not finite
    array[39, 29] = bad
    assert not held(array).is_finite()
    assert not ArrayConstant(array).is_finite()

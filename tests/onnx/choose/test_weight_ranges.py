"""Extremes found in pieces are those of the whole."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from quark.errors import ModelError
from quark.formats.affine import find_ranges
from quark.onnx import large_tensors
from quark.onnx.choose.affine_choices import check_finite
from quark.onnx.choose.weight_ranges import weight_extremes


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_tensors, "PIECE_BYTES", 300)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("group_size", [None, 1, 7, 32])
@pytest.mark.parametrize("shape", [(70, 20), (5, 33, 3, 3), (1, 64, 9), (40,), (), (0, 4)], ids=str)
def test_they_are_those_of_the_whole(shape, group_size, dtype):
    array = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    for axis in [*range(len(shape)), *([] if group_size else [None])]:
        found = weight_extremes(ir.Tensor(array), axis, group_size)
        expected = find_ranges(array.astype(np.float32), axis, group_size)
        for each, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(each, np.ravel(other))
            assert each.dtype == np.float32


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_found(bad):
    array = np.full((40, 30), 3e38, np.float32)
    array[::2] *= -1
    check_finite("w", ir.Tensor(array))
    check_finite("w", np.abs(array))  # whose sum is not finite
    array[39, 29] = bad
    for values in (array, ir.Tensor(array)):
        with pytest.raises(ModelError, match="'w' holds NaN or Inf"):
            check_finite("w", values)

"""The compiled loops of compensation, compared with numpy's."""

from __future__ import annotations

import numpy as np
import pytest

from quark.features.compensation import input_products, rounding
from quark.features.compensation.fixed_scales import FixedScales
from quark.features.compensation.grids import block_grid, independent
from quark.features.compensation.input_products import add_products, add_rounded_products
from quark.features.compensation.rounding import Root, compensated, descended
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.formats.native import load_library, native_row_products
from quark.formats.spec import BlockFormat, NonFinite, Rounding, ScaleRule
from quark.plan import AffineChoice, BlockChoice

pytestmark = pytest.mark.skipif(load_library() is None, reason="the library is not built")


@pytest.mark.parametrize(("rows", "groups", "columns"), [(1, 1, 1), (50, 7, 9), (33, 1, 17), (70, 2, 40), (5, 1, 131)])
def test_products_agree_with_numpy(rows: int, groups: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(columns)
    own, exact = rng.normal(size=(2, rows, groups, columns)).astype(np.float32)
    start = rng.normal(size=(groups, columns, columns)).astype(np.float32)
    found = [start.copy(), start.copy()]
    assert native_row_products() is not None
    add_products(own, exact, *found)
    monkeypatch.setattr(input_products, "native_row_products", lambda: None)
    expected = [start.copy(), start.copy()]
    add_products(own, exact, *expected)
    np.testing.assert_allclose(np.triu(found[0]), np.triu(expected[0]), atol=1e-4)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-4)
    assert not np.array_equal(found[1], start)


@pytest.mark.parametrize(("rows", "groups", "columns"), [(1, 1, 1), (50, 7, 9), (70, 2, 40)])
@pytest.mark.parametrize("choice", [AffineChoice("int8", (0.03,), (0,)), AffineChoice("uint8", (0.02,), (131,))])
def test_products_of_rows_that_are_rounded_on_the_way(
    choice: AffineChoice, rows: int, groups: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = np.random.default_rng(columns).normal(size=(rows, groups, columns), scale=2).astype(np.float32)
    found, expected = np.zeros((2, groups, columns, columns), np.float32)
    add_rounded_products(exact, choice, found)
    monkeypatch.setattr(input_products, "native_row_products", lambda: None)
    add_rounded_products(exact, choice, expected)
    np.testing.assert_allclose(np.triu(found), np.triu(expected), rtol=1e-5, atol=1e-4)
    assert not np.allclose(np.triu(found), np.triu(np.einsum("rgi,rgj->gij", exact, exact)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["int8", "uint4"])
@pytest.mark.parametrize(("outputs", "columns"), [(1, 3), (5, 70), (300, 33)])
def test_rounded_columns_are_equal_to_the_bit(
    name: str, outputs: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(outputs)
    weights = rng.normal(size=(1, outputs, columns))
    rows = rng.normal(size=(4 * columns, columns)) @ rng.normal(size=(columns, columns))
    inner = (rows.T @ rows)[None]
    scale = np.exp2(rng.integers(-5, -2, size=weights.shape)).astype(np.float64) * 1.1
    zero_point = rng.integers(0, 3, size=weights.shape).astype(np.float64)
    scales = FixedScales(scale, zero_point, get_format(name))
    assert scales.compiled() is not None
    results = []
    for is_compiled in (True, False):
        if not is_compiled:
            monkeypatch.setattr(rounding, "_compiled", lambda quantize, groups: None)
        first = compensated(weights, Root.of(inner, np.arange(columns), 0.01), independent(scales, columns))
        results.append((first, descended(weights, first, inner, scales, 2)))
    for result, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("name", "rule", "tensor_scale"),
    [
        ("mxfp4_e2m1", "mse", None),
        ("mxfp8_e4m3", "floor", None),
        ("mx6", "floor", None),
        ("mx9", "mse", None),
        ("bfp16", "even", None),
        ("nvfp4", "mse", 0.01),
    ],
)
@pytest.mark.parametrize(("outputs", "columns"), [(1, 40), (300, 33), (131, 64)])
def test_rounded_blocks_are_equal_to_the_bit(
    name: str, rule: str, tensor_scale: float | None, outputs: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(outputs)
    weights = rng.normal(size=(1, outputs, columns)) * np.exp2(rng.integers(-9, 9, size=(1, outputs, 1)))
    rows = rng.normal(size=(4 * columns, columns)) @ rng.normal(size=(columns, columns))
    fmt = get_format(name)
    assert isinstance(fmt, BlockFormat)
    quantizer = BlockQuantizer(fmt, ScaleRule(rule), Rounding.HALF_EVEN, NonFinite.BLOCK_NAN, tensor_scale)
    grid = block_grid(BlockChoice(quantizer, axis=1), rounding.runs(np.arange(columns), fmt.block_size))
    root = Root.of((rows.T @ rows)[None], grid.order, 0.01)
    found = compensated(weights, root, grid)
    monkeypatch.setattr(rounding, "_compiled", lambda quantize, groups: None)
    np.testing.assert_array_equal(found, compensated(weights, root, grid))

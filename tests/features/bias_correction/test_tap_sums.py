"""Sums under taps, and of the errors of rounding, in one compiled pass: those of numpy, without a compiled library."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from quark.errors import InvalidValueError
from quark.features.bias_correction import taps as module
from quark.features.bias_correction.on_onnx import TapMeans
from quark.features.bias_correction.taps import Taps, TapSums, Window, tap_sums
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.formats.spec import BlockFormat
from quark.plan import AffineChoice, BlockChoice, Choice, DynamicChoice
from quark.ranges.statistics import native_statistics
from quark.rounded import rounding_error

Array = np.ndarray[Any, Any]

WINDOWS: dict[str, tuple[Window, ...]] = {
    "one tap": (Window(1), Window(1)),
    "one tap, strided": (Window(1, stride=2), Window(1, stride=3)),
    "plain": (Window(3), Window(3)),
    "padded": (Window(3, pad_begin=1, pad_end=1), Window(3, pad_begin=1, pad_end=1)),
    "strided": (Window(3, 2, pad_begin=1, pad_end=1), Window(3, 2, pad_begin=0, pad_end=1)),
    "dilated": (Window(2, dilation=3), Window(3, dilation=2, pad_begin=2)),
    "different": (Window(1), Window(5, 3, pad_begin=4, pad_end=2)),
    "same": (Window(4, 2, same="SAME_UPPER"), Window(3, 3, same="SAME_LOWER")),
    "transposed": (
        Window(3, 2, pad_begin=1, is_transposed=True),
        Window(2, 3, pad_begin=1, pad_end=1, is_transposed=True),
    ),
    "larger than the input": (Window(7, pad_begin=3, pad_end=3), Window(9, pad_begin=4, pad_end=4)),
    "one dimension": (Window(3, 2, pad_begin=1, pad_end=1),),
    "three dimensions": (Window(2), Window(3, pad_begin=1), Window(1)),
}
SIZES = [(1, 1), (3, 5), (7, 7), (14, 14), (9, 16), (5, 17), (4, 33), (2, 129)]

AFFINE = [
    AffineChoice("int8", (2.0**-4,), (0,)),
    AffineChoice("int8", (0.0371,), (11,)),  # its numbers end at 4.3: some are clipped
    AffineChoice("uint8", (0.01,), (0,)),
    AffineChoice("uint16", (3e-5,), (30000,)),
    AffineChoice("int32", (1e-9,), (0,)),
]


def input_of(taps: Taps, size: tuple[int, int]) -> Array:
    sizes = {1: (size[0] * size[1],), 2: size, 3: (*size, 3)}[len(taps.windows)]
    return (np.random.default_rng(sum(sizes)).standard_normal((2, 5, *sizes)) * 2 + 0.5).astype(np.float32)


def sums_of(x: Array, taps: Taps, choice: Choice | None) -> TapSums:
    return dict(tap_sums(x, [(taps, choice)]))[taps, choice]


def plain_sums(monkeypatch: pytest.MonkeyPatch, x: Array, taps: Taps, choice: Choice | None) -> TapSums:
    with monkeypatch.context() as patch:
        patch.setattr(module, "native_statistics", lambda: None)
        return sums_of(x, taps, choice)


def assert_equal(found: TapSums, expected: TapSums, x: Array) -> None:
    assert found.positions == expected.positions
    assert found.values.dtype == found.errors.dtype == np.float32
    for actual, plain, size in (
        (found.values, expected.values, np.abs(x).sum() / x.shape[0] / x.shape[1]),
        (found.errors, expected.errors, np.abs(expected.errors).max(initial=0)),
    ):
        assert actual.shape == plain.shape
        np.testing.assert_allclose(actual, plain, rtol=2e-6, atol=1e-6 * float(size))


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_windows(monkeypatch: pytest.MonkeyPatch, windows: tuple[Window, ...], size: tuple[int, int]) -> None:
    taps = Taps(windows, axis=1)
    x = input_of(taps, size)
    choice = AffineChoice("int8", (2.0**-4,), (3,))
    assert_equal(sums_of(x, taps, choice), plain_sums(monkeypatch, x, taps, choice), x)


BLOCK_FORMAT = get_format("mxfp4_e2m1")
assert isinstance(BLOCK_FORMAT, BlockFormat)
OTHERS: list[Choice | None] = [  # the first two without an error
    None,
    DynamicChoice("uint8"),
    BlockChoice(BlockQuantizer(BLOCK_FORMAT), 1),
    AffineChoice("int8", (0.1, 0.2, 0.03, 0.4, 0.05), (0,) * 5, axis=1),
]


@pytest.mark.parametrize("choice", [*AFFINE, *OTHERS], ids=str)
@pytest.mark.parametrize("windows", ["one tap", "padded", "one dimension"])
def test_roundings(monkeypatch: pytest.MonkeyPatch, choice: Choice | None, windows: str) -> None:
    taps = Taps(WINDOWS[windows], axis=1)
    x = input_of(taps, (12, 19))
    found = sums_of(x, taps, choice)
    assert_equal(found, plain_sums(monkeypatch, x, taps, choice), x)
    assert found.errors.any() == (choice not in OTHERS[:2])


def test_halves_go_to_even_and_the_error_is_that_of_the_definition() -> None:
    taps = Taps(WINDOWS["one tap"], axis=1)
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 200.0, -300.0, 126.5], np.float32).reshape(1, 8, 1, 1)
    errors = sums_of(x, taps, AffineChoice("int8", (1.0,), (0,))).errors
    assert errors.reshape(-1).tolist() == [-0.5, 0.5, -0.5, 0.5, -0.5, -73.0, 172.0, -0.5]


def test_large_planes_lose_nothing() -> None:
    """A hundred thousand times the same: float32 alone would be off in the fourth digit."""
    taps = Taps((Window(1), Window(1)), axis=1)
    if native_statistics() is None:
        pytest.skip("no compiled library here")
    x = np.full((1, 1, 400, 251), 0.1, np.float32)
    found = sums_of(x, taps, AffineChoice("int8", (0.25,), (0,)))
    assert found.values.item() == np.float32(np.float64(x[0, 0, 0, 0]) * x.size)
    assert found.errors.item() == -found.values.item()


def test_what_lies_otherwise_in_memory() -> None:
    taps, choice = Taps(WINDOWS["padded"], axis=1), AFFINE[1]
    x = input_of(taps, (8, 9)).transpose(1, 0, 3, 2)
    assert not x.flags.c_contiguous
    for found, expected in zip(sums_of(x, taps, choice), sums_of(x.copy(), taps, choice), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 0, 4, 4), (2, 3, 0, 4), (2, 3, 4, 0)], ids=str)
def test_empty_tensors(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    taps, x = Taps(WINDOWS["padded"], axis=1), np.zeros(shape, np.float32)
    found = sums_of(x, taps, AFFINE[0])
    assert_equal(found, plain_sums(monkeypatch, x, taps, AFFINE[0]), np.ones((1, 1)))
    assert found.values.shape == (*shape[:2], 3, 3)


@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_refused(monkeypatch: pytest.MonkeyPatch, bad: float, has_library: bool) -> None:
    if not has_library:
        monkeypatch.setattr(module, "native_statistics", lambda: None)
    x = input_of(Taps(WINDOWS["padded"]), (7, 7))
    x[1, 2, 3, 4] = bad
    for windows, choice in itertools.product(("one tap", "padded"), (AFFINE[0], None)):
        with pytest.raises(InvalidValueError, match="NaN or Inf"):
            TapMeans([(Taps(WINDOWS[windows], axis=1), choice)]).observe(x)


def test_an_error_that_needs_an_array_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Choice] = []

    def counted(x: np.ndarray, choice: Choice) -> np.ndarray:
        made.append(choice)
        return rounding_error(x, choice)

    monkeypatch.setattr(module, "rounding_error", counted)
    wanted = [(Taps(WINDOWS[value], axis=1), choice) for value in ("one tap", "plain", "padded") for choice in OTHERS]
    assert len(dict(tap_sums(input_of(wanted[0][0], (8, 9)), wanted))) == len(wanted)
    assert len(made) == len(set(made)) == len(OTHERS[2:])

"""The compiled statistics against numpy, at every instruction set that this processor has."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from quark.formats.power_of_two import find_position, min_mse_position
from quark.ranges import statistics
from quark.ranges.statistics import NativeStatistics, native_statistics

LENGTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 100, 511, 512, 513, 4095, 4097, 20_011)


@pytest.fixture(name="native")
def _native() -> NativeStatistics:
    found = native_statistics()
    if found is None:
        pytest.skip("no compiled library here")
    return found


@pytest.fixture(name="plain")
def _plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module without compiled code."""
    monkeypatch.setattr(statistics, "native_statistics", lambda: None)
    return statistics


def values(length: int, scale: float = 1.0) -> Any:
    return (np.random.default_rng(length).standard_t(2, length) * scale).astype(np.float32)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scale", [1e-42, 1.0, 1e36])
def test_extremes_are_equal(native: NativeStatistics, plain: Any, length: int, scale: float) -> None:
    x = np.clip(values(length, scale), -3e38, 3e38)
    assert native.extremes(x) == plain.extremes(x) == (x.min(), x.max())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_nonfinite_value_is_found_anywhere(native: NativeStatistics, length: int, bad: float) -> None:
    x = values(length)
    assert native.extremes(x) is not None
    for where in {0, length // 2, length - 1}:
        broken = x.copy()
        broken[where] = bad
        assert native.extremes(broken) is None


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("bins", [1, 2, 255, 4096])
def test_histograms_are_equal(native: NativeStatistics, plain: Any, length: int, bins: int) -> None:
    x = values(length)
    for lowest, highest in ((float(x.min()), float(x.max())), (-1.0, 1.0), (0.0, 1e-40)):
        expected, counts = np.zeros(bins, np.int64), np.zeros(bins, np.int64)
        plain.add_to_histogram(x, lowest, highest, expected)
        per_unit = bins / (highest - lowest) if highest > lowest else 0.0
        native.add_to_histogram(x, lowest, per_unit, counts)
        np.testing.assert_array_equal(counts, expected)
        assert counts.sum() == length


def test_counts_are_numpys_histogram(plain: Any) -> None:
    x = values(50_000)
    counts = np.zeros(64, np.int64)
    plain.add_to_histogram(x, -4.0, 4.0, counts)
    expected, _ = np.histogram(np.clip(x, -4, 4), 64, (-4.0, 4.0))
    np.testing.assert_array_equal(counts, expected)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("bits", [2, 4, 8, 16, 24, 32])
def test_squared_errors_are_equal(native: NativeStatistics, plain: Any, length: int, bits: int) -> None:
    x = values(length)
    start = find_position(x, bits)
    for positions, tolerance in (((start, start + 1, start + 4), 1e-12), ((-120, 0, 127), 1e-7)):
        expected = plain.squared_errors(x, bits, positions)
        np.testing.assert_allclose(native.squared_errors(x, bits, positions), expected, rtol=tolerance)


def test_squared_errors_are_those_of_the_definition(native: NativeStatistics) -> None:
    x = values(3_000).astype(np.float64)
    codes = np.clip(np.rint(x * 32), -128, 127)
    expected = ((codes / 32 - x) ** 2).sum()
    assert native.squared_errors(x.astype(np.float32), 8, (5,))[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("position", [-300, -128, -100, 0, 99, 100, 127, 300])
@pytest.mark.parametrize("bits", [8, 32])
def test_the_largest_and_smallest_numbers_have_finite_errors(
    native: NativeStatistics, bits: int, position: int
) -> None:
    """Also where their number of steps is beyond float32, or its square would be beyond float64."""
    for x in (3e38, -3e38, 1e-45, 1.0):
        data = np.full(40, x, np.float32)
        steps = np.ldexp(data.astype(np.float64), position)
        codes = np.clip(np.rint(steps), -(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1)
        expected = (np.ldexp(codes - steps, -position) ** 2).sum()
        slack = 40 * 2.0 ** (-249 - 2 * position) if -100 <= position < 0 and bits == 8 else 0.0
        actual = native.squared_errors(data, bits, (position,))[0]
        assert actual == pytest.approx(expected, rel=1e-6, abs=slack)


@pytest.mark.parametrize("position", [301, -301, 2**31 - 1, -(2**31)])
def test_positions_of_no_use_are_refused(native: NativeStatistics, position: int) -> None:
    """The least int32 too, whose absolute value is none."""
    with pytest.raises(RuntimeError, match="refused positions"):
        native.squared_errors(values(10), 8, (0, position))


@pytest.mark.parametrize("bins", [0, 2**24 + 1])
def test_numbers_of_bins_out_of_range_are_refused(native: NativeStatistics, bins: int) -> None:
    with pytest.raises(RuntimeError, match="refused to count"):
        native.add_to_histogram(values(10), 0.0, 1.0, np.zeros(bins, np.int64))


def test_data_between_two_elements_are_copied() -> None:
    """Compiled code may take a float to begin at a multiple of four bytes."""
    x = values(100)
    shifted = np.frombuffer(b"\0" + x.tobytes(), np.float32, offset=1)
    assert not shifted.flags.aligned
    copied = statistics.as_float32(shifted)
    assert copied.flags.aligned
    np.testing.assert_array_equal(copied, x)
    assert np.shares_memory(statistics.as_float32(x), x)


_PROGRAM = """
import numpy as np
from quark.formats.native import instruction_set
from quark.ranges import statistics
x = np.random.default_rng(5).standard_t(2, 30_001).astype(np.float32)
counts = np.zeros(999, np.int64)
statistics.add_to_histogram(x, -3.0, 3.0, counts)
errors = statistics.squared_errors(x, 8, (3, 4, 5, 6))
print(instruction_set(), statistics.extremes(x), counts @ np.arange(999) ** 2,
      [f"{e:.9e}" for e in errors])
"""


def test_all_instruction_sets_and_numpy_agree() -> None:
    """Each in a process of its own, since the choice is made once."""
    told = {}
    for name in ("avx512", "avx2", "baseline", "none"):
        extra = {"QUARK_NO_NATIVE": "1"} if name == "none" else {"QUARK_INSTRUCTION_SET": name}
        environment = {**os.environ, **extra}
        run = subprocess.run(
            [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, check=True
        )
        told[name] = run.stdout.split(" ", 1)[1]
    assert len(set(told.values())) == 1, told


def test_numpy_alone_finds_the_same_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    from quark.formats import get_format
    from quark.ranges import PowerOfTwoMinMSE, range_of

    x = values(10_000)
    monkeypatch.setattr(statistics, "native_statistics", lambda: None)
    fmt: Any = get_format("int8")
    assert range_of(x, PowerOfTwoMinMSE(), fmt, True).position == min_mse_position(x)

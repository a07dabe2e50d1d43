"""What every calibration method promises, whatever it computes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.formats import get_format, min_mse_position, non_overflow_position
from quark.formats.affine import choose_affine
from quark.formats.spec import IntFormat
from quark.ranges import (
    KLJ,
    Distribution,
    Entropy,
    LayerwisePercentile,
    MinMax,
    MinMSE,
    NonOverflow,
    Percentile,
    PowerOfTwoMinMSE,
    PowerOfTwoPercentile,
    PowerOfTwoRange,
    RangeMethod,
    TensorRange,
    ThreeSigma,
    range_of,
    ranges_of_channels,
)
from quark.ranges.method import LEAST_AVERAGED_SIZE

Array = np.ndarray[Any, Any]


def integer(name: str) -> IntFormat:
    fmt = get_format(name)
    assert isinstance(fmt, IntFormat)
    return fmt


INT8, UINT8 = integer("int8"), integer("uint8")
ALL = (
    *(MinMax(), MinMax(0.01), Percentile(), Percentile(99.0), Entropy(), Distribution(), LayerwisePercentile()),
    *(MinMSE(), PowerOfTwoMinMSE(), PowerOfTwoMinMSE(has_most_common=True), NonOverflow(), ThreeSigma(), KLJ()),
    *(LayerwisePercentile((99.0, 99.9), is_squared=False, is_exact=True), PowerOfTwoRange(Percentile(99.9))),
    PowerOfTwoPercentile(),
)
INDEPENDENT = tuple(each for each in ALL if each not in (MinMax(0.01), PowerOfTwoMinMSE(has_most_common=True)))
CODES = ((INT8, True), (UINT8, False))

methods = pytest.mark.parametrize("method", ALL, ids=str)
independent = pytest.mark.parametrize("method", INDEPENDENT, ids=str)
codes = pytest.mark.parametrize(("fmt", "is_symmetric"), CODES, ids=("int8", "uint8"))


def heavy_tailed(seed: int, size: int = 20_000) -> Array:
    return np.random.default_rng(seed).standard_t(3, size).astype(np.float32)


def stream(method: RangeMethod, pieces: list[Array], fmt: IntFormat, is_symmetric: bool) -> TensorRange:
    observer = method.observer(fmt, is_symmetric)
    for piece in pieces:
        observer.observe(piece)
        observer.end_of_sample()
    if observer.needs_second_pass:
        for piece in pieces:
            observer.observe_again(piece)
    if observer.needs_third_pass:
        for piece in pieces:
            observer.observe_finally(piece)
    return observer.result()


@independent
@codes
def test_order_and_size_of_batches_do_not_matter(method: RangeMethod, fmt: IntFormat, is_symmetric: bool) -> None:
    x = heavy_tailed(0)
    shuffled = np.random.default_rng(1).permutation(x)
    whole = range_of(x, method, fmt, is_symmetric)
    assert stream(method, np.array_split(x, 7), fmt, is_symmetric) == whole
    assert stream(method, np.array_split(shuffled, 13)[::-1], fmt, is_symmetric) == whole


@independent
@codes
def test_two_observers_merge_into_one_of_all(method: RangeMethod, fmt: IntFormat, is_symmetric: bool) -> None:
    a, b = heavy_tailed(2), 3 * heavy_tailed(3, 5_000)
    first, second = method.observer(fmt, is_symmetric), method.observer(fmt, is_symmetric)
    first.observe(a)
    second.observe(b)
    first.merge(second)
    if first.needs_second_pass:
        second = copy.deepcopy(first)
        first.observe_again(a)
        second.observe_again(b)
        first.merge(second)
    if first.needs_third_pass:
        second = copy.deepcopy(first)
        first.observe_finally(a)
        second.observe_finally(b)
        first.merge(second)
    assert first.result() == range_of(np.concatenate([a, b]), method, fmt, is_symmetric)


@independent
def test_an_observer_that_saw_nothing_merges_into_one_that_did(method: RangeMethod) -> None:
    x = heavy_tailed(4)
    busy, idle = method.observer(INT8, True), method.observer(INT8, True)
    busy.observe(x)
    idle.merge(busy)
    if idle.needs_second_pass:
        spare = copy.deepcopy(idle)
        idle.observe_again(x)
        spare.merge(idle)
        idle = spare
    if idle.needs_third_pass:
        spare = copy.deepcopy(idle)
        idle.observe_finally(x)
        spare.merge(idle)
        idle = spare
    assert idle.result() == range_of(x, method, INT8, True)


@methods
@codes
@pytest.mark.parametrize("offset", [-9.0, 0.0, 9.0])
def test_the_range_lies_within_the_data(method: RangeMethod, fmt: IntFormat, is_symmetric: bool, offset: float) -> None:
    x = heavy_tailed(5) + np.float32(offset)
    found = range_of(x, method, fmt, is_symmetric)
    assert x.min() <= found.lowest <= found.highest <= x.max()


@methods
@codes
@pytest.mark.parametrize("value", [0.0, 2.5, -1e-30, 3e38])
def test_a_constant_has_its_own_range(method: RangeMethod, fmt: IntFormat, is_symmetric: bool, value: float) -> None:
    found = range_of(np.full(100, value, np.float32), method, fmt, is_symmetric)
    if found.position is None:
        assert found.lowest == found.highest == np.float32(value)
    else:
        assert found.lowest == found.highest
        assert abs(found.lowest - value) <= abs(value) / 100


@methods
@codes
def test_no_elements_have_the_range_zero(method: RangeMethod, fmt: IntFormat, is_symmetric: bool) -> None:
    found = range_of(np.zeros((0, 3), np.float32), method, fmt, is_symmetric)
    assert (found.lowest, found.highest) == (0.0, 0.0)


@methods
@codes
@pytest.mark.parametrize("sign", [-1, 1])
def test_data_of_one_sign_stay_on_their_side(
    method: RangeMethod, fmt: IntFormat, is_symmetric: bool, sign: int
) -> None:
    x = sign * np.maximum(heavy_tailed(6), 0)
    found = range_of(x, method, fmt, is_symmetric)
    assert found.lowest >= 0 if sign > 0 else found.highest <= 0
    assert max(-found.lowest, found.highest) > 1


@methods
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_data_are_refused(method: RangeMethod, bad: float) -> None:
    with pytest.raises(InvalidValueError, match="1 of 3 values are NaN or Inf"):
        method.observer(INT8, True).observe(np.array([1, bad, 2], np.float32))


@methods
def test_integers_are_refused(method: RangeMethod) -> None:
    with pytest.raises(UnsupportedTypeError, match="int64"):
        method.observer(INT8, True).observe(np.arange(3))


@methods
def test_methods_are_values_with_a_name(method: RangeMethod) -> None:
    assert copy.deepcopy(method) == method
    assert hash(copy.deepcopy(method)) == hash(method)
    assert type(method).__name__ in str(method)


@methods
def test_float16_and_strided_arrays_are_taken(method: RangeMethod) -> None:
    x = heavy_tailed(7, 2_000).astype(np.float16).reshape(40, 50)
    expected = range_of(np.ascontiguousarray(x.T.astype(np.float32)), method, INT8, True)
    assert range_of(x.T, method, INT8, True) == expected


def test_torch_tensors_are_taken() -> None:
    torch = pytest.importorskip("torch")
    x = heavy_tailed(8)
    tensor = torch.from_numpy(x).requires_grad_()
    assert range_of(tensor, Percentile(), INT8, True) == range_of(x, Percentile(), INT8, True)


@pytest.mark.parametrize("method", [Percentile(), PowerOfTwoMinMSE()], ids=str)
def test_histograms_of_different_ranges_do_not_merge(method: RangeMethod) -> None:
    first, second = method.observer(INT8, True), method.observer(INT8, True)
    for observer, x in ((first, heavy_tailed(1)), (second, 2 * heavy_tailed(1))):
        observer.observe(x)
        observer.observe_again(x)
    with pytest.raises(InvalidValueError, match="merge after the first pass"):
        first.merge(second)
    with pytest.raises(InvalidValueError, match="second pass has begun"):
        first.observe(heavy_tailed(1))
    with pytest.raises(InvalidValueError, match="cannot be merged"):
        first.merge(MinMax().observer(INT8, True))


@pytest.mark.parametrize("method", [Percentile(), PowerOfTwoMinMSE()], ids=str)
def test_a_missing_second_pass_is_an_error(method: RangeMethod) -> None:
    observer = method.observer(INT8, True)
    observer.observe(heavy_tailed(1))
    with pytest.raises(InvalidValueError, match="needs the data twice"):
        observer.result()


# ---- power of two ----
@pytest.mark.parametrize("scale", [1e-30, 0.01, 1.0, 900.0, 1e30])
@pytest.mark.parametrize("bits", ["int4", "int8", "uint8", "int16", "int32"])
def test_streamed_positions_are_those_of_all_data_at_once(scale: float, bits: str) -> None:
    fmt = integer(bits)
    for seed in range(4):
        x = (heavy_tailed(seed, 3_000) * scale).astype(np.float32)
        found = stream(PowerOfTwoMinMSE(), np.array_split(x, 5), fmt, True)
        assert found.position == min_mse_position(x, fmt.bits)
        assert range_of(x, NonOverflow(), fmt, True).position == non_overflow_position(x, fmt.bits)


def test_positions_of_one_sided_zero_and_tiny_data() -> None:
    for x in (np.zeros(9), np.full(9, 1e-45), np.full(9, 3.4e38), np.array([127.5]), np.array([-128.5, 0.25])):
        data = x.astype(np.float32)
        assert range_of(data, PowerOfTwoMinMSE(), INT8, True).position == min_mse_position(data)


def test_the_most_common_position_wins_and_of_equals_the_smaller() -> None:
    method = PowerOfTwoMinMSE(has_most_common=True)
    small, large = np.full(50, 0.9, np.float32), np.full(50, 30.0, np.float32)
    few, many = min_mse_position(large), min_mse_position(small)
    assert few < many
    assert stream(method, [small, small, large], INT8, True).position == many
    assert stream(method, [small, large], INT8, True).position == few
    assert stream(method, [np.zeros(9, np.float32), np.zeros(9, np.float32), large], INT8, True).position == few


# ---- the others, each by its own definition ----
def test_a_moving_average_is_the_formula() -> None:
    x = np.repeat(np.array([[-1.0, 1.0], [-3.0, 2.0], [0.0, 8.0]], np.float32), 2500, axis=1)
    low, high = -1.0, 1.0
    for constant, row in ((0.5, x[1]), (0.4, x[2])):  # the first samples count alike, until 1/n is below the constant
        low, high = (1 - constant) * low + constant * row[0], (1 - constant) * high + constant * row[-1]
    found = stream(MinMax(moving_average=0.4), list(x), INT8, False)
    assert (found.lowest, found.highest) == pytest.approx((low, high), rel=1e-6)
    few = stream(MinMax(moving_average=0.4), list(x[:, ::2500]), INT8, False)
    assert (few.lowest, few.highest) == (-3.0, 8.0)


def test_moving_averages_merge_into_that_of_all_samples() -> None:
    x = heavy_tailed(4, 5 * LEAST_AVERAGED_SIZE).reshape(5, -1)
    parts = [MinMax(0.01).observer(INT8, False) for _ in range(4)]
    for part, samples in zip(parts, (x[:3], x[3:], x[:0], x), strict=True):
        for sample in samples:
            part.observe(sample)
            part.end_of_sample()
    first, second, idle, whole = parts
    idle.merge(first)
    idle.merge(second)
    merged, expected = idle.result(), whole.result()
    assert (merged.lowest, merged.highest) == pytest.approx((expected.lowest, expected.highest), rel=1e-6)
    assert merged.observed == expected.observed
    assert merged.highest < x.max()
    with pytest.raises(InvalidValueError, match="cannot be merged"):
        first.merge(MinMax().observer(INT8, True))


@pytest.mark.parametrize("percentile", [90.0, 99.0, 99.9, 99.99, 100.0])
def test_percentiles_are_numpys_to_within_a_bin(percentile: float) -> None:
    x = heavy_tailed(9, 100_000)
    cut = (1 - percentile / 100) / 2
    width = 1.01 * float(x.max() - x.min()) / 4096
    found = range_of(x, Percentile(percentile), UINT8, False)
    assert_is_quantile(found.lowest, x, cut, width)
    assert_is_quantile(found.highest, x, 1 - cut, width)
    reach = range_of(x, Percentile(percentile), INT8, True)
    assert_is_quantile(max(-reach.lowest, reach.highest), np.abs(x), percentile / 100, 2 * width)


def assert_is_quantile(value: float, x: Array, fraction: float, width: float) -> None:
    """Between the values next to that rank, to within a bin: numpy has several answers in between."""
    rank = fraction * len(x)
    around = np.sort(x)[[max(0, int(rank) - 1), min(len(x) - 1, int(np.ceil(rank)))]]
    assert around[0] - width <= value <= around[1] + width
    assert around[0] <= np.quantile(x, fraction) <= around[1]


def squared_error(x: Array, found: TensorRange, fmt: IntFormat, is_symmetric: bool) -> float:
    """In plain numpy, from ONNX's formulas."""
    low, high = min(found.lowest, 0.0), max(found.highest, 0.0)
    if is_symmetric:
        reach = max(-low, high)
        scale, zero = 2 * reach / (254 if fmt.signed else 255), 0 if fmt.signed else 128
    else:
        scale = (high - low) / 255
        zero = round(fmt.qmin - low / scale)
    codes = np.clip(np.rint(x / scale) + zero, fmt.qmin, fmt.qmax)
    return float((((codes - zero) * scale - x) ** 2).sum())


@codes
@pytest.mark.parametrize("shift", [0.0, 2.0])
def test_min_mse_beats_every_other_range(fmt: IntFormat, is_symmetric: bool, shift: float) -> None:
    x = heavy_tailed(10) + np.float32(shift)
    best = squared_error(x, range_of(x, MinMSE(), fmt, is_symmetric), fmt, is_symmetric)
    lowest, highest = x.min(), x.max()
    for low in np.geomspace(0.02, 1, 25):
        for high in np.geomspace(0.02, 1, 25):
            other = TensorRange(float(lowest * low), float(highest * high))
            assert best <= 1.02 * squared_error(x, other, fmt, is_symmetric)


@codes
def test_layerwise_percentile_takes_the_candidate_with_the_least_error(fmt: IntFormat, is_symmetric: bool) -> None:
    candidates = (99.0, 99.9, 99.99, 100.0)
    for seed, tail in ((11, 3), (12, 30), (13, 2)):
        x = np.random.default_rng(seed).standard_t(tail, 50_000).astype(np.float32)
        found = range_of(x, LayerwisePercentile(candidates), fmt, is_symmetric)
        each = [range_of(x, Percentile(c), fmt, is_symmetric) for c in candidates]
        errors = [squared_error(x, r, fmt, is_symmetric) for r in each]
        assert found == each[int(np.argmin(errors))]


@codes
@pytest.mark.parametrize("is_exact", [False, True])
def test_layerwise_percentile_by_magnitude_clips_more(fmt: IntFormat, is_symmetric: bool, is_exact: bool) -> None:
    candidates = (99.0, 99.9, 99.99, 100.0)
    x = np.random.default_rng(11).standard_t(3, 50_000).astype(np.float32)
    each = {c: range_of(x, Percentile(c), fmt, is_symmetric) for c in candidates}
    errors = {c: absolute_error(x, r, fmt, is_symmetric) for c, r in each.items()}
    best = min(errors, key=errors.__getitem__)
    found = range_of(x, LayerwisePercentile(candidates, is_squared=False, is_exact=is_exact), fmt, is_symmetric)
    assert found == each[best] != range_of(x, LayerwisePercentile(candidates), fmt, is_symmetric)


def absolute_error(x: Array, found: TensorRange, fmt: IntFormat, is_symmetric: bool) -> float:
    scale, zero = choose_affine(np.array([found.lowest]), np.array([found.highest]), fmt, symmetric=is_symmetric)
    codes = np.clip(np.rint(x / scale) + zero, fmt.qmin, fmt.qmax)
    return float(np.abs((codes - zero) * scale - x).mean())


def test_exact_min_mse_of_few_values_beats_the_histogram() -> None:
    x = np.random.default_rng(2).normal(size=12).astype(np.float32)
    exact = squared_error(x, range_of(x, MinMSE(is_exact=True), INT8, True), INT8, True)
    assert exact < squared_error(x, range_of(x, MinMSE(), INT8, True), INT8, True)
    x = np.random.default_rng(6).normal(size=12).astype(np.float32)
    exact = squared_error(x, range_of(x, MinMSE(is_exact=True), INT8, True), INT8, True)
    assert exact < squared_error(x, range_of(x, MinMax(), INT8, True), INT8, True)


def test_power_of_two_of_a_percentile_covers_that_percentile() -> None:
    x = np.concatenate([np.linspace(-0.9, 0.9, 9_999), [100.0]]).astype(np.float32)
    found = range_of(x, PowerOfTwoRange(Percentile(99.9)), INT8, True)
    assert found.position == 7  # 127 / 2^7 is 0.992; 100 takes position 0
    assert range_of(x, NonOverflow(), INT8, True).position == 0
    assert range_of(x, PowerOfTwoPercentile(99.9), INT8, True).position == 7


def test_distribution_is_mean_and_deviation_times_what_the_bits_want() -> None:
    x = np.random.default_rng(14).normal(1.0, 2.0, 200_000).astype(np.float32)
    found = range_of(x, Distribution(), integer("int4"), False)
    reach = (found.highest - found.lowest) / 2
    assert (found.highest + found.lowest) / 2 == pytest.approx(1.0, abs=0.05)
    # of the reaches around it, none quantizes normal data better
    errors = [squared_error_16(x, 1.0 + k * reach) for k in (-0.2, -0.1, 0.0, 0.1, 0.2)]
    assert int(np.argmin(errors)) == 2


def squared_error_16(x: Array, factor: float) -> float:
    """Of the 16 evenly spaced levels over mean -+ 2.51 deviations times a factor near 1."""
    reach = factor if factor > 2 else 5.0 * factor
    step = 2 * reach / 16
    levels = np.clip(np.floor((x - 1.0) / step), -8, 7) + 0.5
    return float(((levels * step + 1.0 - x) ** 2).sum())


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Percentile(40.0), "percentile"),
        (lambda: Percentile(100.1), "percentile"),
        (lambda: LayerwisePercentile(()), "candidates"),
        (lambda: LayerwisePercentile((101.0,)), "percentile"),
        (lambda: MinMax(0.0), "moving_average"),
        (lambda: TensorRange(2.0, 1.0), "in order"),
        (lambda: TensorRange(float("nan"), 1.0), "in order"),
    ],
)
def test_impossible_settings_are_refused(make: Any, word: str) -> None:
    with pytest.raises(InvalidValueError, match=word):
        make()


# ---- channels ----
@pytest.mark.parametrize("method", [MinMax(), Percentile(99.0), MinMSE(), Entropy(), PowerOfTwoMinMSE()], ids=str)
@codes
def test_ranges_of_channels_are_those_of_each_channel(method: RangeMethod, fmt: IntFormat, is_symmetric: bool) -> None:
    x = heavy_tailed(15, 6 * 4 * 50).reshape(4, 6, 50) * np.linspace(0.1, 3, 6, dtype=np.float32)[:, None]
    lowest, highest = ranges_of_channels(x, 1, method, fmt, is_symmetric)
    assert lowest.shape == highest.shape == (6,)
    assert lowest.dtype == highest.dtype == np.float32
    for c in range(6):
        channel = x[:, c]
        assert channel.min() <= lowest[c] <= highest[c] <= channel.max()
        if isinstance(method, (MinMax, Entropy)):
            found = range_of(channel, method, fmt, is_symmetric)
            assert (lowest[c], highest[c]) == (np.float32(found.lowest), np.float32(found.highest))
        if isinstance(method, MinMSE):
            mine = squared_error(channel, TensorRange(float(lowest[c]), float(highest[c])), fmt, is_symmetric)
            full = squared_error(channel, range_of(channel, MinMax(), fmt, is_symmetric), fmt, is_symmetric)
            assert mine <= full


def test_channels_with_nan_or_a_wrong_axis_are_refused() -> None:
    x = np.ones((2, 3), np.float32)
    with pytest.raises(InvalidValueError, match="axis 2"):
        ranges_of_channels(x, 2, MinMax(), INT8, True)
    x[1, 2] = np.nan
    with pytest.raises(InvalidValueError, match="channel 1 of axis 0"):
        ranges_of_channels(x, 0, MinMax(), INT8, True)

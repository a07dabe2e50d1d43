"""Measures of how far a tensor is from the one it should equal, most of them as sums that add up over samples.

With y the reference and z the candidate:

    SQNR            10 log10(sum y^2 / sum (z - y)^2), in decibels; 6 dB are one bit
    cosine          of the angle between y and z; 1 is the same direction
    relative error  sum (z - y)^2 / sum y^2
    agreement       for class scores: the share of rows with the same largest class
    divergence      sum p log(p / q), where p and q are the probabilities that rows of class scores stand for
    PSNR            10 log10(peak^2 / mean of (z - y)^2), in decibels
    SSIM            structural similarity of images, the mean over every position of an 11 x 11 Gaussian window

This is the only module that computes these. Squares are summed in four ways, because results of a quantization and
figures in reports and journals must not change with the order of a sum:

    pair_sums       dot products in float64
    fast_pair_sums  dot products in float32 over stretches that stay in the processor's cache, added in float64: for
                    comparing every layer of two networks
    squared_sums    numpy's pairwise sums in float64
    square_sum      a running sum in float64 that makes no copy of float32 values
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
STRETCH = 1 << 15
TINY_PROBABILITY = 1e-12
SMALLEST_SHARE = 1e-10
NEAR_TIE = 0.9
SSIM_WINDOW, SSIM_DEVIATION = 11, 1.5
SSIM_K1, SSIM_K2 = 0.01, 0.03


# ---------------------------------------------------------------- from sums to figures
def decibels(ratio: float) -> float:
    """A ratio of powers in decibels.

    >>> decibels(100.0), decibels(0.0)
    (20.0, -inf)
    """
    return -math.inf if ratio <= 0 else 10.0 * math.log10(ratio)


def sqnr_of(error: float, power: float) -> float:
    """SQNR from sums of squares; infinite without an error.

    >>> sqnr_of(1.0, 1000.0), sqnr_of(0.0, 0.0), sqnr_of(1.0, 0.0), sqnr_of(math.inf, 1.0)
    (30.0, inf, -inf, -inf)
    """
    if error == 0:
        return math.inf
    return decibels(power / error) if power > 0 else -math.inf


def cosine_of(dot: float, first: float, second: float) -> float | None:
    """Cosine from y.z, y.y and z.z; None if one of the vectors is zero."""
    norm = math.sqrt(first) * math.sqrt(second)
    return min(dot / norm, 1.0) if norm > 0 else None


def relative_error_of(error: float, power: float) -> float:
    """Squared error relative to the power; the error itself if there is no power."""
    return error / power if power else error


def mean_relative_error(error: Sequence[float] | Array, power: Sequence[float] | Array) -> float:
    """The mean over samples of squared error by power; samples of little power count as if they had a tenth of it."""
    e, p = np.asarray(error, np.float64), np.asarray(power, np.float64)
    if not e.any():
        return 0.0
    return float((e / np.maximum(p + 0.1 * p.mean(), 1e-30)).mean())


# ---------------------------------------------------------------- sums of squares
@dataclass(frozen=True)
class PairSums:
    """Sums over a reference y (`exact`) and a candidate z (`quantized`): y.z, y.y, z.z, the squared error, and the
    largest error. A z that is not finite where y is breaks them: every measure is then the worst there is.

    >>> (pair_sums(np.array([3.0]), np.array([3.0])) + pair_sums(np.array([4.0]), np.array([3.0]))).relative_error
    0.04
    """

    dot: float = 0.0
    exact: float = 0.0
    quantized: float = 0.0
    error: float = 0.0
    max_error: float = 0.0
    is_broken: bool = False

    def __add__(self, other: PairSums) -> PairSums:
        return PairSums(
            self.dot + other.dot,
            self.exact + other.exact,
            self.quantized + other.quantized,
            self.error + other.error,
            max(self.max_error, other.max_error),
            self.is_broken or other.is_broken,
        )

    @property
    def sqnr_db(self) -> float:
        return -math.inf if self.is_broken else sqnr_of(self.error, self.exact)

    @property
    def cosine(self) -> float:
        """If one side is all zero: 1 if both are, else 0."""
        if self.is_broken:
            return 0.0
        result = cosine_of(self.dot, self.exact, self.quantized)
        return float(self.error == 0.0) if result is None else result

    @property
    def relative_error(self) -> float:
        """Infinite if broken, or if there is an error and no power."""
        if self.is_broken or (self.error and not self.exact):
            return math.inf
        return relative_error_of(self.error, self.exact)


def pair_sums(expected: Array, actual: Array) -> PairSums:
    """Sums of two tensors in float64. Places where `expected` is not finite do not count."""
    y, z = (x.astype(np.float64).reshape(-1) for x in (expected, actual))
    usable = np.isfinite(y)
    if not (usable.all() and np.isfinite(z).all()):
        y, z = np.where(usable, y, 0.0), np.where(usable, z, 0.0)
        if not np.isfinite(z).all():
            return PairSums(is_broken=True)
    e = z - y
    return PairSums(float(y @ z), float(y @ y), float(z @ z), float(e @ e), float(np.abs(e).max(initial=0.0)))


def fast_pair_sums(expected: Array, actual: Array) -> PairSums:
    """Sums of two tensors, mostly in float32; in float64 if something is not finite or float32 overflows.

    >>> fast_pair_sums(np.array([3.0, 4.0]), np.array([3.0, 3.0])).relative_error
    0.04
    """
    y, z = (
        np.ascontiguousarray(x, np.float64 if x.dtype == np.float64 else np.float32).reshape(-1)
        for x in (expected, actual)
    )
    total = np.zeros(5)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, y.size, STRETCH):
            a, b = y[start : start + STRETCH], z[start : start + STRETCH]
            e = b - a
            largest = max(float(e.max()), -float(e.min()))
            total[:4] += (a @ b, a @ a, b @ b, e @ e)
            total[4] = max(total[4], largest) if largest == largest else math.nan
    if not np.isfinite(total).all():
        usable = np.isfinite(y)
        return pair_sums(y[usable], z[usable])
    return PairSums(*total.tolist())


@dataclass(frozen=True, eq=False)
class ChannelSums:
    """y.z, y.y and z.z for every channel."""

    dot: Array
    exact: Array
    quantized: Array

    def __add__(self, other: ChannelSums) -> ChannelSums:
        return ChannelSums(self.dot + other.dot, self.exact + other.exact, self.quantized + other.quantized)


def channel_sums(expected: Array, actual: Array, axis: int) -> ChannelSums:
    """Sums of two tensors in float64 for every channel along `axis`."""
    y, z = (np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1).astype(np.float64) for x in (expected, actual))
    with np.errstate(over="ignore", invalid="ignore"):
        return ChannelSums(*(np.einsum("ci,ci->c", a, b) for a, b in ((y, z), (y, y), (z, z))))


def squared_sums(expected: Array, actual: Array) -> tuple[float, float]:
    """Squared error and power of two tensors, by pairwise sums in float64. NaN and Inf are not treated specially."""
    y = np.asarray(expected, np.float64)
    return float(np.square(actual - y).sum()), float(np.square(y).sum())


@dataclass
class ErrorSums:
    """Squared errors and powers by `squared_sums`, added up over samples.

    Places where the reference is not finite do not count; the error is infinite if the candidate is not finite.
    """

    error: float = 0.0
    power: float = 0.0
    distances: list[float] = field(default_factory=list)  # L2, of each sample

    def add(self, expected: Array, actual: Array) -> None:
        """Add one sample."""
        usable = np.isfinite(expected)
        if not usable.all():
            expected, actual = np.where(usable, expected, 0), np.where(usable, actual, 0)
        with np.errstate(over="ignore"):
            error, power = squared_sums(expected, actual)
        error = error if math.isfinite(error) else math.inf
        self.error += error
        self.power += power
        self.distances.append(math.sqrt(error))

    @property
    def relative_error(self) -> float:
        return relative_error_of(self.error, self.power)

    @property
    def mean_l2(self) -> float:
        """The mean over samples of the L2 distance."""
        return sum(self.distances) / max(len(self.distances), 1)

    @property
    def sqnr_db(self) -> float:
        return sqnr_of(self.error, self.power)


def square_sum(values: Array) -> float:
    """Sum of squares in float64."""
    flat = values.reshape(-1)
    if flat.dtype.kind != "f":
        flat = flat.astype(np.float64)
    return float(np.einsum("i,i->", flat, flat, dtype=np.float64))


# ---------------------------------------------------------------- class scores
def same_largest(expected: Array, actual: Array, axis: int = 1) -> NDArray[np.bool_]:
    """True for each position whose largest class along the axis is the same on both sides."""
    return np.asarray(expected.argmax(axis) == actual.argmax(axis))


def near_ties(expected: Array, actual: Array) -> int:
    """The number of rows whose largest class changed to one that `expected` finds nearly as likely, at least `NEAR_TIE`
    times. It is a ratio: of many classes, all may be unlikely. NaN is never near.

    >>> near_ties(np.array([[2.0, 1.95, 0.0], [3.0, 0.0, 0.0]]), np.array([[1.9, 2.0, 0.0], [0.0, 3.0, 0.0]]))
    1
    >>> near_ties(np.array([[0.5] + [0.0] * 999]), np.array([[0.0, 0.5] + [0.0] * 998]))
    0
    """
    rows = np.flatnonzero(~same_largest(expected, actual))
    if not len(rows):
        return 0
    likely = np.exp(log_probabilities(expected[rows]))
    places = np.arange(len(rows))
    return int((likely[places, actual[rows].argmax(axis=1)] >= NEAR_TIE * likely.max(axis=1)).sum())


def edit_distance(first: Array, second: Array) -> int:
    """The number of insertions, deletions and replacements that turn one sequence into the other.

    >>> edit_distance(np.array(list("kitten")), np.array(list("sitting")))
    3
    """
    places = np.arange(len(second) + 1)
    row = places
    for count, symbol in enumerate(first, 1):
        best = np.minimum(row[:-1] + (second != symbol), row[1:] + 1)
        row = np.minimum.accumulate(np.append(count, best) - places) + places
    return int(row[-1])


def are_probabilities(rows: Array) -> bool:
    """True if every row sums to one without negative numbers."""
    return bool((rows >= 0).all() and np.allclose(rows.sum(axis=1), 1.0, atol=1e-3))


def log_probabilities(rows: Array) -> Array:
    """Logarithms of rows of probabilities; rows that are not probabilities go through softmax."""
    wide = rows.astype(np.float64)
    if are_probabilities(wide):
        return np.asarray(np.log(np.maximum(wide, TINY_PROBABILITY)))
    wide = wide - wide.max(axis=1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=1, keepdims=True)))


def divergence(expected: Array, actual: Array) -> float:
    """The sum over rows of sum p log(p / q); infinite if `actual` is not finite.

    >>> divergence(np.array([[0.0, 0.0]]), np.array([[1.0, 1.0]]))
    0.0
    """
    if not np.isfinite(actual).all():
        return math.inf
    wide = expected.astype(np.float64)
    given = wide if are_probabilities(wide) else None
    return max(0.0, float(_divergence_terms(expected, actual, given).sum()))


def mean_divergence(expected: Array, actual: Array) -> float:
    """The mean over rows of sum p log(p / q); infinite if `actual` is not finite.

    A class of probability 0 counts as `TINY_PROBABILITY`, and no row counts as less than 0.

    >>> mean_divergence(np.array([[0.0, 0.0]]), np.array([[0.0, 0.0]]))
    0.0
    """
    if not np.isfinite(actual).all():
        return math.inf
    return float(np.maximum(_divergence_terms(expected, actual).sum(axis=1), 0.0).mean())


def share_divergence(expected: Array, actual: Array) -> float:
    """sum p log(p / q), where p and q are the shares of the elements in the sum of each tensor, moved up so that
    nothing is negative; all elements have the same share if the sum is 0. Infinite if `actual` is not finite.

    >>> share_divergence(np.array([1.0, 3.0]), np.array([2.0, 6.0]))
    0.0
    """
    if not np.isfinite(actual).all():
        return math.inf
    shares = []
    for x in (expected, actual):
        wide = x.astype(np.float64).reshape(-1)
        wide = wide - min(float(wide.min(initial=0.0)), 0.0)
        total = float(wide.sum())
        shares.append(wide / total if total > 0 else np.full(wide.shape, 1.0 / max(wide.size, 1)))
    p, q = (share + SMALLEST_SHARE for share in shares)
    return float((shares[0] * np.log(p / q)).sum())


def _divergence_terms(expected: Array, actual: Array, probabilities: Array | None = None) -> Array:
    """p log(p / q) of each class, with p = `probabilities` or those that `expected` stands for."""
    log_p = log_probabilities(expected)
    p = np.exp(log_p) if probabilities is None else probabilities
    return np.asarray(p * (log_p - log_probabilities(actual)))


def absolute_error(expected: Array, actual: Array) -> float:
    """Sum of absolute differences in float64."""
    return float(np.abs(np.asarray(actual, np.float64) - np.asarray(expected, np.float64)).sum())


def similarity_of_moments(expected: Array, actual: Array, peak: float) -> float:
    """SSIM of whole tensors from their means and standard deviations alone, as if they were fully correlated."""
    y, z = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
    c1, c2 = (SSIM_K1 * peak) ** 2, (SSIM_K2 * peak) ** 2
    means = (2 * y.mean() * z.mean() + c1) / (y.mean() ** 2 + z.mean() ** 2 + c1)
    return float(means * (2 * y.std() * z.std() + c2) / (y.var() + z.var() + c2))


# ---------------------------------------------------------------- images
def psnr_of(mean_error: float, peak: float) -> float:
    """PSNR from a mean squared error; infinite without an error.

    >>> psnr_of(1.0, 100.0), psnr_of(0.0, 1.0)
    (40.0, inf)
    """
    return sqnr_of(mean_error, peak * peak)


def structural_similarity(expected: Array, actual: Array, peak: float) -> float:
    """SSIM of images [n, h, w] in float64, with c1 = (0.01 peak)^2 and c2 = (0.03 peak)^2.

    Means, variances and the covariance are those of a Gaussian window of 11 x 11 pixels with standard deviation 1.5,
    at every position where it is inside of the image; a smaller image has a smaller window. 1 means equal images.
    """
    y, z = expected.astype(np.float64), actual.astype(np.float64)
    size = min(SSIM_WINDOW, *y.shape[1:])
    places = np.arange(size) - (size - 1) / 2
    window = np.exp(-(places**2) / (2 * SSIM_DEVIATION**2))
    window /= window.sum()
    mean_y, mean_z = _blurred(y, window), _blurred(z, window)
    variance_y = _blurred(y * y, window) - mean_y**2
    variance_z = _blurred(z * z, window) - mean_z**2
    covariance = _blurred(y * z, window) - mean_y * mean_z
    c1, c2 = (SSIM_K1 * peak) ** 2, (SSIM_K2 * peak) ** 2
    likeness = (2 * mean_y * mean_z + c1) * (2 * covariance + c2)
    likeness /= (mean_y**2 + mean_z**2 + c1) * (variance_y + variance_z + c2)
    return float(likeness.mean())


def _blurred(planes: Array, window: Array) -> Array:
    """Filter [n, h, w] by the window in both directions, without borders."""
    height, width = (size - len(window) + 1 for size in planes.shape[1:])
    rows: Array = np.zeros((len(planes), height, planes.shape[2]))
    for i, weight in enumerate(window):
        rows += weight * planes[:, i : i + height]
    result: Array = np.zeros((len(planes), height, width))
    for i, weight in enumerate(window):
        result += weight * rows[:, :, i : i + width]
    return result

"""Calibration methods: find the range of numbers that a tensor's codes should cover from the data.

    MinMax                 the whole range of the data, or a moving average over samples
    Percentile             all but the outermost values
    Entropy                the smallest loss of information (Kullback-Leibler divergence)
    Distribution           the range that suits a normal distribution with the same mean and deviation
    LayerwisePercentile    the percentile with the smallest error for each tensor
    MinMSE                 the smallest squared error
    PowerOfTwoMinMSE       the smallest squared error among power-of-two scales
    NonOverflow            the smallest power-of-two scale without clipping
    PowerOfTwoRange        the range of another method, at the smallest power-of-two scale that clips nothing of it
    PowerOfTwoPercentile   the smallest squared error among power-of-two scales, without the outermost values
    ThreeSigma, KLJ        initial thresholds for TQT
    LeastErrorStep         initial step for LSQ

`method.observer(integer, is_symmetric)` observes a stream of batches; `range_of` and `ranges_of_channels` take a whole
array, such as a weight. To add a method: a dataclass, derived from `HistogramMethod` if it reads its range off a
histogram, and its line here.

>>> import numpy as np
>>> from quark.formats import get_format
>>> range_of(np.array([-1.0, 0.5, 3.0], np.float32), MinMax(), get_format("int8"), is_symmetric=False)
TensorRange(lowest=-1.0, highest=3.0, position=None)
"""

from quark.ranges.histogram_methods import (
    Distribution,
    Entropy,
    LayerwisePercentile,
    MinMSE,
    Percentile,
    range_of,
    ranges_of_channels,
)
from quark.ranges.method import MinMax, Observer, RangeMethod, TensorRange
from quark.ranges.power_of_two import NonOverflow, PowerOfTwoMinMSE, PowerOfTwoPercentile, PowerOfTwoRange
from quark.ranges.thresholds import KLJ, LeastErrorStep, ThreeSigma, kl_j_threshold, three_sigma

__all__ = [
    "KLJ",
    "Distribution",
    "Entropy",
    "LayerwisePercentile",
    "LeastErrorStep",
    "MinMSE",
    "MinMax",
    "NonOverflow",
    "Observer",
    "Percentile",
    "PowerOfTwoMinMSE",
    "PowerOfTwoPercentile",
    "PowerOfTwoRange",
    "RangeMethod",
    "TensorRange",
    "ThreeSigma",
    "kl_j_threshold",
    "range_of",
    "ranges_of_channels",
    "three_sigma",
]

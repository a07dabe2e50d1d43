"""Calibration methods: which range of numbers a tensor's codes should cover, found from the data.

    MinMax                 all of it; or a moving average of each sample's
    Percentile             all but the outermost
    Entropy                the least information lost, by Kullback and Leibler
    Distribution           as wide as a normal distribution of the same mean and deviation wants it
    LayerwisePercentile    of several percentiles the one with the least error
    MinMSE                 the least squared error
    PowerOfTwoMinMSE       the least squared error among power-of-two scales
    NonOverflow            the smallest power-of-two scale at which nothing is clipped
    ThreeSigma, KLJ        where a threshold that is trained starts from

`method.observer(integer, is_symmetric)` watches a stream of batches; `range_of` and `ranges_of_channels` take a whole
array, such as a weight. To add a method: one file with its dataclass and observer, and its line here.

>>> import numpy as np
>>> from quark.formats import get_format
>>> range_of(np.array([-1.0, 0.5, 3.0], np.float32), MinMax(), get_format("int8"), is_symmetric=False)
TensorRange(lowest=-1.0, highest=3.0, position=None)
"""

from quark.ranges.distribution import Distribution
from quark.ranges.entropy import Entropy
from quark.ranges.layerwise_percentile import LayerwisePercentile
from quark.ranges.method import Observer, RangeMethod, TensorRange
from quark.ranges.min_max import MinMax
from quark.ranges.min_mse import MinMSE
from quark.ranges.percentile import Percentile
from quark.ranges.power_of_two import NonOverflow, PowerOfTwoMinMSE
from quark.ranges.thresholds import KLJ, ThreeSigma, kl_j_threshold, three_sigma
from quark.ranges.whole_array import range_of, ranges_of_channels

__all__ = [
    "KLJ",
    "Distribution",
    "Entropy",
    "LayerwisePercentile",
    "MinMSE",
    "MinMax",
    "NonOverflow",
    "Observer",
    "Percentile",
    "PowerOfTwoMinMSE",
    "RangeMethod",
    "TensorRange",
    "ThreeSigma",
    "kl_j_threshold",
    "range_of",
    "ranges_of_channels",
    "three_sigma",
]

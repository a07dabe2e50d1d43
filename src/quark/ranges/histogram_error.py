"""The squared error that quantizing would do to data of a histogram, for many ranges at once.

With step s and t = x / s, the error of x is s * (t - n), n being t rounded and clipped to the codes. Its square has the
integral s^3 * (n / 12 + (t - n)^3 / 3), exact on both sides of the clipping, so that a bin of uniform density needs its
two edges only, however coarse or fine the steps are against the bins.
"""

from __future__ import annotations

import numpy as np

from quark.formats.affine import choose_affine
from quark.formats.spec import IntFormat
from quark.ranges.histogram import Histogram
from quark.ranges.statistics import Doubles


def expected_errors(
    histogram: Histogram, lowest: Doubles, highest: Doubles, integer: IntFormat, is_symmetric: bool
) -> Doubles:
    """The mean squared error for each of the ranges lowest[i]..highest[i], by the scales that `choose_affine` gives."""
    scale, zero_point = choose_affine(lowest, highest, integer, symmetric=is_symmetric)
    zero = zero_point.astype(np.float64)
    steps = histogram.edges / scale[:, None]
    levels = np.clip(np.rint(steps), (integer.qmin - zero)[:, None], (integer.qmax - zero)[:, None])
    steps -= levels
    integral = levels
    integral /= 12
    integral += steps * steps * steps / 3
    density = histogram.counts / (np.diff(histogram.edges) * histogram.total)
    return np.asarray(np.diff(integral, axis=1) @ density * scale**3)

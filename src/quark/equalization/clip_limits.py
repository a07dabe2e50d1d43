"""How far channels in front of a Clip(0, c) may be rescaled while the Clip stays as it is.

Divided by s, a channel meets the bound at c * s of its old values. Let [l, m] be its values before the Clip on
calibration data, and t = m + (m - l) / 10 what it may reach elsewhere:

    m >= 0.98 c     the bound is at work: s = 1
    m <  0.98 c     it never was: any s with t / s <= c leaves it so, and any s >= 1

so that the function stays on the calibration data, and nearly so elsewhere. The margin is a part of the whole range: a
channel that is rarely positive has a small m that says little.

Some networks hardly ever reach their bounds, and could do without. In others the bound is a part of what they compute,
and a sample of images does not show all of the channels that it works in: there the channels are to be left.
"""

from __future__ import annotations

import numpy as np

from quark.equalization.cross_layer import Array

AT_WORK_FROM = 0.98  # of the bound
MARGIN = 0.1  # of the range
MAX_AT_WORK = 0.05  # of the channels


def limits_of_clip(bottom: Array, top: Array, bound: float) -> tuple[Array, Array]:
    """The least and the largest scale of every channel; the same number where a channel has to stay."""
    bottom, top = np.asarray(bottom, np.float64), np.asarray(top, np.float64)
    lowest = np.minimum(1.0, (top + (top - bottom) * MARGIN) / bound)
    is_at_work = top >= bound * AT_WORK_FROM
    return np.where(is_at_work, 1.0, np.maximum(lowest, 0.0)), np.where(is_at_work, 1.0, np.inf)


def share_at_work(top: Array, bound: float) -> float:
    """The share of channels that reach the bound; above MAX_AT_WORK they are all to be left."""
    return float((np.asarray(top, np.float64) >= bound * AT_WORK_FROM).mean())

"""How far channels in front of a Clip(0, c) may be rescaled while the Clip stays as it is.

Divided by s, a channel meets the bound at c * s of its old values. Let [l, m] be its values before the Clip on
calibration data, and t = m + (m - l) / 10 what it may reach elsewhere:

    m >= 0.98 c     the bound is at work: s = 1
    m <  0.98 c     it never was: any s with t / s <= c leaves it so, and any s >= 1

so that the function stays on the calibration data, and nearly so elsewhere. The margin is a part of the whole range: a
channel that is rarely positive has a small m that says little.

Some networks hardly ever reach their bounds, and could do without. In others the bound is a part of what they compute,
and a sample of images does not show all of the channels that it works in: there the region is to be left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from quark.onnx.equalize.channels import Array
from quark.onnx.equalize.regions import Region

Extremes: TypeAlias = Mapping[str, tuple[Array, Array]]

AT_WORK_FROM = 0.98  # of the bound
MARGIN = 0.1  # of the range
MAX_AT_WORK = 0.05  # of the channels


def limits_of_clips(region: Region, extremes: Extremes) -> tuple[Array, Array]:
    """The least and the largest scale of every channel that all Clips of the region allow; the same number where a
    channel has to stay."""
    lowest, highest = np.zeros(region.count), np.full(region.count, np.inf)
    for clip, bound in region.clips.items():
        bottom, top = _extremes_before(clip, extremes)
        lowest = np.maximum(lowest, np.minimum(1.0, (top + (top - bottom) * MARGIN) / bound))
        is_at_work = top >= bound * AT_WORK_FROM
        lowest, highest = np.where(is_at_work, 1.0, lowest), np.where(is_at_work, 1.0, highest)
    return lowest, highest


def reason_against_clips(region: Region, extremes: Extremes) -> str | None:
    """Why the region has to be left because of a Clip that is to stay; None where nothing speaks against it."""
    for clip, bound in region.clips.items():
        value = clip.inputs[0]
        if value is None or value.name not in extremes:
            return f"'{clip.name}': the values before this Clip were not measured"
        share = float((_extremes_before(clip, extremes)[1] >= bound * AT_WORK_FROM).mean())
        if share > MAX_AT_WORK:
            return f"'{clip.name}': this Clip is at work in {share:.0%} of the channels"
    return None


def _extremes_before(clip: ir.Node, extremes: Extremes) -> tuple[Array, Array]:
    value = clip.inputs[0]
    assert value is not None
    bottom, top = extremes[str(value.name)]
    return np.asarray(bottom, np.float64), np.asarray(top, np.float64)

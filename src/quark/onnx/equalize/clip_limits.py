"""Clips of a region that stay as they are: how far its channels may be rescaled (quark.equalization.clip_limits)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from quark.equalization.clip_limits import MAX_AT_WORK, limits_of_clip, share_at_work
from quark.onnx.equalize.channels import Array
from quark.onnx.equalize.regions import Region

Extremes: TypeAlias = Mapping[str, tuple[Array, Array]]


def limits_of_clips(region: Region, extremes: Extremes) -> tuple[Array, Array]:
    """The least and the largest scale of every channel that all Clips of the region allow; the same number where a
    channel has to stay."""
    lowest, highest = np.zeros(region.count), np.full(region.count, np.inf)
    for clip, bound in region.clips.items():
        least, largest = limits_of_clip(*_extremes_before(clip, extremes), bound)
        lowest, highest = np.maximum(lowest, least), np.minimum(highest, largest)
    return lowest, highest


def reason_against_clips(region: Region, extremes: Extremes) -> str | None:
    """Why the region has to be left because of a Clip that is to stay; None where nothing speaks against it."""
    for clip, bound in region.clips.items():
        value = clip.inputs[0]
        if value is None or value.name not in extremes:
            return f"'{clip.name}': the values before this Clip were not measured"
        share = share_at_work(_extremes_before(clip, extremes)[1], bound)
        if share > MAX_AT_WORK:
            return f"'{clip.name}': this Clip is at work in {share:.0%} of the channels"
    return None


def _extremes_before(clip: ir.Node, extremes: Extremes) -> tuple[Array, Array]:
    value = clip.inputs[0]
    assert value is not None
    return extremes[str(value.name)]

"""Observe: the float network runs over the calibration data, and what it computes is watched."""

from quark.torch.observe.channel_extremes import channel_extremes
from quark.torch.observe.observe import RangeKey, observe
from quark.torch.observe.watching import Watching

__all__ = ["RangeKey", "Watching", "channel_extremes", "observe"]

"""Observers: classes that a spec names, each a method of `quark.ranges` for a tensor, channels or blocks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from quark.torch.quantization.observer.lsq_observer import LSQObserver
from quark.torch.quantization.observer.observer import (
    ObserverBase,
    PerBlockBFPObserver,
    PerBlockMXObserver,
    PerBlockObserver,
    PerChannelMinMaxObserver,
    PerChannelPowOf2MinMaxObserver,
    PerChannelPowOf2MinMSEObserver,
    PerGroupMinMaxObserver,
    PerTensorHistogramObserver,
    PerTensorMinMaxObserver,
    PerTensorMSEObserver,
    PerTensorPercentileObserver,
    PerTensorPowOf2MinMaxObserver,
    PerTensorPowOf2MinMSEObserver,
    PerTensorPowOf2NonOverflowObserver,
    PlaceholderObserver,
)
from quark.torch.quantization.observer.tqt_observer import TQTObserver

_CLASSES: tuple[type[ObserverBase], ...] = (
    PlaceholderObserver,
    PerTensorMinMaxObserver,
    PerTensorHistogramObserver,
    PerTensorPercentileObserver,
    PerTensorMSEObserver,
    PerTensorPowOf2MinMaxObserver,
    PerTensorPowOf2MinMSEObserver,
    PerTensorPowOf2NonOverflowObserver,
    PerChannelMinMaxObserver,
    PerChannelPowOf2MinMaxObserver,
    PerChannelPowOf2MinMSEObserver,
    PerGroupMinMaxObserver,
    PerBlockMXObserver,
    PerBlockBFPObserver,
    TQTObserver,
    LSQObserver,
)

OBSERVERS: Mapping[str, type[ObserverBase]] = MappingProxyType({each.__name__: each for each in _CLASSES})

__all__ = [
    "OBSERVERS",
    "LSQObserver",
    "ObserverBase",
    "PerBlockBFPObserver",
    "PerBlockMXObserver",
    "PerBlockObserver",
    "PerChannelMinMaxObserver",
    "PerChannelPowOf2MinMSEObserver",
    "PerChannelPowOf2MinMaxObserver",
    "PerGroupMinMaxObserver",
    "PerTensorHistogramObserver",
    "PerTensorMSEObserver",
    "PerTensorMinMaxObserver",
    "PerTensorPercentileObserver",
    "PerTensorPowOf2MinMSEObserver",
    "PerTensorPowOf2MinMaxObserver",
    "PerTensorPowOf2NonOverflowObserver",
    "PlaceholderObserver",
    "TQTObserver",
]

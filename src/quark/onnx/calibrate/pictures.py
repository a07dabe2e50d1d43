"""Pictures of the histograms that ranges were found from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quark.ranges import Observer, TensorRange
from quark.ranges.power_of_two import histogram_observer
from quark.report.histogram_picture import picture_names, write_histogram
from quark.text import get_logger

_LOG = get_logger(__name__)


def draw_histograms(folder: Path, observers: Mapping[str, Observer], ranges: Mapping[str, TensorRange]) -> None:
    """Write a PNG file for each tensor whose range was found from a histogram, with the extremes of the data and the
    range marked. Logs a warning if there is none."""
    inner = {name: histogram_observer(observer) for name, observer in observers.items()}
    drawn = {name: observer for name, observer in inner.items() if observer is not None and observer.has_histogram}
    for name, file in picture_names(drawn).items():
        histogram, range_ = drawn[name].histogram, ranges[name]
        marks = [
            (histogram.lowest, "lowest value"),
            (histogram.highest, "highest value"),
            (range_.lowest, "range from"),
            (range_.highest, "range to"),
        ]
        write_histogram(folder / file, histogram.counts, histogram.edges, name, marks)
    if drawn:
        _LOG.info("histograms of %d tensors are in %s", len(drawn), folder)
    else:
        _LOG.warning(
            "SaveTensorHistFig: no range was found from a histogram, so that there is none to draw; use Percentile, "
            "Entropy, Distribution, LayerwisePercentile or MinMSE with float scales"
        )

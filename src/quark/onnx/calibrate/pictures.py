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
    inner = {name: histogram_observer(each) for name, each in observers.items()}
    drawn = {name: each for name, each in inner.items() if each is not None and each.has_histogram}
    for name, file in picture_names(drawn).items():
        histogram, found = drawn[name].histogram, ranges[name]
        marks = [
            (histogram.lowest, "lowest value"),
            (histogram.highest, "highest value"),
            (found.lowest, "range from"),
            (found.highest, "range to"),
        ]
        write_histogram(folder / file, histogram.counts, histogram.edges, name, marks)
    if drawn:
        _LOG.info("histograms of %d tensors are in %s", len(drawn), folder)
    else:
        _LOG.warning(
            "SaveTensorHistFig: no range was found from a histogram, so that there is none to draw; use Percentile, "
            "Entropy, Distribution, LayerwisePercentile or MinMSE with float scales"
        )

"""Whether a change to a quantized network brought its outputs closer to float, judged on a few held-out samples.

In the end the divergence of predictions counts, but a few samples say little about it: it is tiny for most of them and
large for the odd sample that the network is not sure of, which then decides alone. The relative squared error of the
scores varies far less from sample to sample and points the same way. So a change is kept if

    the mean relative error did not rise, and the mean divergence did not rise by more than chance explains
    or the mean divergence fell, and the mean relative error rose by a few percent at most (`TOLERATED`)

Chance is twice the standard error of the differences between both networks, sample by sample. Of fewer than
`FEWEST_SAMPLES` neither says anything, and the relative error decides alone. Divergence and its spread alone never keep
a change: a network that collapsed has a large spread too, but its scores are wrong on all samples.

Measured on 39 networks for the digits of the demo, finetuned well or with too large steps, and judged on 8 random ones
of 450 digits: mean divergence alone kept 1.3 % of the networks that were clearly worse on all of them, and rolled back
20 % of those that were clearly better. This rule: 0.3 % and 12 %; with 16 digits 0.0 % and 9 %. With MobileNet-V2 and 8
images it rolls compensation of XINT8 back, which divergence alone kept and which is worse on 100 others (divergence
0.048 and 0.080), and keeps that of MX6, which is better (0.268 and 0.216).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.compare.measures import mean_divergence, relative_error_of, squared_sums

Array = NDArray[Any]
FEWEST_SAMPLES = 4
TOLERATED = 1.05


@dataclass
class OutputErrors:
    """Errors of a network on samples, in their order, each the mean over outputs.

    `relative` has squared errors as shares of the power, for scores of classes without their mean, which softmax
    ignores. `divergence` has sum p log(p / q) for scores of classes, and the relative error of other outputs.
    """

    relative: list[float] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)

    def add(self, expected: Mapping[str, Array], actual: Mapping[str, Array], classes: frozenset[str]) -> None:
        """Add a sample. `classes` are the outputs with one row of scores; outputs that are not floats do not count."""
        relative, divergence = [], []
        for name, output in actual.items():
            wanted = expected[name]
            if name in classes:
                rows = [array.astype(np.float64).reshape(1, -1) for array in (wanted, output)]
                relative.append(relative_error_of(*squared_sums(*(row - row.mean() for row in rows))))
                divergence.append(mean_divergence(*rows))
            elif np.issubdtype(wanted.dtype, np.floating):
                relative.append(relative_error_of(*squared_sums(wanted, output)))
                divergence.append(relative[-1])
        self.relative.append(sum(relative) / max(1, len(actual)))
        self.divergence.append(sum(divergence) / max(1, len(actual)))

    @property
    def mean(self) -> float:
        """The mean relative error, which ranks networks; 0 without samples, infinite if outputs are not finite."""
        return _mean(self.relative)

    @property
    def mean_divergence(self) -> float:
        return _mean(self.divergence)

    def is_no_worse_than(self, before: OutputErrors) -> bool:
        """True if a change from `before`, on the same samples, to this should be kept.

        >>> before = OutputErrors([0.03, 0.02], [0.003, 0.001])
        >>> OutputErrors([0.02, 0.02], [0.008, 0.001]).is_no_worse_than(before)
        True
        >>> OutputErrors([1.1, 0.9], [0.0, 9.0]).is_no_worse_than(before)
        False
        """
        if math.isinf(self.mean) or math.isinf(self.mean_divergence):
            return False
        if len(self.divergence) < FEWEST_SAMPLES:
            return self.mean <= before.mean
        if self.mean > before.mean:
            return self.mean <= TOLERATED * before.mean and self.mean_divergence < before.mean_divergence
        rise = np.array(self.divergence) - np.array(before.divergence)
        return bool(rise.mean() <= 2 * rise.std(ddof=1) / math.sqrt(len(rise)))


def _mean(values: list[float]) -> float:
    mean = sum(values) / max(1, len(values))
    return math.inf if math.isnan(mean) else mean

"""The rounding of weights in the form that `rounding` needs: a rounding function, and columns in the order of their
turns.

Matrices are [groups, outputs, columns], as in `rounding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.features.compensation.fixed_scales import SharedScales
from quark.features.compensation.rounding import COLUMNS, Grid, Round, runs
from quark.formats.affine import AffineParameters
from quark.formats.arrays import array_kind
from quark.plan import BlockChoice, Choice
from quark.rounded import rounded

Array = NDArray[Any]


def spread(parameters: AffineParameters, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Scale and zero point of every weight, in float64."""
    values = []
    for parameter in (parameters.scale, parameters.zero_point):
        numbers = np.asarray(parameter, np.float64)
        values.append(np.broadcast_to(parameters.granularity.spread(array_kind(numbers), numbers, shape), shape))
    return values[0], values[1]


def independent(quantize: Round, count: int, columns: int = COLUMNS) -> Grid:
    """A grid of `count` columns that round independently, `columns` at a time."""
    return Grid(quantize, runs(np.arange(count), columns))


def rounded_alone(choice: Choice) -> Round:
    """The rounding of numbers that share no scale: small floats."""
    return lambda values, _: rounded(values, choice).astype(np.float64)


def block_grid(choice: BlockChoice, units: Sequence[Array]) -> Grid:
    """The grid of a block format; `units` are the columns of each block."""
    return Grid(SharedScales(choice), units, is_joint=True)

"""Constants that were computed in float64, rounded once to the type that the graph has."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def in_dtype(array: NDArray[Any], like: NDArray[Any]) -> NDArray[Any] | None:
    """The numbers in the type of `like`; None where they leave its range.

    >>> in_dtype(np.array([1.5, 7e4]), np.zeros(1, np.float16)) is None
    True
    """
    with np.errstate(all="ignore"):
        rounded = array.astype(like.dtype)
    return rounded if bool(np.isfinite(rounded.astype(np.float64)).all()) else None

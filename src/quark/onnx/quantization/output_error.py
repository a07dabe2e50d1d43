"""How far a network's outputs are from those of the float network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.onnx.session import open_session

Array = NDArray[Any]


def output_error(
    model: ir.Model,
    samples: Sequence[Mapping[str, Array]],
    expected: Sequence[Mapping[str, Array]],
    *,
    has_integer_kernels: bool = True,
) -> float:
    """The squared difference over the squared float output, the mean over outputs and samples."""
    session = open_session(model, has_integer_kernels=has_integer_kernels)
    names = [each.name for each in session.get_outputs()]
    total = 0.0
    for sample, wanted in zip(samples, expected, strict=True):
        for name, found in zip(names, session.run(names, dict(sample)), strict=True):
            exact = np.asarray(wanted[name], np.float64)
            if not np.issubdtype(wanted[name].dtype, np.floating):
                continue
            power = float(np.square(exact).sum())
            total += float(np.square(found - exact).sum()) / (power or 1.0)
    return total / max(1, len(samples) * len(names))

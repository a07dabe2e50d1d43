"""Fuse an instance normalization that was taken apart into InstanceNormalization.

    (x - mean(x)) / sqrt(mean((x - mean(x))^2) + e) * g + b   becomes   InstanceNormalization(x, g, b)

Applies when the means are over all axes from the third on, the number of channels is known, and g and b are constants
with one number for each channel, or a single one (either may be missing).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import add_initializer, become, dimensions, nodes
from quark.onnx.optimize.normalization import Normalization, following_affine, match_normalization


class FuseInstanceNorm:
    name: ClassVar[str] = "fuse_instance_norm"
    is_default: ClassVar[bool] = True

    def apply(self, model: ir.Model) -> int:
        found = [match_normalization(model, node) for node in nodes(model)]
        return sum(_fuse(model, match) for match in found if match is not None)


def _fuse(model: ir.Model, match: Normalization) -> bool:
    dims, dtype = dimensions(match.x), match.x.dtype
    if dims is None or dtype is None or len(dims) < 3 or dims[1] is None or match.axes != list(range(2, len(dims))):
        return False
    affine = following_affine(match.last)
    last = affine.last
    scale, shift = _by_channel(affine.scale, 1.0, dims), _by_channel(affine.shift, 0.0, dims)
    if scale is None or shift is None:
        last, scale, shift = match.last, np.ones(dims[1]), np.zeros(dims[1])
    kind = dtype.numpy()
    inputs = [
        match.x,
        add_initializer(model, f"{last.name}_scale", scale.astype(kind)),
        add_initializer(model, f"{last.name}_bias", shift.astype(kind)),
    ]
    become(last, "InstanceNormalization", inputs, {"epsilon": match.epsilon})
    return True


def _by_channel(
    array: np.ndarray[Any, Any] | None, missing: float, dims: tuple[int | None, ...]
) -> np.ndarray[Any, Any] | None:
    """One number for each channel, where the constant says no more than that."""
    channels = dims[1]
    assert channels is not None
    if array is None:
        return np.full(channels, missing)
    if array.ndim > len(dims):
        return None
    shape = (1,) * (len(dims) - array.ndim) + array.shape
    is_by_channel = shape[1] in (1, channels) and all(size == 1 for axis, size in enumerate(shape) if axis != 1)
    return np.broadcast_to(array.reshape(-1), (channels,)) if is_by_channel else None

"""Fuse a layer normalization that was taken apart into LayerNormalization.

    (x - mean(x)) / sqrt(mean((x - mean(x))^2) + e) * g + b   becomes   LayerNormalization(x, g, b)

Applies from opset 17 on, which has the operator, when the means are over the last axes, the sizes of these are known,
and g and b are constants of the shape of these axes or narrower (either may be missing).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import add_initializer, become, dimensions, nodes, opset
from quark.onnx.optimize.normalization import Normalization, following_affine, match_normalization
from quark.text import get_logger

MIN_OPSET = 17

_log = get_logger(__name__)


class FuseLayerNorm:
    name: ClassVar[str] = "fuse_layer_norm"
    is_default: ClassVar[bool] = True

    def apply(self, model: ir.Model) -> int:
        found = [match_normalization(model, node) for node in nodes(model)]
        matches = [match for match in found if match is not None and _normalized_shape(match) is not None]
        if opset(model) < MIN_OPSET:
            if matches:
                _log.info(
                    "%d layer normalizations stay as they are: opset %d has no LayerNormalization (17 has)",
                    len(matches),
                    opset(model),
                )
            return 0
        return sum(_fuse(model, match) for match in matches)


def _normalized_shape(match: Normalization) -> tuple[int, ...] | None:
    """The sizes of the last axes, where these are the axes of the means."""
    dims = dimensions(match.x)
    if dims is None or match.axes != list(range(len(dims) - len(match.axes), len(dims))):
        return None
    sizes = [dims[axis] for axis in match.axes]
    known = [size for size in sizes if size is not None]
    return tuple(known) if len(known) == len(sizes) else None


def _fuse(model: ir.Model, match: Normalization) -> bool:
    shape, dtype = _normalized_shape(match), match.x.dtype
    if shape is None or dtype is None:
        return False
    affine = following_affine(match.last)
    scale, shift, last = affine.scale, affine.shift, affine.last
    if not (_fits(scale, shape) and _fits(shift, shape)):
        scale, shift, last = None, None, match.last
    kind = dtype.numpy()
    gamma = np.ones(shape, kind) if scale is None else np.broadcast_to(scale, shape).astype(kind)
    inputs = [match.x, add_initializer(model, f"{last.name}_scale", gamma)]
    if shift is not None:
        inputs.append(add_initializer(model, f"{last.name}_bias", np.broadcast_to(shift, shape).astype(kind)))
    become(last, "LayerNormalization", inputs, {"axis": -len(shape), "epsilon": match.epsilon})
    return True


def _fits(array: np.ndarray[Any, Any] | None, shape: tuple[int, ...]) -> bool:
    if array is None:
        return True
    sizes = zip(reversed(array.shape), reversed(shape), strict=False)
    return array.ndim <= len(shape) and all(size in (1, full) for size, full in sizes)

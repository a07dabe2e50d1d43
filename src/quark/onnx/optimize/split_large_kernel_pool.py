"""Split a GlobalAveragePool over a large image into an AveragePool and a smaller GlobalAveragePool.

    mean over H*W   becomes   the mean of the means over tiles of h*w, where h divides H and w divides W

Some hardware pools over 512 elements at most. Applies when the image is larger than that, its size is known, and it can
be cut into equal tiles so that neither pool is larger. Only when asked for.
"""

from __future__ import annotations

from itertools import product
from typing import ClassVar

import onnx_ir as ir

from quark.onnx.graph import add_node, dimensions, input_value, nodes, replace_input

MAX_KERNEL = 512


class SplitLargeKernelPool:
    name: ClassVar[str] = "split_large_kernel_pool"
    is_default: ClassVar[bool] = False

    def apply(self, model: ir.Model) -> int:
        return sum(_split(model, node) for node in nodes(model) if node.op_type == "GlobalAveragePool")


def _split(model: ir.Model, pool: ir.Node) -> bool:
    value = input_value(pool, 0)
    dims = dimensions(value)
    if dims is None or len(dims) != 4 or dims[2] is None or dims[3] is None or dims[2] * dims[3] <= MAX_KERNEL:
        return False
    tile = _tile(dims[2], dims[3])
    if tile is None or value is None or value.shape is None:
        return False
    attributes = {"kernel_shape": list(tile), "strides": list(tile)}
    first = add_node(model, "AveragePool", [value], before=pool, name=f"{pool.name}_tiles", attributes=attributes)
    first.outputs[0].shape = ir.Shape([*value.shape[:2], dims[2] // tile[0], dims[3] // tile[1]])
    replace_input(pool, 0, first.outputs[0])
    return True


def _tile(height: int, width: int) -> tuple[int, int] | None:
    """The tile that makes both pools about as large; None where no tile keeps both within the limit."""

    def larger_pool(tile: tuple[int, int]) -> int:
        return max(tile[0] * tile[1], (height // tile[0]) * (width // tile[1]))

    tiles = list(product(_divisors(height), _divisors(width)))
    best = min(tiles, key=lambda tile: (larger_pool(tile), tile))
    return best if larger_pool(best) <= MAX_KERNEL else None


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]

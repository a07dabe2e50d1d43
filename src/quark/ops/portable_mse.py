"""The scale rule `mse` as ordinary ONNX operators: of half, once and twice the floor rule's scale, the best.

The three candidates are stacked on the outer axis and quantized at once. Their errors are squared and summed in
float64, along the balanced tree that every implementation uses: zeros fill the block up to a power of two, then the
upper half is added to the lower until one is left. The block size is an attribute, so the number of halvings is not
known here. But a block seen as 2 x 2 x ... x 2 halves when its first axis is summed up, and axes of size 1 stand in for
the halvings that it does not need. (A Loop would not be folded for constant inputs.)

A block of more than MAX_BLOCK elements stops the runtime.
"""

from __future__ import annotations

from collections.abc import Callable

from quark.ops.function_body import DOUBLE, INT64, Value
from quark.ops.portable_elements import SCALE_LIMITS
from quark.ops.portable_layout import BLOCK_AXIS, pad_end, shape_part

LEVELS = 16
MAX_BLOCK = 2**LEVELS
CANDIDATES = (0.5, 1.0, 2.0)


def within_reach(block: Value, is_mse: Value) -> Value:
    """The block size, a vector of one element, if this module can do it or need not."""
    expectation = f"block_size: expected at most {MAX_BLOCK} with scale_rule mse"
    return block.body.stop_if(is_mse & (block > MAX_BLOCK), block, expectation)


def least_error_scale(x: Value, floor: Value, scale_shape: Value, quantize: Callable[[Value, Value], Value]) -> Value:
    """The best scales of x, shape (outer, blocks, block, inner), as a row; `floor` is a row too, and `scale_shape` the
    one that broadcasts with x. Of equal errors the smaller scale wins."""
    body, count = x.body, len(CANDIDATES)
    stacked = body.op("Concat", *[x] * count, axis=0)
    row = body.op("Concat", *(floor * step for step in CANDIDATES), axis=0).clip(*SCALE_LIMITS)
    scales = row.reshape(scale_shape * body.constant([count, 1, 1, 1], INT64))
    elements = quantize(stacked / scales, stacked.shape())
    error = elements.cast(DOUBLE) * scales.cast(DOUBLE) - stacked.cast(DOUBLE)
    totals = tree_sum(error * error).reshape([count, -1])
    best = body.op("ArgMin", totals, type=INT64, axis=0, keepdims=1)
    return body.op("GatherElements", row.reshape([count, -1]), best, axis=0).reshape([-1])


def tree_sum(x: Value) -> Value:
    """The sums over the block axis of four, in the fixed order; that axis is gone."""
    body = x.body
    shape = x.shape()
    outer, size, inner = (shape_part(shape, *ends) for ends in ((0, 2), (2, 3), (3, 4)))
    powers = body.constant([2**level for level in reversed(range(LEVELS))], INT64)
    halves = (powers < size).where(body.constant(2, INT64), 1)
    x = pad_end(x, BLOCK_AXIS, 4, halves.reduce("Prod", 0) - size)
    x = x.reshape(body.op("Concat", outer, halves, inner, axis=0))
    for _ in range(LEVELS):
        x = body.op("ReduceSum", x, body.constant([BLOCK_AXIS], INT64), keepdims=0)
    return x

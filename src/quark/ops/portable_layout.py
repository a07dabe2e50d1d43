"""Cut a tensor of any rank into blocks along an axis, and put it together again.

    (..., n, ...)  ->  (outer, n, inner)  ->  (outer, blocks, block, inner)

A last block that is too short is filled up with zeros and cut off again in the end. A tensor of rank 0 or 1 has one
axis, whatever the attribute says; otherwise an axis out of range stops the runtime. With static shapes all of this is
done when the session is made, and a tensor that divides evenly is not copied.
"""

from __future__ import annotations

from dataclasses import dataclass

from quark.ops.function_body import INT64, Value

END = 2**62
BLOCK_AXIS = 2  # of the four


@dataclass(frozen=True)
class BlockLayout:
    """The shapes on the way; `n` and `padded` are the length of the axis without and with the zeros."""

    shape: Value
    rows: Value
    padded_rows: Value
    blocks: Value
    n: Value
    padded: Value
    is_even: Value

    @classmethod
    def of(cls, x: Value, axis: Value, block: Value) -> BlockLayout:
        shape = x.shape()
        outer, n, inner = _sizes_around(shape, axis)
        count = (n + block - 1) // block
        padded = count * block
        rows, padded_rows, blocks = (
            x.body.op("Concat", *dims, axis=0)
            for dims in ((outer, n, inner), (outer, padded, inner), (outer, count, block, inner))
        )
        return cls(shape, rows, padded_rows, blocks, n, padded, padded <= n)

    def split(self, x: Value) -> Value:
        """x as (outer, blocks, block, inner)."""
        rows = x.reshape(self.rows)
        rows = x.body.shortcut(self.is_even, lambda: rows, lambda: pad_end(rows, 1, 3, self.padded - self.n))
        return rows.reshape(self.blocks)

    def join(self, blocks: Value) -> Value:
        """The inverse of split."""
        rows = blocks.reshape(self.padded_rows)
        rows = blocks.body.shortcut(self.is_even, lambda: rows, lambda: cut_end(rows, 1, self.n))
        return rows.reshape(self.shape)


def _sizes_around(shape: Value, axis: Value) -> tuple[Value, Value, Value]:
    """The number of elements before, along and after the axis, as vectors of one element."""
    body = shape.body
    rank = shape.shape()
    zero, one, end = (body.constant([number], INT64) for number in (0, 1, END))
    # a scalar counts as one element: the slice is [1] for rank 0 and empty for every other
    dims = body.op("Concat", shape, body.op("Slice", one, zero, 1 - rank), axis=0)
    axis = axis * (rank > 1).cast(INT64)
    n = body.op("Gather", dims, axis, axis=0, expected="axis: expected a dimension of the input")
    after = axis + (axis < 0).where(rank, 0) + 1
    framed = body.op("Concat", one, dims, one, axis=0)
    outer = body.op("Slice", framed, zero, after).reduce("Prod", 0)
    inner = body.op("Slice", framed, after + 1, end).reduce("Prod", 0)
    return outer, n, inner


def pad_end(x: Value, axis: int, rank: int, count: Value) -> Value:
    """x, of that rank, with `count` zeros after it along axis."""
    before = x.body.constant([0] * (rank + axis), INT64)
    after = x.body.constant([0] * (rank - axis - 1), INT64)
    return x.body.op("Pad", x, x.body.op("Concat", before, count, after, axis=0))


def cut_end(x: Value, axis: int, count: Value) -> Value:
    """The first `count` of x along axis."""
    return x.body.op("Slice", x, x.body.constant([0], INT64), count, x.body.constant([axis], INT64))


def shape_part(shape: Value, start: int, stop: int) -> Value:
    """Some dimensions of a shape."""
    return shape.body.op("Slice", shape, shape.body.constant([start], INT64), shape.body.constant([stop], INT64))

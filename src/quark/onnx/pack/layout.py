"""What a layout of codes is: tensors for them, and nodes that read these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from numpy.typing import NDArray

from quark.onnx.pack.block_codes import Bytes, Geometry

Array = NDArray[Any]


class Writer(Protocol):
    """What unpacking is written with: into a graph, or as the body of a function."""

    def op(self, op_type: str, inputs: list[str], **attributes: Any) -> str:
        """A node; the name of its output."""
        ...

    def plane(self, role: str) -> str:
        """A tensor of this weight."""
        ...

    def table(self, name: str, content: Array) -> str:
        """A constant that weights share."""
        ...

    def wide_table(self, name: str, content: Array) -> str:
        """The table for pairs of bytes that belongs to this one for bytes."""
        ...

    def product_table(self, name: str, upper: Array, lower: Array) -> str:
        """The products of each of 256 numbers with each of 256 rows, for words of an upper and a lower byte."""
        ...

    def dims(self, role: str, values: list[int]) -> str:
        """Integers of this weight, such as a shape."""
        ...


class Layout(Protocol):
    """Where the codes of elements are."""

    name: str

    def planes(self, codes: Bytes, geometry: Geometry) -> dict[str, Array]:
        """The tensors for codes [outer, length, inner], by their role."""
        ...

    def sizes(self, count: int) -> dict[str, tuple[Any, int]]:
        """The type and the number of elements of each tensor for that many codes."""
        ...

    def codes(self, planes: Mapping[str, Array], count: int) -> Bytes:
        """The codes again, flat."""
        ...

    def write(self, writer: Writer) -> str:
        """The numbers, times `unit`, with a shape of that many elements at least."""
        ...

    def row(self, size: int) -> list[int]:
        """The shape in which `write` gives a block of that size where blocks are rows, see `is_in_rows`."""
        ...

    @property
    def group(self) -> int:
        """How many codes are read at once: what is stored is filled up to a multiple of it."""
        ...

    @property
    def unit(self) -> float:
        """What 1 is among the numbers that `write` gives: integers are left as integers."""
        ...


def block_dims(geometry: Geometry) -> list[int]:
    """The shape in which one scale goes with each block: [blocks, (sub-blocks,) elements, inner]."""
    if not geometry.is_even:
        return [geometry.outer, geometry.length, geometry.inner]
    parts = [geometry.size // geometry.sub_size, geometry.sub_size] if geometry.sub_size else [geometry.size]
    return [geometry.outer * geometry.blocks, *parts, geometry.inner]


def is_in_rows(layout: Layout, geometry: Geometry) -> bool:
    """That every block is a row of whole words, and its microexponents are a byte: what is looked up then goes with
    the scales as it is. Where blocks with microexponents do not lie along the last axis, their rows are stored, and
    turned when they are numbers."""
    has_one_byte = geometry.shift_bits_of_block in (0, 8)
    is_worth_it = geometry.inner == 1 or geometry.shift_bits > 0
    return geometry.is_even and is_worth_it and geometry.size % layout.group == 0 and has_one_byte


def rows_of(geometry: Geometry) -> Geometry:
    """The tensor of all blocks, one a row."""
    rows = geometry.outer * geometry.blocks * geometry.inner
    return replace(geometry, shape=(rows, geometry.size), axis=1)

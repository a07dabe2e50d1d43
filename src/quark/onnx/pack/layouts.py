"""How the codes of a weight lie in tensors of ONNX's types, and how standard operators read them.

The order is always the tensor's own, so nothing is transposed. ONNX Runtime unpacks while it makes a session, on one
thread, one operator after the other. What counts is how many operators go over the whole weight, and how many look-ups
there are. So several codes share a word, and one look-up finds all of them:

    cast            8 bits: a tensor of int8, or of a float8 from opset 19 on, that a Cast turns into numbers
    words           8 or 4 bits: 16-bit words of 2 or 4 codes, the first one lowest; a table has the numbers of each
    signed_words    5 bits: the magnitudes as words of 4, the signs as bytes of 8; a product puts them together
    split_words     6 or 3 bits: two or four have 12; the lower 8 are a byte, the upper 4 of two words another one

Codes are filled up with zeros to whole words. Tables of 16-bit words are put together from tables of bytes in the
graph: the file has 2 KB for them instead of 1 MB.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from quark.errors import ModelError
from quark.formats.packing import encode_elements
from quark.formats.spec import ElementFormat, IntFormat
from quark.onnx.pack.block_codes import (
    BlockCodes,
    Bytes,
    Geometry,
    filled,
    integers,
    joined,
    magnitudes_of_bytes,
    numbers_of_bytes,
    numbers_of_words,
    parted,
    signs_of_bytes,
    words_to_codes,
)

Array = NDArray[Any]
PREFIX = "quark.packed"
FLOAT8_OPSET = 19
FLOAT8_TYPES = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}


@dataclass(eq=False)
class Shared:
    """Constants and nodes that several weights read, put into the graph once. `fresh` makes names that are not in use.

    A table for pairs of bytes is computed from one for bytes: the numbers of the lower byte vary fastest along the
    second axis, those of the upper along the first.
    """

    fresh: Callable[[str], str]
    constants: list[onnx.TensorProto] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)

    def table(self, name: str, content: Array) -> str:
        return self._constant(name, name, content)

    def integers(self, values: list[int]) -> str:
        dims = "x".join(map(str, values))
        return self._constant(
            f"dims.{dims}", f"dims.{dims}" if len(values) < 8 else "places", np.array(values, np.int64)
        )

    def _constant(self, key: str, name: str, content: Array) -> str:
        if key not in self._names:
            self._names[key] = self.fresh(f"{PREFIX}.{name}")
            self.constants.append(numpy_helper.from_array(content, self._names[key]))
        return self._names[key]

    def wide_table(self, name: str, content: Array) -> str:
        wide = f"{name}.wide"
        if wide in self._names:
            return self._names[wide]
        row_size = content.shape[1]
        narrow = self.table(name, content)
        square = self.integers([256, 256, row_size])
        lower = self._op("Expand", [narrow, square], f"{wide}.lower")
        column = self._op("Reshape", [narrow, self.integers([256, 1, row_size])], f"{wide}.column")
        upper = self._op("Expand", [column, square], f"{wide}.upper")
        both = self._op("Concat", [lower, upper], f"{wide}.both", axis=2)
        self._names[wide] = self._op("Reshape", [both, self.integers([1 << 16, 2 * row_size])], wide)
        return self._names[wide]

    def product_table(self, name: str, upper: Array, lower: Array) -> str:
        products = f"{name}.products"
        if products in self._names:
            return self._names[products]
        row = lower.shape[1:]
        ones = [1] * len(row)
        factors = [self.table(f"{name}.upper", upper.reshape(-1, 1, *ones)), self.table(f"{name}.lower", lower)]
        square = self._op("Mul", factors, f"{products}.square")
        dims = self.integers([len(upper) * len(lower), *row])
        self._names[products] = self._op("Reshape", [square, dims], products)
        return self._names[products]

    def _op(self, op_type: str, inputs: list[str], name: str, **attributes: Any) -> str:
        output = self.fresh(f"{PREFIX}.{name}")
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=output, **attributes))
        return output


@dataclass(eq=False)
class Writer(ABC):
    """Writes the nodes that unpack a weight: into the graph, or as the body of a function. `planes` are the tensors of
    the weight by role."""

    planes: dict[str, str]
    shared: Shared

    @abstractmethod
    def op(self, op_type: str, inputs: list[str], **attributes: Any) -> str:
        """Write a node; return the name of its output."""

    @abstractmethod
    def dims(self, role: str, values: list[int]) -> str:
        """Integers of this weight, such as a shape."""

    @abstractmethod
    def read(self, role: str, name: str) -> str:
        """The name by which nodes read a value of the graph."""

    def plane(self, role: str) -> str:
        """A tensor of this weight."""
        return self.read(role, self.planes[role])

    def table(self, name: str, content: Array) -> str:
        """A constant that weights share."""
        return self.read(f"table_{name}", self.shared.table(name, content))

    def wide_table(self, name: str, content: Array) -> str:
        """The table for pairs of bytes that belongs to this one for bytes."""
        return self.read(f"table_{name}", self.shared.wide_table(name, content))

    def product_table(self, name: str, upper: Array, lower: Array) -> str:
        """The products of each of 256 numbers with each of 256 rows, for words of an upper and a lower byte."""
        return self.read(f"table_{name}", self.shared.product_table(name, upper, lower))


class Layout(Protocol):
    """A way of storing the codes of elements."""

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
        """Write nodes for the numbers times `unit`; the shape has at least as many elements as there are codes."""
        ...

    def row(self, size: int) -> list[int]:
        """The shape of a block of that size in the result of `write`, if blocks are rows (see `is_in_rows`)."""
        ...

    @property
    def group(self) -> int:
        """The number of codes that are read at once; the stored codes are padded to a multiple of it."""
        ...

    @property
    def unit(self) -> float:
        """The value of 1 in the result of `write`: integers are left as integers."""
        ...


def block_dims(geometry: Geometry) -> list[int]:
    """The shape in which one scale goes with each block: [blocks, (sub-blocks,) elements, inner]."""
    if not geometry.is_even:
        return [geometry.outer, geometry.length, geometry.inner]
    parts = [geometry.size // geometry.sub_size, geometry.sub_size] if geometry.sub_size else [geometry.size]
    return [geometry.outer * geometry.blocks, *parts, geometry.inner]


def is_in_rows(layout: Layout, geometry: Geometry) -> bool:
    """True if every block is a row of whole words, and its microexponents are a byte.

    The numbers can then be multiplied with the scales as they are. If blocks with microexponents do not lie along the
    last axis, their rows are stored, and transposed when they are numbers.
    """
    has_one_byte = geometry.shift_bits_of_block in (0, 8)
    is_worth_it = geometry.inner == 1 or geometry.shift_bits > 0
    return geometry.is_even and is_worth_it and geometry.size % layout.group == 0 and has_one_byte


def rows_of(geometry: Geometry) -> Geometry:
    """The tensor of all blocks, one in each row."""
    rows = geometry.outer * geometry.blocks * geometry.inner
    return replace(geometry, shape=(rows, geometry.size), axis=1)


@dataclass(frozen=True)
class Cast:
    """Elements in a type of their own."""

    element: ElementFormat
    name = "cast"
    group = 1

    @property
    def unit(self) -> float:
        return 2.0**self.element.fraction_bits if isinstance(self.element, IntFormat) else 1.0

    @property
    def _dtype(self) -> Any:
        return np.int8 if isinstance(self.element, IntFormat) else FLOAT8_TYPES[str(self.element)]

    def planes(self, codes: Bytes, geometry: Geometry) -> dict[str, Array]:
        if isinstance(self.element, IntFormat):
            return {"codes": self._shaped(integers(self.element)[codes], geometry)}
        return {"codes": self._shaped(codes.view(self._dtype), geometry)}

    def _shaped(self, codes: Array, geometry: Geometry) -> Array:
        """Give the codes the shape that scales are multiplied with."""
        return codes.reshape(-1, geometry.size) if is_in_rows(self, geometry) else codes.reshape(block_dims(geometry))

    def row(self, size: int) -> list[int]:
        return [size]

    def sizes(self, count: int) -> dict[str, tuple[Any, int]]:
        return {"codes": (self._dtype, count)}

    def codes(self, planes: Mapping[str, Array], count: int) -> Bytes:
        stored = np.ascontiguousarray(planes["codes"]).reshape(-1)
        if isinstance(self.element, IntFormat):
            return encode_elements(self.element, stored * np.float32(1 / self.unit)).astype(np.uint8)
        return stored.view(np.uint8)

    def write(self, writer: Writer) -> str:
        return writer.op("Cast", [writer.plane("codes")], to=TensorProto.FLOAT)


@dataclass(frozen=True)
class Words:
    """16-bit words of as many codes as fit."""

    element: ElementFormat
    name = "words"
    unit = 1.0

    @property
    def group(self) -> int:
        return 16 // self.element.bits

    def planes(self, codes: Bytes, geometry: Geometry) -> dict[str, Array]:
        words = joined(codes, self.element.bits).view("<u2")
        return {"codes": words.reshape(-1, geometry.size // self.group) if is_in_rows(self, geometry) else words}

    def row(self, size: int) -> list[int]:
        return [size // self.group, self.group]

    def sizes(self, count: int) -> dict[str, tuple[Any, int]]:
        return {"codes": (np.uint16, -(-count // self.group))}

    def codes(self, planes: Mapping[str, Array], count: int) -> Bytes:
        stored = np.ascontiguousarray(planes["codes"].astype("<u2", copy=False))
        return parted(stored.reshape(-1).view(np.uint8), self.element.bits)[:count]

    def write(self, writer: Writer) -> str:
        bits = self.element.bits
        table = writer.wide_table(str(self.element), numbers_of_bytes(self.element, bits))
        return writer.op("Gather", [table, _index(writer, "codes")])


@dataclass(frozen=True)
class SignedWords:
    """Magnitudes and signs apart."""

    element: ElementFormat
    name = "signed_words"
    group = 16
    unit = 1.0

    @property
    def _bits(self) -> int:
        """Bits of a magnitude, rounded up to a divisor of 8."""
        return next(width for width in (1, 2, 4, 8) if width >= self.element.bits - 1)

    @property
    def _mask(self) -> int:
        return (1 << (self.element.bits - 1)) - 1

    def planes(self, codes: Bytes, geometry: Geometry) -> dict[str, Array]:
        flat = filled(codes, self.group)
        signs = np.packbits(flat >> (self.element.bits - 1), bitorder="little")
        magnitudes = joined(flat & np.uint8(self._mask), self._bits)
        wide = magnitudes.view("<u2") if self._bits == 4 else magnitudes
        rows = [-1, *self.row(geometry.size)[:-1]] if is_in_rows(self, geometry) else [signs.size, -1]
        return {"magnitudes": wide.reshape(rows), "signs": signs.reshape(rows[:-1])}

    def row(self, size: int) -> list[int]:
        return [size // 8, 8 // self._each, self._each]

    @property
    def _each(self) -> int:
        """Magnitudes in a word."""
        return (16 if self._bits == 4 else 8) // self._bits

    def sizes(self, count: int) -> dict[str, tuple[Any, int]]:
        filled = count + -count % self.group
        kind, bits = (np.uint16, 16) if self._bits == 4 else (np.uint8, 8)
        return {"magnitudes": (kind, filled * self._bits // bits), "signs": (np.uint8, filled // 8)}

    def codes(self, planes: Mapping[str, Array], count: int) -> Bytes:
        stored = np.ascontiguousarray(planes["magnitudes"])
        flat = stored.astype(stored.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8)
        magnitudes = parted(flat, self._bits)[:count] & np.uint8(self._mask)
        signs = np.unpackbits(planes["signs"].reshape(-1), bitorder="little")[:count]
        return np.asarray(magnitudes | signs << np.uint8(self.element.bits - 1), np.uint8)

    def write(self, writer: Writer) -> str:
        content = magnitudes_of_bytes(self.element, self._bits)
        name = f"{self.element}.magnitudes"
        table = writer.wide_table(name, content) if self._bits == 4 else writer.table(name, content)
        shape = 256, 8 // self._each, self._each
        signs = writer.table(f"signs.{shape[1]}x{shape[2]}", signs_of_bytes().reshape(shape))
        numbers = writer.op("Gather", [table, _index(writer, "magnitudes")])
        return writer.op("Mul", [numbers, writer.op("Gather", [signs, _index(writer, "signs")])])


@dataclass(frozen=True)
class SplitWords:
    """12-bit words of two or four codes, in 8 and 4 bits. Integers are looked up as int8, a quarter of the memory."""

    element: ElementFormat
    has_minus_zero: bool = False  # int8 has no -0
    name = "split_words"

    @property
    def _each(self) -> int:
        """Codes in a word."""
        return 12 // self.element.bits

    @property
    def group(self) -> int:
        return 2 * self._each

    @property
    def _is_integer(self) -> bool:
        return isinstance(self.element, IntFormat) and not self.has_minus_zero

    @property
    def unit(self) -> float:
        return 2.0**self.element.fraction_bits if isinstance(self.element, IntFormat) and self._is_integer else 1.0

    def planes(self, codes: Bytes, geometry: Geometry) -> dict[str, Array]:
        parts = filled(codes, self.group).reshape(-1, self._each).astype(np.uint16)
        words: Array = np.zeros(len(parts), np.uint16)
        for index in range(self._each):
            words |= parts[:, index] << np.uint16(self.element.bits * index)
        high = (words >> 8).astype(np.uint8).reshape(-1, 2)
        lower: Array = words.astype(np.uint8)
        upper: Array = high[:, 0] | high[:, 1] << np.uint8(4)
        rows = [-1, *self.row(geometry.size)[:-1]] if is_in_rows(self, geometry) else [-1, 2]
        return {"lower": lower.reshape(rows), "upper": upper.reshape(rows[:-1])}

    def row(self, size: int) -> list[int]:
        return [size // self.group, 2, self._each]

    def sizes(self, count: int) -> dict[str, tuple[Any, int]]:
        pairs = -(-count // self.group)
        return {"lower": (np.uint8, 2 * pairs), "upper": (np.uint8, pairs)}

    def codes(self, planes: Mapping[str, Array], count: int) -> Bytes:
        upper = parted(planes["upper"].reshape(-1), 4).astype(np.uint16)
        words = planes["lower"].reshape(-1) | upper << 8
        return words_to_codes(words, self.element.bits).reshape(-1)[:count]

    def write(self, writer: Writer) -> str:
        both = np.arange(256, dtype=np.int32)
        upper = writer.table("upper", np.stack([both % 16, both // 16], axis=1).astype(np.int32) * np.int32(256))
        numbers = numbers_of_words(self.element) * np.float32(self.unit)
        kind = np.int8 if self._is_integer else np.float32
        table = writer.table(f"{self.element}.words.{np.dtype(kind).name}", numbers.astype(kind))
        high = writer.op("Gather", [upper, _index(writer, "upper")])
        looked_up = writer.op("Gather", [table, writer.op("Add", [_index(writer, "lower"), high])])
        return writer.op("Cast", [looked_up], to=TensorProto.FLOAT) if self._is_integer else looked_up


def _index(writer: Writer, role: str) -> str:
    return writer.op("Cast", [writer.plane(role)], to=TensorProto.INT32)


def layout_of(codes: BlockCodes, opset: int) -> Layout:
    """The layout for a weight in a model of that opset. Two's complement of less than 8 bits, which no preset has,
    takes 8."""
    element = codes.format.element
    is_number = isinstance(element, IntFormat) and (element.bits == 8 or not element.symmetric)
    is_float8 = str(element) in FLOAT8_TYPES and opset >= FLOAT8_OPSET
    if is_float8 or (is_number and not codes.has_minus_zero):
        return Cast(element)
    if element.bits in (4, 8):
        return Words(element)
    if element.bits in (3, 6):
        return SplitWords(element, codes.has_minus_zero)
    return SignedWords(element)


def read_layout(name: str, element: ElementFormat) -> Layout:
    """The layout that a file names."""
    kinds: dict[str, type[Cast] | type[Words] | type[SignedWords] | type[SplitWords]] = {
        kind.name: kind for kind in (Cast, Words, SignedWords, SplitWords)
    }
    if name not in kinds:
        raise ModelError(f"packed weights have a layout '{name}' that this version does not know: {', '.join(kinds)}")
    return kinds[name](element)

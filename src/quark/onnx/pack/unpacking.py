"""The nodes that unpack a weight, in standard operators of any opset from 13 on.

    numbers = the layout's reading of the codes
    scales  = table[exponents], times table[microexponents] where the format has them
    weight  = numbers * scales, in the shape of the weight

Everything is exact: elements and scales are float32, and so is the weight. Where blocks divide the axis, a scale is
broadcast over its block; where the last one is short, each element's scale is looked up by the number of its block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark.formats.spec import SCALE_MIN_EXPONENT, BlockFormat
from quark.onnx.pack.block_codes import BlockCodes, Bytes, Geometry
from quark.onnx.pack.code_words import joined, parted
from quark.onnx.pack.layout import Layout, Writer, block_dims, is_in_rows

Array = NDArray[Any]

EXPONENTS, SHIFTS = "exponents", "shifts"


@dataclass(frozen=True)
class Unpacking:
    """How one weight is unpacked; `dtype` is ONNX's number of its type."""

    format: BlockFormat
    geometry: Geometry
    layout: Layout
    dtype: int

    @property
    def variant(self) -> str:
        """The name of what differs between the nodes of weights, but for numbers in them."""
        parts = [str(self.format).replace(".", "_"), self.layout.name]
        parts += ["short_last_block"] * (not self.geometry.is_even)
        parts += ["rows"] * self._is_in_rows + ["integers"] * (self.layout.unit != 1)
        parts += ["cut"] * self._is_cut + ["sub_blocks_cut"] * self._are_shifts_cut + ["plain"] * self._lacks_shifts
        parts += [TensorProto.DataType.Name(self.dtype).lower()] * (self.dtype != TensorProto.FLOAT)
        return "_".join(parts)

    def planes(self, codes: BlockCodes) -> dict[str, Array]:
        """All tensors of the weight by their role."""
        geometry = self.geometry
        result = self.layout.planes(codes.elements, geometry)
        result[EXPONENTS] = codes.exponents.reshape(self._scale_dims())
        if codes.shifts is not None and self._shift_bits:  # without bits there is nothing but 0
            stored = joined(codes.shifts, self._shift_bits)
            result[SHIFTS] = stored[: -(-codes.shifts.size * self._shift_bits // 8)]
        return result

    def sizes(self) -> dict[str, tuple[Any, int]]:
        """The type and the number of elements of each of them."""
        geometry = self.geometry
        result = self.layout.sizes(geometry.count)
        result[EXPONENTS] = (np.uint8, geometry.outer * geometry.blocks * geometry.inner)
        if self._shift_bits:
            result[SHIFTS] = (np.uint8, -(-self._shift_count * self._shift_bits // 8))
        return result

    def codes(self, planes: dict[str, Array]) -> BlockCodes:
        """The codes again; `planes` must have the sizes that they were written with."""
        geometry, fmt = self.geometry, self.format
        elements = self.layout.codes(planes, geometry.count).reshape(geometry.outer, geometry.length, geometry.inner)
        exponents = planes[EXPONENTS].reshape(geometry.outer, geometry.blocks, geometry.inner)
        shifts: Bytes | None = None
        if geometry.sub_size:
            shape = (geometry.outer, geometry.sub_blocks, geometry.inner)
            shifts = np.zeros(shape, np.uint8)
            if self._shift_bits:
                stored = parted(planes[SHIFTS].reshape(-1), self._shift_bits)
                shifts = stored[: shifts.size].reshape(shape)
        return BlockCodes(fmt, geometry, elements, exponents, shifts)

    def write(self, writer: Writer) -> str:
        """Nodes for all of it; the name of the weight that comes out, in its shape and type."""
        numbers = self._in_shape(writer, self.layout.write(writer))
        if self._is_in_rows and self._shift_bits:
            numbers = writer.op("Mul", [numbers, self._fractions_in_rows(writer)])
            scales = self._scales(writer)
        else:
            scales = self._even_scales(writer) if self.geometry.is_even else self._looked_up_scales(writer)
        product = writer.op("Mul", [numbers, scales])
        weight = writer.op("Reshape", [product, writer.dims("shape", list(self.geometry.shape))])
        return weight if self.dtype == TensorProto.FLOAT else writer.op("Cast", [weight], to=self.dtype)

    @property
    def _is_in_rows(self) -> bool:
        return is_in_rows(self.layout, self.geometry)

    @property
    def _is_cut(self) -> bool:
        return self.geometry.count % self.layout.group > 0

    @property
    def _shift_count(self) -> int:
        return self.geometry.outer * self.geometry.sub_blocks * self.geometry.inner

    @property
    def _are_shifts_cut(self) -> bool:
        return self._shift_bits > 0 and self._shift_count % (8 // self._shift_bits) > 0

    @property
    def _lacks_shifts(self) -> bool:
        """That a format with sub-blocks needs none here."""
        return self.format.sub_blocks is not None and not self.geometry.sub_size

    @property
    def _shift_bits(self) -> int:
        return self.geometry.shift_bits

    def _scale_dims(self) -> list[int]:
        geometry = self.geometry
        if not geometry.is_even:
            return [geometry.outer, geometry.blocks, geometry.inner]
        if self._is_in_rows:
            return [geometry.outer * geometry.blocks, *([1] * len(self.layout.row(geometry.size)))]
        ones = [1] * (2 if geometry.sub_size else 1)
        return [geometry.outer * geometry.blocks, *ones, geometry.inner]

    def _in_shape(self, writer: Writer, numbers: str) -> str:
        """The numbers as the scales go with them; what filled up the last word is cut off."""
        if self.layout.name == "cast" or self._is_in_rows:
            return numbers
        if self._is_cut:
            numbers = _first(writer, numbers, "count", self.geometry.count)
        return writer.op("Reshape", [numbers, writer.dims("blocks", block_dims(self.geometry))])

    def _scales(self, writer: Writer) -> str:
        """2^e for all blocks, in the units of the layout's numbers."""
        exponents = np.arange(256) + SCALE_MIN_EXPONENT - int(np.log2(self.layout.unit))
        powers = np.ldexp(np.float32(1), np.minimum(exponents, 127)).astype(np.float32)
        table = writer.table(f"powers.{int(self.layout.unit)}", powers)
        return writer.op("Gather", [table, writer.op("Cast", [writer.plane(EXPONENTS)], to=TensorProto.INT32)])

    def _fractions(self, writer: Writer, dims: list[int]) -> str:
        """2^-shift for all sub-blocks."""
        bits = self._shift_bits
        shifts = parted(np.arange(256, dtype=np.uint8), bits).reshape(256, -1)
        table = writer.table(f"fractions.{bits}", np.ldexp(np.float32(1), -shifts.astype(np.int32)))
        result = writer.op("Gather", [table, writer.op("Cast", [writer.plane(SHIFTS)], to=TensorProto.INT32)])
        if self._are_shifts_cut:
            result = _first(writer, result, "sub_block_count", self._shift_count)
        return writer.op("Reshape", [result, writer.dims("sub_blocks", dims)])

    def _fractions_in_rows(self, writer: Writer) -> str:
        """2^-shift for all elements: a product of equals is faster than one in which each goes with two."""
        geometry = self.geometry
        row = self.layout.row(geometry.size)
        shifts = parted(np.arange(256, dtype=np.uint8), self._shift_bits).reshape(256, -1)
        powers = np.ldexp(np.float32(1), -np.repeat(shifts, geometry.sub_size, axis=1).astype(np.int32))
        table = writer.table(f"fractions.{'x'.join(map(str, row))}", powers.reshape(256, *row))
        return writer.op("Gather", [table, writer.op("Cast", [writer.plane(SHIFTS)], to=TensorProto.INT32)])

    def _even_scales(self, writer: Writer) -> str:
        scales = self._scales(writer)
        if not self._shift_bits:
            return scales
        geometry = self.geometry
        dims = [geometry.outer * geometry.blocks, geometry.size // geometry.sub_size, 1, geometry.inner]
        return writer.op("Mul", [scales, self._fractions(writer, dims)])

    def _looked_up_scales(self, writer: Writer) -> str:
        geometry = self.geometry
        number = writer.dims("block_of", [index // geometry.size for index in range(geometry.length)])
        scales = writer.op("Gather", [self._scales(writer), number], axis=1)
        if not self._shift_bits:
            return scales
        fractions = self._fractions(writer, [geometry.outer, geometry.sub_blocks, geometry.inner])
        number = writer.dims("sub_block_of", [index // geometry.sub_size for index in range(geometry.length)])
        return writer.op("Mul", [scales, writer.op("Gather", [fractions, number], axis=1)])


def _first(writer: Writer, values: str, role: str, count: int) -> str:
    """The first `count` of the values, flat."""
    flat = writer.op("Reshape", [values, writer.dims("flat", [-1])])
    return writer.op("Slice", [flat, writer.dims("start", [0]), writer.dims(role, [count])])

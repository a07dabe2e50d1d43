"""The nodes that unpack a weight, in standard operators of any opset from 13 on.

    numbers = the layout's reading of the codes
    scales  = table[exponents], times table[microexponents] if the format has them, times the tensor's scale if it has
    weight  = numbers * scales, in the shape of the weight

Everything is exact: elements and scales are float32, and so is the weight. If blocks divide the axis, a scale is
broadcast over its block; if the last block is short, each element's scale is looked up by the number of its block. If
the microexponents of a block are a byte, they are stored in one word with its exponent: one look-up finds the scales of
all its elements. Such blocks are stored as rows, wherever they lie, and transposed at the end. If blocks without
microexponents lie across the last axes, scales are repeated until they make a long row of whole words.

The nodes go into the graph (profile portable), or into a function that the graph calls (custom).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from quark.formats.spec import SCALE_MIN_EXPONENT, BlockFormat
from quark.onnx.pack.block_codes import BlockCodes, Bytes, Geometry, float_scales, joined, parted
from quark.onnx.pack.layouts import Layout, Shared, Writer, block_dims, is_in_rows, rows_of

Array = NDArray[Any]
FUNCTION_DOMAIN = "com.amd.quark.packed"
FUNCTION_VERSION = 1
EXPONENTS, SHIFTS = "exponents", "shifts"
MIN_ROW = 32  # products of shorter rows take twice as long an element, and longer ones are no faster
SCALES = "scales"  # both, in words: the exponent is the upper byte
TENSOR_SCALE = "tensor_scale"


@dataclass(frozen=True)
class Unpacking:
    """The unpacking of one weight; `dtype` is ONNX's number of its type."""

    format: BlockFormat
    geometry: Geometry
    layout: Layout
    dtype: int

    @property
    def variant(self) -> str:
        """A name for the form of the nodes; weights with the same name differ in numbers only."""
        lacks_shifts = self.format.sub_blocks is not None and not self.geometry.sub_size
        parts = [str(self.format).replace(".", "_"), self.layout.name]
        parts += ["short_last_block"] * (not self.geometry.is_even)
        parts += (
            ["rows"] * self._is_in_rows
            + ["turned"] * self._is_turned
            + ["across"] * (self._period > 0)
            + ["integers"] * (self.layout.unit != 1)
        )
        parts += ["cut"] * self._is_cut + ["sub_blocks_cut"] * self._are_shifts_cut + ["plain"] * lacks_shifts
        parts += [TensorProto.DataType.Name(self.dtype).lower()] * (self.dtype != TensorProto.FLOAT)
        return "_".join(parts)

    def planes(self, codes: BlockCodes) -> dict[str, Array]:
        """All tensors of the weight by role."""
        planes = self._block_planes(codes)
        if self.format.scale is not None:
            planes[TENSOR_SCALE] = np.array(codes.tensor_scale, np.float32)
        return planes

    def _block_planes(self, codes: BlockCodes) -> dict[str, Array]:
        geometry = self.geometry
        if self._is_in_rows:
            result = self.layout.planes(_rows(codes.elements, geometry.size), rows_of(geometry))
            exponents = codes.exponents.reshape(-1)
            if self._has_words:
                assert codes.shifts is not None
                per_block = geometry.size // geometry.sub_size
                shifts = joined(_rows(codes.shifts, per_block), self._shift_bits)[: exponents.size]
                result[SCALES] = shifts | exponents.astype(np.uint16) << 8
            else:
                result[EXPONENTS] = exponents.reshape(-1, *self._ones)
            if not self._is_turned:
                return result
            return {role: plane.reshape(-1, geometry.inner, *plane.shape[1:]) for role, plane in result.items()}
        if self._period:
            length = self._period * geometry.inner
            rows = replace(geometry, shape=(geometry.count // length, length), axis=1, size=length)
            parts = self.layout.planes(codes.elements.reshape(rows.shape), rows)
            steps = geometry.size // self._period
            result = {role: plane.reshape(-1, steps, *plane.shape[1:]) for role, plane in parts.items()}
            return result | {EXPONENTS: codes.exponents.reshape(-1, 1, geometry.inner)}
        result = self.layout.planes(codes.elements, geometry)
        dims = [geometry.outer, geometry.blocks, geometry.inner]
        if geometry.is_even:
            ones = [1] * (2 if geometry.sub_size else 1)
            dims = [geometry.outer * geometry.blocks, *ones, geometry.inner]
        result[EXPONENTS] = codes.exponents.reshape(dims)
        if codes.shifts is not None and self._shift_bits:  # without bits there is nothing but 0
            stored = joined(codes.shifts, self._shift_bits)
            result[SHIFTS] = stored[: -(-codes.shifts.size * self._shift_bits // 8)]
        return result

    def sizes(self) -> dict[str, tuple[Any, int]]:
        """The type and the number of elements of each of these tensors."""
        geometry = self.geometry
        result = self.layout.sizes(geometry.count)
        if self.format.scale is not None:
            result[TENSOR_SCALE] = (np.float32, 1)
        if self._has_words:
            return result | {SCALES: (np.uint16, geometry.outer * geometry.blocks * geometry.inner)}
        result[EXPONENTS] = (np.uint8, geometry.outer * geometry.blocks * geometry.inner)
        if self._shift_bits:
            result[SHIFTS] = (np.uint8, -(-self._shift_count * self._shift_bits // 8))
        return result

    def codes(self, planes: dict[str, Array]) -> BlockCodes:
        """The inverse of `planes`, for tensors of the right sizes."""
        geometry, fmt = self.geometry, self.format
        elements = self.layout.codes(planes, geometry.count)
        if self._is_in_rows:
            elements = _turned(elements, geometry, geometry.size)
        elements = elements.reshape(geometry.outer, geometry.length, geometry.inner)
        shape = (geometry.outer, geometry.blocks, geometry.inner)
        shifts: Bytes | None = None
        if self._has_words:
            words = planes[SCALES].reshape(-1)
            exponents = (words >> 8).astype(np.uint8).reshape(shape)
            per_block = geometry.size // geometry.sub_size
            stored = parted(words.astype(np.uint8), self._shift_bits)
            return BlockCodes(fmt, geometry, elements, exponents, _turned(stored, geometry, per_block))
        exponents = planes[EXPONENTS].reshape(shape)
        if geometry.sub_size:
            shape = (geometry.outer, geometry.sub_blocks, geometry.inner)
            shifts = np.zeros(shape, np.uint8)
            if self._shift_bits:
                stored = parted(planes[SHIFTS].reshape(-1), self._shift_bits)
                shifts = stored[: shifts.size].reshape(shape)
        tensor_scale = float(planes[TENSOR_SCALE].reshape(())) if fmt.scale is not None else 1.0
        return BlockCodes(fmt, geometry, elements, exponents, shifts, tensor_scale)

    def write(self, writer: Writer) -> str:
        """Write all nodes; return the name of the weight, which has its shape and type."""
        numbers = self.layout.write(writer)
        if not (self.layout.name == "cast" or self._is_in_rows or self._period):
            if self._is_cut:  # the padding of the last word
                numbers = _first(writer, numbers, "count", self.geometry.count)
            numbers = writer.op("Reshape", [numbers, writer.dims("blocks", block_dims(self.geometry))])
        if self._is_in_rows:
            scales = self._scales_of_elements(writer) if self._has_words else self._scales(writer)
        elif self._period:
            scales = writer.op("Tile", [self._scales(writer), writer.dims("repeats", [1, 1, self._period])])
            row = self.layout.row(self._period * self.geometry.inner)
            if len(row) > 1:
                scales = writer.op("Reshape", [scales, writer.dims("row", [-1, 1, *row])])
        else:
            scales = self._block_scales(writer)
        product = writer.op("Mul", [numbers, scales])
        if self._is_turned:
            last = len(self._ones) + 2
            product = writer.op("Transpose", [product], perm=[0, *range(2, last), 1])
        weight = writer.op("Reshape", [product, writer.dims("shape", list(self.geometry.shape))])
        return weight if self.dtype == TensorProto.FLOAT else writer.op("Cast", [weight], to=self.dtype)

    @property
    def _is_in_rows(self) -> bool:
        return is_in_rows(self.layout, self.geometry)

    @property
    def _is_turned(self) -> bool:
        return self._is_in_rows and self.geometry.inner > 1

    @property
    def _period(self) -> int:
        """The number of steps along the axis that make a row if blocks lie across the last axes. 0 if they do not, or
        if no such row has whole words."""
        geometry, group = self.geometry, self.layout.group
        if geometry.inner == 1 or geometry.sub_size or not geometry.is_even:
            return 0
        steps = [count for count in range(1, geometry.size + 1) if geometry.size % count == 0]
        whole = [count for count in steps if count * geometry.inner % group == 0]
        return next((count for count in whole if count * geometry.inner >= MIN_ROW), whole[-1] if whole else 0)

    @property
    def _has_words(self) -> bool:
        return self._is_in_rows and self._shift_bits > 0

    @property
    def _ones(self) -> list[int]:
        return [1] * len(self.layout.row(self.geometry.size))

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
    def _shift_bits(self) -> int:
        return self.geometry.shift_bits

    @property
    def _powers(self) -> Array:
        exponents = np.arange(256) + SCALE_MIN_EXPONENT - int(np.log2(self.layout.unit))
        return np.asarray(np.ldexp(np.float32(1), np.minimum(exponents, 127)), np.float32)

    def _scales(self, writer: Writer) -> str:
        """The scales of all blocks, in the units of the layout's numbers."""
        if self.format.scale is not None:
            numbers = float_scales(self.format.scale) * np.float32(1 / self.layout.unit)
            table = writer.table(f"{self.format.scale}.{int(self.layout.unit)}", numbers)
            factors = writer.op("Gather", [table, writer.op("Cast", [writer.plane(EXPONENTS)], to=TensorProto.INT32)])
            return writer.op("Mul", [factors, writer.plane(TENSOR_SCALE)])
        table = writer.table(f"powers.{int(self.layout.unit)}", self._powers)
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

    def _scales_of_elements(self, writer: Writer) -> str:
        """2^(e - shift) for each element: multiplying arrays of one shape is faster than broadcasting."""
        geometry = self.geometry
        row = self.layout.row(geometry.size)
        shifts = parted(np.arange(256, dtype=np.uint8), self._shift_bits).reshape(256, -1)
        fractions = np.ldexp(np.float32(1), -np.repeat(shifts, geometry.sub_size, axis=1).astype(np.int32))
        name = f"scales.{int(self.layout.unit)}.{'x'.join(map(str, row))}"
        table = writer.product_table(name, self._powers, fractions.reshape(256, *row))
        return writer.op("Gather", [table, writer.op("Cast", [writer.plane(SCALES)], to=TensorProto.INT32)])

    def _block_scales(self, writer: Writer) -> str:
        """The scales of blocks in the shape that numbers are multiplied with."""
        geometry = self.geometry
        if geometry.is_even:
            scales = self._scales(writer)
            if not self._shift_bits:
                return scales
            dims = [geometry.outer * geometry.blocks, geometry.size // geometry.sub_size, 1, geometry.inner]
            return writer.op("Mul", [scales, self._fractions(writer, dims)])
        number = writer.dims("block_of", [index // geometry.size for index in range(geometry.length)])
        scales = writer.op("Gather", [self._scales(writer), number], axis=1)
        if not self._shift_bits:
            return scales
        fractions = self._fractions(writer, [geometry.outer, geometry.sub_blocks, geometry.inner])
        number = writer.dims("sub_block_of", [index // geometry.sub_size for index in range(geometry.length)])
        return writer.op("Mul", [scales, writer.op("Gather", [fractions, number], axis=1)])


def _rows(values: Bytes, size: int) -> Bytes:
    """[outer, length, inner] with the rows along the axis, of that size, in one piece each: [rows, size]."""
    outer, _, inner = values.shape
    return np.ascontiguousarray(values.reshape(outer, -1, size, inner).transpose(0, 1, 3, 2)).reshape(-1, size)


def _turned(rows: Bytes, geometry: Geometry, size: int) -> Bytes:
    """The inverse of `_rows`; there may be more at the end of `rows`."""
    count = geometry.outer * geometry.blocks * geometry.inner * size
    parts = rows[:count].reshape(geometry.outer, geometry.blocks, geometry.inner, size)
    return np.ascontiguousarray(parts.transpose(0, 1, 3, 2)).reshape(geometry.outer, -1, geometry.inner)


def _first(writer: Writer, values: str, role: str, count: int) -> str:
    """The first `count` of the values, flat."""
    flat = writer.op("Reshape", [values, writer.dims("flat", [-1])])
    return writer.op("Slice", [flat, writer.dims("start", [0]), writer.dims(role, [count])])


@dataclass(eq=False)
class GraphWriter(Writer):
    """Writes the nodes of one weight into the graph."""

    weight: str
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def op(self, op_type: str, inputs: list[str], **attributes: Any) -> str:
        output = self.shared.fresh(f"{self.weight}.{op_type}")
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=output, **attributes))
        return output

    def dims(self, role: str, values: list[int]) -> str:
        return self.shared.integers(values)

    def read(self, role: str, name: str) -> str:
        return name


@dataclass(eq=False)
class FunctionWriter(Writer):
    """Writes the body of a function, and collects the inputs and attributes of the node that calls it."""

    body: list[onnx.NodeProto] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)  # inputs of the function, and of the node
    attributes: dict[str, list[int]] = field(default_factory=dict)

    def op(self, op_type: str, inputs: list[str], **attributes: Any) -> str:
        output = f"{op_type.lower()}_{len(self.body)}"
        self.body.append(helper.make_node(op_type, inputs, [output], **attributes))
        return output

    def dims(self, role: str, values: list[int]) -> str:
        if role in self.attributes:
            return role
        self.attributes[role] = values
        node = helper.make_node("Constant", [], [role])
        attribute = node.attribute.add()
        attribute.name, attribute.ref_attr_name, attribute.type = "value_ints", role, onnx.AttributeProto.INTS
        self.body.append(node)
        return role

    def read(self, role: str, name: str) -> str:
        role = role.replace(".", "_")
        self.inputs[role] = name
        return role


def portable_nodes(unpacking: Unpacking, weight: str, planes: dict[str, str], shared: Shared) -> list[onnx.NodeProto]:
    """Standard operators, the last of which makes the weight."""
    writer = GraphWriter(planes, shared, weight)
    unpacking.write(writer)
    writer.nodes[-1].output[0] = weight
    return writer.nodes


@dataclass(eq=False)
class Functions:
    """The functions that the weights of a model need, by name."""

    opset: int
    defined: dict[str, onnx.FunctionProto] = field(default_factory=dict)

    def node(self, unpacking: Unpacking, weight: str, planes: dict[str, str], shared: Shared) -> onnx.NodeProto:
        """The node that makes the weight; its function is defined where it is the first to call it."""
        writer = FunctionWriter(planes, shared)
        result = unpacking.write(writer)
        name = f"unpack_{unpacking.variant}"
        if name not in self.defined:
            opsets, names = [helper.make_opsetid("", self.opset)], (list(writer.inputs), list(writer.attributes))
            self.defined[name] = helper.make_function(
                FUNCTION_DOMAIN, name, names[0], [result], writer.body, opsets, attributes=names[1]
            )
        attributes: dict[str, Any] = dict(writer.attributes)
        label = shared.fresh(f"{weight}.{name}")
        inputs = list(writer.inputs.values())
        return helper.make_node(name, inputs, [weight], name=label, domain=FUNCTION_DOMAIN, **attributes)

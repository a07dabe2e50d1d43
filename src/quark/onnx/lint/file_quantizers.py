"""The quantizers of a file: pairs of QuantizeLinear and DequantizeLinear, or codes with the second alone.

A tensor that is computed has one key however many pairs stand behind it; a constant has one for each DequantizeLinear.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.onnx.graph import constant, input_value, is_constant, readers

Array = NDArray[Any]
_DOMAINS = ("", "com.microsoft")  # the second has the same operators, for more types


@dataclass(frozen=True)
class TensorKey:
    """The tensor that is quantized; of a constant also the node that gives it back."""

    tensor: str
    node: str = ""


@dataclass(frozen=True, eq=False)
class Quantizer:
    """One QuantizeLinear or DequantizeLinear; `scale` is None where it comes at run time."""

    node: ir.Node
    key: TensorKey
    is_constant: bool
    scale: Array | None
    zero_point: Array | None
    codes: ir.DataType

    @property
    def position(self) -> int | None:
        """Where there is one scale, and a power of two."""
        if self.scale is None or self.scale.size != 1:
            return None
        return position_of(float(self.scale.reshape(())))


def position_of(scale: float) -> int | None:
    """The p with scale = 2^-p; None where there is none.

    >>> position_of(0.25), position_of(0.3)
    (2, None)
    """
    significand, exponent = math.frexp(scale)
    return 1 - exponent if significand == 0.5 else None


def is_quantize(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "QuantizeLinear" and node.domain in _DOMAINS


def is_dequantize(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "DequantizeLinear" and node.domain in _DOMAINS


class FileQuantizers:
    """All quantizers of the main graph, and the positions that they have; see `Quantizers` in choose."""

    def __init__(self, model: ir.Model) -> None:
        self.all: tuple[Quantizer, ...] = tuple(_quantizers(model))
        self.positions: dict[Hashable, int] = {}
        self._by_node = {id(each.node): each for each in self.all}  # names of nodes may be double
        for each in self.all:
            if each.position is not None:
                self.positions.setdefault(each.key, each.position)

    def of(self, value: ir.Value | None) -> Quantizer | None:
        """The DequantizeLinear that gives the value."""
        writer = None if value is None else value.producer()
        return self._by_node.get(id(writer)) if writer is not None and is_dequantize(writer) else None

    def read(self, node: ir.Node, index: int) -> TensorKey | None:
        found = self.of(input_value(node, index))
        return None if found is None else found.key

    def written(self, value: ir.Value) -> TensorKey | None:
        found = next((self._by_node[id(reader)] for reader, _ in readers(value) if is_quantize(reader)), None)
        return None if found is None else found.key

    def source(self, value: ir.Value) -> ir.Value:
        for is_one in (is_dequantize, is_quantize):
            writer = value.producer()
            before = input_value(writer, 0) if writer is not None and is_one(writer) else None
            value = value if before is None else before
        return value


def _quantizers(model: ir.Model) -> Iterator[Quantizer]:
    for node in model.graph:
        if is_quantize(node) or is_dequantize(node):
            yield _quantizer(node)


def _quantizer(node: ir.Node) -> Quantizer:
    data = input_value(node, 0)
    writer = None if data is None else data.producer()
    if is_dequantize(node) and is_quantize(writer):
        assert writer is not None
        data = input_value(writer, 0)
    has_numbers = is_constant(data)
    tensor = "" if data is None else str(data.name)
    key = TensorKey(tensor, str(node.name) if has_numbers else "")
    scale, zero_point = _numbers(node, 1), _numbers(node, 2)
    if not has_numbers:
        scale, zero_point = _single(scale), _single(zero_point)
    return Quantizer(node, key, has_numbers, scale, zero_point, _codes(node))


def _single(numbers: Array | None) -> Array | None:
    """One number where all channels have the same, as behind layers in float: see insert/keep_float.py."""
    is_same = numbers is not None and numbers.size > 1 and bool((numbers == numbers.flat[0]).all())
    return numbers.flat[0].reshape(()) if is_same and numbers is not None else numbers


def _numbers(node: ir.Node, index: int) -> Array | None:
    array = constant(input_value(node, index))
    return None if array is None else np.asarray(array)


def _codes(node: ir.Node) -> ir.DataType:
    """The type of the codes; the standard's is uint8 where nothing says so."""
    found = _dtype(input_value(node, 2))
    if found is None and is_dequantize(node):
        found = _dtype(input_value(node, 0))
    return ir.DataType.UINT8 if found is None else found


def _dtype(value: ir.Value | None) -> ir.DataType | None:
    """What the constant is, rather than what is said of it."""
    if value is None or value.const_value is None:
        return None if value is None else value.dtype
    return value.const_value.dtype

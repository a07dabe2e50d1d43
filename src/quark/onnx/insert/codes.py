"""8-bit codes in a graph: those that a node reads through DequantizeLinear, and those that QuantizeLinear makes of what
it computes.

Between a node and the QuantizeLinear behind it may stand Relu and Clip. QuantizeLinear is monotone, so that they can as
well be applied to its codes:

    Q(clip(x, low, high)) = clip(Q(x), Q(low), Q(high))

and where Q(low) is the lowest code and Q(high) the highest, the codes' own range does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.onnx.graph import attribute, constant, input_value, is_read_once, rank, readers

Array = NDArray[Any]

_CLIPS = ("Relu", "Clip")


@dataclass(frozen=True, eq=False)
class Parameters:
    """Scale and zero point as values of the graph and as arrays; `axis` is None where there is one for the tensor."""

    scale: ir.Value
    zero_point: ir.Value
    scales: Array
    zero_points: Array
    axis: int | None

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.zero_points.dtype

    @property
    def is_symmetric_int8(self) -> bool:
        return self.dtype == np.int8 and not self.zero_points.any()

    def is_same(self, other: Parameters) -> bool:
        """That a code stands for the same number in both."""
        return (
            self.axis == other.axis
            and self.dtype == other.dtype
            and np.array_equal(self.scales.ravel(), other.scales.ravel())
            and np.array_equal(self.zero_points.ravel(), other.zero_points.ravel())
        )

    def code(self, number: float) -> int:
        """What QuantizeLinear makes of a number, with one scale for the tensor."""
        limits = np.iinfo(self.dtype)
        with np.errstate(over="ignore"):
            code = np.rint(np.float32(number) / self.scales.item()) + self.zero_points.item()
        return int(np.clip(code, limits.min, limits.max))


@dataclass(frozen=True, eq=False)
class Codes:
    """Codes as a node of the graph reads them."""

    value: ir.Value
    parameters: Parameters

    @property
    def inputs(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        """As operators on codes take them: value, scale, zero point."""
        return self.value, self.parameters.scale, self.parameters.zero_point


@dataclass(frozen=True, eq=False)
class Bias:
    """int32 codes with zero point 0."""

    value: ir.Value
    scales: Array

    def has_scale(self, scales: Array) -> bool:
        """Up to the rounding of a product of two scales."""
        sizes = {self.scales.size, scales.size} - {1}
        return len(sizes) < 2 and np.allclose(self.scales.ravel(), scales.ravel(), rtol=2.0**-22, atol=0)


@dataclass(frozen=True, eq=False)
class Ending:
    """All that reads one output of a node: quantizers with the same parameters, and the lowest and the highest code
    that get through Relu and Clip on the way."""

    quantizers: tuple[ir.Node, ...]
    parameters: Parameters
    lowest: int
    highest: int


def codes_read(node: ir.Node, index: int) -> Codes | None:
    """What the input is dequantized from; None where it is not, or not from 8-bit codes with constant parameters."""
    dequantize = _dequantizer(node, index)
    parameters = None if dequantize is None else _parameters(dequantize)
    value = None if dequantize is None else dequantize.inputs[0]
    return None if parameters is None or value is None else Codes(value, parameters)


def bias_read(node: ir.Node, index: int) -> Bias | None:
    """The int32 codes that the input is dequantized from; None where it is something else."""
    dequantize = _dequantizer(node, index)
    value = None if dequantize is None else dequantize.inputs[0]
    if dequantize is None or value is None or value.dtype is not ir.DataType.INT32:
        return None
    scales, zero_point = constant(dequantize.inputs[1]), input_value(dequantize, 2)
    zero_points = constant(zero_point)
    if scales is None or (zero_point is not None and (zero_points is None or zero_points.any())):
        return None
    is_last_axis = scales.size == 1 or rank(value) == 1 or attribute(dequantize, "axis", 1) in (-1, _last_axis(value))
    return Bias(value, scales) if scales.ndim < 2 and is_last_axis else None


def ending(value: ir.Value) -> Ending | None:
    """What happens to a value until it is codes; None where something else reads it, too."""
    clips = []
    while (clip := _only_clip(value)) is not None:
        bounds = clip_bounds(clip)
        if bounds is None:
            return None
        clips.append(bounds)
        value = clip.outputs[0]
    quantizers = tuple(node for node, _ in readers(value))
    if value.is_graph_output() or not quantizers or not all(_is_quantizer(node) for node in quantizers):
        return None
    all_parameters = [_parameters(node) for node in quantizers]
    first = all_parameters[0]
    if first is None or first.axis is not None or not all(p is not None and first.is_same(p) for p in all_parameters):
        return None
    low, high = _composed(clips)
    return Ending(quantizers, first, first.code(low), first.code(high))


def clip_bounds(node: ir.Node) -> tuple[float, float] | None:
    """Between which numbers Relu or Clip leaves its input; None where that is known at run time only."""
    if node.op_type == "Relu":
        return 0.0, np.inf
    bounds = []
    for index, default in ((1, -np.inf), (2, np.inf)):
        value = input_value(node, index)
        array = constant(value)
        if value is not None and (array is None or array.size != 1):
            return None
        bounds.append(default if array is None else float(array.item()))
    return bounds[0], bounds[1]


def _last_axis(value: ir.Value) -> int | None:
    count = rank(value)
    return None if count is None else count - 1


def _composed(clips: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """One clip for several after each other; where one has its bounds the wrong way round, the upper one wins."""
    low, high = -np.inf, np.inf
    for lower, upper in clips:
        low, high = min(max(low, lower), upper), min(max(high, lower), upper)
    return low, high


def _only_clip(value: ir.Value) -> ir.Node | None:
    """The Relu or Clip that is all that reads the value."""
    if not is_read_once(value):
        return None
    node, index = readers(value)[0]
    return node if node.op_type in _CLIPS and node.domain in ("", "ai.onnx") and index == 0 else None


def _dequantizer(node: ir.Node, index: int) -> ir.Node | None:
    value = input_value(node, index)
    producer = None if value is None else value.producer()
    is_one = producer is not None and producer.op_type == "DequantizeLinear" and producer.domain in ("", "ai.onnx")
    return producer if is_one else None


def _is_quantizer(node: ir.Node) -> bool:
    return node.op_type == "QuantizeLinear" and node.domain in ("", "ai.onnx")


def _parameters(node: ir.Node) -> Parameters | None:
    """Those of QuantizeLinear or DequantizeLinear. None where they are not constant, not for 8 bits, not float32, for
    groups, or without a zero point: operators on codes want one."""
    scale, zero_point = input_value(node, 1), input_value(node, 2)
    scales, zero_points = constant(scale), constant(zero_point)
    if scale is None or zero_point is None or scales is None or zero_points is None or scales.ndim > 1:
        return None
    if scales.dtype != np.float32 or zero_points.dtype not in (np.int8, np.uint8) or scales.size != zero_points.size:
        return None
    axis = None if scales.size == 1 else int(attribute(node, "axis", 1))
    return Parameters(scale, zero_point, scales, zero_points, axis)

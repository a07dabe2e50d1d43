"""Multiply a tensor by a factor for each channel, in the constants of what computes it.

From the tensor backwards, node by node: what is homogeneous hands the factor on to its input, what adds a constant
multiplies that as well, and a layer or a normalization takes the factor into its weights, where the way ends.

    takes it      Conv, ConvTranspose, Gemm, MatMul; LayerNormalization and its kin; Mul, Div by a constant
    hands it on   Relu and its like, pooling, Add and Sub of a constant, Transpose, Reshape and its like,
                  MatMul of two activations: factors of its columns go to the second, those of its rows to the first

A factor is an array that broadcasts to the tensor, all positive. Nothing else may read a tensor on the way. A weight
that others read stays as it is, and so does one that would leave the range of its type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import attribute, constant, dimensions, input_value, is_read_once, rank, set_constant
from quark.onnx.narrowing import in_dtype

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Edit:
    """A constant input of a node, to be multiplied."""

    node: ir.Node
    index: int
    factor: Array

    def result(self) -> Array | None:
        """The new constant; None where there is none, or where it does not fit its type."""
        array = constant(input_value(self.node, self.index))
        return None if array is None else in_dtype(array.astype(np.float64) * self.factor, array)


@dataclass(frozen=True, eq=False)
class Fold:
    """A way for the factor that can be gone: the node at its end, and what is multiplied."""

    into: ir.Node
    edits: tuple[Edit, ...]

    def apply(self, model: ir.Model) -> None:
        for edit in self.edits:
            array = edit.result()
            assert array is not None
            set_constant(model, edit.node, edit.index, array)


@dataclass(frozen=True, eq=False)
class _Step:
    """What one node does with the factor of its output. No `source`: it has taken it."""

    edits: tuple[Edit, ...] = ()
    source: ir.Value | None = None
    factor: Array | None = None


def find_fold(value: ir.Value, factor: Array) -> Fold | None:
    """How a tensor can be multiplied by the factor without a node more; None where it cannot. Who reads `value` itself
    is the caller's concern."""
    edits: list[Edit] = []
    while True:
        node = value.producer()
        rule = None if node is None else _RULES.get((node.domain, node.op_type))
        if node is None or rule is None or value is not node.outputs[0]:
            return None
        step = rule(node, factor)
        if step is None or any(edit.result() is None for edit in step.edits):
            return None
        edits += step.edits
        if step.source is None or step.factor is None:
            return Fold(node, tuple(edits))
        if not is_read_once(step.source):
            return None
        value, factor = step.source, _trimmed(step.factor)


def _trimmed(factor: Array) -> Array:
    """Without leading dimensions of 1, which broadcasting adds; and 1 along what it does not depend on."""
    for axis in range(factor.ndim):
        first = factor.take([0], axis)
        factor = first if np.array_equal(np.broadcast_to(first, factor.shape), factor) else factor
    while factor.ndim > 1 and factor.shape[0] == 1:
        factor = factor[0]
    return factor


def _vector(factor: Array, axis: int) -> Array | None:
    """The factor as one number for each index along that axis, from the end; None where it depends on another."""
    if factor.ndim < -axis or any(size != 1 for i, size in enumerate(factor.shape, -factor.ndim) if i != axis):
        return None
    return factor.reshape(-1)


# --- what takes it


def _into_conv(node: ir.Node, factor: Array) -> _Step | None:
    weight = constant(input_value(node, 1))
    vector = None if weight is None else _vector(factor, 1 - weight.ndim)
    if weight is None or vector is None:
        return None
    ones = (1,) * (weight.ndim - 2)
    if node.op_type == "Conv":
        by_weight = vector.reshape(-1, 1, *ones)
    else:
        groups = attribute(node, "group", 1)
        by_weight = np.repeat(vector.reshape(groups, -1), weight.shape[0] // groups, axis=0).reshape(
            *weight.shape[:2], *ones
        )
    return _into_layer(node, 1, by_weight, vector)


def _into_gemm(node: ir.Node, factor: Array) -> _Step | None:
    vector = _vector(factor, -1)
    if vector is None:
        return None
    return _into_layer(node, 1, vector[:, None] if attribute(node, "transB", 0) else vector, vector)


def _into_layer(node: ir.Node, index: int, by_weight: Array, by_bias: Array) -> _Step | None:
    weight = input_value(node, index)
    if weight is None or not is_read_once(weight):
        return None
    edits = (Edit(node, index, by_weight),)
    return _Step(edits if input_value(node, 2) is None else (*edits, Edit(node, 2, by_bias)))


def _through_matmul(node: ir.Node, factor: Array) -> _Step | None:
    first, second = node.inputs[0], node.inputs[1]
    rows, columns = _vector(factor, -2), _vector(factor, -1)
    if min(rank(first) or 0, rank(second) or 0) < 2 or first is None or second is None:
        return None
    if constant(second) is not None:
        return None if columns is None else _into_layer(node, 1, columns, columns)
    if constant(first) is not None:
        return None if rows is None else _into_layer(node, 0, rows[:, None], rows)
    padded = factor.reshape((1,) * max(0, 2 - factor.ndim) + factor.shape)
    if padded.shape[-2] == 1:
        return _hand_on(second, factor)
    return _hand_on(first, factor) if padded.shape[-1] == 1 else None


def _into_affine(scale: int, shift: int | None, *, is_by_channel: bool = False) -> Callable[..., _Step | None]:
    """For a normalization: the inputs with its factors and offsets, for each channel or place of the last axes."""

    def rule(node: ir.Node, factor: Array) -> _Step | None:
        array = constant(input_value(node, scale))
        if array is None or attribute(node, "training_mode", 0):
            return None
        if is_by_channel:
            known = rank(input_value(node, 0))
            vector = None if known is None else _vector(factor, 1 - known)
            if vector is None:
                return None
            factor = vector
        if array.shape != np.broadcast_shapes(array.shape, factor.shape):
            return None
        edits = (Edit(node, scale, factor),)
        has_shift = shift is not None and input_value(node, shift) is not None
        return _Step((*edits, Edit(node, shift, factor)) if shift is not None and has_shift else edits)

    return rule


def _into_product(node: ir.Node, factor: Array) -> _Step | None:
    index = _constant_operand(node)
    if index is None:
        return None
    is_divisor = node.op_type == "Div" and index == 1
    return _Step((Edit(node, index, 1 / factor if is_divisor else factor),))


# --- what hands it on


def _constant_operand(node: ir.Node) -> int | None:
    return next((i for i in (1, 0) if constant(input_value(node, i)) is not None), None)


def _hand_on(source: ir.Value | None, factor: Array, edits: tuple[Edit, ...] = ()) -> _Step | None:
    """To a source that has as many channels itself, and does not get them by broadcasting."""
    shape = dimensions(source)
    if source is None or shape is None or len(shape) < factor.ndim:
        return None
    sizes = shape[len(shape) - factor.ndim :]
    if any(wanted not in (1, size) for wanted, size in zip(factor.shape, sizes, strict=True)):
        return None
    return _Step(edits, source, factor)


def _through_sum(node: ir.Node, factor: Array) -> _Step | None:
    index = _constant_operand(node)
    if index is None:
        return None
    return _hand_on(input_value(node, 1 - index), factor, (Edit(node, index, factor),))


def _through_elementwise(node: ir.Node, factor: Array) -> _Step | None:
    return _hand_on(input_value(node, 0), factor)


def _through_pooling(node: ir.Node, factor: Array) -> _Step | None:
    source = input_value(node, 0)
    known = rank(source)
    return None if known is None or _vector(factor, 1 - known) is None else _hand_on(source, factor)


def _through_transpose(node: ir.Node, factor: Array) -> _Step | None:
    source = input_value(node, 0)
    known = rank(source)
    if known is None or factor.ndim > known:
        return None
    order = attribute(node, "perm") or tuple(reversed(range(known)))
    whole = factor.reshape((1,) * (known - factor.ndim) + factor.shape)
    return _hand_on(source, whole.transpose(np.argsort(order)))


def _through_reshape(node: ir.Node, factor: Array) -> _Step | None:
    """Where the axes that the factor depends on, and those behind them, are the last ones of the input as well."""
    source = input_value(node, 0)
    before, after = dimensions(source), dimensions(node.outputs[0])
    if before is None or after is None or factor.ndim > len(after):
        return None
    last = [size for size in after[len(after) - factor.ndim :] if size is not None]
    if len(last) < factor.ndim:
        return None
    sizes: list[int] = []
    for size in reversed(before):
        if size is None:
            return None
        sizes.insert(0, size)
        if math.prod(sizes) == math.prod(last):
            return _hand_on(source, _trimmed(np.broadcast_to(factor, last).reshape(sizes)))
    return None


_RULES: dict[tuple[str, str], Callable[[ir.Node, Array], _Step | None]] = {
    ("", "Conv"): _into_conv,
    ("", "ConvTranspose"): _into_conv,
    ("", "Gemm"): _into_gemm,
    ("", "MatMul"): _through_matmul,
    ("", "LayerNormalization"): _into_affine(1, 2),
    ("", "RMSNormalization"): _into_affine(1, None),
    ("com.microsoft", "SkipLayerNormalization"): _into_affine(2, 3),
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): _into_affine(2, None),
    ("", "BatchNormalization"): _into_affine(1, 2, is_by_channel=True),
    ("", "InstanceNormalization"): _into_affine(1, 2, is_by_channel=True),
    ("", "GroupNormalization"): _into_affine(1, 2, is_by_channel=True),
    ("", "Mul"): _into_product,
    ("", "Div"): _into_product,
    **dict.fromkeys([("", "Add"), ("", "Sub")], _through_sum),
    **dict.fromkeys([("", op) for op in ("Relu", "LeakyRelu", "PRelu", "Identity", "Dropout")], _through_elementwise),
    **dict.fromkeys([("", op) for op in ("MaxPool", "AveragePool")], _through_pooling),
    **dict.fromkeys([("", op) for op in ("GlobalAveragePool", "GlobalMaxPool")], _through_pooling),
    ("", "Transpose"): _through_transpose,
    **dict.fromkeys([("", op) for op in ("Reshape", "Flatten", "Squeeze", "Unsqueeze")], _through_reshape),
}

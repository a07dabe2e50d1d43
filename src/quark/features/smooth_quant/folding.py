"""Multiply a tensor by one factor per channel, in the constants of the nodes that compute it.

The search goes backwards from the tensor, node by node. Homogeneous operators pass the factor on to their input,
operators that add a constant multiply that as well, and a layer or a normalization takes the factor into its weights,
where the search ends.

    takes it      Conv, ConvTranspose, Gemm, MatMul; LayerNormalization and its kin; Mul, Div by a constant
    passes it on  Relu and similar operators, pooling, Add and Sub of a constant, Transpose, Reshape and its like,
                  MatMul of two activations: factors of its columns go to the second, those of its rows to the first

A factor is a positive array that broadcasts to the tensor. Nothing else may read a tensor on the way. A weight with
other readers stays as it is, and so does one that would leave the range of its type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from quark.decide.view import Array, Node, Value

Reader: TypeAlias = tuple[Node, int]  # with the number of the input


@dataclass(frozen=True, eq=False)
class Edit:
    """A constant input of a node, to be multiplied. `is_by_input`: the factor belongs to the input channels of a layer,
    and not to what it computes."""

    node: Node
    index: int
    factor: Array
    is_by_input: bool = False


class Road(Protocol):
    """The constants of an ONNX model or a torch network, and how they are changed."""

    def obstacle(self, node: Node) -> str | None:
        """The reason why the node cannot take part, if there is one that the graph does not show."""
        ...

    def is_possible(self, edit: Edit) -> bool:
        """True if there is such a constant, and the product is in the range of its type."""
        ...

    def write(self, edits: Sequence[Edit]) -> None: ...

    @property
    def insert_mul(self) -> Callable[[Sequence[Reader], Array], None] | None:
        """Multiplies the tensor that these nodes read, for them alone; None if the road inserts no nodes."""
        ...


@dataclass(frozen=True, eq=False)
class Fold:
    """Edits that multiply a tensor, and the node where the search for them ended."""

    into: Node
    edits: tuple[Edit, ...]


@dataclass(frozen=True, eq=False)
class _Step:
    """The effect of one node on the factor of its output. A node without a `source` has absorbed the factor."""

    edits: tuple[Edit, ...] = ()
    source: Value | None = None
    factor: Array | None = None


def find_fold(value: Value, factor: Array, road: Road) -> Fold | None:
    """Find a way to multiply a tensor by the factor without an additional node; None if there is none. The caller has
    to check the readers of `value` itself."""
    edits: list[Edit] = []
    while True:
        node = value.producer
        rule = None if node is None else (_RULES if node.is_standard else _MICROSOFT_RULES).get(node.op_type)
        if node is None or rule is None or value is not node.outputs[0] or road.obstacle(node) is not None:
            return None
        step = rule(node, factor)
        if step is None or not all(road.is_possible(edit) for edit in step.edits):
            return None
        edits += step.edits
        if step.source is None or step.factor is None:
            return Fold(node, tuple(edits))
        if not _is_read_once(step.source):
            return None
        value, factor = step.source, _trimmed(step.factor)


def _is_read_once(value: Value) -> bool:
    return len(value.readers) == 1 and not value.outputs


def _trimmed(factor: Array) -> Array:
    """Without leading dimensions of 1, which broadcasting adds, and with size 1 along axes on which it is constant."""
    for axis in range(factor.ndim):
        first = factor.take([0], axis)
        factor = first if np.array_equal(np.broadcast_to(first, factor.shape), factor) else factor
    while factor.ndim > 1 and factor.shape[0] == 1:
        factor = factor[0]
    return factor


def _vector(factor: Array, axis: int) -> Array | None:
    """The factor as one number for each index along that axis, from the end; None if it depends on another axis."""
    if factor.ndim < -axis or any(size != 1 for i, size in enumerate(factor.shape, -factor.ndim) if i != axis):
        return None
    return factor.reshape(-1)


# --- operators that take it


def _into_conv(node: Node, factor: Array) -> _Step | None:
    weight = node.input(1)
    if weight is None or weight.constant is None:
        return None
    shape = weight.constant.shape
    vector, ones = _vector(factor, 1 - len(shape)), (1,) * (len(shape) - 2)
    if vector is None:
        return None
    if node.op_type == "Conv":
        return _into_layer(node, 1, vector.reshape(-1, 1, *ones), vector)
    groups = node.setting("group", 1)
    by_weight = np.repeat(vector.reshape(groups, -1), shape[0] // groups, axis=0)
    return _into_layer(node, 1, by_weight.reshape(*shape[:2], *ones), vector)


def _into_gemm(node: Node, factor: Array) -> _Step | None:
    vector = _vector(factor, -1)
    if vector is None:
        return None
    return _into_layer(node, 1, vector[:, None] if node.setting("transB", 0) else vector, vector)


def _into_layer(node: Node, index: int, by_weight: Array, by_bias: Array) -> _Step | None:
    weight = node.input(index)
    if weight is None or not _is_read_once(weight):
        return None
    edits = (Edit(node, index, by_weight),)
    return _Step(edits if node.input(2) is None else (*edits, Edit(node, 2, by_bias)))


def _through_matmul(node: Node, factor: Array) -> _Step | None:
    first, second = node.inputs[0], node.inputs[1]
    rows, columns = _vector(factor, -2), _vector(factor, -1)
    if first is None or second is None or min(first.rank or 0, second.rank or 0) < 2:
        return None
    if second.constant is not None:
        return None if columns is None else _into_layer(node, 1, columns, columns)
    if first.constant is not None:
        return None if rows is None else _into_layer(node, 0, rows[:, None], rows)
    if factor.ndim < 2 or factor.shape[-2] == 1:
        return _pass_on(second, factor)
    return _pass_on(first, factor) if factor.shape[-1] == 1 else None


def _into_affine(*scales: int, has_shift: bool = True, is_by_channel: bool = False) -> Callable[..., _Step | None]:
    """The rule of a normalization: its scales are the first of these inputs that is given, with its shifts behind, one
    for each channel or for each place of the last axes."""

    def rule(node: Node, factor: Array) -> _Step | None:
        index = next((i for i in scales if node.input(i) is not None), None)
        scale = None if index is None else node.input(index)
        if index is None or scale is None or scale.constant is None or node.setting("training_mode", 0):
            return None
        if is_by_channel:
            data = node.input(0)
            vector = None if data is None or data.rank is None else _vector(factor, 1 - data.rank)
            if vector is None:
                return None
            factor = vector
        shape = scale.constant.shape
        if shape != np.broadcast_shapes(shape, factor.shape):
            return None
        inputs = (index, index + 1) if has_shift and node.input(index + 1) is not None else (index,)
        return _Step(tuple(Edit(node, i, factor) for i in inputs))

    return rule


# --- operators that pass it on


def _pass_on(source: Value | None, factor: Array, edits: tuple[Edit, ...] = ()) -> _Step | None:
    """Pass the factor on to a source that has as many channels itself, and does not get them by broadcasting."""
    if source is None or source.shape is None or len(source.shape) < factor.ndim:
        return None
    sizes = source.shape[len(source.shape) - factor.ndim :]
    if any(wanted not in (1, size) for wanted, size in zip(factor.shape, sizes, strict=True)):
        return None
    return _Step(edits, source, factor)


def _through_arithmetic(node: Node, factor: Array) -> _Step | None:
    """A product takes the factor into its constant; a sum multiplies its constant and its data."""
    index = next((i for i in (1, 0) if (value := node.input(i)) is not None and value.constant is not None), None)
    if index is None:
        return None
    if node.op_type in ("Mul", "Div"):
        is_divisor = node.op_type == "Div" and index == 1
        return _Step((Edit(node, index, 1 / factor if is_divisor else factor),))
    return _pass_on(node.input(1 - index), factor, (Edit(node, index, factor),))


def _through_pooling(node: Node, factor: Array) -> _Step | None:
    source = node.input(0)
    if source is None or source.rank is None or _vector(factor, 1 - source.rank) is None:
        return None
    return _pass_on(source, factor)


def _through_transpose(node: Node, factor: Array) -> _Step | None:
    source = node.input(0)
    rank = None if source is None else source.rank
    if rank is None or factor.ndim > rank:
        return None
    order = node.setting("perm", tuple(reversed(range(rank))))
    if order is None or len(order) != rank:
        return None
    whole = factor.reshape((1,) * (rank - factor.ndim) + factor.shape)
    return _pass_on(source, whole.transpose(np.argsort(order)))


def _through_reshape(node: Node, factor: Array) -> _Step | None:
    """Possible if the axes that the factor depends on, and those behind them, are also the last axes of the input."""
    source, after = node.input(0), node.outputs[0].shape
    if source is None or source.shape is None or after is None or factor.ndim > len(after):
        return None
    last = [size for size in after[len(after) - factor.ndim :] if size is not None]
    if len(last) < factor.ndim:
        return None
    sizes: list[int] = []
    for size in reversed(source.shape):
        if size is None:
            return None
        sizes.insert(0, size)
        if math.prod(sizes) == math.prod(last):
            return _pass_on(source, _trimmed(np.broadcast_to(factor, last).reshape(sizes)))
    return None


_Rule: TypeAlias = Callable[[Node, Array], _Step | None]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("Conv", "ConvTranspose"), _into_conv),
    "Gemm": _into_gemm,
    "MatMul": _through_matmul,
    "LayerNormalization": _into_affine(1, 2),  # in aten, input 1 is the normalized shape, or the number of groups
    "RMSNormalization": _into_affine(1, has_shift=False),
    **dict.fromkeys(("BatchNormalization", "InstanceNormalization"), _into_affine(1, is_by_channel=True)),
    "GroupNormalization": _into_affine(1, 2, is_by_channel=True),
    **dict.fromkeys(("Mul", "Div", "Add", "Sub"), _through_arithmetic),
    **dict.fromkeys(
        ["Relu", "LeakyRelu", "PRelu", "Identity", "Dropout"], lambda node, factor: _pass_on(node.input(0), factor)
    ),
    **dict.fromkeys(["MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"], _through_pooling),
    "Transpose": _through_transpose,
    **dict.fromkeys(["Reshape", "Flatten", "Squeeze", "Unsqueeze"], _through_reshape),
}
_MICROSOFT_RULES: dict[str, _Rule] = {
    "SkipLayerNormalization": _into_affine(2),
    "SkipSimplifiedLayerNormalization": _into_affine(2, has_shift=False),
}

"""Weights of an ONNX model that take a rotation, and the nodes that carry one out at inference.

Layers compute x W + b, with W [inputs, outputs]:

    output    W R, b R
    input     R' W
    online    x goes through nodes that compute x R, which stay in float and read float: a quantizer comes behind them

A constant that is also read elsewhere is copied before it is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import onnx_ir as ir

from quark.errors import InvalidValueError, ModelError
from quark.features.rotation.matrices import Array, rotate
from quark.onnx.graph import (
    READS_FLOAT,
    add_initializer,
    add_node,
    attribute,
    constant,
    dimensions,
    fresh_name,
    input_value,
    readers,
    replace_input,
    set_constant,
)

NAME = "rotation"
Change = Callable[[Array], Array]


@dataclass(frozen=True, eq=False)
class Online:
    """x R at inference: `matrix` as it is, or kron(left, matrix), for every block of that size."""

    matrix: Array
    left: Array | None = None

    @property
    def size(self) -> int:
        return len(self.matrix) * (1 if self.left is None else len(self.left))

    @property
    def product(self) -> Array:
        """The matrix that the layer behind it has to undo."""
        return self.matrix if self.left is None else np.kron(self.left, self.matrix)


@dataclass(eq=False)
class Edits:
    """Changes of one model, in place. `changed` has a phrase for each layer."""

    model: ir.Model
    changed: list[str] = field(default_factory=list)
    _matrices: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = field(default_factory=dict)

    def rotate_output(self, node: ir.Node, matrix: Array, channels: int = 0) -> None:
        """Multiply a layer's result by the matrix. An Add that is the only reader of the result belongs to the layer if
        it adds a constant with `channels` elements."""
        self.edit_weight(node, partial(rotate, matrix=matrix), len(matrix))
        place = self.bias_place(node, channels)
        if place is not None:
            self.edit(*place, partial(rotate, matrix=matrix))
        self.changed.append(f"{node.name}: its output")

    def rotate_input(self, node: ir.Node, matrix: Array) -> None:
        """Undo a rotation of a layer's input in the layer's weight."""
        self.edit_weight(node, partial(rotate, matrix=matrix, axis=-2), len(matrix))
        self.changed.append(f"{node.name}: its input")

    def edit_weight(self, node: ir.Node, change: Change, size: int) -> None:
        """Change the weight, as [inputs, outputs]; `size` is that of the rotation, for messages."""
        index, is_transposed = weight_place(node)
        value = input_value(node, index)
        transpose = None if value is None else value.producer()
        if transpose is not None:  # of a constant that others read as it is
            held = constant(input_value(transpose, 0))
            assert held is not None
            replace_input(node, index, add_initializer(self.model, f"{node.name}_weight", np.ascontiguousarray(held.T)))
        turned: Change = (lambda w: change(w.swapaxes(-1, -2)).swapaxes(-1, -2)) if is_transposed else change
        try:
            self.edit(node, index, turned)
        except InvalidValueError as error:
            raise not_rotated(node, dimensions(input_value(node, index)) or (), size) from error

    def edit(self, node: ir.Node, index: int, change: Change) -> None:
        """Change a constant, in float64."""
        values = constant(input_value(node, index))
        assert values is not None
        set_constant(self.model, node, index, change(values.astype(np.float64)).astype(values.dtype))

    def bias_place(self, node: ir.Node, channels: int = 0) -> tuple[ir.Node, int] | None:
        """The node and the input that add a constant to the result; None if there is none. A separate Add only counts
        if it adds as many numbers as there are `channels`."""
        if node.op_type == "Gemm":
            value = input_value(node, 2)
            if value is not None and constant(value) is None:
                raise ModelError(f"node '{node.name}' (Gemm) cannot be rotated: its bias is computed")
            if value is None:
                return None
            width = dimensions(node.outputs[0])
            # one number for all
            if width and width[-1] is not None and (dimensions(value) or (1,))[-1:] != (width[-1],):
                count = width[-1]
                self.edit(node, 2, lambda b: np.broadcast_to(b, (*b.shape[:-1], count)))
            return node, 2
        uses = readers(node.outputs[0])
        if node.op_type == "MatMul" and len(uses) == 1 and uses[0][0].op_type == "Add":
            add, index = uses[0]
            values = constant(input_value(add, 1 - index))
            if values is not None and values.shape[-1:] == (channels,) and values.size == channels:
                return add, 1 - index
        return None

    def fold_gain(self, node: ir.Node, gain: Array, shift: Array | None) -> None:
        """Multiply a layer's input by one factor per channel, and add a shift to it, in the layer's weight and bias."""
        if shift is not None and shift.any():
            index, is_transposed = weight_place(node)
            value = input_value(node, index)
            transpose = None if value is None else value.producer()
            weight = constant(value if transpose is None else input_value(transpose, 0))
            assert weight is not None
            matrix = weight.T if is_transposed != (transpose is not None) else weight
            self._add_bias(node, shift.astype(np.float64) @ matrix.astype(np.float64))
        factor = gain.astype(np.float64)[:, None]
        self.edit_weight(node, lambda w: factor * w, len(gain))

    def _add_bias(self, node: ir.Node, values: Array) -> None:
        if node.op_type == "Gemm":
            values = values * attribute(node, "alpha", 1.0) / attribute(node, "beta", 1.0)
        place = self.bias_place(node, len(values))
        if place is not None:
            self.edit(*place, lambda b: b + values)
            return
        weight = input_value(node, 1)
        assert weight is not None
        assert weight.dtype is not None
        held = add_initializer(self.model, f"{node.name}_bias", values.astype(weight.dtype.numpy()))
        if node.op_type == "Gemm":
            replace_input(node, 2, held)
            return
        product = node.outputs[0]
        add = add_node(self.model, "Add", [product, held], after=node, name=f"{node.name}_bias")
        self._take_place(product, add.outputs[0])
        add.replace_input_with(0, product)

    def _take_place(self, old: ir.Value, new: ir.Value) -> None:
        """Move the name and all readers of `old` to `new`."""
        new.type, new.shape = old.type, old.shape
        name, old.name = old.name, fresh_name(self.model, f"{old.name}_product")
        new.name = name  # the name by which others, and graph outputs, know it
        old.replace_all_uses_with(new, replace_graph_outputs=True)

    # -- at inference

    def insert(
        self, value: ir.Value, places: Iterable[tuple[ir.Node, int]], online: Online, name: str, channels: int
    ) -> None:
        """Multiply the tensor by the matrix for these nodes."""
        result = self._rotated(value, online, name, channels)
        for node, index in places:
            replace_input(node, index, result)

    def insert_for_all(
        self, value: ir.Value, places: Iterable[tuple[ir.Node, int]], online: Online, name: str, channels: int
    ) -> None:
        """Multiply the tensor by the matrix for these nodes, and for the graph output that it is."""
        others = list(places)
        result = self._rotated(value, online, name, channels)
        output, value.name = value.name, fresh_name(self.model, f"{value.name}_rotated")
        result.name = output
        graph = self.model.graph
        for index, graph_output in enumerate(graph.outputs):
            if graph_output is value:
                graph.outputs[index] = result
        for node, index in others:
            replace_input(node, index, result)

    def insert_left(self, node: ir.Node, index: int, matrix: Array, name: str) -> None:
        """Multiply the node's operand [..., channels, positions] by the matrix from the left."""
        value = input_value(node, index)
        assert value is not None
        product = self._node("MatMul", [self._held(matrix, value, name), value], value, name)
        product.shape = value.shape
        replace_input(node, index, product)

    def _rotated(self, value: ir.Value, online: Online, name: str, channels: int) -> ir.Value:
        """The tensor, which has that many channels, times the matrix, behind the node that computes it."""
        dims = dimensions(value)
        if dims is None:
            raise ModelError(f"tensor '{value.name}' cannot be rotated: its number of dimensions is not known")
        last, result = online.size, value
        is_parted = channels != last or online.left is not None
        if is_parted:
            sizes = [] if channels == last else [channels // last]
            if online.left is not None:
                sizes.append(len(online.left))
            sizes.append(len(online.matrix))
            result = self._reshaped(result, [0] * (len(dims) - 1) + sizes, name)
        result = self._node("MatMul", [result, self._held(online.matrix, value, name)], result, name)
        if online.left is not None:
            result = self._node("MatMul", [self._held(online.left.T, value, f"{name}_left"), result], result, name)
        if is_parted:
            result = self._reshaped(result, [0] * (len(dims) - 1) + [channels], name)
        result.shape = value.shape
        return result

    def _reshaped(self, value: ir.Value, sizes: Sequence[int], name: str) -> ir.Value:
        shape = add_initializer(self.model, f"{name}_shape", np.array(sizes, np.int64))
        return self._node("Reshape", [value, shape], value, name)

    def _held(self, matrix: Array, value: ir.Value, name: str) -> ir.Value:
        """The matrix as a constant of the model; equal ones are stored once."""
        assert value.dtype is not None
        array = np.ascontiguousarray(matrix.astype(value.dtype.numpy()))
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._matrices:
            self._matrices[key] = add_initializer(self.model, f"{name}_matrix", array)
        return self._matrices[key]

    def _node(self, op_type: str, inputs: Sequence[ir.Value], behind: ir.Value, name: str) -> ir.Value:
        producer = behind.producer()
        if producer is None:
            first = next(iter(self.model.graph))
            node = add_node(self.model, op_type, inputs, before=first, name=name)
        else:
            node = add_node(self.model, op_type, inputs, after=producer, name=name)
        node.meta[READS_FLOAT] = NAME
        node.outputs[0].type = behind.type
        return node.outputs[0]


def weight_place(node: ir.Node) -> tuple[int, bool]:
    """The input that is the weight, and whether it is [channels, inputs] instead of [inputs, channels]."""
    if node.op_type == "Gather" and constant(input_value(node, 0)) is not None:
        return 0, False
    if node.op_type in ("MatMul", "Gemm"):
        value = input_value(node, 1)
        transpose = None if value is None else value.producer()
        source = input_value(transpose, 0) if transpose is not None and transpose.op_type == "Transpose" else value
        if source is not None and constant(source) is not None:
            return 1, bool(attribute(node, "transB", 0))
    raise ModelError(
        f"node '{node.name}' ({node.op_type}) cannot be rotated: it has no constant weight; name nodes of type "
        "MatMul, Gemm or Gather"
    )


def not_rotated(node: ir.Node, shape: Iterable[int | None], size: int) -> ModelError:
    """An error that says that a weight does not fit the rotation."""
    return ModelError(
        f"node '{node.name}' ({node.op_type}) cannot be rotated: its constant has the shape {list(shape)}, and "
        f"RMatrixDim is {size}"
    )

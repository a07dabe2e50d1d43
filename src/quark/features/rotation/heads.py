"""Which columns of a weight belong to which head of attention, found by sending numbers through the network.

Between the layer that computes the values and the product with the probabilities, nodes only move numbers. If the
layer's result is replaced by the numbers of its columns, what arrives at the product says for every head which columns
its channels are. In the same way, places in the product's result are followed to the layers that read it. One sample is
run for all heads of a network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from quark.decide.view import Node
from quark.features.rotation.attention import Attention
from quark.features.rotation.matrices import Array
from quark.features.rotation.streams import channels_of
from quark.onnx.calibrate import FloatRunner
from quark.onnx.deciding import Work
from quark.onnx.graph import add_initializer, add_node, readers, replace_input


@dataclass(frozen=True, eq=False)
class Heads:
    """The channels of every head, in their order: as columns of the weight that computes the values [heads, size], and
    as rows of the weights that read the result."""

    columns: Array
    outputs: list[tuple[Node, Array]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return int(self.columns.shape[1])

    def rotate_values(self, values: Array, matrix: Array) -> Array:
        """A weight [inputs, outputs] or a bias [outputs] with the columns of every head rotated."""
        result: Array = values.copy()
        result[..., self.columns] = values[..., self.columns] @ matrix
        return result

    def rotate_rows(self, weight: Array, matrix: Array, channels: Array) -> Array:
        """A weight [inputs, outputs] that undoes the rotation of its input."""
        result: Array = weight.copy()
        result[channels] = np.einsum("hio,ij->hjo", weight[channels], matrix)
        return result


def find_heads(
    work: Work, attentions: Sequence[Attention], sample: Mapping[str, Array] | None
) -> Iterator[tuple[Attention, Heads | str]]:
    """The heads of every attention, or the reason why its values cannot be rotated."""
    possible = [attention for attention in attentions if not attention.obstacle]
    sent = {} if sample is None or not possible else _sent_through(work, possible, sample)
    for attention in attentions:
        if attention.obstacle:
            yield attention, attention.obstacle
        elif sample is None:
            yield attention, "there is no sample to follow the channels of its heads with"
        else:
            yield attention, _heads(attention, sent)


def _sent_through(work: Work, attentions: Sequence[Attention], sample: Mapping[str, Array]) -> dict[str, Array]:
    """What arrives at the tensors behind the moves, by name, if columns and places are sent through them.

    The result of a product is found under its own name with "/places" behind it, and has their shape.
    """
    model = work.model.clone()
    values = {str(value.name): value for node in model.graph for value in node.outputs}
    renamed: dict[str, str] = {}
    wanted: list[str] = []
    for attention in attentions:
        source, product, result = attention.source, attention.product, attention.product.outputs[0]
        assert source is not None
        assert attention.writer is not None
        columns = channels_of(attention.writer, of_input=False)
        assert columns is not None
        if source.name not in renamed:
            renamed[source.name] = _replaced_by_columns(model, values[source.name], columns)
        renamed[result.name] = _replaced_by_places(model, values[result.name])
        read = [product.input(1), result, *(node.input(0) for node in attention.outputs)]
        wanted += [value.name for value in (*read, *(value for value, _ in attention.others)) if value is not None]
    names = list(dict.fromkeys(renamed.get(name, name) for name in wanted))
    with FloatRunner(model, names, providers=work.settings.calibrate.providers) as runner:
        tensors = {name: tensor.array.copy() for name, tensor in runner.tensors(sample, names).items()}
    return {name: tensors[renamed.get(name, name)] for name in dict.fromkeys(wanted)}


def _replaced_by_columns(model: ir.Model, value: ir.Value, columns: int) -> str:
    """Replace a tensor, for all readers, by the number of the column of each element."""
    assert value.dtype is not None
    producer = value.producer()
    read = readers(value)
    held = add_initializer(model, "columns", np.arange(columns).astype(value.dtype.numpy()))
    shape = _of_integers(add_node(model, "Shape", [value], after=producer))
    expanded = add_node(model, "Expand", [held, shape.outputs[0]], after=shape)
    return _let_read(read, expanded.outputs[0], value)


def _replaced_by_places(model: ir.Model, value: ir.Value) -> str:
    """Replace a tensor, for all readers, by the number of each element, row by row."""
    assert value.dtype is not None
    producer = value.producer()
    read = readers(value)
    zero, step = (add_initializer(model, "number", np.array(number, np.int64)) for number in (0, 1))
    shape = _of_integers(add_node(model, "Shape", [value], after=producer))
    size = _of_integers(add_node(model, "Size", [value], after=shape))
    order = add_node(model, "Range", [zero, size.outputs[0], step], after=size)
    placed = add_node(model, "Reshape", [order.outputs[0], shape.outputs[0]], after=order)
    cast = add_node(model, "Cast", [placed.outputs[0]], after=placed, attributes={"to": int(value.dtype)})
    return _let_read(read, cast.outputs[0], value)


def _of_integers(node: ir.Node) -> ir.Node:
    node.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    return node


def _let_read(read: Sequence[tuple[ir.Node, int]], new: ir.Value, old: ir.Value) -> str:
    new.type, new.shape = old.type, old.shape
    for node, index in read:
        replace_input(node, index, new)
    return str(new.name)


def _heads(attention: Attention, tensors: Mapping[str, Array]) -> Heads | str:
    values, result = attention.product.input(1), attention.product.outputs[0]
    assert values is not None
    columns = _whole(np.unique(_rows(tensors[values.name]), axis=0))
    if columns is None:
        return "its heads do not have columns of their own in the weight that computes the values"
    others = (value for value, _ in attention.others)
    if any(np.isin(columns, tensors[value.name]).any() for value in others):
        reader = attention.others[0][1][0]
        return f"columns of its values are also read by {reader.op_type} '{reader.label}'"
    places = tensors[result.name]
    if places.size != np.unique(places).size:
        return "there are too many places in its result to tell them apart; calibrate with shorter samples"
    heads = Heads(columns)
    for node in attention.outputs:
        data = node.input(0)
        assert data is not None
        channels = _channels(_rows(tensors[data.name]).astype(np.int64), heads.size)
        if channels is None:
            return f"the channels of its heads do not arrive in order at '{node.label}'"
        heads.outputs.append((node, channels))
    return heads


def _rows(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1])


def _whole(rows: Array) -> Array | None:
    """The rows as integers; None if a number is in several of them, or more than once in one."""
    return rows.astype(np.int64) if np.unique(rows).size == rows.size else None


def _channels(rows: Array, size: int) -> Array | None:
    """[heads, size]: for each head the channels of a layer that have its numbers, in their order.

    Every row is a position, with numbers of places: place // size is a head at a position. The order must be the same
    at all positions.
    """
    first = rows[0]
    if first.size % size:
        return None
    order = np.argsort(first, kind="stable").reshape(-1, size)
    ordered = rows[:, order]  # [positions, heads, size]
    is_whole = (ordered % size == np.arange(size)).all() and (ordered // size == ordered[..., :1] // size).all()
    return order if is_whole else None

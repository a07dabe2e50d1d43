"""Rotation of an ONNX model, folded into the weights on both sides.

With R orthogonal, what a pair's writers compute becomes x R, and its readers undo it:

    writers   W R for their weights [inputs, channels], b R for their biases, E R for an embedding
    norm      its scale goes into the readers' weights and its bias into their biases, so that it commutes with R
    readers   R' W

The network computes the same, as long as a tensor that is rotated is rotated by all nodes that write it and undone by
all that read it. The names come from the user, so that is checked by running both networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import onnx_ir as ir

from quark.account import AlgorithmFacts
from quark.compare.measures import pair_sums
from quark.errors import InvalidValueError, ModelError, unknown_name
from quark.features.rotation.matrices import Array, rotation
from quark.features.rotation.options import RotatedPair, RotationOptions
from quark.onnx.calibrate import FloatRunner
from quark.onnx.deciding import Work
from quark.onnx.graph import (
    add_initializer,
    add_node,
    attribute,
    constant,
    dimensions,
    fresh_name,
    input_value,
    is_float,
    readers,
    set_constant,
)

NAME = "rotation"
LEAST_SQNR_DB = 60.0  # of the rotated network in float32
NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")


def before_calibration(work: Work, options: RotationOptions) -> list[AlgorithmFacts]:
    """Rotate the model in place."""
    nodes = {str(node.name): node for node in work.model.graph}
    for name in (each for pair in options.pairs for each in (*pair.writers, *pair.readers, pair.norm or "")):
        if name and name not in nodes:
            raise unknown_name(f"node (rotation config '{options.source}')", name, nodes)
    for pair in options.pairs:
        _check_sizes(pair, nodes, options.size)  # before a matrix of that size is made
    has_means = any(nodes[pair.norm].op_type == "LayerNormalization" for pair in options.pairs if pair.norm)
    matrix = rotation(options.size, is_random=options.is_random, keeps_mean=has_means)
    samples = [sample for sample, _ in zip(work.samples, range(2), strict=False)]
    before = _outputs(work, samples)
    rotating = _Rotating(work.model, matrix)
    for pair in options.pairs:
        rotating.apply(pair, nodes)
    sums = [
        pair_sums(old[name], new[name])
        for old, new in zip(before, _outputs(work, samples), strict=True)
        for name in old
    ]
    worst = min((each.sqnr_db for each in sums), default=LEAST_SQNR_DB)
    if worst < LEAST_SQNR_DB:
        raise InvalidValueError(
            f"rotation config '{options.source}': the rotated network computes something else (SQNR {worst:.1f} dB). "
            "Every node that writes a rotated tensor belongs to prev_nodes, and every node that reads one to next_nodes"
        )
    return [AlgorithmFacts(NAME, tuple(rotating.changed), ())]


def _check_sizes(pair: RotatedPair, nodes: dict[str, ir.Node], size: int) -> None:
    """Raise ModelError if a weight of the pair has another number of channels."""
    for axis, names in ((-1, pair.writers), (-2, pair.readers)):
        for node in (nodes[name] for name in names):
            index, is_transposed = _weight_place(node)
            dims = dimensions(input_value(node, index)) or ()
            if len(dims) < 2 or (dims[::-1] if is_transposed else dims)[axis] != size:
                raise _not_rotated(node, dims, size)


def _weight_place(node: ir.Node) -> tuple[int, bool]:
    """The input that is the weight, and whether it is [channels, inputs] instead of [inputs, channels]."""
    if node.op_type == "Gather" and constant(input_value(node, 0)) is not None:
        return 0, False
    if node.op_type in ("MatMul", "Gemm") and constant(input_value(node, 1)) is not None:
        return 1, bool(attribute(node, "transB", 0))
    raise ModelError(
        f"node '{node.name}' ({node.op_type}) cannot be rotated: it has no constant weight; name nodes of type "
        "MatMul, Gemm or Gather"
    )


def _not_rotated(node: ir.Node, shape: Iterable[int | None], size: int) -> ModelError:
    return ModelError(
        f"node '{node.name}' ({node.op_type}) cannot be rotated: its constant has the shape {list(shape)}, and "
        f"RMatrixDim is {size}"
    )


def _outputs(work: Work, samples: Iterable[dict[str, Array]]) -> list[dict[str, Array]]:
    names = _compared(work.model)
    with FloatRunner(work.model, names, providers=work.settings.calibrate.providers) as runner:
        return [{name: each.array.copy() for name, each in runner.tensors(sample, names).items()} for sample in samples]


def _compared(model: ir.Model) -> list[str]:
    """The float outputs of a network; if it has none, the float tensors that its outputs are found from."""
    ends = [value for value in model.graph.outputs if is_float(value)]
    if ends:
        return [str(value.name) for value in ends if value.producer() is not None]
    found, left, seen = [], list(model.graph.outputs), set()
    while left:
        value = left.pop()
        producer = value.producer()
        if producer is None or value in seen:
            continue
        seen.add(value)
        if is_float(value):
            found.append(str(value.name))
        else:
            left += [each for each in producer.inputs if each is not None]
    return found


class _Rotating:
    """One rotation of a model. A weight that several pairs name is rotated once on each side."""

    def __init__(self, model: ir.Model, matrix: Array) -> None:
        self.model, self.matrix = model, matrix
        self.changed: list[str] = []
        self._done: set[tuple[str, str]] = set()

    def apply(self, pair: RotatedPair, nodes: dict[str, ir.Node]) -> None:
        if pair.norm is not None:
            self._fold_norm(nodes[pair.norm], [nodes[name] for name in pair.readers])
        for side, names in (("its output", pair.writers), ("its input", pair.readers)):
            for name in names:
                if (name, side) in self._done:
                    continue
                self._done.add((name, side))
                if side == "its output":
                    self._rotate_output(nodes[name])
                else:
                    index, is_transposed = _weight_place(nodes[name])
                    self._edit(nodes[name], index, lambda w: self.matrix.T @ w, is_transposed=is_transposed)
                self.changed.append(f"{name}: {side}")

    def _rotate_output(self, node: ir.Node) -> None:
        index, is_transposed = _weight_place(node)
        self._edit(node, index, lambda w: w @ self.matrix, is_transposed=is_transposed)
        place = self._bias_place(node)
        if place is not None:
            self._edit(*place, lambda b: b @ self.matrix)

    def _bias_place(self, node: ir.Node) -> tuple[ir.Node, int] | None:
        """The node and the input that add a constant to the result; None if there is none."""
        if node.op_type == "Gemm":
            value = input_value(node, 2)
            if value is not None and constant(value) is None:
                raise ModelError(f"node '{node.name}' (Gemm) cannot be rotated: its bias is computed")
            return None if value is None else (node, 2)
        found = readers(node.outputs[0])
        if node.op_type == "MatMul" and len(found) == 1 and found[0][0].op_type == "Add":
            add, index = found[0]
            values = constant(input_value(add, 1 - index))
            if values is not None and values.shape[-1:] == (len(self.matrix),) and values.size == len(self.matrix):
                return add, 1 - index
        return None

    def _fold_norm(self, norm: ir.Node, following: list[ir.Node]) -> None:
        """Move scale and bias of a normalization into the nodes behind it."""
        if norm.op_type not in NORMS:
            raise ModelError(f"norm_node '{norm.name}' is of type {norm.op_type}: expected one of {', '.join(NORMS)}")
        behind = {str(reader.name) for reader, _ in readers(norm.outputs[0])}
        if behind != {str(node.name) for node in following}:
            raise ModelError(
                f"norm_node '{norm.name}' is read by {', '.join(sorted(behind))}: next_nodes must be exactly these"
            )
        scale, bias = constant(input_value(norm, 1)), constant(input_value(norm, 2))
        if scale is None or (input_value(norm, 2) is not None and bias is None):
            raise ModelError(f"norm_node '{norm.name}': its scale or its bias is computed, and cannot be folded")
        if np.all(scale == 1) and (bias is None or not bias.any()):
            return
        for node in following:
            index, is_transposed = _weight_place(node)
            if bias is not None and bias.any():
                weight = constant(input_value(node, index))
                assert weight is not None
                matrix = weight.T if is_transposed else weight
                self._add_bias(node, bias.astype(np.float64) @ matrix.astype(np.float64))
            by_scale = partial(np.multiply, scale.astype(np.float64)[:, None])
            self._edit(node, index, by_scale, is_transposed=is_transposed)
        set_constant(self.model, norm, 1, np.ones_like(scale))
        if bias is not None:
            set_constant(self.model, norm, 2, np.zeros_like(bias))

    def _add_bias(self, node: ir.Node, values: Array) -> None:
        place = self._bias_place(node) if node.op_type == "Gemm" else None
        if place is not None:
            self._edit(*place, lambda b: b + values)
            return
        weight = constant(input_value(node, 1))
        assert weight is not None
        held = add_initializer(self.model, f"{node.name}_bias", values.astype(weight.dtype))
        if node.op_type == "Gemm":
            node.resize_inputs(3)
            node.replace_input_with(2, held)
            return
        product = node.outputs[0]
        add = add_node(self.model, "Add", [product, held], after=node, name=f"{node.name}_bias")
        result = add.outputs[0]
        result.type, result.shape = product.type, product.shape
        name, product.name = product.name, fresh_name(self.model, f"{product.name}_product")
        result.name = name  # what others, and outputs of the graph, know it by
        product.replace_all_uses_with(result, replace_graph_outputs=True)
        add.replace_input_with(0, product)

    def _edit(
        self, node: ir.Node, index: int, change: Callable[[Array], Array], *, is_transposed: bool = False
    ) -> None:
        values = constant(input_value(node, index))
        assert values is not None
        wide = values.astype(np.float64)
        try:
            changed = change(wide.swapaxes(-1, -2)).swapaxes(-1, -2) if is_transposed else change(wide)
        except ValueError as error:
            raise _not_rotated(node, values.shape, len(self.matrix)) from error
        set_constant(self.model, node, index, changed.astype(values.dtype))

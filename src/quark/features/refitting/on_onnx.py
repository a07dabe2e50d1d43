"""Refit Conv, ConvTranspose, Gemm and MatMul by least squares, one layer after the other.

A layer of the quantized network reads z, where the float network has x, and should give y = W x + b all the same:

    V, c = least of E |V z + c - y|^2 + share * tr(H) / n * |V - W|^2,      H = the covariance of z

so that each layer makes up for what the layers before it have lost, as far as that follows from z. V is then rounded
with compensation for H (compensation/rounding.py), and c is E y - V E z. `share` is chosen by samples that are held
back, and so is, for each output, whether V is better than the weight that stands there.

Where the output of a layer is added to a tensor that is computed already, the sum is what is fitted:

    y + (what is added in the float network - what is added in the quantized one)

Otherwise errors on the identity path of a residual network are never made up for, and grow with every block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.account import AlgorithmFacts
from quark.compare.improvement import OutputErrors
from quark.features.compensation.input_products import evenly_spread
from quark.features.compensation.layer_rounding import rounded_matrices
from quark.features.compensation.options import CompensationOptions
from quark.features.finetuning.layers import TrainedLayer, bias_of, trained_layers
from quark.features.finetuning.walk import Walk, quantized_copy, stages
from quark.features.refitting.options import RefittingOptions
from quark.onnx.blas_threads import one_blas_thread
from quark.onnx.calibrate.runner import processor_count
from quark.onnx.data.samples import SampleStore
from quark.onnx.deciding import Decision, quantized_errors
from quark.onnx.graph import constant, input_value, is_read_once, readers, set_constant
from quark.onnx.progress import track
from quark.plan import SkippedNode
from quark.rounded import rounded

Array = NDArray[Any]
NAME = "refitting"
LAYER_TYPES = ("Conv", "ConvTranspose", "Gemm", "MatMul")
SHARES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # of the mean of the diagonal
HELD_BACK = 4  # every fourth sample
ROWS_PER_COLUMN = 8
FEWEST_ROWS = 4096
MEMORY_LIMIT = 512 << 20


def after_choosing(work: Decision, options: RefittingOptions) -> list[AlgorithmFacts]:
    """Fit weights and biases in place. All of it is taken back if the network's outputs on held-out samples get worse."""
    if work.samples.is_random or not work.samples.count:
        reason = "no calibration data was given, and random numbers do not vary together as inputs do"
        return [AlgorithmFacts(NAME, (), (SkippedNode("", "", reason),))]
    if work.exact is None:
        return []
    plan, positions, before = work.plan, work.positions, quantized_errors(work)
    standing = {name: value.const_value for name, value in work.model.graph.initializers.items()}
    run = _Refitting(work, work.exact, options)
    try:
        with one_blas_thread():
            run.layer_by_layer()
    finally:
        run.close()
    work.rechoose(frozenset(run.biases))
    after = quantized_errors(work)
    if run.changed and not after.is_no_worse_than(before):
        for name, value in work.model.graph.initializers.items():
            value.const_value = standing.get(name, value.const_value)
        work.plan, work.positions = plan, positions
        reason = f"the outputs on held-out samples got worse with it: {before.mean:.4g} became {after.mean:.4g}"
        run.left += [SkippedNode(each.partition(": ")[0], "", reason) for each in run.changed]
        run.changed.clear()
    return [AlgorithmFacts(NAME, tuple(run.changed), tuple(run.left))]


@dataclass(eq=False)
class _Products:
    """Sums over rows: z z' [groups, columns, columns], y z' [groups, outputs, columns], y, y y, z and their number."""

    shape: tuple[int, int, int]
    count: int = 0
    inner: Array = field(init=False)
    cross: Array = field(init=False)
    inputs: Array = field(init=False)
    targets: Array = field(init=False)
    squares: Array = field(init=False)

    def __post_init__(self) -> None:
        groups, outputs, columns = self.shape
        self.inner = np.zeros((groups, columns, columns))
        self.cross = np.zeros((groups, outputs, columns))
        self.inputs = np.zeros((groups, columns))
        self.targets = np.zeros((groups, outputs))
        self.squares = np.zeros((groups, outputs))

    def add(self, rows: Array, wanted: Array) -> None:
        """Add rows [rows, groups, columns] and what is wanted for them [rows, groups, outputs]."""
        own, aim = rows.swapaxes(0, 1), wanted.swapaxes(0, 1)
        turned = aim.swapaxes(1, 2)
        self.inner += own.swapaxes(1, 2) @ own
        self.cross += turned @ own
        self.inputs += own.sum(axis=1, dtype=np.float64)
        self.targets += aim.sum(axis=1, dtype=np.float64)
        self.squares += np.square(aim, dtype=np.float64).sum(axis=1)
        self.count += len(rows)

    def joined(self, other: _Products) -> _Products:
        both = _Products(self.shape, self.count + other.count)
        for name in ("inner", "cross", "inputs", "targets", "squares"):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        return both

    def covariances(self, has_bias: bool) -> tuple[Array, Array]:
        """Of z, and of y with z; second moments without a bias."""
        inner, cross = self.inner / self.count, self.cross / self.count
        if has_bias:
            mean = self.inputs / self.count
            inner = inner - mean[:, :, None] * mean[:, None, :]
            cross = cross - (self.targets / self.count)[:, :, None] * mean[:, None, :]
        return inner, cross

    def bias(self, weights: Array) -> Array:
        """The best bias for weights, [groups, outputs]."""
        return np.asarray((self.targets - np.einsum("goc,gc->go", weights, self.inputs)) / self.count)

    def error(self, weights: Array, bias: Array) -> Array:
        """E |V z + c - y|^2 of each output."""
        found = self.squares - 2 * np.einsum("goc,goc->go", weights, self.cross)
        found += np.einsum("goc,goc->go", weights @ self.inner, weights)
        found += 2 * bias * (np.einsum("goc,gc->go", weights, self.inputs) - self.targets)
        return np.asarray(found / self.count + np.square(bias))


class _Refitting:
    """`copy` computes what the quantized network does, with constants that change as layers are fitted."""

    def __init__(self, work: Decision, exact: ir.Model, options: RefittingOptions) -> None:
        self._model, self._options = work.model, options
        self.layers, self.left = trained_layers(work.model, work.plan, LAYER_TYPES)
        self.changed: list[str] = []
        self.biases: list[str] = []
        self._choices = {(reader.node, reader.index): each.choice for each in work.plan for reader in each.readers}
        self._copy = quantized_copy(work.model, work.plan)
        self._nodes, self._copied, self._exact = (
            {str(node.name): node for node in each.graph} for each in (work.model, self._copy, exact)
        )
        self._samples = SampleStore(MEMORY_LIMIT // 8)
        for sample in itertools.islice(work.samples, work.samples.batches(options.sample_limit)):
            self._samples.append(sample)
        processors = processor_count()
        self._walks = tuple(
            Walk(
                network,
                self._samples,
                lambda: SampleStore(MEMORY_LIMIT // 4),
                workers=min(2, processors),
                threads=max(1, processors // 2),
            )
            for network in (exact, self._copy)
        )

    def layer_by_layer(self) -> None:
        with track(len(self.layers), "refitting") as advance:
            done = 0
            for stage in stages(self._walks[0], self.layers):
                for layer in stage:
                    self._refit(layer)
                    advance()
                done += len(stage)
                final, rest = ([each.name for each in some] for some in (self.layers[:done], self.layers[done:]))
                for walk in self._walks if rest else ():
                    walk.advance(final, rest)

    def _refit(self, layer: TrainedLayer) -> None:
        node = self._nodes[layer.name]
        weight, bias = constant(input_value(node, 1)), bias_of(node)
        assert weight is not None, layer.name
        train, aside = self._products(layer)
        if not train.count or not aside.count:
            self.left.append(SkippedNode(layer.name, layer.op_type, "there are too few rows"))
            return
        layout, has_bias = layer.layout, layer.has_bias and bias is not None
        matrices = layout.to_matrices(weight.astype(np.float64))
        original = constant(input_value(self._exact[layer.name], 1))
        assert original is not None, layer.name
        exact = layout.to_matrices(original.astype(np.float64))
        now = layout.to_matrices(rounded(weight, layer.weight).astype(np.float64))
        shift = np.zeros(train.targets.shape) if bias is None else bias.astype(np.float64).reshape(train.targets.shape)
        before = aside.error(now, shift)

        whole = train.joined(aside)

        def fitted(products: _Products, share: float) -> tuple[Array, Array]:
            inner, cross = products.covariances(has_bias)
            extra = share * _mean_diagonal(inner) * np.eye(inner.shape[-1])
            wanted = cross + exact @ extra
            return inner, np.linalg.solve(inner + extra, wanted.swapaxes(1, 2)).swapaxes(1, 2)

        def error_of(share: float) -> float:
            found = fitted(train, share)[1]
            return float(aside.error(found, train.bias(found) if has_bias else shift).sum())

        share = min(SHARES, key=error_of)
        inner, best = fitted(train, share)
        damped = inner + 0.01 * _mean_diagonal(inner) * np.eye(inner.shape[-1])
        attempt = rounded_matrices(layer, weight, best, damped, CompensationOptions(), 2)
        if isinstance(attempt, str):
            self.left.append(SkippedNode(layer.name, layer.op_type, attempt))
            return
        found, _ = attempt
        offset = train.bias(found) if has_bias else shift
        after = aside.error(found, offset)
        # the weights that stand there, with a bias for what the layer gets
        moved = whole.bias(now) if has_bias else shift
        is_better = after < aside.error(now, train.bias(now) if has_bias else shift)
        kept = np.where(is_better[:, :, None], found, matrices)
        offset = np.where(is_better, whole.bias(found) if has_bias else shift, moved)
        total = np.where(is_better, after, aside.error(now, moved)).sum()
        self._put(node, layer, 1, layout.from_matrices(kept).astype(weight.dtype))
        if has_bias and bias is not None:
            value = input_value(node, 2)
            assert value is not None
            self._put(node, layer, 2, offset.reshape(bias.shape).astype(bias.dtype))
            self.biases.append(str(input_value(node, 2).name))  # type: ignore[union-attr]
        self.changed.append(f"{layer.name}: error {before.sum():.3g} became {total:.3g}, share {share}")

    def _put(self, node: ir.Node, layer: TrainedLayer, index: int, values: Array) -> None:
        old = constant(input_value(node, index))
        assert old is not None, layer.name
        values = values.reshape(old.shape)
        set_constant(self._model, node, index, values)
        choice = self._choices.get((layer.name, index))
        seen = values if choice is None or index != 1 else rounded(values, choice).astype(old.dtype)
        set_constant(self._copy, self._copied[layer.name], index, seen)

    def _products(self, layer: TrainedLayer) -> tuple[_Products, _Products]:
        groups, outputs, columns = layer.layout.matrices
        exact, copied = self._exact[layer.name], self._copied[layer.name]
        y, z = str(exact.outputs[0].name), str(copied.inputs[0].name)  # type: ignore[union-attr]
        added = self._added(layer)
        rows = math.ceil(max(FEWEST_ROWS, ROWS_PER_COLUMN * columns) / len(self._samples))
        count = len(self._samples)
        picks: list[Array] = [np.zeros(0, np.int64)] * count
        targets: list[Array] = [np.zeros(0)] * count

        def see_float(index: int, values: Mapping[str, Array]) -> None:
            own = values[y]
            picks[index] = evenly_spread(layer.source.count(own.shape), rows)
            targets[index] = layer.source.outputs(own, picks[index])
            if added is not None:
                targets[index] = targets[index] + layer.source.outputs(values[added[0]], picks[index])

        self._walks[0].visit(list(dict.fromkeys([y, *([added[0]] if added else [])])), see_float)
        products = _Products((groups, outputs, columns)), _Products((groups, outputs, columns))
        seen: dict[int, Array] = {}

        def see_quantized(index: int, values: Mapping[str, Array]) -> None:
            seen[index] = layer.source.inputs(values[z], picks[index])
            if added is not None:
                targets[index] = targets[index] - layer.source.outputs(values[added[1]], picks[index])

        self._walks[1].visit(list(dict.fromkeys([z, *([added[1]] if added else [])])), see_quantized)
        for index in range(count):
            wanted = targets[index].reshape(-1, groups, outputs)
            products[index % HELD_BACK == HELD_BACK - 1].add(seen.pop(index), wanted)
        return products

    def _added(self, layer: TrainedLayer) -> tuple[str, str] | None:
        """What is added to the output of the layer, in the float and in the quantized network, if it is final."""
        exact, copied = self._exact[layer.name], self._copied[layer.name]
        found: list[str] = []
        value = exact.outputs[0]
        if layer.op_type != "Conv" or len(readers(value)) != 1:
            return None
        add, index = readers(value)[0]
        if add.op_type != "Add":
            return None
        other = add.inputs[1 - index]
        twin = self._copied.get(str(add.name))
        if other is None or other.const_value is not None or twin is None:
            return None
        seen = twin.inputs[1 - index]
        remaining = {each.name for each in self.layers[self.layers.index(layer) :]}
        producer = seen.producer() if seen is not None else None
        if producer is not None and str(seen.name) not in self._walks[1]._names:
            if remaining & {str(each.name) for each in self._walks[1]._before([str(producer.name)])}:
                return None
        return str(other.name), str(seen.name)

    def close(self) -> None:
        for walk in self._walks:
            walk.close()
        self._samples.close()


def _mean_diagonal(matrices: Array) -> Array:
    mean = np.einsum("gii->g", matrices)[:, None, None] / matrices.shape[-1]
    return np.where(mean > 0, mean, 1.0)

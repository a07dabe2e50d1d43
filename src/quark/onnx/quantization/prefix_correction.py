"""Bias correction that follows the quantized network, layer by layer.

What a layer computes in the quantized network, from what the layers before it made of the samples, is compared with the
float network; its bias is moved by the mean difference before the next layer is looked at. So the errors of earlier
layers are undone too, and on residual networks over-corrected: the sums on the identity path are in no bias's hands.
Hence the guard: the result is kept only where it brings the network's outputs closer to the float network's on samples
that were held out; otherwise the biases stay as they were.

One session of the quantized network serves all layers: its biases are inputs, and a run goes no further than the layer
that is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.account import AlgorithmFacts
from quark.onnx.calibrate import FloatRunner
from quark.onnx.data import Samples
from quark.onnx.graph import constant, set_constant
from quark.onnx.insert import InsertOptions, insert
from quark.onnx.progress import track
from quark.onnx.refine import Layer, layers
from quark.onnx.save import SaveOptions, finish
from quark.onnx.session import open_session, release_memory, running
from quark.plan import QuantizationPlan, Role, SkippedNode

Array = NDArray[Any]
NAME = "bias correction from the quantized network"


def correct_from_prefix(
    model: ir.Model,
    plan: QuantizationPlan,
    runner: FloatRunner,
    samples: Samples,
    expected: Sequence[Mapping[str, Array]],
    sample_limit: int,
) -> tuple[AlgorithmFacts, frozenset[str]]:
    """Change the biases of the float model in place where that helps; with the account, the constants that changed."""
    found, left = layers(model, plan)
    network = _OpenBiases(model, plan, found)
    seen = list(islice(samples, sample_limit))
    before = dict(network.biases)
    try:
        error = network.output_error(samples.held_out, expected)
        with track(len(found), "following the quantized network") as advance:
            for layer in found:
                wanted = _float_means(runner, seen, layer)
                network.biases[layer.name] += np.median(wanted - network.means(seen, layer), axis=0)
                advance()
        corrected = network.output_error(samples.held_out, expected)
    finally:
        network.close()
    if not corrected < error:
        reason = f"the outputs on held-out samples got worse: squared error {error:.4g} became {corrected:.4g}"
        return AlgorithmFacts(NAME, (), (*left, SkippedNode("", "", reason))), frozenset()
    changed = []
    tensors = []
    nodes = {str(node.name): node for node in model.graph}
    for layer in found:
        values = network.biases[layer.name]
        kept = set_constant(model, nodes[layer.bias_of.node], layer.bias_of.index, values.astype(_dtype(layer, nodes)))
        tensors.append(str(kept.name))
        changed.append(f"{layer.name}: by at most {np.abs(values - before[layer.name]).max(initial=0.0):.3g}")
    return AlgorithmFacts(NAME, tuple(changed), tuple(left)), frozenset(tensors)


class _OpenBiases:
    """The quantized network with the biases of its layers as inputs; `biases` are by layer, in float64."""

    def __init__(self, model: ir.Model, plan: QuantizationPlan, found: Sequence[Layer]) -> None:
        import onnxruntime

        copy = model.clone()
        nodes = {str(node.name): node for node in copy.graph}
        self.biases: dict[str, Array] = {}
        self._inputs: dict[str, tuple[str, Any]] = {}
        for layer in found:
            value = nodes[layer.bias_of.node].inputs[layer.bias_of.index]
            values = constant(value)
            assert value is not None, layer.name
            assert values is not None, layer.name
            self.biases[layer.name] = values.astype(np.float64)
            self._inputs[layer.name] = (str(value.name), values.dtype)
            del copy.graph.initializers[str(value.name)]
            value.const_value = None
            copy.graph.inputs.append(value)
        opened = {name for name, _ in self._inputs.values()}
        rest = tuple(each for each in plan if each.role is not Role.BIAS and each.tensor not in opened)
        insert(copy, QuantizationPlan(rest), InsertOptions())
        self._outputs = {layer.name: str(nodes[layer.bias_of.node].outputs[0].name) for layer in found}
        runnable = finish(copy, {}, SaveOptions(has_portable_functions=False)).to_graph()
        self._session: Any = open_session(runnable, extra_outputs=list(dict.fromkeys(self._outputs.values())))
        self._options = onnxruntime.RunOptions()
        self._options.only_execute_path_to_fetches = True

    def means(self, samples: Sequence[Mapping[str, Array]], layer: Layer) -> Array:
        """The mean output of the layer, [samples, channels]."""
        name = self._outputs[layer.name]
        return np.concatenate([_channel_means(self._run(each, [name])[0], layer) for each in samples])

    def output_error(self, samples: Sequence[Mapping[str, Array]], expected: Sequence[Mapping[str, Array]]) -> float:
        """The sum of squared differences of all float outputs, each output relative to its size."""
        total: dict[str, list[float]] = {}
        for sample, reference in zip(samples, expected, strict=True):
            floats = [name for name, value in reference.items() if value.dtype.kind == "f"]
            for name, value in zip(floats, self._run(sample, floats), strict=True):
                wide = reference[name].astype(np.float64)
                sums = total.setdefault(name, [0.0, 0.0])
                sums[0] += float(((value - wide) ** 2).sum())
                sums[1] += float((wide**2).sum())
        return sum(error / size if size else error for error, size in total.values())

    def close(self) -> None:
        self._session = None
        release_memory()

    def _run(self, sample: Mapping[str, Array], names: list[str]) -> list[Array]:
        biases = {name: self.biases[layer].astype(dtype) for layer, (name, dtype) in self._inputs.items()}
        with running("the quantized model"):
            results: list[Array] = self._session.run(names, {**sample, **biases}, self._options)
        return results


def _float_means(runner: FloatRunner, samples: Sequence[Mapping[str, Array]], layer: Layer) -> Array:
    output = layer.output
    return np.concatenate([_channel_means(runner.tensors(each, [output])[output].array, layer) for each in samples])


def _channel_means(x: Array, layer: Layer) -> Array:
    """The mean of each row of the batch and each channel."""
    lines = np.moveaxis(x.astype(np.float64), 1 if layer.has_space else -1, -1)
    return np.asarray(lines.reshape(len(lines), -1, lines.shape[-1]).mean(axis=1))


def _dtype(layer: Layer, nodes: Mapping[str, ir.Node]) -> Any:
    values = constant(nodes[layer.bias_of.node].inputs[layer.bias_of.index])
    assert values is not None, layer.name
    return values.dtype

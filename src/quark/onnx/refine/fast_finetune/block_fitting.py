"""Fit the layers of a block together: whole activations of both networks, and the block as torch computes it.

Activations of all samples are kept while the block is fitted, beyond a limit in a temporary file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from quark.onnx.graph import constant, input_value, readers
from quark.onnx.refine.fast_finetune.blocks import Block, nodes_of
from quark.onnx.refine.fast_finetune.gathering import held_out
from quark.onnx.refine.fast_finetune.trained_layers import TrainedLayer, bias_of
from quark.onnx.refine.fast_finetune.walk import Walk
from quark.onnx.refine.options import FinetuneOptions
from quark.plan import Choice, DynamicChoice
from quark.reconstruction.problem import Array, Fitted


@dataclass(frozen=True, eq=False)
class BlockFitter:
    """`model` is the network without quantizers, `choices` how inputs of its nodes are rounded. `count` samples are
    walked through the float network and through the quantized one, which has the nodes of the model by name.
    `make_store` gives an empty store of samples (append, [], len, close)."""

    model: ir.Model
    choices: Mapping[tuple[str, int], Choice]
    float_walk: Walk
    quantized_walk: Walk
    count: int
    make_store: Callable[[], Any]
    options: FinetuneOptions

    def why_not(self, block: Block) -> str | None:
        """Why the layers of the block have to be fitted one by one; None where they need not."""
        from quark.onnx.refine.fast_finetune.torch_graph import unsupported

        if len(block.layers) == 1:
            return "it has one layer"
        if self.count < 2:
            return "there is one sample only"
        if self.float_walk.value(block.output) is None:
            return f"the float network has no '{block.output}'"
        return unsupported(nodes_of(self.model, block))

    def fit(self, block: Block, place: int) -> list[Fitted]:
        """What each layer is to be; `place` is the number of the first of them among all."""
        from quark.onnx.refine.fast_finetune.torch_graph import TorchGraph
        from quark.reconstruction.block_problem import BlockProblem
        from quark.reconstruction.fit_block import fit_block

        options = replace(self.options.fit, seed=self.options.fit.seed + place)
        nodes = {str(node.name): node for node in self.model.graph}
        layers = tuple(_layer(nodes[layer.name], layer) for layer in block.layers)
        network = TorchGraph(self.model, block, self.choices, options.device)
        with self._kept() as keep:
            inputs = keep(self.quantized_walk, self._name_in_quantized(block.input))
            outputs = keep(self.float_walk, block.output)
            floats = keep(self.float_walk, block.input) if self._has_float_inputs(block) else None
            held = held_out(self.count)
            behind = self._choice_behind(block.output)
            problem = BlockProblem(block.name, layers, network, inputs, outputs, held, floats, behind)
            return fit_block(problem, options)

    def _has_float_inputs(self, block: Block) -> bool:
        return self.options.fit.drop_ratio < 1 and self.float_walk.value(block.input) is not None

    @contextmanager
    def _kept(self) -> Iterator[Callable[[Walk, str], Sequence[Array]]]:
        stores: list[Any] = []

        def keep(walk: Walk, tensor: str) -> Sequence[Array]:
            stores.append(self.make_store())
            return _gathered(walk, tensor, stores[-1])

        try:
            yield keep
        finally:
            for store in stores:
                store.close()

    def _name_in_quantized(self, tensor: str) -> str:
        """An output of the graph that is quantized has given its name away."""
        for node in self.model.graph:
            for index, value in enumerate(node.outputs):
                if value.name == tensor:
                    copied = next(each for each in self.quantized_walk.model.graph if each.name == node.name)
                    return str(copied.outputs[index].name)
        return tensor

    def _choice_behind(self, tensor: str) -> Choice | None:
        """How the first quantized reader sees the block's output."""
        value = next(each for node in self.model.graph for each in node.outputs if each.name == tensor)
        found = (self.choices.get((str(reader.name), index)) for reader, index in readers(value))
        return next((each for each in found if each is not None and not isinstance(each, DynamicChoice)), None)


class _Activations(Sequence[Array]):
    """One tensor for every sample, read when it is asked for."""

    def __init__(self, store: Any, tensor: str) -> None:
        self._store, self._tensor = store, tensor

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, number: Any) -> Any:
        return self._store[number][self._tensor]


def _gathered(walk: Walk, tensor: str, store: Any) -> _Activations:
    pending: dict[int, Array] = {}
    lock = threading.Lock()

    def see(index: int, values: Mapping[str, Array]) -> None:
        with lock:  # in the order of the samples, whoever is computed first
            pending[index] = values[tensor]
            while len(store) in pending:
                store.append({tensor: pending.pop(len(store))})

    walk.visit([tensor], see)
    return _Activations(store, tensor)


def _layer(node: ir.Node, layer: TrainedLayer) -> Any:
    from quark.reconstruction.block_problem import BlockLayer

    weight, bias = constant(input_value(node, 1)), bias_of(node)
    assert weight is not None, layer.name
    flat = None if bias is None else bias.reshape(-1)
    return BlockLayer(layer.name, weight, layer.layout, flat, layer.weight, layer.bias, layer.has_bias)

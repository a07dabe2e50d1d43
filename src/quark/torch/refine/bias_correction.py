"""Correct each bias by the mean error that rounding makes in its layer.

    b' = b + E[y_float - y_quantized]     for each output channel

E is the mean over positions, and over samples the mean of the middle half: a few samples with a value far outside the
range would otherwise decide the bias of all others. Both outputs are computed from the float network's activations, so
that only the layer's own rounding counts, of its input and of its weights.

The correction goes into the layer's bias, or into that of the batch norm that belongs to it. Several processes that
each see a part of the data (torchrun) come to the same correction out of all samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from quark.account import AlgorithmFacts
from quark.errors import InvalidValueError
from quark.plan import SkippedNode
from quark.torch.graph import layer_name
from quark.torch.processes import gathered
from quark.torch.refine.bias_rounding import Rounding, compensations
from quark.torch.refine.layers import CorrectedLayer, LayerChoices, corrected_layers
from quark.torch.refine.options import BiasCorrectionOptions
from quark.torch.refine.rounding import kept

NAME = "bias correction"
COMPENSATION_SAMPLES = 32  # which run at once; a mean over positions of an image needs no more

Errors = dict[str, list[torch.Tensor]]  # by node, [samples, channels] of each batch


def correct_biases(
    network: fx.GraphModule,
    choices: Mapping[str, LayerChoices],
    batches: Iterable[tuple[torch.Tensor, ...]],
    options: BiasCorrectionOptions,
    roundings: Mapping[str, Rounding] | None = None,
) -> AlgorithmFacts:
    """Change the biases of the float network in place. `choices` says by node how a layer sees its operands, and
    `roundings` what becomes of its bias where that has few bits of its own."""
    layers, left = corrected_layers(network, choices)
    errors = _measured(network, layers, batches, options.samples)
    corrections = {name: middle_mean(torch.cat(each).double()) for name, each in errors.items() if each}
    _add_compensations(network, layers, corrections, batches, roundings or {})
    changed: list[str] = []
    for layer in layers:
        name = layer_name(layer.node)
        correction = corrections.get(layer.node.name)
        if correction is None:
            left.append(SkippedNode(name, layer.op_type, "no sample reached it"))
            continue
        if not layer.add_to_bias(correction):
            left.append(SkippedNode(name, layer.op_type, "the correction is beyond the type of its bias"))
            continue
        changed.append(f"{name}: by at most {float(correction.abs().max()):.3g}")
    return AlgorithmFacts(NAME, tuple(changed), tuple(left))


def _add_compensations(
    network: fx.GraphModule,
    layers: list[CorrectedLayer],
    corrections: dict[str, torch.Tensor],
    batches: Iterable[tuple[torch.Tensor, ...]],
    roundings: Mapping[str, Rounding],
) -> None:
    """What rounding biases does to the layers behind them goes into the corrections of these, on some samples."""
    if not roundings:
        return
    batch = _first(next(iter(batches)), COMPENSATION_SAMPLES)
    found = compensations(network, layers, corrections, roundings, batch)
    ranks = _of_all_ranks({name: [each] for name, each in found.items()})
    for name, each in ranks.items():
        if name in corrections:
            corrections[name] = corrections[name] + torch.stack(each).mean(dim=0)


def middle_mean(values: torch.Tensor) -> torch.Tensor:
    """The mean over the first axis without the lowest and the highest quarter."""
    cut = len(values) // 4
    return values.sort(dim=0).values[cut : len(values) - cut].mean(dim=0)


def _measured(
    network: fx.GraphModule, layers: list[CorrectedLayer], batches: Iterable[tuple[torch.Tensor, ...]], samples: int
) -> Errors:
    """The mean error of every layer in every sample, of all processes."""
    comparison = _Comparison(network, layers)
    was_training = network.training
    network.eval()
    try:
        for batch in batches:
            samples -= comparison.over(_first(batch, samples))
            if samples <= 0:
                break
    finally:
        network.train(was_training)
    return _of_all_ranks(comparison.errors)


def _first(batch: tuple[torch.Tensor, ...], samples: int) -> tuple[torch.Tensor, ...]:
    """So many samples of a batch, where all of its tensors count samples by their first axis."""
    sizes = {int(each.shape[0]) if each.dim() else 0 for each in batch}
    return tuple(each[:samples] for each in batch) if len(sizes) == 1 and samples < max(sizes) else batch


def _of_all_ranks(errors: Errors) -> Errors:
    ranks = gathered(errors)
    return {name: [each for one in ranks for each in one[name]] for name in errors}


class _Comparison(fx.Interpreter):
    """Runs the float network, and each layer once more with rounded operands."""

    def __init__(self, network: fx.GraphModule, layers: list[CorrectedLayer]) -> None:
        super().__init__(network)
        self.extra_traceback = False
        self.errors: Errors = {layer.node.name: [] for layer in layers}
        self._layers = {layer.node: layer for layer in layers}
        self._weights = {layer.node: kept(layer.weight(), layer.choices.weight) for layer in layers}
        self._device = next((each.device for each in network.parameters()), torch.device("cpu"))

    def over(self, batch: tuple[torch.Tensor, ...]) -> int:
        """Run one batch; the number of its samples."""
        with torch.no_grad():
            self.run(*(each.to(self._device) for each in batch), enable_io_processing=False)
        return int(batch[0].shape[0]) if batch and batch[0].dim() else 1

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        layer = self._layers.get(n)
        if layer is not None:
            x = self.env[n.args[0]]  # type: ignore[index]
            rounded = layer.operation(kept(x, layer.choices.input), self._weights[n], layer.bias())
            self._add(layer, value - rounded)
        return value

    def _add(self, layer: CorrectedLayer, error: torch.Tensor) -> None:
        if error.dim() == -layer.output_axis:
            error = error.unsqueeze(0)  # one sample without a batch
        axis = layer.output_axis % error.dim()
        others = [each for each in range(1, error.dim()) if each != axis]
        mean = error.double().mean(dim=others) if others else error.double()
        if not bool(torch.isfinite(mean).all()):
            raise InvalidValueError(f"layer '{layer_name(layer.node)}': NaN or Inf in its output on calibration data")
        self.errors[layer.node.name].append(mean.cpu())

"""Cross-layer equalization of a torch network.

A batch norm that belongs to a layer takes the division, so that training goes on from there:

    y / s = (gamma / s) * (conv(x) - mean) / deviation + beta / s

An activation that clips to 0..c stays as it is (`ClipTreatment.CALIBRATED`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from quark.account import AlgorithmFacts
from quark.decide.view import Array
from quark.features.equalization.cross_layer import (
    Extremes,
    Rescaling,
    Weights,
    clip_tensors,
    equalize_cross_layer,
)
from quark.features.equalization.options import CrossLayerOptions
from quark.features.equalization.regions import Layer
from quark.torch.deciding import Work
from quark.torch.graph import attribute_of, module_of, readers_of_parameters
from quark.torch.observe import channel_extremes
from quark.torch.train.conv_batch_norm import ConvBatchNorm
from quark.torch.view import view_of


def before_calibration(work: Work, options: CrossLayerOptions) -> list[AlgorithmFacts]:
    """Rescale between layers, in place."""
    batches = work.batches
    wanted = tensors_to_survey(work.network, options) if batches is not None else {}
    return [equalize(work.network, options, channel_extremes(work.network, wanted, batches or ()))]


def tensors_to_survey(network: fx.GraphModule, options: CrossLayerOptions) -> dict[str, int]:
    """The tensors whose extremes equalization wants to know, each with the axis of its channels."""
    return clip_tensors(view_of(network), options, TorchRoad(network))


def equalize(network: fx.GraphModule, options: CrossLayerOptions, extremes: Extremes) -> AlgorithmFacts:
    """Equalize in place; `extremes` are the lowest and highest values by channel of `tensors_to_survey`."""
    return equalize_cross_layer(view_of(network), options, extremes, TorchRoad(network)).facts


class TorchRoad:
    """See `quark.features.equalization.cross_layer.Road`."""

    writes_constants = False

    def __init__(self, network: fx.GraphModule) -> None:
        self._network = network
        self._readers = readers_of_parameters(network)

    def obstacle(self, layer: Layer, is_source: bool) -> str | None:
        node: fx.Node = layer.node.origin
        if node.kwargs:
            return "its weight is not constant"
        module, weight, bias = self._parameters(layer)
        for parameter in (weight, bias):
            others = (
                []
                if parameter is None
                else [other for other in self._readers.get(id(parameter), ()) if other is not node]
            )
            if others:
                return f"its weight or bias is also read by '{others[0].name}'"
        if is_source and module is not None and not module.batch_norm.affine:
            return "its batch norm has no weight and bias"
        return None

    def weight(self, layer: Layer) -> Array:
        module, weight, _ = self._parameters(layer)
        return (weight if module is None else module.folded_weight()).detach().double().cpu().numpy()

    def bias(self, layer: Layer) -> Array | None:
        module, _, bias = self._parameters(layer)
        value = bias if module is None else module.folded_bias()
        return None if value is None else value.detach().double().cpu().numpy()

    def write(self, rescalings: Sequence[Rescaling], weights: Weights) -> None:
        with torch.no_grad():
            for layer, magnitudes in weights:
                module, weight, _ = self._parameters(layer)
                inputs, outputs = (layer.groups, 1, layer.inputs, 1), (layer.groups, layer.outputs, 1, 1)
                self._multiply(weight, layer, magnitudes.multiplied.reshape(inputs))
                if module is None:
                    self._multiply(weight, layer, (1 / magnitudes.divided).reshape(outputs))
            for rescaling in rescalings:
                for layer in rescaling.region.sources.values():
                    module, _, bias = self._parameters(layer)
                    added = (bias,) if module is None else (module.batch_norm.weight, module.batch_norm.bias)
                    for value in added:
                        if value is not None:
                            value.div_(torch.from_numpy(rescaling.scales).to(value))

    def _multiply(self, weight: torch.Tensor, layer: Layer, factors: Array) -> None:
        view: Any = layer.view(weight) * torch.from_numpy(factors).to(weight)  # type: ignore[arg-type]
        weight.copy_((view.swapaxes(1, 2) if layer.is_input_first else view).reshape(weight.shape))

    def _parameters(self, layer: Layer) -> tuple[ConvBatchNorm | None, torch.Tensor, torch.Tensor | None]:
        """The layer's module if it has a batch norm, its weight and its bias."""
        node: fx.Node = layer.node.origin
        module = module_of(self._network, node)
        if isinstance(module, ConvBatchNorm):
            return module, module.weight, module.bias
        weight = attribute_of(self._network, node.args[1])
        assert weight is not None, node.name
        return None, weight, attribute_of(self._network, node.args[2]) if len(node.args) > 2 else None

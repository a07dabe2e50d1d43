"""Biases of few bits: what rounding one of them does is made up for in the layers behind it.

A bias of 8 bits with one scale for all channels is off by up to half a step, which shifts a whole channel. Two networks
run side by side on the same samples, both in float, but one with every bias rounded that was passed so far. In each
layer, the mean difference of the two goes into its bias, before that is rounded in its turn:

    d = E[y_float - y_rounded]             for each output channel
    b' = b + c + d                         c: the correction for the rounding of weights and activations
    r = Q(b') - b'                         what is left in this layer, and seen by those behind it

so that shifts do not add up along the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx

from quark.torch.refine.layers import CorrectedLayer

Rounding: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def compensations(
    network: fx.GraphModule,
    layers: list[CorrectedLayer],
    corrections: Mapping[str, torch.Tensor],
    roundings: Mapping[str, Rounding],
    batch: tuple[torch.Tensor, ...],
) -> dict[str, torch.Tensor]:
    """d for each layer, by its node. `roundings` says what becomes of a bias; layers without one pass shifts on."""
    side_by_side = _SideBySide(network, layers, corrections, roundings)
    device = next((each.device for each in network.parameters()), torch.device("cpu"))
    with torch.no_grad():
        side_by_side.run(*(torch.cat((each, each)).to(device) for each in batch), enable_io_processing=False)
    return side_by_side.found


class _SideBySide(fx.Interpreter):
    """The first half of the batch goes through the float network, the second through the one with rounded biases."""

    def __init__(
        self,
        network: fx.GraphModule,
        layers: list[CorrectedLayer],
        corrections: Mapping[str, torch.Tensor],
        roundings: Mapping[str, Rounding],
    ) -> None:
        super().__init__(network)
        self.extra_traceback = False
        self.found: dict[str, torch.Tensor] = {}
        self._layers = {layer.node.name: layer for layer in layers if layer.node.name in roundings}
        self._corrections, self._roundings = corrections, roundings

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        layer = self._layers.get(n.name)
        if layer is None:
            return value
        axis = layer.output_axis % value.dim()
        shape = [-1 if each == axis else 1 for each in range(value.dim())]
        exact, shifted = value.chunk(2)
        others = [each for each in range(value.dim()) if each != axis]
        difference = (exact.double() - shifted.double()).mean(dim=others)
        wanted = layer.bias().double() + difference
        if n.name in self._corrections:
            wanted = wanted + self._corrections[n.name].to(wanted.device)
        left = self._roundings[n.name](wanted) - wanted
        self.found[n.name] = difference.cpu()
        return torch.cat((exact, shifted + (difference + left).reshape(shape).to(value.dtype)))

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
    rounded = {layer.node.name: layer for layer in layers if layer.node.name in roundings}
    device = next((each.device for each in network.parameters()), torch.device("cpu"))
    exact, shifted = (_Step(network, tuple(each.to(device) for each in batch)) for _ in range(2))
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for node in network.graph.nodes:
            values = exact.compute(node), shifted.compute(node)
            if node.name in rounded:
                layer, correction = rounded[node.name], corrections.get(node.name)
                difference, shift = _shift(layer, *values, correction, roundings[node.name])
                found[node.name] = difference.cpu()
                values = values[0], values[1] + shift
            exact.keep(node, values[0])
            shifted.keep(node, values[1])
    return found


class _Step(fx.Interpreter):
    """A network that runs one node at a time: two of them go side by side, whatever a model does with its batch."""

    def __init__(self, network: fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> None:
        super().__init__(network)
        self.extra_traceback = False
        self.args_iter = iter(inputs)

    def compute(self, node: fx.Node) -> Any:
        return self.run_node(node)

    def keep(self, node: fx.Node, value: Any) -> None:
        """What those behind the node see of it; what nobody reads any more is forgotten."""
        self.env[node] = value
        for each in self.user_to_last_uses.get(node, ()):
            del self.env[each]


def _shift(
    layer: CorrectedLayer,
    exact: torch.Tensor,
    shifted: torch.Tensor,
    correction: torch.Tensor | None,
    rounding: Rounding,
) -> tuple[torch.Tensor, torch.Tensor]:
    """d, and what to add to the shifted result: d and what rounding leaves of the bias, in its shape."""
    axis = layer.output_axis % exact.dim()
    others = [each for each in range(exact.dim()) if each != axis]
    error = exact.double() - shifted.double()
    difference = error.mean(dim=others) if others else error
    wanted = layer.bias().double() + difference
    if correction is not None:
        wanted = wanted + correction.to(wanted.device)
    left = rounding(wanted) - wanted
    shape = [-1 if each == axis else 1 for each in range(exact.dim())]
    return difference, (difference + left).reshape(shape).to(exact.dtype)

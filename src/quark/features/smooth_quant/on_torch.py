"""SmoothQuant of a torch network.

The division of a tensor goes into the parameters of what computes it. No Mul is inserted: training and export would
have to carry it, and the tensor before it in float. So a group of layers is left as it is if its input is computed
without such parameters, as that of a Gelu is, or if something else reads it as well, as in a residual connection. A
batch norm that does not belong to a layer takes no division in either.

Parameters are changed in place. Those that several nodes share are left, with their layers. A layer with a batch norm
takes the division into that, so that training goes on from there:

    y / s = (gamma / s) * (conv(x) - mean) / deviation + beta / s
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from quark.account import AlgorithmFacts
from quark.decide.view import Node
from quark.errors import UnsupportedOptionError
from quark.features.smooth_quant.folding import Edit
from quark.features.smooth_quant.groups import smooth_graph, steps_of, tensors_to_survey
from quark.features.smooth_quant.options import SMOOTH_SAMPLES, SmoothOptions
from quark.features.smooth_quant.smoothing import ChannelMoments, ChannelStatistics, Steps
from quark.torch.deciding import Work
from quark.torch.graph import attribute_of, layer_name, module_of, readers_of_parameters
from quark.torch.observe import survey
from quark.torch.train.conv_batch_norm import ConvBatchNorm
from quark.torch.view import parameter_of, view_of


def before_calibration(work: Work, options: SmoothOptions) -> list[AlgorithmFacts]:
    """Smooth the network in place, for the integers that the configuration asks for."""
    _refuse_structure(options)
    statistics: dict[str, ChannelStatistics] = {}
    if work.batches is not None:
        wanted = {name: ChannelMoments(axis) for name, axis in smooth_tensors(work.network).items()}
        surveyed = survey(work.network, wanted, work.batches, SMOOTH_SAMPLES)
        statistics = {name: moments.statistics for name, moments in surveyed.items()}
    return [smooth(work.network, options, statistics, steps_of(work.settings.choose.default))]


def _refuse_structure(options: SmoothOptions) -> None:
    """Raise for what is only carried out on language models."""
    given = {
        "scaling_layers": bool(options.groups),
        "model_decoder_layers": bool(options.decoder_layers),
        "scale_clamp_min": options.least_scale != SmoothOptions.least_scale,
        "compute_scale_loss": options.error_power != SmoothOptions.error_power,
    }
    name = next((name for name, is_given in given.items() if is_given), None)
    if name is not None:
        raise UnsupportedOptionError(
            f"{name} of SmoothQuant is for causal language models of Hugging Face, and this model is quantized on its "
            "graph, where layers, and what computes their inputs, are found; leave it out"
        )


def smooth_tensors(network: fx.GraphModule) -> dict[str, int]:
    """The tensors whose statistics `smooth` needs, each with the axis of its channels, from the end."""
    return tensors_to_survey(view_of(network), TorchRoad(network))


def smooth(
    network: fx.GraphModule,
    options: SmoothOptions,
    statistics: Mapping[str, ChannelStatistics],
    steps: Steps | None = None,
) -> AlgorithmFacts:
    """Smooth, in place, what gains by it."""
    return smooth_graph(view_of(network), TorchRoad(network), options, statistics, steps or Steps())


class TorchRoad:
    """See `quark.features.smooth_quant.folding.Road`."""

    insert_mul = None

    def __init__(self, network: fx.GraphModule) -> None:
        self._network = network
        self._readers = readers_of_parameters(network)

    def obstacle(self, node: Node) -> str | None:
        origin: fx.Node = node.origin
        if origin.kwargs:
            return "it has arguments by keyword"
        dimensions = re.search(r"pool(\d)d", str(origin.target))
        if dimensions and (value := node.input(0)) is not None and value.rank != int(dimensions[1]) + 2:
            return "it pools a tensor without a batch"
        module = module_of(self._network, origin)
        constants = [attribute_of(self._network, node) for node in origin.all_input_nodes]
        for parameter in (*constants, *(() if module is None else module.parameters())):
            others = [other for other in self._readers.get(id(parameter), ()) if other is not origin]
            if others:
                return f"its weight or bias is also read by '{layer_name(others[0])}'"
        return None

    def is_possible(self, edit: Edit) -> bool:
        products = self._products(edit)
        return products is not None and all(
            product.shape == parameter.shape and bool(torch.isfinite(product).all()) for parameter, product in products
        )

    def write(self, edits: Sequence[Edit]) -> None:
        with torch.no_grad():
            for edit in edits:
                for parameter, product in self._products(edit) or ():
                    parameter.copy_(product)

    def _products(self, edit: Edit) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """The parameters to change, each with its new value; None if the input is computed, or a number in the code."""
        module, value = module_of(self._network, edit.node.origin), edit.node.input(edit.index)
        parameters: list[torch.Tensor | None]
        if not isinstance(module, ConvBatchNorm):
            is_held = value is not None and value.constant is not None and value.origin is not None
            parameters = [parameter_of(self._network, value.name) if value is not None and is_held else None]
        elif edit.is_by_input:
            parameters = [module.weight]
        else:  # the batch norm takes the factor of weight and bias
            parameters = [] if edit.index == 1 else [module.batch_norm.weight, module.batch_norm.bias]
        products = []
        for parameter in parameters:
            if parameter is None:
                return None
            factor = torch.tensor(edit.factor, device=parameter.device)
            products.append((parameter, (parameter.detach().double() * factor).to(parameter.dtype)))
        return products

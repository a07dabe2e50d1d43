"""The layers whose bias can be corrected, and where that bias is.

Convolutions and linear layers have one; `give_biases` gives them one of zeros where it is missing. A layer with a batch
norm has that of the batch norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from quark.plan import Choice, SkippedNode
from quark.torch.graph import attribute_of, is_call, layer_name, module_of, set_attribute
from quark.torch.train.conv_batch_norm import (
    CONVOLUTIONS,
    TRANSPOSED,
    TRANSPOSED_GROUPS,
    ConvBatchNorm,
    LinearOperation,
)

aten = torch.ops.aten
LAYERS = (*CONVOLUTIONS, *TRANSPOSED, aten.linear.default)


@dataclass(frozen=True)
class LayerChoices:
    """How a layer sees its operands; None: in float."""

    input: Choice | None
    weight: Choice | None


@dataclass(frozen=True, eq=False)
class CorrectedLayer:
    """A layer with what its bias is corrected for. `parameters` are the weight and the bias of a plain layer."""

    node: fx.Node
    op_type: str
    operation: LinearOperation
    choices: LayerChoices
    parameters: tuple[torch.Tensor, torch.Tensor] | ConvBatchNorm

    @property
    def output_axis(self) -> int:
        """The axis of the result that counts channels, from its end: there may be no batch."""
        found = self.parameters
        return 1 - (found.weight if isinstance(found, ConvBatchNorm) else found[0]).dim()

    def weight(self) -> torch.Tensor:
        """What inference multiplies by."""
        found = self.parameters
        return (found.folded_weight() if isinstance(found, ConvBatchNorm) else found[0]).detach()

    def bias(self) -> torch.Tensor:
        """What inference adds."""
        found = self.parameters
        return (found.folded_bias() if isinstance(found, ConvBatchNorm) else found[1]).detach()

    def add_to_bias(self, correction: torch.Tensor) -> bool:
        """Change the bias by so much for each channel; False, and nothing, where its type does not hold the sum."""
        target = self.parameters.batch_norm.bias if isinstance(self.parameters, ConvBatchNorm) else self.parameters[1]
        corrected = (target.detach().double() + correction.to(target.device)).to(target.dtype)
        if not bool(torch.isfinite(corrected).all()):
            return False
        with torch.no_grad():
            target.copy_(corrected)
        return True


def give_biases(network: fx.GraphModule) -> None:
    """Let every convolution and linear layer with a constant weight have a bias, zeros where it has none."""
    for node in list(network.graph.nodes):
        if not is_call(node, *LAYERS) or (len(node.args) > 2 and node.args[2] is not None):
            continue
        weight = attribute_of(network, node.args[1])
        if weight is None or node.kwargs:
            continue
        name = _free_name(network, node)
        zeros = torch.zeros(_output_channels(node, weight), dtype=weight.dtype, device=weight.device)
        set_attribute(network, name, nn.Parameter(zeros, requires_grad=weight.requires_grad))
        with network.graph.inserting_before(node):
            bias = network.graph.get_attr(name)
        node.args = (*node.args[:2], bias, *node.args[3:])
    network.recompile()


def corrected_layers(
    network: fx.GraphModule, choices: Mapping[str, LayerChoices]
) -> tuple[list[CorrectedLayer], list[SkippedNode]]:
    """The layers among these whose bias can take a correction; the others with the reason."""
    found: list[CorrectedLayer] = []
    left: list[SkippedNode] = []
    for node in network.graph.nodes:
        seen = choices.get(node.name)
        if seen is None or (seen.input is None and seen.weight is None):
            continue
        layer = _layer(network, node, seen)
        if isinstance(layer, str):
            left.append(SkippedNode(layer_name(node), _op_type(network, node), layer))
        else:
            found.append(layer)
    return found, left


def _layer(network: fx.GraphModule, node: fx.Node, seen: LayerChoices) -> CorrectedLayer | str:
    module, op_type = module_of(network, node), _op_type(network, node)
    if isinstance(module, ConvBatchNorm):
        has_bias = module.batch_norm.bias is not None
        layer = CorrectedLayer(node, op_type, module.operation, seen, module)
        return layer if has_bias else "its batch norm has no bias"
    if not is_call(node, *LAYERS):
        return "nothing is added to its result"
    weight = attribute_of(network, node.args[1])
    bias_node: Any = node.args[2] if len(node.args) > 2 else None
    bias = attribute_of(network, bias_node)
    if weight is None or bias is None or node.kwargs:
        return "its weight or bias is computed"
    if _readers(network, bias) != 1:
        return "its bias is shared with another layer"
    operation = LinearOperation(node.target, tuple(node.args[3:]))  # type: ignore[arg-type]
    return CorrectedLayer(node, op_type, operation, seen, (weight, bias))


def _readers(network: fx.GraphModule, value: torch.Tensor) -> int:
    nodes = [node for node in network.graph.nodes if attribute_of(network, node) is value]
    return sum(len(node.users) for node in nodes)


def _op_type(network: fx.GraphModule, node: fx.Node) -> str:
    module = module_of(network, node)
    target: Any = module.operation.target if isinstance(module, ConvBatchNorm) else node.target
    return str(target._schema.name).removeprefix("aten::") if isinstance(target, torch._ops.OpOverload) else str(target)


def _output_channels(node: fx.Node, weight: torch.Tensor) -> int:
    if node.target in TRANSPOSED:
        groups: Any = node.args[TRANSPOSED_GROUPS] if len(node.args) > TRANSPOSED_GROUPS else 1
        return int(weight.shape[1]) * int(groups)
    return int(weight.shape[0])


def _free_name(network: fx.GraphModule, node: fx.Node) -> str:
    """Beside the weight, under a name that is not taken: layers that share a weight have biases of their own."""
    weight: Any = node.args[1]
    path = str(weight.target).rpartition(".")[0]
    taken = {str(each.target) for each in network.graph.nodes if each.op == "get_attr"}
    taken |= {name for name, _ in network.named_parameters()} | {name for name, _ in network.named_buffers()}
    stem = f"{path}.bias" if path else f"{node.name}_bias"
    names = (stem, *(f"{stem}_{number}" for number in range(1, len(taken) + 2)))
    return next(name for name in names if name not in taken)

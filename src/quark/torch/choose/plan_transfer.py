"""A plan that was made for an ONNX file, for the layers of a torch network: so that what was decided there is trained
here.

The file was exported from the network, by quark or by torch, so that names tell which layer is which:

    QuantizationPlan     by the name of the weight, which is that of the parameter
    MixedPlan            by the name of the node: the path of the module, also as /path/Conv or node_conv2d

Exporters that fold and rename leave no names. Then layers are taken in order, where the plan speaks of as many weights
as the network has, and what is known of each fits: the number of channels, or of weights. Anything else is an error
that names the layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from quark.errors import ModelError
from quark.mixed_precision import LayerPrecision, MixedPlan, Precision
from quark.plan import AffineChoice, BlockChoice, QuantizationPlan, Reader, Role, TensorChoice
from quark.torch.choose.operators import operator_of
from quark.torch.graph import attribute_of, layer_name, module_of
from quark.torch.train.conv_batch_norm import ConvBatchNorm

_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclass(frozen=True)
class PlannedLayer:
    """What a plan has for a layer. Formats are names of the catalog, None where a tensor stays float; `weight_axis` is
    the axis of the channels in the file's weight, None where it has one scale. `precision` is what a mixed plan chose,
    which has no formats of its own."""

    input_format: str | None = None
    weight_format: str | None = None
    weight_axis: int | None = None
    precision: Precision | None = None


@dataclass(frozen=True)
class WeightedLayer:
    """A node of the network with a weight."""

    node: str
    layer: str
    parameter: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return int(torch.Size(self.shape).numel())


def layers_of_plan(network: fx.GraphModule, plan: QuantizationPlan | MixedPlan) -> dict[str, PlannedLayer]:
    """What the plan has for the layers of the network, by the names of their nodes. Layers of which a QuantizationPlan
    says nothing stay float there, and are planned so here; a MixedPlan leaves them out."""
    layers = weighted_layers(network)
    if isinstance(plan, MixedPlan):
        matched = _matched_precisions(layers, plan.layers)
        return {node: PlannedLayer(precision=each.choice) for node, each in matched.items()}
    matched_weights = _matched_weights(layers, [each for each in plan if each.role is Role.WEIGHT])
    inputs = {reader: each for each in plan if each.role is Role.ACTIVATION for reader in each.readers}
    return {each.node: _planned(matched_weights.get(each.node), inputs) for each in layers}


def weighted_layers(network: fx.GraphModule) -> list[WeightedLayer]:
    """The layers with a weight of two axes or more, in the order of the graph. A weight that several share counts for
    each of them."""
    found = []
    for node in network.graph.nodes:
        module = module_of(network, node)
        if isinstance(module, ConvBatchNorm):
            parameter = f"{node.target}.weight"
            found.append(WeightedLayer(str(node.name), layer_name(node), parameter, tuple(module.weight.shape)))
        elif len(node.args) > 1 and operator_of(network, node).op_type in _WEIGHTED:
            source = node.args[1]
            value = attribute_of(network, source)
            if value is not None and value.dim() > 1 and isinstance(source, fx.Node):
                found.append(WeightedLayer(str(node.name), layer_name(node), str(source.target), tuple(value.shape)))
    return found


def _planned(weight: TensorChoice | None, inputs: Mapping[Reader, TensorChoice]) -> PlannedLayer:
    if weight is None:
        return PlannedLayer()
    readers = (Reader(reader.node, 0) for reader in weight.readers)
    data = next((inputs[reader] for reader in readers if reader in inputs), None)
    choice = weight.choice
    axis = choice.axis if isinstance(choice, (AffineChoice, BlockChoice)) else None
    return PlannedLayer(None if data is None else data.choice.format, choice.format, axis)


def _matched_weights(layers: Sequence[WeightedLayer], weights: Sequence[TensorChoice]) -> dict[str, TensorChoice]:
    """Layer nodes to choices: by name, or all of them in order. Constants that are added or multiplied with are weights
    to a plan, too: where layers are known by name, others that could be anything are left aside."""
    by_name = {each.tensor: each for each in weights}
    named = {layer.node: by_name[layer.parameter] for layer in layers if layer.parameter in by_name}
    parameters = {layer.parameter for layer in layers}
    strange = [each for each in weights if each.tensor not in parameters]
    if not strange or len(named) == len(layers) or (named and not any(map(_is_of_layer, strange))):
        return named
    if named or len(weights) != len(layers):
        name = next((each.tensor for each in strange if _is_of_layer(each)), strange[0].tensor)
        raise ModelError(
            f"the plan quantizes the weight '{name}', and the network has no parameter of that name; it has "
            f"{len(layers)} layers with weights, the plan {len(weights)}. Make the plan on the ONNX file that "
            "quark.torch.export_onnx writes of this network, which keeps the names"
        )
    for layer, each in zip(layers, weights, strict=True):
        channels = _channels(each)
        if channels is not None and channels not in layer.shape:
            raise ModelError(
                f"the plan has {channels} scales for weight '{each.tensor}', and layer '{layer.layer}' in its place "
                f"has a weight of shape {layer.shape}: the plan is for another network"
            )
    return {layer.node: each for layer, each in zip(layers, weights, strict=True)}


def _is_of_layer(each: TensorChoice) -> bool:
    """That only the weight of a layer is quantized like this."""
    choice = each.choice
    return isinstance(choice, BlockChoice) or (isinstance(choice, AffineChoice) and choice.axis is not None)


def _channels(each: TensorChoice) -> int | None:
    choice = each.choice
    is_known = isinstance(choice, AffineChoice) and choice.axis is not None and choice.group_size is None
    return len(choice.scale) if is_known and isinstance(choice, AffineChoice) else None


def _matched_precisions(
    layers: Sequence[WeightedLayer], planned: Sequence[LayerPrecision]
) -> dict[str, LayerPrecision]:
    """Layer nodes to what was chosen. Layers without weights, such as products of activations, have nothing here."""
    matched: dict[str, LayerPrecision] = {}
    for each in planned:
        layer = _named(layers, each)
        if layer is None and each.op_type == "MatMul" and not each.weights:
            continue
        layer = layer or _of_size(layers, each, planned)
        if layer.node in matched:
            raise ModelError(
                f"layers '{matched[layer.node].layer}' and '{each.layer}' of the plan are both '{layer.layer}' here"
            )
        matched[layer.node] = each
    return matched


def _named(layers: Sequence[WeightedLayer], planned: LayerPrecision) -> WeightedLayer | None:
    """The one whose path, node or weight is what the planned layer is called."""
    parts = planned.layer.strip("/").split("/")
    names = {planned.layer, planned.layer.removeprefix("node_"), parts[0], parts[-2] if len(parts) > 1 else parts[0]}
    found = [each for each in layers if {each.layer, each.node, each.parameter.rpartition(".")[0]} & names]
    return found[0] if len(found) == 1 else None


def _of_size(
    layers: Sequence[WeightedLayer], planned: LayerPrecision, others: Sequence[LayerPrecision]
) -> WeightedLayer:
    """The only one with that many weights."""
    found = [each for each in layers if planned.weights and each.size == planned.weights]
    alike = [each for each in others if each.weights == planned.weights]
    if len(found) == 1 and len(alike) == 1:
        return found[0]
    known = ", ".join(each.layer for each in layers[:5])
    raise ModelError(
        f"layer '{planned.layer}' of the plan: the network has {len(found)} layers with {planned.weights} weights and "
        f"none of that name; its layers are {known} ... Write the names of the network into the plan, or make the plan "
        "on the ONNX file that quark.torch.export_onnx writes"
    )

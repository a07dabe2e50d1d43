"""A plan that was made for an ONNX file as specs of a torch network's layers, so that what was decided there is trained
here.

The file was exported from the network, by quark or by torch, so that names tell which layer is which:

    QuantizationPlan     by the name of the weight, which is that of the parameter
    MixedPlan            by the name of the node: the path of the module, also as /path/Conv or node_conv2d

Exporters that fold and rename leave no names. Then layers are matched in order, if the plan has as many weights
as the network has, and what is known of each fits: the number of channels, or of weights. Anything else is an error
that names the layer.

Types are the plan's. Scales are not taken over: the file's weights may have been equalized or finetuned, and training
moves them anyway; ranges are measured again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from quark.decide.specs import AffineSpec, BlockSpec, FloatSpec, LayerSpec, TensorSpec
from quark.errors import InvalidValueError, ModelError
from quark.features.mixed_precision.plan import LayerPrecision, MixedPlan, Precision
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.formats.spec import BlockFormat, FloatFormat, IntFormat
from quark.plan import AffineChoice, BlockChoice, QuantizationPlan, Reader, Role, TensorChoice
from quark.ranges import MinMax
from quark.torch.specs import Settings
from quark.torch.view import view_of

_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_ACTIVATIONS, _WEIGHTS = " activations", " weights"


def with_plan(network: fx.GraphModule, settings: Settings, plan: QuantizationPlan | MixedPlan) -> Settings:
    """The settings with what the plan says of each layer."""
    planned = layers_of_plan(network, plan)
    if isinstance(plan, MixedPlan):
        words = {Precision.HIGH: plan.high, Precision.LOW: plan.low}
        planned = {
            node: PlannedLayer(*formats_in_words(words[layer.precision]))
            for node, layer in planned.items()
            if layer.precision is not None
        }
    common = settings.specs
    by_node: dict[str, LayerSpec | None] = {}
    for node, layer in planned.items():
        by_node[node] = None
        if layer.input_format is not None or layer.weight_format is not None:
            by_node[node] = replace(
                common,
                activation=_in_format(common.activation, layer.input_format),
                output=None if common.output is None else _in_format(common.output, layer.input_format),
                weight=_in_format(common.weight, layer.weight_format),
            )
    return replace(settings, by_node=by_node)


def formats_in_words(words: str) -> tuple[str | None, str | None]:
    """(activations, weights) of what a mixed plan says of a precision; None is float.

    >>> formats_in_words("int16 activations, int8 weights"), formats_in_words("float")
    (('int16', 'int8'), (None, None))
    """
    first, comma, second = words.partition(", ")
    names = (first.removesuffix(_ACTIVATIONS), second.removesuffix(_WEIGHTS)) if comma else (words, words)
    activation, weight = (None if name == "float" else get_format(name).name for name in names)
    return activation, weight


def _in_format(spec: TensorSpec | None, name: str | None) -> TensorSpec | None:
    """The spec with codes of that format; where it is of another kind, the plainest of the format's own."""
    if name is None:
        return None
    fmt = get_format(name)
    if isinstance(fmt, IntFormat):
        if not isinstance(spec, AffineSpec):
            return AffineSpec(fmt.name, MinMax(), fmt.signed)
        is_even = spec.is_symmetric and (fmt.signed or spec.learning is not None)
        return replace(spec, format=fmt.name, is_symmetric=is_even)
    if isinstance(fmt, BlockFormat):
        is_same = isinstance(spec, BlockSpec) and spec.quantizer.format == fmt
        return spec if is_same else BlockSpec(BlockQuantizer(fmt))
    if isinstance(fmt, FloatFormat) and name in ("float16", "bfloat16"):
        return FloatSpec(name)
    raise InvalidValueError(f"the plan has '{name}' for a layer: expected integers, blocks, float16 or bfloat16")


@dataclass(frozen=True)
class PlannedLayer:
    """A plan's entry for a layer. Formats are names of the catalog, None for a tensor that stays float; `weight_axis`
    is the axis of the channels in the file's weight, None if it has one scale. `precision` is the choice of a mixed
    plan, which has no formats of its own."""

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
        return math.prod(self.shape)


def layers_of_plan(network: fx.GraphModule, plan: QuantizationPlan | MixedPlan) -> dict[str, PlannedLayer]:
    """The plan's entries for the layers of the network, by the names of their nodes. Layers that a QuantizationPlan
    does not mention stay float there, and get such an entry here; a MixedPlan leaves them out."""
    layers = weighted_layers(network)
    if isinstance(plan, MixedPlan):
        matched: dict[str, LayerPrecision] = {}
        for planned_layer in plan.layers:
            parts = planned_layer.layer.strip("/").split("/")
            names = {
                planned_layer.layer,
                planned_layer.layer.removeprefix("node_"),
                parts[0],
                parts[-2] if len(parts) > 1 else parts[0],
            }
            matching = [own for own in layers if {own.layer, own.node, own.parameter.rpartition(".")[0]} & names]
            if (
                len(matching) != 1 and planned_layer.op_type == "MatMul" and not planned_layer.weights
            ):  # a product of activations
                continue
            layer = matching[0] if len(matching) == 1 else _of_size(layers, planned_layer, plan.layers)
            if layer.node in matched:
                pair = f"'{matched[layer.node].layer}' and '{planned_layer.layer}'"
                raise ModelError(f"layers {pair} of the plan are both '{layer.layer}' here")
            matched[layer.node] = planned_layer
        return {node: PlannedLayer(precision=precision.choice) for node, precision in matched.items()}
    weights = _matched_weights(layers, [entry for entry in plan if entry.role is Role.WEIGHT])
    inputs = {reader: entry for entry in plan if entry.role is Role.ACTIVATION for reader in entry.readers}
    planned: dict[str, PlannedLayer] = {}
    for layer in layers:
        weight = weights.get(layer.node)
        if weight is None:
            planned[layer.node] = PlannedLayer()
            continue
        readers = (Reader(reader.node, 0) for reader in weight.readers)
        data = next((inputs[reader] for reader in readers if reader in inputs), None)
        axis = weight.choice.axis if isinstance(weight.choice, (AffineChoice, BlockChoice)) else None
        planned[layer.node] = PlannedLayer(None if data is None else data.choice.format, weight.choice.format, axis)
    return planned


def weighted_layers(network: fx.GraphModule) -> list[WeightedLayer]:
    """The layers with a weight of two axes or more, in the order of the graph. A weight that several share counts for
    each of them."""
    layers = []
    for node in view_of(network):
        weight = node.input(1)
        if node.op_type in _WEIGHTED and weight is not None and weight.constant and len(weight.constant.shape) > 1:
            layers.append(WeightedLayer(node.name, node.label, weight.name, weight.constant.shape))
    return layers


def _matched_weights(layers: Sequence[WeightedLayer], weights: Sequence[TensorChoice]) -> dict[str, TensorChoice]:
    """Layer nodes to choices: by name, or all of them in order. Constants that are added or multiplied with are weights
    to a plan, too: where layers are known by name, others that could be anything are left aside."""
    by_name = {weight.tensor: weight for weight in weights}
    named = {layer.node: by_name[layer.parameter] for layer in layers if layer.parameter in by_name}
    parameters = {layer.parameter for layer in layers}
    strange = [weight for weight in weights if weight.tensor not in parameters]
    if not strange or len(named) == len(layers) or (named and not any(map(_is_of_layer, strange))):
        return named
    if named or len(weights) != len(layers):
        name = next((weight.tensor for weight in strange if _is_of_layer(weight)), strange[0].tensor)
        raise ModelError(
            f"the plan quantizes the weight '{name}', and the network has no parameter of that name; it has "
            f"{len(layers)} layers with weights, the plan {len(weights)}. Make the plan on the ONNX file that "
            "quark.torch.export_onnx writes of this network, which keeps the names"
        )
    for layer, weight in zip(layers, weights, strict=True):
        choice = weight.choice
        if not isinstance(choice, AffineChoice) or choice.axis is None or choice.group_size is not None:
            continue
        if len(choice.scale) not in layer.shape:
            raise ModelError(
                f"the plan has {len(choice.scale)} scales for weight '{weight.tensor}', and layer '{layer.layer}' in "
                f"its place has a weight of shape {layer.shape}: the plan is for another network"
            )
    return {layer.node: weight for layer, weight in zip(layers, weights, strict=True)}


def _is_of_layer(weight: TensorChoice) -> bool:
    """True if only the weight of a layer is quantized like this."""
    choice = weight.choice
    return isinstance(choice, BlockChoice) or (isinstance(choice, AffineChoice) and choice.axis is not None)


def _of_size(
    layers: Sequence[WeightedLayer], planned: LayerPrecision, others: Sequence[LayerPrecision]
) -> WeightedLayer:
    """The only one with that many weights."""
    matching = [layer for layer in layers if planned.weights and layer.size == planned.weights]
    alike = [other for other in others if other.weights == planned.weights]
    if len(matching) == 1 and len(alike) == 1:
        return matching[0]
    known = ", ".join(layer.layer for layer in layers[:5])
    raise ModelError(
        f"layer '{planned.layer}' of the plan: the network has {len(matching)} layers with {planned.weights} weights "
        f"and none of that name; its layers are {known} ... Write the names of the network into the plan, or make the "
        "plan on the ONNX file that quark.torch.export_onnx writes"
    )

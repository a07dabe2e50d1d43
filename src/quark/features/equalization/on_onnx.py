"""Cross-layer equalization of an ONNX model, with bias absorption if requested.

Absorption moves what a channel has on top of zero all the time from its bias into the biases behind it:

    Relu(x) = Relu(x - c) + c   for x >= c >= 0,   so   b1 - c   and   b2 + W2 c   leave the function as it is

with c the lowest value of the channel before its activation on calibration data: exact there, and elsewhere where
values go no lower. The activation then covers less, and its codes are finer. The paper (arXiv 1906.04721) has no data,
and takes c from the statistics of a batch norm, which are gone once that is folded. It is possible where a region has
one source, nothing on the way that turns a constant into something else, and only sinks that a constant reaches evenly:
a padded convolution sees zeros at its borders, and is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from quark.account import AlgorithmFacts
from quark.decide.view import Array, Node, Value
from quark.features.equalization.cross_layer import (
    Equalized,
    Extremes,
    Rescaling,
    Weights,
    clip_tensors,
    ends_of,
    equalize_cross_layer,
    left_alone,
)
from quark.features.equalization.options import CLIP_SAMPLES, ClipTreatment, CrossLayerOptions
from quark.features.equalization.regions import Channels, Layer, Region, find_regions
from quark.onnx.calibrate import ChannelExtremes, FloatRunner, survey
from quark.onnx.deciding import Work
from quark.onnx.graph import add_initializer, add_node, become, constant, input_value, rank, set_constant
from quark.onnx.large_tensors import kept, whole
from quark.onnx.view import view_of

# f(x - c) = f(x) - c for x >= c >= 0
_KEEPS_SHIFTS = frozenset(
    {"Relu", "LeakyRelu", "PRelu", "Identity", "Dropout", "MaxPool", "GlobalAveragePool", "GlobalMaxPool"}
    | {"ReduceMean", "ReduceMax", "ReduceMin", "Slice", "Split", "Concat"}
    | {"Transpose", "Flatten", "Reshape", "Squeeze", "Unsqueeze"}
)


def before_calibration(work: Work, options: CrossLayerOptions) -> list[AlgorithmFacts]:
    """Rescale between layers, in place."""
    if options.clip is ClipTreatment.CALIBRATED and work.samples.is_random:
        options = replace(options, clip=ClipTreatment.SKIP)  # random numbers do not show the bounds of activations
    extremes: dict[str, tuple[Array, Array]] = {}
    wanted = {name: ChannelExtremes(axis) for name, axis in tensors_to_survey(work.model, options).items()}
    if wanted:
        calibrate = work.settings.calibrate
        with FloatRunner(work.model, wanted, providers=calibrate.providers) as runner:
            surveyed = survey(runner, wanted, work.samples, calibrate, sample_limit=CLIP_SAMPLES)
        extremes = {name: (measured.lowest, measured.highest) for name, measured in surveyed.items()}
    return [equalize(work.model, options, extremes)]


def tensors_to_survey(model: ir.Model, options: CrossLayerOptions) -> dict[str, int]:
    """The tensors whose extremes equalization wants to know, each with the axis of its channels: what goes into a Clip
    that stays as it is, and what biases may be absorbed from."""
    graph = view_of(model)
    wanted = clip_tensors(graph, options, OnnxRoad(model))
    for region in find_regions(graph) if options.has_bias_absorption else ():
        if region.obstacle is None and region.sinks and reason_against_absorbing(region) is None:
            value = _absorbed_tensor(region)
            wanted[value.name] = region.members[value].axis
    return wanted


def equalize(model: ir.Model, options: CrossLayerOptions, extremes: Extremes) -> AlgorithmFacts:
    """Equalize in place; `extremes` are the lowest and highest values by channel of `tensors_to_survey`."""
    equalized = equalize_cross_layer(view_of(model), options, extremes, OnnxRoad(model))
    if options.has_bias_absorption:
        _absorb_all(model, equalized, extremes)
    return equalized.facts


@dataclass(frozen=True)
class OnnxRoad:
    """See `quark.features.equalization.cross_layer.Road`. A bias or another constant that is also read elsewhere is
    copied before it is changed."""

    model: ir.Model
    writes_constants: bool = True

    def obstacle(self, layer: Layer, is_source: bool) -> str | None:
        return None

    def weight(self, layer: Layer) -> Array:
        array = whole(layer.weight.origin.const_value)
        return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)

    def bias(self, layer: Layer) -> Array | None:
        return constant(input_value(layer.node.origin, 2))

    def write(self, rescalings: Sequence[Rescaling], weights: Weights) -> None:
        for layer, magnitudes in weights:
            if bool((magnitudes.divided == 1).all() and (magnitudes.multiplied == 1).all()):
                continue
            # All layers that read this weight are in the same regions, so that it is changed where it is.
            value = layer.weight.origin
            array = constant(value)
            assert array is not None
            dtype = array.dtype if array.dtype == np.float64 else np.dtype(np.float32)
            scaled: Array = array.astype(dtype)  # a copy; it is written through the view
            view = layer.view(scaled)
            view *= magnitudes.multiplied.reshape(layer.groups, 1, layer.inputs, 1).astype(dtype)
            view /= magnitudes.divided.reshape(layer.groups, layer.outputs, 1, 1).astype(dtype)
            value.const_value = kept(self.model, scaled.astype(array.dtype, copy=False), str(value.name))
        for rescaling in rescalings:
            if rescaling.is_changed:
                self._write_constants(rescaling)

    def _write_constants(self, rescaling: Rescaling) -> None:
        for node in rescaling.region.sources:
            bias = constant(input_value(node.origin, 2))
            if bias is not None:
                # a Gemm takes one number for all channels
                shape = np.broadcast_shapes(bias.shape, rescaling.scales.shape)
                set_constant(self.model, node.origin, 2, _divided(np.broadcast_to(bias, shape), rescaling.scales))
        for (node, index), channels in rescaling.region.constants.items():
            array = constant(input_value(node.origin, index))
            assert array is not None
            divided = _divided(array, _along(rescaling.scales, channels, array.ndim))
            set_constant(self.model, node.origin, index, divided)
        if rescaling.options.clip is ClipTreatment.PER_CHANNEL:
            for clip, bound in rescaling.region.clips.items():
                self._clip_by_channel(clip.origin, bound / rescaling.scales, rescaling.region.members[clip.outputs[0]])

    def _clip_by_channel(self, clip: ir.Node, bounds: Array, channels: Channels) -> None:
        """Clip(x, 0, c) as Min(Relu(x), bounds): exact, whatever the bounds."""
        value = clip.inputs[0]
        bound = constant(input_value(clip, 2))
        assert value is not None
        assert bound is not None
        relu = add_node(self.model, "Relu", [value], before=clip, name=f"{clip.name}_relu")
        relu.outputs[0].shape, relu.outputs[0].type = value.shape, value.type
        shaped = _along(bounds, channels, rank(value) or channels.axis + 1).astype(bound.dtype)
        become(clip, "Min", [relu.outputs[0], add_initializer(self.model, f"{clip.name}_bounds", shaped)])


def _along(scales: Array, channels: Channels, array_rank: int) -> Array:
    """The scales in a shape that multiplies a tensor of that rank."""
    return np.repeat(scales, channels.width).reshape(-1, *(1,) * (array_rank - channels.axis - 1))


def _divided(array: Array, scales: Array) -> Array:
    return (array.astype(np.float64) / scales).astype(array.dtype)


# --- bias absorption


def _absorb_all(model: ir.Model, equalized: Equalized, extremes: Extremes) -> None:
    for rescaling in equalized.rescalings:
        reason = reason_against_absorbing(rescaling.region)
        known = extremes.get(_absorbed_tensor(rescaling.region).name) if reason is None else None
        if known is None:
            why = f"bias not absorbed: {reason or 'its values were not measured'}"
            equalized.left.append(left_alone(rescaling.region, why))
            continue
        count = _absorb(model, rescaling.region, known[0] / rescaling.scales)
        if count:
            equalized.changed.append(f"{ends_of(rescaling.region)}: biases of {count} channels absorbed")


def reason_against_absorbing(region: Region) -> str | None:
    """The reason why nothing can be absorbed in the region; None if something can."""
    if len(region.sources) != 1 or region.constants:
        return "its channels have more than one source"
    for node in region.passed:
        is_pool = node.op_type == "AveragePool" and _is_unpadded(node)
        if node.op_type not in _KEEPS_SHIFTS and not is_pool:
            return f"'{node.label}': {node.op_type} does not keep a constant"
    for layer, _ in region.sinks.values():
        node, bias = layer.node, layer.node.input(2)
        if node.op_type not in ("Conv", "Gemm"):
            return f"'{node.label}': {node.op_type} has no bias that takes a constant"
        if node.op_type == "Conv" and not _is_unpadded(node):
            return f"'{node.label}': its padding is zero, and not the constant"
        if (bias is not None and bias.constant is None) or node.setting("beta", 1.0) == 0:
            return f"'{node.label}': its bias is not constant"
    return None


def _absorbed_tensor(region: Region) -> Value:
    """The tensor whose lowest values have to be known: what the source makes."""
    return next(iter(region.sources)).outputs[0]


def _is_unpadded(node: Node) -> bool:
    is_explicit = node.setting("auto_pad", "NOTSET") in ("NOTSET", "VALID")
    return is_explicit and not any(node.setting("pads") or ()) and not node.setting("ceil_mode", 0)


def _absorb(model: ir.Model, region: Region, lowest: Array) -> int:
    """Move what is below `lowest`, the least value of every channel as it is scaled now; of how many channels."""
    layer = next(iter(region.sources.values()))
    shift = np.maximum(np.asarray(lowest, np.float64), 0)
    bias = constant(input_value(layer.node.origin, 2))
    if not shift.any() or (bias is not None and bias.shape != shift.shape):
        return 0
    for sink, width in region.sinks.values():
        weight = constant(sink.weight.origin)
        assert weight is not None
        taps = sink.view(weight).sum(axis=3, dtype=np.float64)
        by_group = np.einsum("goi,gi->go", taps, np.repeat(shift, width).reshape(sink.groups, sink.inputs))
        _add_to_bias(model, sink, by_group.reshape(-1) * float(sink.node.setting("alpha", 1.0)))
    _add_to_bias(model, layer, -shift)
    return int(np.count_nonzero(shift))


def _add_to_bias(model: ir.Model, layer: Layer, addend: Array) -> None:
    node = layer.node.origin
    bias, weight = constant(input_value(node, 2)), constant(layer.weight.origin)
    assert weight is not None
    before: Array = np.zeros(1) if bias is None else bias.astype(np.float64)
    total = before + addend / float(layer.node.setting("beta", 1.0))
    set_constant(model, node, 2, total.astype(weight.dtype), f"{layer.node.name}_bias")

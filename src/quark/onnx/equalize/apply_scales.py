"""Write the scales into the graph: weights, biases, constants that scale along, and the bounds of Clips."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from quark.equalization.channels import Channels
from quark.equalization.cross_layer import ChannelMagnitudes
from quark.onnx.equalize.channels import Array, Layer, along
from quark.onnx.equalize.options import ClipTreatment
from quark.onnx.equalize.rescaling import Rescaling, Weights
from quark.onnx.graph import add_initializer, add_node, become, constant, input_value, rank, set_constant


def apply_scales(model: ir.Model, rescalings: Sequence[Rescaling], weights: Weights) -> None:
    """Carry out what was found. A bias or another constant that is also read elsewhere is copied."""
    for layer, magnitudes in weights:
        _write_weight(layer, magnitudes)
    for each in rescalings:
        if each.is_changed:
            _write_constants(model, each)


def _write_weight(layer: Layer, magnitudes: ChannelMagnitudes) -> None:
    """All layers that read this weight are in the same regions, so that it is changed where it is."""
    array = constant(layer.weight)
    assert array is not None
    if bool((magnitudes.divided == 1).all() and (magnitudes.multiplied == 1).all()):
        return
    dtype = array.dtype if array.dtype == np.float64 else np.dtype(np.float32)
    scaled: Array = array.astype(dtype)  # a copy, written through the view
    view = layer.view(scaled)
    view *= magnitudes.multiplied.reshape(layer.groups, 1, layer.inputs, 1).astype(dtype)
    view /= magnitudes.divided.reshape(layer.groups, layer.outputs, 1, 1).astype(dtype)
    layer.weight.const_value = ir.Tensor(scaled.astype(array.dtype, copy=False), name=layer.weight.name)


def _write_constants(model: ir.Model, each: Rescaling) -> None:
    for node in each.region.sources:
        _write_bias(model, node, each.scales)
    for (node, index), channels in each.region.constants.items():
        array = constant(input_value(node, index))
        assert array is not None
        set_constant(model, node, index, _divided(array, along(each.scales, channels, array.ndim)))
    if each.options.clip is ClipTreatment.PER_CHANNEL:
        for clip, bound in each.region.clips.items():
            _clip_by_channel(model, clip, bound / each.scales, each.region.members[clip.outputs[0]])


def _write_bias(model: ir.Model, node: ir.Node, scales: Array) -> None:
    bias = constant(input_value(node, 2))
    if bias is None:
        return
    shape = np.broadcast_shapes(bias.shape, scales.shape)  # a Gemm takes one number for all channels
    set_constant(model, node, 2, _divided(np.broadcast_to(bias, shape), scales))


def _clip_by_channel(model: ir.Model, clip: ir.Node, bounds: Array, channels: Channels) -> None:
    """Clip(x, 0, c) as Min(Relu(x), bounds): exact, whatever the bounds."""
    value = clip.inputs[0]
    bound = constant(input_value(clip, 2))
    assert value is not None
    assert bound is not None
    relu = add_node(model, "Relu", [value], before=clip, name=f"{clip.name}_relu")
    relu.outputs[0].shape, relu.outputs[0].type = value.shape, value.type
    shaped = along(bounds, channels, rank(value) or channels.axis + 1).astype(bound.dtype)
    become(clip, "Min", [relu.outputs[0], add_initializer(model, f"{clip.name}_bounds", shaped)])


def _divided(array: Array, scales: Array) -> Array:
    exact = array.astype(np.float64) / scales
    return exact.astype(array.dtype)

"""Bias absorption: what a channel has on top of zero all the time moves from its bias into the biases behind it.

    Relu(x) = Relu(x - c) + c   for x >= c >= 0,   so   b1 - c   and   b2 + W2 c   leave the function as it is

with c the lowest value of the channel before its activation on calibration data: exact there, and elsewhere where
values go no lower. The activation then covers less, and its codes are finer. The paper (arXiv 1906.04721) has no data,
and takes c from the statistics of a batch norm, which are gone once that is folded.

Possible where a region has one source, nothing on the way that turns a constant into something else, and only sinks
that a constant reaches evenly: a padded convolution sees zeros at its borders, and is none.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.onnx.equalize.channels import Array, Layer
from quark.onnx.equalize.regions import Region
from quark.onnx.graph import attribute, constant, input_value, is_constant, set_constant

# f(x - c) = f(x) - c for x >= c >= 0
_KEEPS_SHIFTS = frozenset(
    {"Relu", "LeakyRelu", "PRelu", "Identity", "Dropout", "MaxPool", "GlobalAveragePool", "GlobalMaxPool"}
    | {"ReduceMean", "ReduceMax", "ReduceMin", "Slice", "Split", "Concat"}
    | {"Transpose", "Flatten", "Reshape", "Squeeze", "Unsqueeze"}
)


def reason_against_absorbing(region: Region) -> str | None:
    """Why nothing can be absorbed in the region; None where it can."""
    if len(region.sources) != 1 or region.constants:
        return "its channels have more than one source"
    for node in region.passed:
        is_pool = node.op_type == "AveragePool" and _is_unpadded(node)
        if node.op_type not in _KEEPS_SHIFTS and not is_pool:
            return f"'{node.name}': {node.op_type} does not keep a constant"
    for layer, _ in region.sinks.values():
        reason = _reason_against_sink(layer.node)
        if reason is not None:
            return f"'{layer.name}': {reason}"
    return None


def absorbed_tensor(region: Region) -> ir.Value:
    """The tensor whose lowest values have to be known: what the source makes."""
    return next(iter(region.sources)).outputs[0]


def absorb(model: ir.Model, region: Region, lowest: Array) -> int:
    """Move what is below `lowest`, the least value of every channel as it is scaled now; of how many channels."""
    layer = next(iter(region.sources.values()))
    shift = np.maximum(np.asarray(lowest, np.float64), 0)
    bias = constant(input_value(layer.node, 2))
    if not shift.any() or (bias is not None and bias.shape != shift.shape):
        return 0
    for sink, width in region.sinks.values():
        _add_to_bias(model, sink, _product(sink, np.repeat(shift, width)))
    _add_to_bias(model, layer, -shift)
    return int(np.count_nonzero(shift))


def _reason_against_sink(node: ir.Node) -> str | None:
    if node.op_type not in ("Conv", "Gemm"):
        return f"{node.op_type} has no bias that takes a constant"
    if node.op_type == "Conv" and not _is_unpadded(node):
        return "its padding is zero, and not the constant"
    has_other_bias = input_value(node, 2) is not None and not is_constant(input_value(node, 2))
    return "its bias is not constant" if has_other_bias or attribute(node, "beta", 1.0) == 0 else None


def _is_unpadded(node: ir.Node) -> bool:
    is_explicit = attribute(node, "auto_pad", "NOTSET") in ("NOTSET", "VALID")
    return is_explicit and not any(attribute(node, "pads") or ()) and not attribute(node, "ceil_mode", 0)


def _product(layer: Layer, shift: Array) -> Array:
    """What the layer makes of that constant in every position."""
    weight = constant(layer.weight)
    assert weight is not None
    taps = layer.view(weight).sum(axis=3, dtype=np.float64)
    by_group: Array = np.einsum("goi,gi->go", taps, shift.reshape(layer.groups, layer.inputs))
    product: Array = by_group.reshape(-1) * float(attribute(layer.node, "alpha", 1.0))
    return product


def _add_to_bias(model: ir.Model, layer: Layer, addend: Array) -> None:
    bias, weight = constant(input_value(layer.node, 2)), constant(layer.weight)
    assert weight is not None
    before: Array = np.zeros(1) if bias is None else bias.astype(np.float64)
    total = before + addend / float(attribute(layer.node, "beta", 1.0))
    set_constant(model, layer.node, 2, total.astype(weight.dtype), f"{layer.name}_bias")

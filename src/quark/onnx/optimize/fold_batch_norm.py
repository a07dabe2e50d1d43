"""Fold BatchNormalization into the layer before it: Conv, ConvTranspose, Gemm or MatMul.

    y = g * (w*x + b - m) / sqrt(v + e) + t   becomes   w' = w*a,   b' = (b - m)*a + t   with   a = g / sqrt(v + e)

Channel c of the output scales with a[c]: rows of a Conv's weight; for a ConvTranspose its second axis, counted through
the groups; columns of a Gemm's or MatMul's. A Gemm's beta goes into the bias. A MatMul of matrices gets an
Add behind it.

Applies when the layer has one reader, its weight and bias and the four parameters are constants, and the normalization
is in inference mode. Computed in float64, rounded once; left as it is where that would leave the range of the type, as
it can for float16. A weight that others read as well is copied.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import (
    add_initializer,
    attribute,
    become,
    bypass,
    constant,
    input_value,
    is_read_once,
    nodes,
    rank,
    set_constant,
)
from quark.onnx.narrowing import in_dtype

Array = np.ndarray[Any, Any]


class FoldBatchNorm:
    name: ClassVar[str] = "fold_batch_norm"
    is_default: ClassVar[bool] = True

    def apply(self, model: ir.Model) -> int:
        return sum(_fold(model, node) for node in nodes(model) if is_inference_batch_norm(node))


def is_inference_batch_norm(node: ir.Node) -> bool:
    """That the node normalizes with its stored statistics, and gives out no others."""
    is_norm = node.op_type == "BatchNormalization" and not node.domain and not attribute(node, "training_mode", 0)
    return is_norm and not any(output.uses() or output.is_graph_output() for output in node.outputs[1:])


def affine_of(node: ir.Node) -> tuple[Array, Array] | None:
    """The normalization as a*x + c for each channel, in float64; None where a parameter is not constant or finite."""
    parameters = [constant(input_value(node, index)) for index in range(1, 5)]
    if any(each is None for each in parameters):
        return None
    gamma, beta, mean, variance = (np.asarray(each, np.float64) for each in parameters)
    if gamma.ndim != 1 or not gamma.shape == beta.shape == mean.shape == variance.shape:
        return None
    with np.errstate(all="ignore"):
        scale = gamma / np.sqrt(variance + attribute(node, "epsilon", 1e-5))
        shift = beta - mean * scale
    return (scale, shift) if bool(np.isfinite(scale).all() and np.isfinite(shift).all()) else None


def _fold(model: ir.Model, norm: ir.Node) -> bool:
    source = input_value(norm, 0)
    layer = source.producer() if source is not None else None
    affine = affine_of(norm)
    if source is None or layer is None or layer.domain or affine is None or not is_read_once(source):
        return False
    if layer.op_type == "MatMul":
        return _fold_into_matmul(model, layer, norm, *affine)
    if layer.op_type not in ("Conv", "ConvTranspose", "Gemm"):
        return False
    return _fold_into_layer(model, layer, norm, *affine)


def _fold_into_layer(model: ir.Model, layer: ir.Node, norm: ir.Node, scale: Array, shift: Array) -> bool:
    weight, bias = constant(input_value(layer, 1)), constant(input_value(layer, 2))
    if weight is None or (input_value(layer, 2) is not None and bias is None):
        return False
    by_channel = _by_channel(layer, weight, scale)
    if by_channel is None or (bias is not None and bias.shape[-1:] not in ((), (1,), scale.shape)):
        return False
    beta = attribute(layer, "beta", 1.0) if layer.op_type == "Gemm" else 1.0
    old_bias = np.zeros(1) if bias is None else np.asarray(bias, np.float64)
    new_weight = in_dtype(weight.astype(np.float64) * by_channel, weight)
    new_bias = in_dtype(beta * old_bias * scale + shift, weight)
    if new_weight is None or new_bias is None or not bypass(norm):
        return False
    set_constant(model, layer, 1, new_weight)
    set_constant(model, layer, 2, new_bias, f"{layer.name}_bias")
    layer.attributes.pop("beta", None)
    return True


def _by_channel(layer: ir.Node, weight: Array, scale: Array) -> Array | None:
    """The scale in a shape that multiplies the weight; None where the two do not fit."""
    ones = (1,) * (weight.ndim - 2)
    if layer.op_type == "Conv":
        return scale.reshape(-1, 1, *ones) if weight.shape[0] == scale.size else None
    if layer.op_type == "ConvTranspose":
        groups = attribute(layer, "group", 1)
        if weight.shape[1] * groups != scale.size or weight.shape[0] % groups:
            return None
        rows: Array = np.repeat(scale.reshape(groups, -1), weight.shape[0] // groups, axis=0)
        return np.reshape(rows, (*weight.shape[:2], *ones))
    columns = 0 if attribute(layer, "transB", 0) else 1
    if weight.ndim != 2 or weight.shape[columns] != scale.size:
        return None
    return scale.reshape((-1, 1) if columns == 0 else (1, -1))


def _fold_into_matmul(model: ir.Model, layer: ir.Node, norm: ir.Node, scale: Array, shift: Array) -> bool:
    """Of matrices only: there the channels of the normalization are the columns of the weight."""
    weight = constant(input_value(layer, 1))
    if weight is None or weight.ndim != 2 or rank(input_value(layer, 0)) != 2 or weight.shape[1] != scale.size:
        return False
    new_weight, bias = in_dtype(weight.astype(np.float64) * scale, weight), in_dtype(shift, weight)
    if new_weight is None or bias is None:
        return False
    set_constant(model, layer, 1, new_weight)
    become(norm, "Add", [layer.outputs[0], add_initializer(model, f"{layer.name}_bias", bias)])
    return True

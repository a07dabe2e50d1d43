"""Rewrites of batch normalizations, and of the product and sum that take one up best as a Gemm."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import (
    add_initializer,
    attribute,
    become,
    bypass,
    constant,
    dimensions,
    in_dtype,
    input_value,
    is_constant,
    is_float,
    is_read_once,
    rank,
    readers,
    set_constant,
)
from quark.onnx.optimize.rewrite import per_node

Array = np.ndarray[Any, Any]

# ---- fuse_matmul_add ----


@per_node("MatMul")
def fuse_matmul_add(model: ir.Model, matmul: ir.Node) -> bool:
    """Fuse a MatMul of matrices and the Add of a constant behind it into a Gemm.

        Add(MatMul(A, B), c)   becomes   Gemm(A, B, c)

    so that the bias is quantized with its layer. Applies when A is known to be a matrix (a Gemm takes no batches), B is
    a constant matrix, c is a constant row, and nothing else reads the product.
    """
    a, weight, product = input_value(matmul, 0), input_value(matmul, 1), matmul.outputs[0]
    dims = dimensions(weight)
    if rank(a) != 2 or not is_float(a) or not is_constant(weight) or not is_read_once(product):
        return False
    if dims is None or len(dims) != 2:
        return False
    add, index = readers(product)[0]
    if add.op_type != "Add" or add.domain or add.graph is not matmul.graph:
        return False
    bias = input_value(add, 1 - index)
    if not is_constant(bias) or dimensions(bias) not in ((dims[1],), (1, dims[1]), (1,), ()):
        return False
    if not bypass(add, product):
        return False
    become(matmul, "Gemm", [a, weight, bias])
    return True


# ---- fold_batch_norm ----


@per_node("BatchNormalization")
def fold_batch_norm(model: ir.Model, norm: ir.Node) -> bool:
    """Fold BatchNormalization into the layer before it: Conv, ConvTranspose, Gemm or MatMul. If that is a Concat of
    channels, fold it into the layers before the Concat, each with its share of the channels; not into a MatMul there.

        y = g * (w*x + b - m) / sqrt(v + e) + t   becomes   w' = w*a,   b' = (b - m)*a + t   with   a = g / sqrt(v + e)

    Channel c of the output scales with a[c]: rows of a Conv's weight; for a ConvTranspose its second axis, counted
    through the groups; columns of a Gemm's or MatMul's. A Gemm's beta goes into the bias. A MatMul of matrices gets an
    Add behind it.

    Applies when each layer has one reader, its weight and bias and the four parameters are constants, and the
    normalization is in inference mode. Computed in float64 and rounded once; left alone if the result would overflow,
    as it can in float16. A weight that other nodes read as well is copied.
    """
    source = input_value(norm, 0)
    producer = source.producer() if source is not None else None
    affine = _affine_of(norm)
    if source is None or producer is None or producer.domain or affine is None or not is_read_once(source):
        return False
    scale, shift = affine
    if producer.op_type == "MatMul":  # the columns are the channels of the normalization
        weight = constant(input_value(producer, 1))
        if weight is None or weight.ndim != 2 or rank(input_value(producer, 0)) != 2 or weight.shape[1] != scale.size:
            return False
        new_weight, new_bias = in_dtype(weight.astype(np.float64) * scale, weight), in_dtype(shift, weight)
        if new_weight is None or new_bias is None:
            return False
        set_constant(model, producer, 1, new_weight)
        become(norm, "Add", [producer.outputs[0], add_initializer(model, f"{producer.name}_bias", new_bias)])
        return True
    layers = _joined_layers(producer) if producer.op_type == "Concat" else [producer]
    sizes = [_channels(layer) for layer in layers]
    if not layers or None in sizes or sum(size or 0 for size in sizes) != scale.size:
        return False
    ends = np.cumsum([size or 0 for size in sizes])[:-1]
    shares = zip(layers, np.split(scale, ends), np.split(shift, ends), strict=True)
    folded = [_folded(*share) for share in shares]
    if any(array is None for array in folded) or not bypass(norm):
        return False
    for layer, constants in zip(layers, folded, strict=True):
        assert constants is not None
        set_constant(model, layer, 1, constants[0])
        set_constant(model, layer, 2, constants[1], f"{layer.name}_bias")
        layer.attributes.pop("beta", None)
    return True


def _joined_layers(concat: ir.Node) -> list[ir.Node]:
    """The nodes that compute what a Concat joins along the channels, if it is their only reader; else none."""
    layers = [value.producer() for value in concat.inputs if value is not None and is_read_once(value)]
    axis, dimensions_count = attribute(concat, "axis"), rank(input_value(concat, 0))
    is_by_channel = axis == 1 or (dimensions_count is not None and axis == 1 - dimensions_count)
    joined = [layer for layer in layers if layer is not None and not layer.domain]
    return joined if is_by_channel and len(joined) == len(concat.inputs) else []


def _channels(layer: ir.Node) -> int | None:
    """The number of output channels of a Conv, ConvTranspose or Gemm with a constant weight."""
    dims = dimensions(input_value(layer, 1)) if is_constant(input_value(layer, 1)) else None
    if dims is None or len(dims) < 2 or dims[0] is None or dims[1] is None:
        return None
    if layer.op_type == "Conv":
        return dims[0]
    if layer.op_type == "ConvTranspose":
        return int(dims[1] * attribute(layer, "group", 1))
    return dims[0 if attribute(layer, "transB", 0) else 1] if layer.op_type == "Gemm" else None


def _folded(layer: ir.Node, scale: Array, shift: Array) -> tuple[Array, Array] | None:
    """Weight and bias of the layer that computes scale * y + shift in the place of y; None if there are none."""
    weight, bias = constant(input_value(layer, 1)), constant(input_value(layer, 2))
    if weight is None or (input_value(layer, 2) is not None and bias is None):
        return None
    by_channel = _by_channel(layer, weight, scale)
    if by_channel is None or (bias is not None and bias.shape[-1:] not in ((), (1,), scale.shape)):
        return None
    beta = attribute(layer, "beta", 1.0) if layer.op_type == "Gemm" else 1.0
    old_bias = np.zeros(1) if bias is None else np.asarray(bias, np.float64)
    new_weight = in_dtype(weight.astype(np.float64) * by_channel, weight)
    new_bias = in_dtype(beta * old_bias * scale + shift, weight)
    return None if new_weight is None or new_bias is None else (new_weight, new_bias)


def _affine_of(norm: ir.Node) -> tuple[Array, Array] | None:
    """The normalization as a*x + c for each channel, in float64. None if it is in training mode, has other outputs in
    use, or a parameter that is not constant or not finite."""
    if attribute(norm, "training_mode", 0) or any(
        output.uses() or output.is_graph_output() for output in norm.outputs[1:]
    ):
        return None
    parameters = [constant(input_value(norm, index)) for index in range(1, 5)]
    if any(parameter is None for parameter in parameters):
        return None
    gamma, beta, mean, variance = (np.asarray(parameter, np.float64) for parameter in parameters)
    if gamma.ndim != 1 or not gamma.shape == beta.shape == mean.shape == variance.shape:
        return None
    with np.errstate(all="ignore"):
        scale = gamma / np.sqrt(variance + attribute(norm, "epsilon", 1e-5))
        shift = beta - mean * scale
    return (scale, shift) if bool(np.isfinite(scale).all() and np.isfinite(shift).all()) else None


def _by_channel(layer: ir.Node, weight: Array, scale: Array) -> Array | None:
    """The scale in a shape that multiplies the weight; None if the two do not fit."""
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


# ---- batch_norm_to_conv ----


@per_node("BatchNormalization")
def batch_norm_to_conv(model: ir.Model, norm: ir.Node) -> bool:
    """Turn a BatchNormalization that could not be folded into a depthwise convolution with a kernel of one.

        y[c] = a[c] * x[c] + b[c]   with   a = g / sqrt(v + e),   b = t - m*a

    for hardware that has convolutions only; elsewhere a Conv is no better, so it has to be enabled. Applies when the
    parameters are constants and x is known to have a channel axis and one to three spatial ones.
    """
    value, gamma = input_value(norm, 0), constant(input_value(norm, 1))
    spatial = (rank(value) or 0) - 2
    affine = _affine_of(norm)
    if affine is None or gamma is None or value is None or spatial not in (1, 2, 3):
        return False
    weight, bias = (in_dtype(array, gamma) for array in affine)
    if weight is None or bias is None or (value.dtype is not None and value.dtype.numpy() != gamma.dtype):
        return False
    channels = int(weight.size)
    kernel = add_initializer(model, f"{norm.name}_weight", weight.reshape(channels, 1, *(1,) * spatial))
    inputs = [value, kernel, add_initializer(model, f"{norm.name}_bias", bias)]
    become(norm, "Conv", inputs, {"group": channels, "kernel_shape": [1] * spatial})
    return True

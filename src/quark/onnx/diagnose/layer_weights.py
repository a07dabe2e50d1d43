"""The weight of a layer in both files, as arrays [out, in, positions], and what the quantized one was rounded from.

The float file's weight has the BatchNormalization in it that was folded since. Weights of Conv, Gemm and MatMul are
known this way; of others, and where the two have other shapes, there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.onnx.diagnose.operands import DEQUANTIZE, Operand
from quark.onnx.diagnose.running import Run
from quark.onnx.diagnose.sites import ACTIVATIONS, Site
from quark.onnx.graph import attribute, constant, input_value, is_constant
from quark.onnx.large_tensors import MappedTensor
from quark.onnx.piece import piece
from quark.ops.constant_marks import CONSTANT_DOMAIN

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """`exact` is what the float file has, None where it cannot be told; `groups` are those of a convolution."""

    quantized: Array
    exact: Array | None
    groups: int

    def inputs_of(self, channels: Array) -> Array:
        """Something of the input's channels, for each [out, in] of the weight."""
        out, per_group = self.quantized.shape[:2]
        group = np.arange(out) // max(1, out // self.groups)
        return np.asarray(channels[group[:, None] * per_group + np.arange(per_group)[None, :]])


def layer_weights(site: Site, exact: ir.Model, quantized: ir.Model) -> LayerWeights | None:
    """None where the layer has no weight that is quantized, or not of that kind."""
    operand = site.weight
    if operand is None or site.node.op_type not in ("Conv", "Gemm", "MatMul"):
        return None
    found = _arranged(site.node, operand.index, constant_array(operand, quantized))
    if found is None:
        return None
    reference = _exact_weight(exact, site.tensor)
    is_same = reference is not None and reference.shape == found.shape
    groups = int(attribute(site.node, "group", 1)) if site.node.op_type == "Conv" else 1
    return LayerWeights(found, reference if is_same else None, groups)


def constant_array(operand: Operand, model: ir.Model) -> Array:
    """What the node reads: the numbers of a weight after rounding."""
    writer = operand.value.producer()
    if writer is not None and writer.domain == CONSTANT_DOMAIN and is_constant(writer.inputs[0]):
        return np.asarray(constant(writer.inputs[0]))
    if writer is not None and writer.op_type in DEQUANTIZE and not attribute(writer, "block_size", 0):
        codes, scale = constant(input_value(writer, 0)), constant(input_value(writer, 1))
        if codes is not None and scale is not None and codes.dtype.kind in "iu":
            return _dequantized(codes, scale, constant(input_value(writer, 2)), int(attribute(writer, "axis", 1)))
    name = str(operand.value.name)
    return Run(piece(model, [], [name]), f"the constants of '{name}'")({})[name]


def release_weights(model: ir.Model) -> None:
    """Let go of the pages of a mapped file that were read: they would count as memory in use."""
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, MappedTensor):
            value.const_value.release()


def _dequantized(codes: Array, scale: Array, zero_point: Array | None, axis: int) -> Array:
    shape = [1] * codes.ndim
    if scale.size > 1:
        shape[axis] = -1
    zero = 0 if zero_point is None else zero_point.astype(np.int32).reshape(shape)
    return np.asarray((codes.astype(np.int32) - zero) * scale.reshape(shape), np.float32)


def _exact_weight(model: ir.Model, tensor: str) -> Array | None:
    """Of the node that a tensor comes from, behind its activation and BatchNormalization."""
    value: ir.Value | None = next((v for node in model.graph for v in node.outputs if v.name == tensor), None)
    node = None if value is None else value.producer()
    scale: Array | None = None
    while node is not None and node.op_type in ACTIVATIONS | {"BatchNormalization"}:
        if node.op_type == "BatchNormalization":
            scale = _scale_of(node)
            if scale is None:
                return None
        value = input_value(node, 0)
        node = None if value is None else value.producer()
    if node is None:
        return None
    for index in (1, 0):
        held = constant(input_value(node, index))
        found = None if held is None else _arranged(node, index, held)
        if found is not None:
            return found if scale is None else np.asarray(found * scale[:, None, None], np.float32)
    return None


def _scale_of(node: ir.Node) -> Array | None:
    gain, variance = constant(input_value(node, 1)), constant(input_value(node, 4))
    if gain is None or variance is None:
        return None
    return np.asarray(gain / np.sqrt(variance + float(attribute(node, "epsilon", 1e-5))), np.float32)


def _arranged(node: ir.Node, index: int, array: Array) -> Array | None:
    """[out, in, positions]"""
    if node.op_type == "Conv" and index == 1 and array.ndim >= 3:
        return array.reshape(*array.shape[:2], -1).astype(np.float32)
    if array.ndim != 2 or array.dtype.kind != "f":
        return None
    if node.op_type == "Gemm" and index == 1:
        is_turned = bool(attribute(node, "transB", 0))
        return np.asarray(array if is_turned else array.T, np.float32)[:, :, None]
    if node.op_type == "MatMul" and index == 1:
        return np.asarray(array.T, np.float32)[:, :, None]
    return None

"""Decide: from a graph and measured ranges to a `QuantizationPlan`, for ONNX models and torch networks alike.

view            the graph as decisions see it; quark.onnx.view and quark.torch.view make one
operators       what operators are to a quantizer
selection       which nodes are quantized
placement       which readers see which tensor quantized
scales          scale and zero point from a range
choose          every choice: scales, zero points, axes
npu_positions   positions brought within an NPU's limits
"""

from quark.decide.choose import (
    Decision,
    RangeKey,
    check_overrides,
    choose,
    decide,
    is_derived_bias,
    rechoose,
    tensors_to_measure,
    unused_overrides,
)
from quark.decide.npu_positions import limit_positions
from quark.decide.options import BlockPlacement, ChoiceOptions, Selection, Target, TensorOverride
from quark.decide.placement import Placement, Request, place
from quark.decide.specs import AffineSpec, BlockSpec, DynamicSpec, FloatSpec, LayerSpec, TensorSpec

__all__ = [
    "AffineSpec",
    "BlockPlacement",
    "BlockSpec",
    "ChoiceOptions",
    "Decision",
    "DynamicSpec",
    "FloatSpec",
    "LayerSpec",
    "Placement",
    "RangeKey",
    "Request",
    "Selection",
    "Target",
    "TensorOverride",
    "TensorSpec",
    "check_overrides",
    "choose",
    "decide",
    "is_derived_bias",
    "limit_positions",
    "place",
    "rechoose",
    "tensors_to_measure",
    "unused_overrides",
]

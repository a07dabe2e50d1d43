"""Decide: from a model and measured ranges to a `QuantizationPlan`. Nothing here touches the graph.

operators       what operators are to a quantizer
selection       which nodes are quantized
placement       which readers see which tensor quantized
choose          scales, zero points, axes
overrides       what a user fixes for single tensors
npu_positions   positions brought within an NPU's limits
before_clips    additional quantizers that let ONNX Runtime fuse
"""

from quark.onnx.choose.choose import RangeKey, choose, rechoose, tensors_to_measure
from quark.onnx.choose.npu_positions import limit_positions
from quark.onnx.choose.options import BlockPlacement, ChoiceOptions, Selection, Target, TensorOverride
from quark.onnx.choose.overrides import check_overrides, unused_overrides
from quark.onnx.choose.placement import Placement, place
from quark.onnx.choose.specs import AffineSpec, BlockSpec, DynamicSpec, FloatSpec, LayerSpec, TensorSpec

__all__ = [
    "AffineSpec",
    "BlockPlacement",
    "BlockSpec",
    "ChoiceOptions",
    "DynamicSpec",
    "FloatSpec",
    "LayerSpec",
    "Placement",
    "RangeKey",
    "Selection",
    "Target",
    "TensorOverride",
    "TensorSpec",
    "check_overrides",
    "choose",
    "limit_positions",
    "place",
    "rechoose",
    "tensors_to_measure",
    "unused_overrides",
]

"""Refine: what is corrected once every scale is known.

One file, one algorithm: `bias_correction`.
"""

from __future__ import annotations

from quark.onnx.refine.bias_correction import correct_biases, tensors_to_average
from quark.onnx.refine.layers import Layer, give_biases, layer_inputs, layer_outputs, layers
from quark.onnx.refine.options import BiasCorrectionOptions, CorrectionInputs, RefineOptions

__all__ = [
    "BiasCorrectionOptions",
    "CorrectionInputs",
    "Layer",
    "RefineOptions",
    "correct_biases",
    "give_biases",
    "layer_inputs",
    "layer_outputs",
    "layers",
    "tensors_to_average",
]

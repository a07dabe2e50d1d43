"""Equalize: rescale between layers, so that their numbers fit a quantizer better and the network does what it did.

cross_layer     weights of neighbouring layers get like ranges
smooth_quant    outliers of activations move into the weights that read them
"""

from quark.onnx.equalize.cross_layer import clip_tensors, equalize_cross_layer
from quark.onnx.equalize.options import CLIP_SAMPLES, ClipTreatment, CrossLayerOptions, EqualizeOptions, SmoothOptions
from quark.onnx.equalize.smooth_quant import smooth, smooth_tensors

__all__ = [
    "CLIP_SAMPLES",
    "ClipTreatment",
    "CrossLayerOptions",
    "EqualizeOptions",
    "SmoothOptions",
    "clip_tensors",
    "equalize_cross_layer",
    "smooth",
    "smooth_tensors",
]

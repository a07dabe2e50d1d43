"""Equalize: rescale between layers, so that weights quantize better and the network does what it did."""

from quark.torch.equalize.cross_layer import clip_tensors, equalize_cross_layer
from quark.torch.equalize.options import CrossLayerOptions

__all__ = ["CrossLayerOptions", "clip_tensors", "equalize_cross_layer"]

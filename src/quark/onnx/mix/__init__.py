"""Mix: which layers could have lower types, and what they hold and compute."""

from quark.onnx.mix.candidates import candidates
from quark.onnx.mix.options import LAYER_TYPES, Method, MixOptions

__all__ = ["LAYER_TYPES", "Method", "MixOptions", "candidates"]

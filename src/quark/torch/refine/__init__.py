"""Refine: what is corrected in the float network once every scale is known."""

from quark.torch.refine.bias_correction import correct_biases
from quark.torch.refine.bias_rounding import Rounding
from quark.torch.refine.layers import LayerChoices, give_biases
from quark.torch.refine.options import BiasCorrectionOptions

__all__ = ["BiasCorrectionOptions", "LayerChoices", "Rounding", "correct_biases", "give_biases"]

"""Protect: keep in float what would break a network in 8 bits.

structures   parts of a graph that are known to break, recognised by their form
options      whether and how much is protected
macs         the multiplications of each layer, which the budget is counted in

What is found by measuring (ranges, placement, single layers) is in `quantization/protecting.py`, which runs networks.
"""

from quark.onnx.protect.options import ProtectMode, ProtectOptions
from quark.onnx.protect.structures import Structures, find_structures

__all__ = ["ProtectMode", "ProtectOptions", "Structures", "find_structures"]

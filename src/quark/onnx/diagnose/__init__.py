"""Where a quantized network differs from the float one, layer by layer, why, and what to do about it.

diagnose           two files and some data in, a Diagnosis out
first_divergence   the first layer where the two networks part
"""

from quark.onnx.diagnose.diagnosing import diagnose
from quark.onnx.diagnose.divergence import BELOW_DB, Divergence, first_divergence

__all__ = ["BELOW_DB", "Divergence", "diagnose", "first_divergence"]

"""Where a quantized network differs from the float one, layer by layer, why, and what to do about it.

`quark.onnx.diagnose` is its public path.
"""

from quark.diagnosis import BELOW_DB, Divergence, first_divergence
from quark.inspect.diagnose.diagnosing import diagnose

__all__ = ["BELOW_DB", "Divergence", "diagnose", "first_divergence"]

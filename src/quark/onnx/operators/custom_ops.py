"""The operator library, and the names of its operators, at the import path that existing scripts use."""

from quark.ops.library import get_library_path
from quark.ops.schema import DOMAIN

_COP_DOMAIN = DOMAIN
_COP_VERSION = 1
_COP_QUANT_OP_NAME = "ExtendedQuantizeLinear"
_COP_DEQUANT_OP_NAME = "ExtendedDequantizeLinear"
_COP_BFP_OP_NAME = "BFPQuantizeDequantize"
_COP_MX_OP_NAME = "MXQuantizeDequantize"
_COP_IN_OP_NAME = "ExtendedInstanceNormalization"
_COP_LSTM_OP_NAME = "ExtendedLSTM"

__all__ = ["get_library_path"]

"""Quantization in ONNX models.

    get_library_path          the compiled operators, for `SessionOptions.register_custom_ops_library`
    add_portable_functions    makes a model with these operators run without that library

torch is not needed, and not imported. ONNX Runtime is: which of its distributions is the user's choice.
"""

from quark.onnx.runtime import require_onnxruntime
from quark.ops.library import get_library_path
from quark.ops.portable_functions import add_portable_functions

__all__ = ["add_portable_functions", "get_library_path"]

require_onnxruntime()

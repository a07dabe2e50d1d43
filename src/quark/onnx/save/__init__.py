"""Write: a model becomes a file, whole or not at all."""

from quark.onnx.save.model_file import check_output, to_proto, write_model, write_text
from quark.onnx.save.options import SaveOptions

__all__ = ["SaveOptions", "check_output", "to_proto", "write_model", "write_text"]

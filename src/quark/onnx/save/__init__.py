"""Write: a model becomes a file, whole or not at all."""

from quark.files.output import complete, together, writing
from quark.onnx.save.finish import finish, to_proto
from quark.onnx.save.model_file import check_output, write_model, write_text
from quark.onnx.save.options import SaveOptions

__all__ = [
    "SaveOptions",
    "check_output",
    "complete",
    "finish",
    "to_proto",
    "together",
    "write_model",
    "write_text",
    "writing",
]

"""Models in float16, by the path that scripts import: `float16.convert_float16_to_float(model)`."""

from quark.onnx.convert.floats import to_float32 as convert_float16_to_float

__all__ = ["convert_float16_to_float"]

"""See `quark.onnx.algorithm`."""

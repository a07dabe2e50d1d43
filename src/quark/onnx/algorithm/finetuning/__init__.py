"""See `quark.onnx.algorithm`; finetuning itself is in `quark.features.finetuning`."""

"""The configuration that people write: specs of tensors, of layers, of a model; checked when built."""

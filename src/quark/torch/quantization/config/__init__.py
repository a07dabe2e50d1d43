"""The configuration that users write: specs of tensors, layers and models, checked when they are built."""

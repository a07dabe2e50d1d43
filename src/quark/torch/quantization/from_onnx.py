"""An ONNX file as a torch module that trains."""

from __future__ import annotations

import os

import onnx

from quark.features.finetuning.network import OnnxNetwork
from quark.onnx.load import load


def from_onnx(path: str | os.PathLike[str] | onnx.ModelProto | bytes) -> OnnxNetwork:
    """Return a torch module that computes what a float ONNX network does, with its weights as parameters.

    Call it with the inputs in the order of the file, or by name. `save(path)` writes the network with the weights as
    they are then. Floats are computed in float32. Raises ModelError that names the operators it cannot compute; a file
    that is quantized already is refused too.

    >>> from quark.demo import network_path
    >>> module = from_onnx(network_path())
    >>> module.input_names, module.output_names
    (['input'], ['logits'])
    """
    return OnnxNetwork(load(path).model)

"""The file of the demo network in the installed package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

FILE_NAME = "digits_mobilenet.onnx"


def network_path() -> Path:
    """Return the path of the ONNX file.

    >>> network_path().name
    'digits_mobilenet.onnx'
    """
    return Path(str(files("quark.demo") / FILE_NAME))


def load_network() -> onnx.ModelProto:
    """Return the network: float32 `input` of shape [N, 1, 8, 8] to float32 `logits` of shape [N, 10], opset 17.

    >>> load_network().graph.input[0].name
    'input'
    """
    import onnx

    return onnx.load(network_path())


def network_metadata() -> dict[str, str]:
    """Return the metadata: data, split, preprocessing, accuracy.

    >>> network_metadata()["split_seed"]
    '0'
    """
    return {entry.key: entry.value for entry in load_network().metadata_props}

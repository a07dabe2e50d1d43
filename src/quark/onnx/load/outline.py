"""A file to be looked at and not run: its graph, without the bytes of its large weights."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from quark.onnx.load.source import read_source
from quark.onnx.load.wire import carve


def read_outline(path: Path) -> ir.Model:
    """The graph as the file has it. Large weights have their name, type and shape, and no values to read; those in
    external files know which, and nobody looks whether these are there. Bytes that are no ONNX model are a ModelError.
    """
    model = ir.serde.deserialize_model(carve(read_source(path)).proto)
    ir.external_data.set_base_dir(model.graph, path.parent)
    return model

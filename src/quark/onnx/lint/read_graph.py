"""A file as a graph, checked as the loader does it, and otherwise as it is: neither opset nor operators are changed."""

from __future__ import annotations

import os

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveInitializersFromInputsPass

from quark.errors import ModelError
from quark.onnx.graph import infer_shapes
from quark.onnx.load.external_data import ExternalData
from quark.onnx.load.functions import check_functions
from quark.onnx.load.operators import check_forms, shorten_domains
from quark.onnx.load.source import Source, read_source
from quark.onnx.load.structure import check_structure
from quark.onnx.load.tensors import check_tensors, to_graph
from quark.onnx.load.wire import carve


def read_graph(source: str | os.PathLike[str] | onnx.ModelProto | bytes) -> ir.Model:
    """Read a model: constants as initializers, a name for every node, and types and shapes as far as ONNX infers them.

    Raises ModelError if the source is not an ONNX model.
    """
    read = read_source(source)
    return graph_of(read, ExternalData(read))


def graph_of(read: Source, external: ExternalData) -> ir.Model:
    """The same of a model that was read."""
    carved = carve(read)
    shorten_domains(carved.proto)
    check_structure(carved.proto, read.name)
    check_functions(carved.proto, read.name)
    check_forms(carved.proto, read.name)
    views = check_tensors(read, carved, external)
    if not any(not each.domain for each in carved.proto.opset_import):
        raise ModelError(f"'{read.name}' does not say which opset it is of (opset_import). Export it again")
    model = to_graph(carved, views, read.name)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    RemoveInitializersFromInputsPass()(model)
    _name_nodes(model)
    infer_shapes(model)
    return model


def _name_nodes(model: ir.Model) -> None:
    for node in model.graph:
        if not node.name:
            node.name = next((value.name for value in node.outputs if value.name), node.op_type)

"""Models with operators of ours, made to run where there is no compiled library: the operators become functions.

Files that quark writes have these functions already. Those of others, and the pieces that a step runs while it works,
have not; with the library they need none, and run faster.
"""

from __future__ import annotations

import os
from typing import TypeAlias

import onnx
import onnx_ir as ir

from quark.onnx.message import split
from quark.ops.function_body import CAST_LIKE_OPSET
from quark.ops.portable_functions import add_portable_functions, define_portable_functions
from quark.ops.schema import DOMAIN

ModelSource: TypeAlias = ir.Model | onnx.ModelProto | bytes | str | os.PathLike[str]
_IR_VERSION_OF_FUNCTIONS = 9


def with_functions(model: ModelSource) -> ModelSource:
    """The model with functions for the operators of ours that have none; itself where there are no such operators.

    What is handed over is not changed, and large weights are shared with it, or mapped from its file."""
    if isinstance(model, (str, os.PathLike)):
        read = onnx.load(os.fspath(model), load_external_data=False)
        return with_functions(ir.load(model)) if _lacks_functions(read) else model
    if isinstance(model, bytes):
        read = onnx.load_model_from_string(model)
        return add_portable_functions(read).SerializeToString() if _lacks_functions(read) else model
    if isinstance(model, onnx.ModelProto):
        return add_portable_functions(model) if _lacks_functions(model) else model
    return _graph_with_functions(model)


def _lacks_functions(model: onnx.ModelProto) -> bool:
    """That the domain is declared, which every model with one of its operators does, and has no function."""
    is_declared = any(each.domain == DOMAIN for each in model.opset_import)
    return is_declared and not any(each.domain == DOMAIN for each in model.functions)


def _graph_with_functions(model: ir.Model) -> ir.Model:
    nodes = [node for node in model.graph.all_nodes() if node.domain == DOMAIN]
    if not nodes or any(domain == DOMAIN for domain, _, _ in model.functions):
        return model
    if model.opset_imports.get("", 0) < CAST_LIKE_OPSET:  # there nodes change too, not just functions
        return ir.from_proto(add_portable_functions(ir.to_proto(model)))
    message = split(model, lambda tensor: tensor.nbytes > 0).proto  # types and shapes are enough to write functions by
    define_portable_functions(message)
    copy = model.clone()
    for function in message.functions:
        if function.domain == DOMAIN:
            written = ir.from_proto(function)
            copy.functions[written.identifier()] = written
    copy.opset_imports[DOMAIN] = 1
    copy.ir_version = max(copy.ir_version, _IR_VERSION_OF_FUNCTIONS)
    return copy

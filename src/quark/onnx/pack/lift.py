"""Raise the opset of a quantized model, whose foreign operators ONNX's converter leaves alone."""

from __future__ import annotations

import onnx
from onnx import helper, version_converter

from quark.errors import ModelError
from quark.onnx.pack.editing import Editing


def lifted_nodes(editing: Editing, opset: int) -> None:
    """Let the nodes of the graph be those of the opset. Weights do not go through the converter: they are inputs for
    it. Functions are not converted: whoever has them writes them anew. A ModelError where the converter fails."""
    slim = onnx.ModelProto()
    slim.CopyFrom(editing.proto)
    own = [info for info in slim.graph.input if info.name not in editing.constants]
    del slim.functions[:], slim.graph.initializer[:], slim.graph.input[:]
    slim.graph.input.extend(own)
    read = {name for node in slim.graph.node for name in node.input}
    made = {name for node in slim.graph.node for name in node.output} | {info.name for info in own}
    small = []
    for name in sorted(read - made - {""}):
        tensor = editing.constants.get(name)
        if tensor is None or name in editing.weights:
            kind = onnx.TensorProto.FLOAT if tensor is None else tensor.data_type
            slim.graph.input.append(helper.make_tensor_value_info(name, kind, None if tensor is None else tensor.dims))
        else:
            small.append(tensor)
    slim.graph.initializer.extend(small)
    try:
        converted = version_converter.convert_version(slim, opset)
    except Exception as error:  # whatever its C++ side threw
        reason = " ".join(str(error).split())
        raise ModelError(
            f"the profile native needs opset {opset}, the model has {editing.opset}, and ONNX's converter cannot raise "
            f"it: {reason}. Use the profile portable, or export the model for that opset"
        ) from error
    _take(editing, converted)


def _take(editing: Editing, converted: onnx.ModelProto) -> None:
    editing.constants.update({t.name: t for t in converted.graph.initializer if t.name not in editing.constants})
    known = set(editing.order)
    editing.order += [tensor.name for tensor in converted.graph.initializer if tensor.name not in known]
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in converted.graph.node]
    del editing.graph.node[:]
    editing.graph.node.extend(nodes)
    for entry in editing.proto.opset_import:
        if not entry.domain:
            entry.version = next(each.version for each in converted.opset_import if not each.domain)

"""A model under the hands of packing: a message of its own, its weights by name, and who reads what."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx_ir as ir

from quark.onnx.load.operators import opset_versions
from quark.onnx.message import Message, is_sizable
from quark.onnx.pack.source import empty
from quark.onnx.pack.writers import fresh_names
from quark.ops.onnx_nodes import all_nodes, subgraphs


class Editing:
    """A copy of a message, which is left as it was; the weights are shared."""

    def __init__(self, message: Message) -> None:
        self.proto = onnx.ModelProto()
        self.proto.CopyFrom(message.proto)
        self.weights = dict(message.weights)
        self.graph = self.proto.graph
        self.constants = {tensor.name: tensor for tensor in self.graph.initializer}
        self.order = [tensor.name for tensor in self.graph.initializer]
        self.inputs = {info.name for info in self.graph.input}
        self.outputs = {info.name for info in self.graph.output}
        self.fresh = fresh_names(_all_names(self.graph))

    @property
    def opset(self) -> int:
        return opset_versions(self.proto.opset_import)[""]

    def tensor(self, name: str) -> ir.TensorProtocol:
        """An initializer of the main graph."""
        if name in self.weights:
            return self.weights[name]
        return ir.serde.deserialize_tensor(self.constants[name])

    def readers(self, name: str) -> list[onnx.NodeProto]:
        """The nodes that read a value, also inside subgraphs."""
        return [node for node in all_nodes(self.graph.node) if name in node.input]

    def add_constant(self, name: str, tensor: ir.TensorProtocol, like: onnx.TensorProto | None = None) -> None:
        """A new initializer at the end; what is written about another one is written about it, too."""
        proto = onnx.TensorProto(name=name, data_type=int(tensor.dtype), dims=tensor.shape.numpy())
        if like is not None:
            if like.doc_string:
                proto.doc_string = like.doc_string
            proto.metadata_props.extend(like.metadata_props)
        if is_sizable(tensor):
            empty(proto)
            self.weights[name] = tensor
        else:
            proto.raw_data = tensor.tobytes()
        self.constants[name] = proto
        self.order.append(name)

    def remove_constant(self, name: str) -> None:
        self.order.remove(name)
        del self.constants[name]
        self.weights.pop(name, None)

    def put_first(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Nodes that read nothing but constants."""
        everything = [*nodes, *self.graph.node]
        kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in everything]
        del self.graph.node[:]
        self.graph.node.extend(kept)

    def import_domain(self, domain: str, version: int) -> None:
        if all(entry.domain != domain for entry in self.proto.opset_import):
            self.proto.opset_import.append(onnx.helper.make_opsetid(domain, version))

    def message(self) -> Message:
        """The result. The initializers are put into their order."""
        tensors = [onnx.TensorProto.FromString(self.constants[name].SerializeToString()) for name in self.order]
        del self.graph.initializer[:]
        self.graph.initializer.extend(tensors)
        return Message(self.proto, {name: self.weights[name] for name in self.order if name in self.weights})


def _all_names(graph: onnx.GraphProto) -> set[str]:
    """Of values and nodes, at any depth."""
    names = {info.name for info in (*graph.input, *graph.output, *graph.value_info)}
    names.update(tensor.name for tensor in graph.initializer)
    for node in graph.node:
        names.update((node.name, *node.input, *node.output))
        for inner in subgraphs(node):
            names |= _all_names(inner)
    return names

"""Load a float model: from a file, its bytes or a ModelProto, checked and brought into one form.

    read -> carve -> check -> lift the opset -> onnx_ir -> normalize -> fix shapes -> infer shapes

What is refused, is refused here, before any weight is touched: the error names the file, and the node or tensor.
Neither the file nor the caller's ModelProto is ever changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

import onnx
import onnx_ir as ir

from quark.onnx.graph import infer_shapes
from quark.onnx.input_files import MappedFile, check_unchanged
from quark.onnx.load.digest import Digest
from quark.onnx.load.external_data import ExternalData
from quark.onnx.load.functions import check_functions
from quark.onnx.load.lift_opset import lift_opset
from quark.onnx.load.normalize import InSubgraph, check_layers, drop_empty_inputs, nodes_in_subgraphs, normalize
from quark.onnx.load.operators import check_operators, shorten_domains
from quark.onnx.load.options import LoadOptions
from quark.onnx.load.shapes import fix_shapes
from quark.onnx.load.source import read_source
from quark.onnx.load.structure import check_ports, check_structure
from quark.onnx.load.tensors import check_tensors, to_graph
from quark.onnx.load.to_float32 import convert_to_float32, unusual_layer_types
from quark.onnx.load.wire import carve
from quark.plan import SkippedNode

__all__ = ["Digest", "LoadOptions", "LoadedModel", "load"]


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A float model, and where it came from.

    The graph is the caller's own to change. Its opset is at least 13; every node has a name of its own; what was a
    Constant node is an initializer; initializers are no inputs (unless asked for); functions are inlined; nodes are in
    topological order, those that nothing depends on are gone; types and shapes are known as far as they can be; inputs
    and outputs have their names and order.
    """

    model: ir.Model
    name: str
    bytes: int  # of the file with its external data, or of the serialized ModelProto
    digest: Digest
    remarks: tuple[str, ...] = ()
    skipped: tuple[SkippedNode, ...] = ()
    files: tuple[MappedFile, ...] = ()  # that weights are still read from; none for a model that is held in memory

    def check_unchanged(self) -> None:
        """Raise a ModelError if a file that weights are still read from has changed since it was opened."""
        check_unchanged(self.files)

    @property
    def sha256(self) -> str:
        """Of the file and its external data, or of the serialized ModelProto. Of a large one it may not be there yet,
        and is waited for."""
        return self.digest.hexdigest()


def load(source: str | PathLike[str] | onnx.ModelProto | bytes, options: LoadOptions | None = None) -> LoadedModel:
    """Read, check and normalize a model; see LoadedModel for what can be relied on.

    A model that cannot be quantized is a ModelError: no ONNX, damaged, unsafe external data, an operator or domain that
    nobody knows, an opset that is too new or cannot be lifted, sequences as inputs or outputs, quantized already.
    """
    options = LoadOptions() if options is None else options
    read = read_source(source)
    carved = carve(read)
    shorten_domains(carved.proto)
    check_structure(carved.proto, read.name)
    check_ports(carved.proto, read.name)
    check_functions(carved.proto, read.name)
    external = ExternalData(read)
    views = check_tensors(read, carved, external)
    check_operators(carved.proto, read.name)
    unusual = unusual_layer_types(carved.proto)
    carved, remarks = lift_opset(carved, options.opset, read.name, is_runnable=not unusual)
    drop_empty_inputs(carved.proto)
    model = to_graph(carved, views, read.name)
    remarks += normalize(model, read.name, keeps_inputs=options.has_initializers_as_inputs)
    kinds = [*unusual, ir.DataType.FLOAT16] if options.has_fp16_converted else unusual
    remarks += convert_to_float32(model, kinds, read.name)
    check_layers(model, read.name)
    remarks += fix_shapes(model, options.fixed_shapes)
    infer_shapes(model)
    inside = nodes_in_subgraphs(model)
    if inside:
        remarks.append(f"left in float, with everything inside: {_holders(inside)}")
    skipped = tuple(each.skipped for each in inside)
    size = len(read.data) + external.bytes
    return LoadedModel(model, read.name, size, external.digest(), tuple(remarks), skipped, external.mapped)


def _holders(inside: list[InSubgraph]) -> str:
    names = [f"{each.skipped.op_type} '{each.skipped.node}'" for each in inside if each.is_holder]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

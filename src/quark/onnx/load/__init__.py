"""Load a float model: from a file, its bytes or a ModelProto, checked and brought into one form.

    read -> carve -> check -> lift the opset -> onnx_ir -> normalize -> fix shapes -> infer shapes

Unsuitable models are refused here, before any weight is touched; the error names the file, and the node or tensor.
Neither the file nor the caller's ModelProto is ever changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import onnx
import onnx_ir as ir

from quark.onnx.graph import infer_shapes
from quark.onnx.input_files import MappedFile, check_unchanged
from quark.onnx.load.conversions import (
    convert_to_float32,
    learn_types,
    lift_opset,
    unusual_layer_types,
)
from quark.onnx.load.normalize import (
    check_functions,
    check_layers,
    drop_empty_inputs,
    fix_shapes,
    nodes_in_subgraphs,
    normalize,
)
from quark.onnx.load.reading import check_tensors, to_graph
from quark.onnx.load.source import Digest, ExternalData, read_source
from quark.onnx.load.structure import (
    MIN_OPSET,
    check_operators,
    check_ports,
    check_structure,
    declare_standard_opset,
    shorten_domains,
)
from quark.onnx.load.wire import carve
from quark.plan import SkippedNode

__all__ = ["Digest", "LoadOptions", "LoadedModel", "load"]


@dataclass(frozen=True)
class LoadOptions:
    """`opset` None keeps the model's if it is at least `least_opset`. `fixed_shapes` gives symbolic dimensions of
    inputs and outputs a size: (name, shape) pairs, or a single shape for every input under the name ''.
    `custom_libraries` have operators of other domains."""

    opset: int | None = None
    least_opset: int = MIN_OPSET
    has_fp16_converted: bool = False  # float16 weights and activations become float32 before anything else
    has_fp16_ports: bool = False  # the same, but float16 inputs and outputs of the graph stay, with a Cast
    needs_float32: bool = False  # the same, because of the configuration; a remark says so
    is_fp16_kept: bool = False  # float16 stays, whatever the configuration needs
    fixed_shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    has_initializers_as_inputs: bool = False  # initializers that are also inputs stay inputs, and may change
    has_bodies: bool = False  # subgraphs are quantized too, so that nothing is said of leaving them in float
    custom_libraries: tuple[Path, ...] = ()


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A float model, and where it came from.

    The caller may change the graph. Its opset is at least 13; node names are unique; Constant nodes are initializers;
    initializers are not inputs (unless asked for); functions are inlined; nodes are in topological order, without dead
    ones; types and shapes are known if they can be inferred; inputs and outputs keep their names and order.
    """

    model: ir.Model
    name: str
    bytes: int  # size of the file with its external data, or of the serialized ModelProto
    digest: Digest
    remarks: tuple[str, ...] = ()
    skipped: tuple[SkippedNode, ...] = ()
    files: tuple[MappedFile, ...] = ()  # files that weights are still read from; none for a model in memory

    def check_unchanged(self) -> None:
        """Raise a ModelError if a file that weights are still read from has changed since it was opened."""
        check_unchanged(self.files)

    @property
    def sha256(self) -> str:
        """Hash of the file and its external data, or of the serialized ModelProto. Waits until it is computed."""
        return self.digest.hexdigest()


def load(source: str | PathLike[str] | onnx.ModelProto | bytes, options: LoadOptions | None = None) -> LoadedModel:
    """Read, check and normalize a model; see LoadedModel for its properties.

    Raises ModelError if it cannot be quantized: it is not ONNX, damaged, has unsafe external data, an unknown operator
    or domain, an opset that is too new or cannot be lifted, sequences as inputs or outputs, or is quantized already.
    """
    options = LoadOptions() if options is None else options
    read = read_source(source)
    carved = carve(read)
    shorten_domains(carved.proto)
    declare_standard_opset(carved.proto)
    check_structure(carved.proto, read.name)
    check_ports(carved.proto, read.name)
    check_functions(carved.proto, read.name)
    external = ExternalData(read)
    views = check_tensors(read, carved, external)
    has_foreign = bool(options.custom_libraries)
    check_operators(carved.proto, read.name, has_foreign_domains=has_foreign)
    unusual = unusual_layer_types(carved.proto)
    carved, remarks = lift_opset(
        carved,
        options.opset,
        read.name,
        least=options.least_opset,
        is_runnable=not unusual,
        has_foreign_domains=has_foreign,
    )
    drop_empty_inputs(carved.proto)
    model = to_graph(carved, views, read.name)
    remarks += normalize(model, read.name, keeps_inputs=options.has_initializers_as_inputs)
    is_needed = options.needs_float32 and not options.is_fp16_kept
    is_half_converted = options.has_fp16_converted or options.has_fp16_ports or is_needed
    kinds = [*unusual, ir.DataType.FLOAT16] if is_half_converted else unusual
    kept = [ir.DataType.DOUBLE, *([] if options.has_fp16_converted else [ir.DataType.FLOAT16])]
    converted = convert_to_float32(model, kinds, read.name, kept)
    if is_needed and not (options.has_fp16_converted or options.has_fp16_ports):
        reason = ", because integer operators have float32 scales; QuantizeFP16=true leaves float16"
        converted = [remark + reason if remark.startswith("float16") else remark for remark in converted]
    remarks += converted
    check_layers(model, read.name)
    ends = {str(value.name) for value in model.graph.outputs} - {str(value.name) for value in model.graph.inputs}
    remarks += fix_shapes(model, tuple(pair for pair in options.fixed_shapes if pair[0] not in ends))
    infer_shapes(model)
    if has_foreign:
        learn_types(model)
    remarks += fix_shapes(model, tuple(pair for pair in options.fixed_shapes if pair[0] in ends))
    holders, skipped = ([], []) if options.has_bodies else nodes_in_subgraphs(model)
    if holders:
        names = ", ".join(f"{holder.op_type} '{holder.node}'" for holder in holders[:5])
        more = f" and {len(holders) - 5} more" if len(holders) > 5 else ""
        remarks.append(f"left in float, with everything inside: {names}{more}; EnableSubgraph=true quantizes it too")
    size = len(read.data) + external.bytes
    return LoadedModel(model, read.name, size, external.digest(), tuple(remarks), tuple(skipped), external.mapped)

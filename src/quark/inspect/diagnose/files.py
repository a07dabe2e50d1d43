"""The two files: read, checked to be a float network and its quantized form, and made comparable.

`restore` puts back what other forms of a quantized file leave out, so that its tensors can be matched and compared:

    activations   ONNX Runtime's quantizer and AMD's drop a Relu or Clip if the quantizer behind it saturates at the
                  same bounds. The tensor keeps the activation's name, and is something else up to the quantizer
    codes         QLinearConv and the like compute integers. Their scale is named after the tensor that they stand for:
                  they become floats under that name, and the same codes again

Neither changes what the file computes, except for a quantizer's last step beyond a Clip's bound. And in the float
graph:

    folded nodes  a BatchNormalization, or an Add or Mul with a constant, that became part of the layer before it: that
                  layer's result keeps its name, which in the float graph goes to what the folded node computes
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from quark.account import FileFacts
from quark.errors import InvalidValueError
from quark.files.foreign import REPORT, Fields, parse_json, read_json
from quark.inspect.diagnose.sites import COMPUTING, operands
from quark.onnx.file_graph import computed_graph, graph_of
from quark.onnx.graph import (
    add_initializer,
    add_node,
    constant,
    input_value,
    is_constant,
    is_read_once,
    nodes,
    readers,
)
from quark.onnx.input_files import MappedFile
from quark.onnx.load.source import ExternalData, read_source
from quark.onnx.load.structure import check_ports
from quark.onnx.load.wire import carve
from quark.onnx.plan_reader import CODE_OPERATORS, QuantizedGraph, is_quantize, is_quantizer, is_quantizing
from quark.plan import SkippedNode

ModelFile: TypeAlias = str | os.PathLike[str] | onnx.ModelProto

CONFIG_KEY = "quark.config"  # key in the metadata of our files
FOLDED = frozenset({"BatchNormalization", "Add", "Sub", "Mul", "Div"})
BEFORE_FOLDED = "/before folding"
BOUNDING = frozenset({"Relu", "Clip"})
OUTPUT_SCALES = {"QLinearConcat": 0} | {name: form.result for name, form in CODE_OPERATORS.items()}
NO_QUANTIZER = "no quantizer in the file"


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two models; `path` is None if it was not read from a file. `remarks` say what was converted."""

    model: ir.Model
    facts: FileFacts
    path: Path | None
    files: tuple[MappedFile, ...] = ()  # files that weights are still read from
    remarks: tuple[str, ...] = ()

    @property
    def is_quantized(self) -> bool:
        return any(is_quantizing(node) for node in self.model.graph)

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration that the file says it was made with; empty if it does not say."""
        try:
            content = parse_json(self.model.metadata_props.get(CONFIG_KEY, "{}"), CONFIG_KEY)
        except InvalidValueError:
            return {}  # it only helps to word the advice
        is_config = isinstance(content, dict) and isinstance(content.get("extra_options", {}), dict)
        return content if is_config else {}


def read_side(source: ModelFile, *, is_float: bool = False) -> Side:
    """Raises ModelError if the source is not an ONNX model. The float model is read as it is quantized: layers of
    float64 and bfloat16 compute in float32."""
    read = read_source(source)
    external = ExternalData(read)
    check_ports(carve(read).proto, read.name)
    model, remarks = computed_graph(read, external) if is_float else (graph_of(read, external), [])
    facts = FileFacts(read.name, len(read.data) + external.bytes, external.digest().hexdigest())
    path = Path(source) if isinstance(source, (str, os.PathLike)) else None
    return Side(model, facts, path, external.mapped, tuple(remarks))


def check_pair(exact: Side, quantized: Side) -> None:
    """Check that they are a float model and its quantized form, in that order, with the same inputs and outputs."""
    if exact.is_quantized and not quantized.is_quantized:
        raise InvalidValueError(
            f"'{exact.facts.name}' is quantized and '{quantized.facts.name}' is not: give the float model first"
        )
    if exact.is_quantized:
        raise InvalidValueError(f"'{exact.facts.name}' is quantized: expected the float model that it was made from")
    for kind in ("inputs", "outputs"):
        names = [
            [str(value.name) for value in getattr(graph, kind) if value.name not in graph.initializers]
            for graph in (exact.model.graph, quantized.model.graph)
        ]
        if set(names[0]) != set(names[1]):
            shown = [", ".join(f"'{name}'" for name in of_file) or "none" for of_file in names]
            raise InvalidValueError(
                f"the {kind} differ: '{exact.facts.name}' has {shown[0]}, '{quantized.facts.name}' has {shown[1]}. "
                "Give two forms of one network"
            )


@dataclass(frozen=True)
class Restored:
    """The number of nodes that were restored."""

    activations: int
    codes: int


def restore(exact: ir.Model, quantized: ir.Model) -> Restored:
    """Make the graphs comparable. This changes the quantized graph, and names in the float graph."""
    matches = {str(value.name) for node in quantized.graph for value in node.outputs}
    for node in exact.graph:
        result = node.outputs[0]
        if node.op_type not in FOLDED or result.name in matches or result.is_graph_output():
            continue
        data = [value for value in node.inputs if value is not None and not is_constant(value)]
        if len(data) == 1 and data[0].name in matches and data[0].producer() is not None and is_read_once(data[0]):
            name = str(data[0].name)
            data[0].name = f"{name}{BEFORE_FOLDED}"
            result.name = name
    known = {str(value.name): value for node in exact.graph for value in node.outputs}
    codes = sum(_open_codes(quantized, node, known) for node in nodes(quantized) if node.op_type in OUTPUT_SCALES)
    values = {str(value.name): value for node in quantized.graph for value in node.outputs}
    activations = sum(
        _bound(quantized, values[name], value)
        for name, value in known.items()
        if name in values and not values[name].is_graph_output()
    )
    return Restored(activations, codes)


def _open_codes(model: ir.Model, node: ir.Node, known: dict[str, ir.Value]) -> bool:
    index = OUTPUT_SCALES[node.op_type]
    scale, zero_point = input_value(node, index), input_value(node, index + 1)
    name = str(scale.name or "").removesuffix("_scale") if scale is not None else ""
    taken = {str(value.name) for other in model.graph for value in other.outputs}
    if scale is None or zero_point is None or name not in known or name in taken:
        return False
    result = node.outputs[0]
    uses = readers(result)
    floats = add_node(model, "DequantizeLinear", [result, scale, zero_point], after=node)
    floats.outputs[0].name, floats.outputs[0].type = name, ir.TensorType(ir.DataType.FLOAT)
    again = add_node(model, "QuantizeLinear", [floats.outputs[0], scale, zero_point], after=floats)
    codes = zero_point.dtype if zero_point.const_value is None else zero_point.const_value.dtype
    again.outputs[0].type = None if codes is None else ir.TensorType(codes)
    for reader, place in uses:
        reader.replace_input_with(place, again.outputs[0])
    return True


def _bound(model: ir.Model, value: ir.Value, exact: ir.Value) -> bool:
    """Put the activation behind a tensor that has its name and is not bounded, if only quantizers read it."""
    maker, wanted = value.producer(), exact.producer()
    uses = readers(value)
    if maker is None or wanted is None or wanted.op_type not in BOUNDING:
        return False
    if maker.op_type in BOUNDING or is_quantizer(maker) or not all(is_quantize(use) for use, _ in uses):
        return False
    bounds = _bounds(wanted)
    if bounds is None or not uses:
        return False
    name = str(value.name)
    value.name = f"{name}/unbounded"
    limits = [add_initializer(model, f"{name}_bound", np.float32(bound)) for bound in bounds]
    node = add_node(model, "Clip", [value, *limits], after=maker)
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = name, value.type, value.shape
    for reader, place in uses:
        reader.replace_input_with(place, node.outputs[0])
    return True


def _bounds(node: ir.Node) -> tuple[float, float] | None:
    if node.op_type == "Relu":
        return 0.0, float(np.finfo(np.float32).max)
    lowest, highest = constant(input_value(node, 1)), constant(input_value(node, 2))
    if lowest is None or highest is None:
        return None
    return float(lowest.reshape(())), float(highest.reshape(()))


def find_skipped(side: Side) -> tuple[SkippedNode, ...]:
    """Return the nodes that stayed in float.

    Their reasons are those of MODEL.json beside MODEL.onnx, if it was written for this very file.
    """
    path = None if side.path is None else side.path.with_suffix(".json")
    if path is not None and path.is_file():
        try:
            content = Fields(read_json(path, path.name, REPORT), path.name)
            if content.mapping("result").text("sha256") == side.facts.sha256:
                rows = content.mapping("plan").mappings("skipped")
                return tuple(SkippedNode(row.text("node"), row.text("op_type"), row.text("reason")) for row in rows)
        except InvalidValueError:
            pass  # some other file of that name
    graph = QuantizedGraph(side.model)
    return tuple(
        SkippedNode(str(node.name), node.op_type, NO_QUANTIZER)
        for node in side.model.graph
        if node.op_type in COMPUTING and not operands(node, graph)
    )

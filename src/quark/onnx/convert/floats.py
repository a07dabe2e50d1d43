"""Element types of float models: float32, float16 and bfloat16; infinite weights.

    to_float32, to_float16, to_bfloat16     the network computes in that type
    with_float16_ports                      inputs and outputs in float16 around a network in float32
    replace_infinities                      finite numbers instead of Inf in the weights

A type is changed by one function, `retype`, in the whole model, subgraphs included. Where a node cannot take the new
type, or is to be left alone, Casts stand between it and the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, inliner, numpy_helper

from quark.errors import InvalidValueError, ModelError
from quark.onnx.convert.operators import require
from quark.onnx.convert.quantizers import graph_of_model, model_of_graph
from quark.onnx.graph import add_node, fresh_name, graphs_in, infer_shapes, read_by, replace_input
from quark.onnx.optimize.constants import fold_constants, remove_identity
from quark.ops.onnx_nodes import CONSTANT_DOMAIN, all_nodes, subgraphs
from quark.ops.portable_functions import define_portable_functions
from quark.ops.schema import BLOCK_OPERATORS, DOMAIN
from quark.text import get_logger

FLOAT, FLOAT16, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
MAX_FLOAT16, MIN_FLOAT16 = 65504.0, 5.96e-08  # the magnitudes that ONNX Runtime's converter clips numbers to

# Operators that ONNX Runtime's converter leaves in float32: without float16 kernels, or inaccurate in float16.
FLOAT32_OPERATORS = frozenset({
    "ArrayFeatureExtractor", "Binarizer", "CastMap", "CategoryMapper", "CumSum", "DictVectorizer",
    "FeatureVectorizer", "Imputer", "LabelEncoder", "LinearClassifier", "LinearRegressor", "Max", "Min",
    "NonMaxSuppression", "Normalizer", "OneHotEncoder", "RandomUniformLike", "Range", "RoiAlign", "SVMClassifier",
    "SVMRegressor", "Scaler", "TopK", "TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor",
    "Upsample", "ZipMap",
})  # fmt: skip
_FLOAT32_INPUTS = {"Resize": (2,), "GroupNorm": (1, 2), "SkipGroupNorm": (1, 2)}  # regardless of their schemas
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype")
_DEFAULT_TYPES = {  # operators whose result is float32 unless an attribute says otherwise
    **dict.fromkeys(("RandomNormal", "RandomUniform", "SequenceEmpty"), "dtype"),
    **dict.fromkeys(("HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix"), "output_datatype"),
}
_BFLOAT16_OPSET = 13

Array = np.ndarray[Any, Any]

_log = get_logger(__name__)


# ---- whole models ----


def check_type(model: onnx.ModelProto, kind: ir.DataType, name: str = "") -> None:
    """Raise ModelError if no weight, constant, input or output has the type that is to be converted."""
    nodes = list(all_nodes(model.graph.node))
    constants = (attribute.t for node in nodes for attribute in node.attribute if attribute.HasField("t"))
    types = {tensor.data_type for tensor in (*_initializers(model.graph), *constants)}
    types |= {port.type.tensor_type.elem_type for port in (*model.graph.input, *model.graph.output)}
    types |= {attribute.i for node in nodes if node.op_type == "Cast" for attribute in node.attribute}
    require(kind in types, name or model, f"{kind.numpy().name} tensors")


def to_float32(
    model: onnx.ModelProto,
    disable_shape_infer: bool = False,
    op_block_list: Iterable[str] | None = None,
    node_block_list: Iterable[str] | None = None,
    subgraphs_to_include: Sequence[tuple[Sequence[str], Sequence[str]]] | None = None,
) -> onnx.ModelProto:
    """A float16 model in float32, with its inputs and outputs.

    Operators and nodes of the block lists stay in float16, between Casts. `subgraphs_to_include` has pairs of node
    names, (first nodes, last nodes): what lies between them is converted, and nothing else. Without first nodes, that
    is all that the last ones depend on; without last nodes, all that depends on the first ones.
    """
    graph = _graph(model, disable_shape_infer)
    types, names = frozenset(op_block_list or ()), frozenset(node_block_list or ())
    selected = _between(graph, subgraphs_to_include) if subgraphs_to_include else None

    def keep(node: ir.Node) -> bool:
        is_blocked = node.op_type in types or node.name in names
        return is_blocked or (selected is not None and node.graph is graph.graph and node not in selected)

    retype(graph, FLOAT16, FLOAT, ports=FLOAT if selected is None else FLOAT16, keep=keep, numbers=_single)
    remove_identity(graph)  # Casts from float16 to float32 have become one
    return _model(graph)


def to_float16(
    model: onnx.ModelProto,
    *,
    keep_io_types: bool = False,
    disable_shape_infer: bool = False,
    is_simplified: bool = True,
) -> onnx.ModelProto:
    """A float32 model in float16. Numbers beyond its range are clipped, as ONNX Runtime's converter does.

    Operators that have no float16 form stay in float32, between Casts. With `keep_io_types` inputs and outputs stay in
    float32 too. Constants are folded if `is_simplified`, and nodes removed that do nothing.
    """
    graph = _graph(model, disable_shape_infer)
    ports = FLOAT if keep_io_types else FLOAT16
    retype(graph, FLOAT, FLOAT16, ports=ports, keep=_is_float32_operator, numbers=_half, is_rounding=True)
    if is_simplified:
        remove_identity(graph)
        fold_constants(graph)
    return _model(graph)


def to_bfloat16(model: onnx.ModelProto, source: ir.DataType = FLOAT) -> onnx.ModelProto:
    """A model in bfloat16, which had the type `source`. Its inputs and outputs keep that type, and get a Cast.

    ONNX Runtime has few bfloat16 operators on the CPU, so the file is for compilers and other runtimes.
    """
    opset = next((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), 0)
    if opset < _BFLOAT16_OPSET:
        raise ModelError(
            f"'{model.graph.name or 'model'}' is of opset {opset}, and bfloat16 needs {_BFLOAT16_OPSET} or newer: "
            "convert it with `python -m quark.onnx.tools.convert_opset_version` first"
        )
    graph = _graph(model)
    without = sorted({node.op_type for node in graph.graph.all_nodes() if not _takes_bfloat16(node, opset)})
    if without:
        _log.warning(
            "in opset %d ONNX does not list bfloat16 for %s: ONNX Runtime refuses the file, compilers may take it",
            opset,
            ", ".join(without),
        )
    retype(graph, source, BFLOAT16, ports=source, keep=lambda node: False, numbers=_brain)
    return _model(graph)


def convert_to_bf16(model: onnx.ModelProto, qType: int, original_data_type: int = 1) -> onnx.ModelProto:  # noqa: N803
    """`to_bfloat16` with AMD's arguments, numbers of TensorProto types. `qType` can only be BFLOAT16."""
    if qType != BFLOAT16 or original_data_type not in (FLOAT, FLOAT16):
        raise InvalidValueError(
            f"qType {qType}, original_data_type {original_data_type}: expected TensorProto.BFLOAT16 for the first, and "
            "TensorProto.FLOAT or FLOAT16 for the second"
        )
    return to_bfloat16(model, ir.DataType(original_data_type))


def with_float16_ports(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with float16 instead of float32 inputs and outputs, and Casts between these and its nodes."""
    graph = _graph(model)
    retype(graph, FLOAT, FLOAT16, ports=FLOAT16, keep=lambda node: True, numbers=_half)
    return _model(graph)


def replace_infinities(model: onnx.ModelProto, number: float) -> int:
    """Replace Inf by `number` and -Inf by -`number` in the initializers of the model, in place; return in how many."""
    count = 0
    for tensor in _initializers(model.graph):
        if tensor.data_type not in _FLOAT_TYPES:
            continue
        array = numpy_helper.to_array(tensor)
        is_infinite = np.isinf(array)
        if not is_infinite.any():
            continue
        with np.errstate(over="ignore"):
            bound = np.asarray(number).astype(array.dtype)
        if not np.isfinite(bound):
            raise InvalidValueError(
                f"replace_inf_value {number:g}: initializer '{tensor.name}' is of {array.dtype}, whose largest number "
                f"is {float(ir.DataType(tensor.data_type).max):g}"
            )
        # compared with 0, because numpy has no sign for small floats
        changed = np.where(is_infinite, np.where(array > 0, bound, -bound), array).astype(array.dtype)
        tensor.CopyFrom(numpy_helper.from_array(changed, tensor.name))
        count += 1
        _log.info("initializer '%s': %d infinite numbers replaced", tensor.name, int(is_infinite.sum()))
    return count


_FLOAT_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


# ---- one type becomes another ----


def retype(
    model: ir.Model,
    old: ir.DataType,
    new: ir.DataType,
    *,
    ports: ir.DataType,
    keep: Callable[[ir.Node], bool],
    numbers: Callable[[Array], Array],
    is_rounding: bool = False,
) -> None:
    """Give every tensor of type `old` the type `new`, in place. Types must be inferred.

    ports      the type of the graph's inputs and outputs, `old` or `new`
    keep       True for nodes that stay with `old`; their subgraphs do as well
    numbers    converts constants
    is_rounding    results of kept nodes have the new type, also on their way to other kept nodes

    Inputs and outputs that can only be float32 by the operator's schema are kept too. A constant that nodes of both
    kinds read is stored in the smaller type, and cast for the others.
    """
    work = _Retyping(model, old, new, ports, numbers, is_rounding)
    work.assign(model.graph, keep, is_kept=False)
    work.carry_out()


@dataclass
class _Retyping:
    """The types that the values will have, and the Casts between them."""

    model: ir.Model
    old: ir.DataType
    new: ir.DataType
    ports: ir.DataType
    numbers: Callable[[Array], Array]
    is_rounding: bool
    kept: set[ir.Node] = field(default_factory=set)
    types: dict[ir.Value, ir.DataType] = field(default_factory=dict)  # the chosen types of values that had type `old`
    ends: list[tuple[ir.Graph, ir.DataType]] = field(default_factory=list)  # the types that a graph's outputs must have
    casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = field(default_factory=dict)

    def assign(self, graph: ir.Graph, keep: Callable[[ir.Node], bool], *, is_kept: bool) -> None:
        """Decide on the values of a graph and its subgraphs. `is_kept` says that the node it belongs to is kept."""
        inner_type = self.old if is_kept else self.new
        end = self.ports if graph is self.model.graph else inner_type
        self.ends.append((graph, end))
        self._note(graph.inputs, end)
        for node in graph:
            if is_kept or keep(node):
                self.kept.add(node)
            for attr in node.attributes.values():
                for inner in graphs_in(attr):
                    self.assign(inner, keep, is_kept=node in self.kept)
            for index, value in enumerate(node.outputs):
                self._note([value], self.old if self._is_old(node, index, is_output=True) else self.new)
        for value in graph.initializers.values():
            readers = [self._is_old(node, index) for node, index in value.uses()]
            is_narrower = self.new.itemsize < self.old.itemsize
            is_old = all(readers) if is_narrower else any(readers)
            self._note([value], self.old if is_old and readers else self.new)

    def carry_out(self) -> None:
        """Change constants, attributes and types, and insert the Casts."""
        ends = [(graph, end, *output) for graph, end in self.ends for output in enumerate(graph.outputs)]
        uses = {value: list(value.uses()) for value in self.types}
        for value, kind in self.types.items():
            self._set_type(value, kind)
        for graph, _ in self.ends:
            for node in graph:
                if node not in self.kept:
                    self._change_attributes(node)
        for value, places in uses.items():
            for node, index in places:
                wanted = self.old if self._is_old(node, index) else self.new
                if not isinstance(value.type, ir.TensorType):
                    continue
                if wanted != self.types[value]:
                    replace_input(node, index, self._cast(value, wanted))
                elif self.is_rounding and wanted == self.old and value.producer() is not None:
                    rounded = self._cast(value, self.new)
                    replace_input(node, index, self._cast(rounded, wanted))
        for graph, end, position, value in ends:
            if value in self.types and self.types[value] != end and isinstance(value.type, ir.TensorType):
                self._cast_output(graph, position, value, end)

    def _note(self, values: Iterable[ir.Value], kind: ir.DataType) -> None:
        self.types.update((value, kind) for value in values if _element(value.type) == self.old)

    def _is_old(self, node: ir.Node, index: int, *, is_output: bool = False) -> bool:
        """True if the node reads (or computes) this value in the old type."""
        if node in self.kept:
            return True
        if self.old != FLOAT:
            return False
        if not is_output and index in _FLOAT32_INPUTS.get(node.op_type, ()):
            return True
        version = self.model.opset_imports.get(node.domain, 1)
        return _is_float_only(node.domain, node.op_type, version, index, is_output)

    def _set_type(self, value: ir.Value, kind: ir.DataType) -> None:
        if kind == self.old:
            return
        value.type = _with_element(value.type, kind)
        if value.const_value is not None:
            value.const_value = self._converted(value.const_value)

    def _converted(self, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        return ir.Tensor(self.numbers(tensor.numpy()), self.new, name=tensor.name)

    def _cast(self, value: ir.Value, kind: ir.DataType) -> ir.Value:
        """The value in the other type; one Cast serves all readers."""
        if (value, kind) not in self.casts:
            cast = self._new_cast(value, kind, f"{value.name}_{kind.name.lower()}")
            maker, graph = value.producer(), value.graph
            if maker is not None:
                maker.append(cast)
            else:
                assert graph is not None
                graph.insert_before(graph[0], cast)
            self.casts[value, kind] = cast.outputs[0]
        return self.casts[value, kind]

    def _cast_output(self, graph: ir.Graph, position: int, value: ir.Value, kind: ir.DataType) -> None:
        """Change the type of a graph output, which keeps its name."""
        cast = self._new_cast(value, kind, f"{value.name}_{kind.name.lower()}")
        graph.append(cast)
        graph.outputs[position] = cast.outputs[0]
        if not value.is_graph_input() and not value.is_graph_output():
            name = str(value.name)
            value.name = fresh_name(self.model, f"{name}_{self.types[value].name.lower()}")
            cast.outputs[0].name = name

    def _new_cast(self, value: ir.Value, kind: ir.DataType, name: str) -> ir.Node:
        node = add_node(self.model, "Cast", [value], name=name, attributes={"to": kind})
        assert node.graph is not None
        node.graph.remove(node)
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(kind), value.shape
        return node

    def _change_attributes(self, node: ir.Node) -> None:
        for key, attr in list(node.attributes.items()):
            if attr.type == ir.AttributeType.TENSOR and attr.as_tensor().dtype == self.old:
                node.attributes[key] = ir.AttrTensor(key, self._converted(attr.as_tensor()))
            elif attr.type == ir.AttributeType.INT and key in _TYPE_ATTRIBUTES and attr.value == int(self.old):
                node.attributes[key] = ir.AttrInt64(key, int(self.new))
        if self.old != FLOAT or node.domain:
            return
        name = _DEFAULT_TYPES.get(node.op_type)
        if name is not None and name not in node.attributes:
            node.attributes[name] = ir.AttrInt64(name, int(self.new))
        if node.op_type == "ConstantOfShape" and "value" not in node.attributes:
            zero = ir.Tensor(self.numbers(np.zeros(1, np.float32)), self.new)
            node.attributes["value"] = ir.AttrTensor("value", zero)


@lru_cache(maxsize=4096)
def _is_float_only(domain: str, op_type: str, version: int, index: int, is_output: bool) -> bool:
    """True if the schema of an operator allows float32 there, and no other float type."""
    if domain not in ("", "ai.onnx.ml") or not onnx.defs.has(op_type, version, domain):
        return False
    schema = onnx.defs.get_schema(op_type, version, domain)
    parameters = schema.outputs if is_output else schema.inputs
    if not parameters:
        return False
    types = parameters[min(index, len(parameters) - 1)].types
    return "tensor(float)" in types and not types & {"tensor(float16)", "tensor(bfloat16)", "tensor(double)"}


def _takes_bfloat16(node: ir.Node, version: int) -> bool:
    """True unless the schema of a standard operator allows float32 for its first input, and no bfloat16."""
    if node.domain or not onnx.defs.has(node.op_type, version):
        return True
    inputs = onnx.defs.get_schema(node.op_type, version).inputs
    types = inputs[0].types if inputs else set()
    return "tensor(float)" not in types or "tensor(bfloat16)" in types


def _element(kind: ir.TypeProtocol | None) -> ir.DataType | None:
    if isinstance(kind, ir.TensorType):
        return kind.dtype
    return _element(kind.elem_type) if isinstance(kind, (ir.SequenceType, ir.OptionalType)) else None


def _with_element(kind: ir.TypeProtocol | None, element: ir.DataType) -> ir.TypeProtocol:
    if isinstance(kind, (ir.SequenceType, ir.OptionalType)):
        return type(kind)(_with_element(kind.elem_type, element), denotation=kind.denotation)
    return ir.TensorType(element)


def _single(array: Array) -> Array:
    return array.astype(np.float32)


def _brain(array: Array) -> Array:
    return array.astype(np.float32).astype(ml_dtypes.bfloat16)


def _half(array: Array) -> Array:
    """Numbers in float16; finite ones stay finite, and none becomes zero that was not."""
    magnitude = np.abs(array)
    clipped = np.where(np.isinf(array), magnitude, np.clip(magnitude, MIN_FLOAT16, MAX_FLOAT16))
    return np.where(magnitude == 0, array, np.copysign(clipped, array)).astype(np.float16)


# ---- parts of the work ----


def _is_float32_operator(node: ir.Node) -> bool:
    return node.op_type in FLOAT32_OPERATORS


def _graph(model: onnx.ModelProto, disable_shape_infer: bool = False) -> ir.Model:
    """The model as a graph with types. Functions are inlined, except those of our own operators."""
    ours = (DOMAIN, CONSTANT_DOMAIN)
    foreign = [(function.domain, function.name) for function in model.functions if function.domain not in ours]
    if foreign:
        model = inliner.inline_selected_functions(model, foreign)
    graph = graph_of_model(model)
    if not disable_shape_infer:
        infer_shapes(graph)
    return graph


def _model(graph: ir.Model) -> onnx.ModelProto:
    """The graph as a message. Functions of our operators may be for the types that the graph had."""
    model = model_of_graph(graph)
    if any(function.domain == DOMAIN and function.name in BLOCK_OPERATORS for function in model.functions):
        define_portable_functions(model)
    return model


def _between(graph: ir.Model, pairs: Sequence[tuple[Sequence[str], Sequence[str]]]) -> set[ir.Node]:
    """The nodes of the main graph that lie between first and last nodes, both included, for any of the pairs."""
    nodes = {node.name: node for node in graph.graph if node.name}
    for name in (name for pair in pairs for names in pair for name in names):
        if name not in nodes:
            raise InvalidValueError(f"subgraphs_to_include: the model has no node '{name}'")
    behind: dict[ir.Node, list[ir.Node]] = {node: [] for node in graph.graph}
    before: dict[ir.Node, list[ir.Node]] = {node: [] for node in graph.graph}
    for node in graph.graph:
        makers = {value.producer() for value in read_by(node)}
        for maker in (maker for maker in makers if maker in before):
            behind[maker].append(node)
            before[node].append(maker)
    between: set[ir.Node] = set()
    for first, last in pairs:
        reached = [
            _reachable([nodes[name] for name in names], steps)
            for names, steps in ((first, behind), (last, before))
            if names
        ]
        between |= set.intersection(*reached) if reached else set(graph.graph)
    if not between:
        raise InvalidValueError("subgraphs_to_include: no nodes lie between the given ones")
    return between


def _reachable(start: Sequence[ir.Node], steps: Mapping[ir.Node, list[ir.Node]]) -> set[ir.Node]:
    reached, pending = set(start), list(start)
    while pending:
        fresh = set(steps[pending.pop()]) - reached
        reached |= fresh
        pending += fresh
    return reached


def _initializers(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    """The initializers of a graph and of its subgraphs."""
    yield from graph.initializer
    for node in all_nodes(graph.node):
        for inner in subgraphs(node):
            yield from inner.initializer

"""The functions through which the steps access the graph, an onnx_ir model that is changed in place.

    reading     opset  nodes  constant  is_constant  readers  is_read_once  input_value  attribute  dimensions ...
    naming      fresh_name  FreeNames
    changing    add_initializer  add_copy  set_constant  add_node  become  replace_input  replace_value  bypass
                remove_node  remove_dead  infer_shapes
    parts       piece  frontier  read_by

A node inside a subgraph that reads an outer value counts as its reader, in `readers` and all that is based on it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, ShapeInferencePass

from quark.errors import InvalidValueError
from quark.onnx.large_tensors import MappedTensor, kept

FLOAT_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})

# Key in a node's meta store: it stays in float, and reads its input before that is quantized for others.
READS_FLOAT = "quark.onnx.reads_float"
COMPUTED = "/computed"  # suffix of a tensor of a piece that is both an input and an output
_MAX_COPIES = 100_000_000  # bytes of type copies during shape inference, about 10 seconds
_ATTRIBUTES: Mapping[type, Callable[[str, Any], ir.Attr]] = {
    int: ir.AttrInt64,
    float: ir.AttrFloat32,
    str: ir.AttrString,
}
_NAMES = "quark.onnx.graph.names"  # key of the names in use, in the model's meta store


def opset(model: ir.Model) -> int:
    """The version of the standard operators that the model imports."""
    return model.opset_imports[""]


def nodes(model: ir.Model) -> list[ir.Node]:
    """The nodes of the main graph in order, as a list, so that the graph may change during iteration."""
    return list(model.graph)


def constant(value: ir.Value | None) -> np.ndarray[Any, Any] | None:
    """Return the array of an initializer of the main graph, or None if the value is computed or given at run time.

    An initializer that is also an input of the graph is not a constant: a caller may give another value. The array
    must not be written to. Files hold tensors at any address; one that is not aligned is copied, so that native code
    can read it.
    """
    if value is None or value.const_value is None or not is_constant(value):
        return None
    array = np.require(value.const_value.numpy(), requirements=["C", "A"])
    if isinstance(value.const_value, MappedTensor):
        value.const_value.note_read()
    return array


def is_constant(value: ir.Value | None) -> bool:
    """True if `constant` returns an array. Unlike that, this does not read a large weight."""
    is_held = value is not None and value.const_value is not None and value.is_initializer()
    return is_held and value is not None and not value.is_graph_input()


def readers(value: ir.Value) -> list[tuple[ir.Node, int]]:
    """The nodes that read the value, including those inside subgraphs, each with the index of the input.

    They are in the order of the graph, except for readers that were rewired since.
    """
    return [(use.node, use.idx) for use in value.uses()]


def is_read_once(value: ir.Value) -> bool:
    """True if a single input of a single node reads the value, and it is not a graph output."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def input_value(node: ir.Node, index: int) -> ir.Value | None:
    """Input number `index`; None if the node has no such input, or omits it."""
    return node.inputs[index] if 0 <= index < len(node.inputs) else None


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """The value of an attribute: a Python number or string, a tuple of them, or a tensor or graph of onnx_ir."""
    attr = node.attributes.get(name)
    return default if attr is None else attr.value


def dimensions(value: ir.Value | None) -> tuple[int | None, ...] | None:
    """The shape, with None for an unknown dimension; None if not even the rank is known."""
    if value is None or value.shape is None:
        return None
    return tuple(size if isinstance(size, int) else None for size in value.shape)


def rank(value: ir.Value | None) -> int | None:
    """The number of dimensions, or None if unknown."""
    return None if value is None or value.shape is None else len(value.shape)


def is_float(value: ir.Value | None) -> bool:
    """True if the value is known to be a tensor of float32, float16, bfloat16 or float64."""
    return value is not None and isinstance(value.type, ir.TensorType) and value.dtype in FLOAT_TYPES


def clip_bounds(node: ir.Node) -> tuple[float, float] | None:
    """The bounds of a Relu or Clip; None if they are only known at run time."""
    if node.op_type == "Relu":
        return 0.0, np.inf
    bounds = []
    for index, default in ((1, -np.inf), (2, np.inf)):
        value = input_value(node, index)
        array = constant(value)
        if value is not None and (array is None or array.size != 1):
            return None
        bounds.append(default if array is None else float(array.item()))
    return bounds[0], bounds[1]


def fresh_name(model: ir.Model, base: str) -> str:
    """Return `base`, or `base_1`, `base_2` ... if it is taken by a value or a node.

    The model remembers the names it returned. Names that other code creates after the first call are not known.
    """
    names = model.meta.get(_NAMES)
    if not isinstance(names, FreeNames):
        names = model.meta[_NAMES] = FreeNames([""])
        for graph in model.graphs():
            names.take(value.name for value in (*graph.inputs, *graph.initializers.values()))
            for node in graph:
                names.take([node.name])
                names.take(value.name for value in node.outputs)
    return names.free(base)


class FreeNames:
    """The names in use; a name that is taken gets a number.

    Numbers continue where they ended for the same name, so thousands of equal names take linear time.
    """

    def __init__(self, taken: Iterable[str | None] = (), *, first: int = 1) -> None:
        self._taken = {name for name in taken if name is not None}
        self._first = first
        self._next: dict[str, int] = {}

    def take(self, names: Iterable[str | None]) -> None:
        """Mark names as used."""
        self._taken.update(name for name in names if name is not None)

    def free(self, base: str) -> str:
        """Return `base`, or `base` with the first free number if it is taken. The result is in use from now on."""
        name = base
        if base in self._taken:
            number = self._next.get(base, self._first)
            while (name := f"{base}_{number}") in self._taken:
                number += 1
            self._next[base] = number + 1
        self._taken.add(name)
        return name


def add_initializer(model: ir.Model, name: str, content: np.ndarray[Any, Any] | ir.TensorProtocol) -> ir.Value:
    """Add a constant to the main graph under a fresh name that starts with `name`."""
    fresh = fresh_name(model, name)
    tensor = kept(model, np.asarray(content), fresh) if isinstance(content, (np.ndarray, np.generic)) else content
    tensor.name = fresh
    shape = ir.Shape(tensor.shape.numpy())
    value = ir.Value(name=fresh, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
    model.graph.register_initializer(value)
    return value


def add_copy(model: ir.Model, value: ir.Value) -> ir.Value:
    """Add a constant with the values of another. They share memory until one of them is replaced."""
    tensor, name = value.const_value, value.name or "copy"
    assert tensor is not None, name
    shared = tensor.named(name) if isinstance(tensor, MappedTensor) else ir.Tensor(tensor.numpy(), tensor.dtype)
    return add_initializer(model, name, shared)


def add_node(  # noqa: PLR0913 - options of the public interface, by keyword
    model: ir.Model,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    *,
    before: ir.Node | None = None,
    after: ir.Node | None = None,
    name: str | None = None,
    domain: str = "",
    attributes: Mapping[str, Any] | None = None,
    outputs: int = 1,
) -> ir.Node:
    """Add a node before or after another one, or at the end of the main graph. Its name and those of its outputs are
    fresh and start with `name` (by default the operator's); an attribute of None is omitted.

    The outputs have no type and no shape yet, except that the first one has the type of the first input.
    """
    if before is not None and after is not None:
        raise InvalidValueError(f"{op_type}: a node goes before another or after it, not both")
    base = op_type if name is None else name
    given = {key: value for key, value in (attributes or {}).items() if value is not None}
    values = [ir.Value(name=fresh_name(model, f"{base}_output")) for _ in range(outputs)]
    first = next((value for value in inputs if value is not None), None)
    if values and first is not None and first.type is not None:
        values[0].type = first.type
    node = ir.Node(
        domain,
        op_type,
        inputs,
        [_attribute(key, value) for key, value in given.items()],
        outputs=values,
        name=fresh_name(model, base),
    )
    if before is not None:
        before.prepend(node)
    elif after is not None:
        after.append(node)
    else:
        model.graph.append(node)
    return node


def _attribute(name: str, value: Any) -> ir.Attr:
    """Make an attribute. onnx_ir would infer the type of the value by many checks against protocols, which are slow."""
    make = _ATTRIBUTES.get(type(value))
    return ir.convenience.convert_attribute(name, value) if make is None else make(name, value)


def in_dtype(array: np.ndarray[Any, Any], like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """A constant computed in float64, rounded once to the type of `like`; None if that overflows.

    >>> in_dtype(np.array([1.5, 7e4]), np.zeros(1, np.float16)) is None
    True
    """
    with np.errstate(all="ignore"):
        rounded = array.astype(like.dtype)
    return rounded if bool(np.isfinite(rounded.astype(np.float64)).all()) else None


def set_constant(model: ir.Model, node: ir.Node, index: int, array: np.ndarray[Any, Any], name: str = "") -> ir.Value:
    """Replace the constant at input number `index` of a node.

    The initializer there is changed in place if nothing else reads it. Otherwise, or if there is none, a new one is
    added whose name starts with that of the old one, or with `name`.
    """
    value = input_value(node, index)
    if value is not None and is_constant(value) and is_read_once(value):
        tensor = kept(model, array, str(value.name))
        value.const_value = tensor
        value.type = ir.TensorType(tensor.dtype)
        value.shape = ir.Shape(array.shape)
        return value
    base = value.name if value is not None and value.name else name or f"{node.name}_constant"
    added = add_initializer(model, base, array)
    replace_input(node, index, added)
    return added


def become(
    node: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any] | None = None
) -> None:
    """Turn a node into another standard operator, with exactly these inputs and attributes.

    It keeps its name and its first output with its readers; other outputs must have none.
    """
    node.op_type, node.domain = op_type, ""
    node.attributes.clear()
    for attr in ir.convenience.convert_attributes({k: v for k, v in (attributes or {}).items() if v is not None}):
        node.attributes.add(attr)
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)
    if len(node.outputs) > 1:
        node.resize_outputs(1)


def replace_input(node: ir.Node, index: int, value: ir.Value | None) -> None:
    """Let input number `index` read another value; omitted inputs before it stay omitted."""
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


def replace_value(old: ir.Value, new: ir.Value) -> bool:
    """Let all readers of `old`, nodes and graph outputs, read `new`.

    A graph output keeps its name: `new` takes it, and `old` gets another. Returns False and changes nothing if that is
    impossible: `old` is a graph output, and `new` is one as well, or an input or a constant. `new` inherits the type
    and shape of `old` if its own are unknown.
    """
    if old is new:
        return True
    if not old.is_graph_output():
        old.replace_all_uses_with(new)
        _inherit(old, new)
        return True
    if new.is_graph_output() or new.producer() is None or new.graph is not old.graph:
        return False
    name, spare = old.name, new.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name = f"{spare}/replaced"  # no two values share a name, not even for a moment
    new.name = name
    old.name = spare
    _inherit(old, new)
    return True


def bypass(node: ir.Node, source: ir.Value | None = None) -> bool:
    """Connect the readers of a node's first output to `source`, by default its first input, and remove the node.
    Returns False and changes nothing if the node is between a graph output and a value that cannot take its name."""
    value = input_value(node, 0) if source is None else source
    if value is None or not replace_value(node.outputs[0], value):
        return False
    remove_node(node)
    return True


def remove_node(node: ir.Node) -> None:
    """Remove a node that nothing reads any more."""
    if node.graph is not None:
        node.graph.remove(node, safe=True)


def remove_dead(model: ir.Model) -> bool:
    """Remove the nodes and initializers that no graph output depends on; returns True if there were any."""
    return bool(RemoveUnusedNodesPass()(model).modified)


def infer_shapes(model: ir.Model) -> None:
    """Add the types and shapes that ONNX's inference finds; all others stay as declared.

    Large weights are not passed to it. Failure of the inference is not an error, because later steps can do without
    shapes. Inference is skipped if ONNX would have to copy the types of too many values for too many subgraphs.
    """
    subgraphs = sum(1 for _ in model.graphs()) - 1
    if subgraphs * sum(len(node.outputs) for node in model.graph) > _MAX_COPIES:
        return
    # if inference fails, onnx_ir logs a malformed message, and logging would print a traceback
    log = logging.getLogger("onnx_ir.passes.common.shape_inference")
    was_disabled, log.disabled = log.disabled, True
    try:
        ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    finally:
        log.disabled = was_disabled
    _forget_types_of_sequences(model.graph, model.opset_imports)


def _forget_types_of_sequences(graph: ir.Graph, versions: Mapping[str, int]) -> None:
    """Remove the types that onnx_ir assigns to sequences, maps and optional values without a declared type. It gives
    them the type of their elements, as if they were tensors."""
    for node in graph:
        inner = _subgraphs(node)
        for inner_graph in inner:
            _forget_types_of_sequences(inner_graph, versions)
        for index, value in enumerate(node.outputs):
            if node.domain == "" and node.op_type in ("If", "Loop") and inner:
                given = inner[0].outputs  # the first one of a Loop is the condition
                position = index if node.op_type == "If" else index + 1
                is_tensor = position >= len(given) or given[position].type is not None
            elif node.domain == "" and node.op_type == "Identity":
                is_tensor = node.inputs[0] is None or node.inputs[0].type is not None
            else:
                is_tensor = index not in _sequence_outputs(node.domain, node.op_type, versions.get(node.domain, 1))
            if not is_tensor and isinstance(value.type, ir.TensorType):
                value.type = value.shape = None


@functools.lru_cache(maxsize=4096)
def _sequence_outputs(domain: str, op_type: str, version: int) -> frozenset[int]:
    """The indices of an operator's outputs that are never tensors."""
    is_known = domain in ("", "ai.onnx.ml") and 0 < version < 2**31  # onnx accepts no other versions
    if not is_known or not onnx.defs.has(op_type, version, domain):
        return frozenset()
    outputs = onnx.defs.get_schema(op_type, version, domain).outputs
    return frozenset(
        index for index, output in enumerate(outputs) if not any(kind.startswith("tensor(") for kind in output.types)
    )


def bodies(graph: ir.Graph) -> list[tuple[ir.Graph, ir.Node]]:
    """The subgraphs of If, Loop and Scan, each with the node that holds it. An outer subgraph comes before those inside
    it."""
    graphs = []
    for node in graph:
        for body in (graph for attr in node.attributes.values() for graph in graphs_in(attr)):
            graphs += bodies(body)
            if node.op_type in ("If", "Loop", "Scan") and node.domain in ("", "ai.onnx"):
                graphs.append((body, node))
    return graphs


def as_model(model: ir.Model, body: ir.Graph) -> ir.Model:
    """A body of this model as a model of its own, to be read and changed in place.

    The two share the names in use and the versions of operators. The body may read values of outer graphs.
    """
    fresh_name(model, "body")  # from now on the names in use are known
    body.opset_imports.update(model.opset_imports)
    part = ir.Model(body, ir_version=model.ir_version)
    part.meta[_NAMES] = model.meta[_NAMES]
    return part


def graphs_in(attr: ir.Attr) -> Sequence[ir.Graph]:
    """The graphs that an attribute holds."""
    if attr.is_ref():
        return ()
    if attr.type == ir.AttributeType.GRAPH:
        return (attr.as_graph(),)
    return attr.as_graphs() if attr.type == ir.AttributeType.GRAPHS else ()


def _inherit(old: ir.Value, new: ir.Value) -> None:
    if old.shape is not None and (new.shape is None or (new.shape.is_dynamic() and not new.is_graph_input())):
        new.shape = old.shape
    if new.type is None:
        new.type = old.type


# ---- parts of a model ----


def piece(model: ir.Model, inputs: Collection[str], outputs: Sequence[str]) -> ir.Model:
    """The part of a model that computes `outputs` from `inputs`, any of its tensors, as a model. Weights are shared.

    A tensor can be both: nodes read the given one, and the computed one is an output whose name ends in COMPUTED.
    """
    values = {str(value.name): value for node in model.graph for value in node.outputs}
    values |= {str(value.name): value for value in model.graph.inputs}
    given = set(inputs)
    needed: set[ir.Node] = set()
    pending = [values[name].producer() for name in outputs]
    while pending:
        node = pending.pop()
        if node is not None and node not in needed:
            needed.add(node)
            pending += [value.producer() for value in read_by(node) if value.name not in given]
    # clone only what is needed: a large model is cut into hundreds of pieces
    read = {str(value.name) for node in needed for value in read_by(node)} | set(outputs)
    own = {str(value.name) for value in model.graph.inputs}
    cut = [values[name] for name in inputs if name not in own and values[name].producer() not in needed]
    view = ir.GraphView(
        [*model.graph.inputs, *cut],
        [],
        nodes=[node for node in model.graph if node in needed],
        initializers=[value for name, value in model.graph.initializers.items() if name in read or name in own],
        opset_imports=model.graph.opset_imports,
        name=model.graph.name,
    )
    part = ir.Model(
        view.clone(),
        ir_version=model.ir_version,
        functions=[function.clone() for function in model.functions.values()],
    )
    graph = part.graph
    for value in graph.inputs[len(model.graph.inputs) :]:
        value.shape = None  # the declared shape of an inner tensor is often only inferred
    values = {str(value.name): value for value in graph.inputs}
    values |= {str(value.name): value for node in graph for value in node.outputs}
    for name in inputs:
        if name in own or values[name].is_graph_input():
            continue
        old = values[name]
        replaced = ir.Value(name=name, type=old.type)
        old.name = f"{name}{COMPUTED}"
        old.replace_all_uses_with(replaced)
        graph.inputs.append(replaced)
    graph.outputs.extend(values[name] for name in outputs)
    branching = [node for node in graph if _subgraphs(node)]
    while remove_dead(part):
        # subgraphs of removed nodes still count as readers of the values that they capture
        gone = [node for node in branching if node.graph is None]
        branching = [node for node in branching if node.graph is not None]
        for inner in (inner for node in gone for subgraph in _subgraphs(node) for inner in subgraph.all_nodes()):
            for index in range(len(inner.inputs)):
                inner.replace_input_with(index, None)
    for value in list(graph.inputs):
        if not value.uses():
            graph.inputs.remove(value)
    return part


def frontier(model: ir.Model, last: int) -> list[str]:
    """The tensors that the nodes after number `last` read from the graph's inputs and from earlier nodes."""
    nodes = list(model.graph)
    given = model.graph.initializers
    known = {id(value) for value in model.graph.inputs if value.name not in given}
    known |= {id(value) for node in nodes[: last + 1] for value in node.outputs}
    read = (value for node in nodes[last + 1 :] for value in read_by(node))
    return list(dict.fromkeys(str(value.name) for value in read if id(value) in known))


def read_by(node: ir.Node) -> Iterable[ir.Value]:
    """The values that a node reads, including those that its subgraphs capture."""
    yield from (value for value in node.inputs if value is not None)
    for graph in _subgraphs(node):
        inner = list(graph.all_nodes())
        own = [graph, *(node.graph for node in inner)]
        read = (value for node in inner for value in node.inputs if value is not None)
        yield from (value for value in read if not any(value.graph is own_graph for own_graph in own))


def _subgraphs(node: ir.Node) -> list[ir.Graph]:
    return [graph for attr in node.attributes.values() for graph in graphs_in(attr)]

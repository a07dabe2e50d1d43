"""Where attention and feed-forward layers can be rotated: the products of attention, what computes and reads them.

    scores = q k'           R3: q R (k R)' is the same
    mixed = softmax(scores) v
    output = mixed W        R2: v is computed by a layer too, so (v R) and R' W in the two weights give the same
    down(act(up(x)))        R4: act cannot be rotated, so what it computes is multiplied by R at inference

Which columns of a weight are the channels of a head is not told by the graph alone: Split, Reshape and Transpose nodes
with computed shapes are between them. So only the nodes are found here; numbers are sent through them to find out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from quark.decide.view import Graph, Node, Value
from quark.features.rotation.streams import PRODUCTS, Place, channels_of, vector_operand, weight_of, width

_MOVES = frozenset(
    ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Transpose", "Slice", "Split", "Gather", "Concat")
    + ("Tile", "Identity", "Dropout", "Cast")
)
_AROUND_SOFTMAX = frozenset(("Add", "Sub", "Mul", "Div", "Where", "Tanh", "Max", "Clip")) | _MOVES
_ACTIVATIONS = frozenset(
    ("Relu", "Gelu", "FastGelu", "QuickGelu", "BiasGelu", "Sigmoid", "Tanh", "LeakyRelu", "Elu", "Selu", "HardSwish")
    + ("Swish", "Clip", "Softplus", "Mish", "PRelu")
)
_MOST_STEPS = 12  # between the two products of attention


@dataclass(eq=False)
class Attention:
    """One product with the probabilities of a Softmax.

    `source` is the tensor whose channels become the heads' values, `writer` the layer that computes it, with the
    constant that is added to it, and `outputs` the layers that read the result. `others` are further readers of the
    source, which must not see rotated channels. With an `obstacle`, R2 is not possible.
    """

    product: Node
    scores: Node | None = None
    source: Value | None = None
    writer: Node | None = None
    bias: Place | None = None
    outputs: list[Node] = field(default_factory=list)
    others: list[tuple[Value, Place]] = field(default_factory=list)
    obstacle: str = ""


def find_attention(graph: Graph) -> list[Attention]:
    """All products of probabilities and values, in the order of the graph."""
    attentions = []
    for node in graph:
        softmax = _softmax_before(node) if _is_dynamic_product(node) else None
        if softmax is not None:
            attention = Attention(node, _product_before(softmax))
            _trace_values(attention)
            _trace_outputs(attention)
            attentions.append(attention)
    return attentions


def find_down_projections(graph: Graph, attentions: Iterable[Attention]) -> list[Node]:
    """The layers that read an activation function or a gate and write to a residual sum."""
    outputs = {node for attention in attentions for node in attention.outputs}
    return [
        node
        for node in graph
        if node.op_type in PRODUCTS
        and node not in outputs
        and weight_of(node) is not None
        and _is_activation(node.input(0))
        and _reaches_residual(node.outputs[0])
    ]


def find_layers(graph: Graph) -> list[Node]:
    """All products with a constant weight."""
    return [node for node in graph if node.op_type in PRODUCTS and weight_of(node) is not None]


def _is_dynamic_product(node: Node) -> bool:
    return (
        node.op_type == "MatMul" and node.is_standard and all(v is not None and v.constant is None for v in node.inputs)
    )


def _softmax_before(node: Node) -> Node | None:
    """The Softmax whose probabilities are the first operand, with nothing but casts, masks and moves between."""
    value = node.input(0)
    for _ in range(_MOST_STEPS):
        producer = None if value is None else value.producer
        if producer is None or producer.op_type == "Softmax":
            return producer
        if producer.op_type == "Where":
            value = next(
                (input_ for input_ in producer.inputs[1:] if input_ is not None and input_.constant is None), None
            )
        elif producer.op_type in _MOVES:
            value = producer.input(0)
        else:
            return None
    return None


def _product_before(softmax: Node) -> Node | None:
    """The product of queries and keys whose result reaches the Softmax."""
    pending, seen = [softmax.input(0)], set()
    for value in pending:
        producer = None if value is None or len(pending) > 4 * _MOST_STEPS else value.producer
        if producer is None or producer in seen:
            continue
        seen.add(producer)
        if _is_dynamic_product(producer):
            return producer
        if producer.op_type in _AROUND_SOFTMAX:
            pending += producer.inputs
    return None


def _trace_values(attention: Attention) -> None:
    """Find the layer that computes the values, and everything else that reads its result."""
    sources = _sources(attention.product.input(1))
    if len(sources) != 1:
        attention.obstacle = f"the values come from {len(sources)} tensors"
        return
    (source,) = sources
    node = source.producer
    attention.source = source
    if node is not None and node.op_type == "Add" and (operands := vector_operand(node)) is not None:
        attention.bias = (node, operands[0])
        before = node.input(operands[1])
        is_alone = before is not None and len(before.readers) == 1 and not before.outputs
        node = before.producer if before is not None and is_alone else None
    gemm_bias = None if node is None or node.op_type != "Gemm" else node.input(2)
    if node is None or node.op_type not in PRODUCTS or channels_of(node, of_input=False) is None:
        attention.obstacle = f"the values, tensor '{source.name}', are not computed by a MatMul with a constant weight"
    elif gemm_bias is not None and gemm_bias.constant is None:
        attention.obstacle = f"the bias of '{node.label}', which computes the values, is not a constant"
    else:
        attention.writer = node
    leaves = _leaves(source)
    attention.others = [leaf for leaf in leaves if leaf[1] != (attention.product, 1)]
    if any(value.outputs for value in _moved(source)):
        attention.obstacle = "the values are a graph output, such as a cache, whose meaning would change"


def _trace_outputs(attention: Attention) -> None:
    """Find the layers that read what attention computes."""
    result = attention.product.outputs[0]
    for _, (node, index) in _leaves(result):
        if node.is_inner or index != 0 or node.op_type not in PRODUCTS or weight_of(node) is None:
            attention.obstacle = attention.obstacle or f"its result is read by {node.op_type} '{node.label}'"
        else:
            attention.outputs.append(node)
    attention.outputs = list(dict.fromkeys(attention.outputs))
    if any(value.outputs for value in _moved(result)):
        attention.obstacle = attention.obstacle or "its result is a graph output"
    elif not attention.outputs:
        attention.obstacle = attention.obstacle or "no layer reads its result"


def _sources(value: Value | None) -> list[Value]:
    """The tensors that a tensor is moved together from."""
    sources: dict[Value, None] = {}
    pending, seen = [value], set()
    while pending:
        current = pending.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        node = current.producer
        if node is not None and node.op_type in _MOVES and node.is_standard:
            pending += node.inputs if node.op_type == "Concat" else node.inputs[:1]
        else:
            sources[current] = None
    return list(sources)


def _moved(source: Value) -> list[Value]:
    """A tensor, and what it is moved to."""
    values = [source]
    for value in values:
        for node, index in value.readers:
            is_move = node.op_type in _MOVES and node.is_standard and not node.is_inner
            if is_move and (index == 0 or node.op_type == "Concat"):
                values += [output for output in node.outputs if output not in values]
    return values


def _leaves(source: Value) -> list[tuple[Value, Place]]:
    """The readers of a tensor behind all moves, with the moved tensor; those that only need a shape are left out."""
    moved = _moved(source)
    inside = set(moved)
    return [
        (value, (node, index))
        for value in moved
        for node, index in value.readers
        if node.op_type not in ("Shape", "Size") and not any(output in inside for output in node.outputs)
    ]


def _is_activation(value: Value | None) -> bool:
    """True if an activation function, or a product of two tensors of the same width, computes the tensor."""
    node = None if value is None else value.producer
    while node is not None and node.op_type in ("Identity", "Dropout", "Cast", "Reshape"):
        value = node.input(0)
        node = None if value is None else value.producer
    if node is None or node.op_type != "Mul":
        return node is not None and node.op_type in _ACTIVATIONS
    first, second = node.input(0), node.input(1)
    if vector_operand(node) is not None or first is None or second is None:
        return False
    is_constant = first.constant is not None or second.constant is not None
    return is_constant or width(first) == width(second)


def _reaches_residual(value: Value) -> bool:
    """True if a sum of two tensors reads it, perhaps after a bias and a scale."""
    for _ in range(_MOST_STEPS):
        if len(value.readers) != 1:
            return False
        node = value.readers[0][0]
        if node.op_type == "Add" and all(input_ is not None and input_.constant is None for input_ in node.inputs):
            return True
        if node.op_type not in ("Add", "Mul", "Identity", "Dropout", "Cast", "Reshape") or node.is_inner:
            return False
        value = node.outputs[0]
    return False

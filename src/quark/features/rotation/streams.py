"""The residual streams of a network: the tensors that one rotation of the channels, their last axis, can go through.

Nodes that commute with a rotation R of the last axis join their inputs and outputs:

    x + y, x + constant (rotated too)         x / r, x * r with one number r for all channels of a position
    Reshape, Transpose, Slice, Concat ...     of other axes
    mean and sum over other axes              LayerNormalization and its kin, without scale and bias

That includes decomposed normalizations: mean(x^2) does not change under R, and mean(x) does not either if R keeps the
vector of ones, so nodes that compute them may read rotated tensors as they are. Multiplying by one number per channel
does not commute. Such a gain, also that of a normalization, goes into the layers behind it if nothing else reads its
result (`Gain.is_forward`), or into the layers before it if nothing else computes its input.

What is joined in this way ends at layers. A MatMul, Gemm or Gather with a constant weight takes the rotation into its
weight. At any other place, a product with R or its inverse has to be inserted (`entries`, `exits`). A few of these at
the ends of a network are worth it; otherwise the stream is not rotated, and `obstacle` says what is in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from quark.decide.view import Graph, Node, Value

Place = tuple[Node, int]  # a node and the index of its input
PRODUCTS = ("MatMul", "Gemm")
NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
MOST_NAMED = 3  # tensors in a message
FOLDED_PER_INSERTED = 4  # layers that must take the rotation into their weights, for every product that is inserted

_SIZES = ("Shape", "Size")
_POOL = "GlobalAveragePool"  # the form that optimization gives the mean over the last axis of three


@dataclass(eq=False)
class Gain:
    """One factor per channel, between two tensors. `node` is a Mul, or a normalization that may also add a shift."""

    node: Node
    data: int  # the input of the node that is multiplied
    factor: int
    source: Value
    result: Value
    shift: int | None = None  # the input of a normalization that is added
    is_forward: bool = True  # True if it is folded into the layers behind it
    layers: list[Node] = field(default_factory=list)  # the layers that it is folded into
    constants: list[Place] = field(default_factory=list)  # constants that are added between it and these layers

    @property
    def is_norm(self) -> bool:
        return self.node.op_type in NORMS

    @property
    def is_trivial(self) -> bool:
        """True if it multiplies by 1 and adds nothing."""
        factor = self.node.input(self.factor)
        shift = None if self.shift is None else self.node.input(self.shift)
        is_one = factor is None or bool(np.all(factor.array() == 1))
        return is_one and (shift is None or not np.any(shift.array()))


@dataclass(eq=False)
class Stream:
    """Tensors that are rotated together, and what has to change for it.

    `entries` are computed by something that cannot be rotated, and `exits` are read by something that must not see the
    rotation. Each has the inputs of nodes that need the other form; a graph output has none.
    """

    size: int
    values: list[Value] = field(default_factory=list)
    writers: list[Node] = field(default_factory=list)  # layers whose weight is rotated at its output
    readers: list[Node] = field(default_factory=list)  # layers whose weight is rotated at its input
    constants: list[Place] = field(default_factory=list)
    gains: list[Gain] = field(default_factory=list)
    entries: dict[Value, list[Place]] = field(default_factory=dict)
    exits: dict[Value, list[Place]] = field(default_factory=dict)
    needs_mean: bool = False  # only rotations that keep the vector of ones commute with it
    norms: int = 0

    @property
    def is_worthwhile(self) -> bool:
        """True if there is a normalization, and few products have to be inserted."""
        folded = len(self.writers) + len(self.readers)
        is_whole = bool(self.norms and self.writers and self.readers)
        return is_whole and folded >= FOLDED_PER_INSERTED * (len(self.entries) + len(self.exits))

    @property
    def obstacle(self) -> str:
        """The tensors that prevent a rotation, with the nodes that write or read them; empty if there are none."""
        texts = [f"tensor '{value.name}' is {_origin(value)}" for value in self.entries]
        texts += [f"tensor '{value.name}' is {_use(places)}" for value, places in self.exits.items()]
        return "; ".join(texts[:MOST_NAMED]) + (f" and {len(texts) - MOST_NAMED} more" if texts[MOST_NAMED:] else "")


def _origin(value: Value) -> str:
    node = value.producer
    return "an input of the graph" if node is None else f"computed by {node.op_type} '{node.label}'"


def _use(places: list[Place]) -> str:
    if not places:
        return "an output of the graph"
    return f"read by {places[0][0].op_type} '{places[0][0].label}'"


def find_streams(graph: Graph) -> list[Stream]:
    """All groups of tensors around normalizations that layers write or read, whether worthwhile to rotate or not."""
    return [stream for stream in _Search(graph).streams() if stream.writers or stream.readers]


def weight_of(node: Node) -> Value | None:
    """The constant weight [inputs, outputs], or [outputs, inputs] with transB, of a MatMul or Gemm that reads its data
    as input 0; the table of an embedding. None for all other nodes.

    The weight may go through a Transpose node, as a head does that shares the table of the embedding.
    """
    if not node.is_standard:
        return None
    if node.op_type == "Gather":
        table = node.input(0)
        return table if node.setting("axis", 0) == 0 and _is_matrix(table) else None
    if node.op_type not in PRODUCTS or node.setting("transA", 0) or node.setting("beta", 1.0) == 0:
        return None
    value = node.input(1)
    if value is not None and value.producer is not None and value.producer.op_type == "Transpose":
        transpose = value.producer
        value = transpose.input(0) if tuple(transpose.setting("perm", (1, 0))) == (1, 0) else None
    data = node.input(0)
    return value if _is_matrix(value) and data is not None and data.constant is None else None


def is_transposed(node: Node) -> bool:
    """True if the constant that `weight_of` returns is [outputs, inputs]."""
    through = node.input(1) if node.op_type in PRODUCTS else None
    is_turned = through is not None and through.constant is None
    return bool(node.op_type == "Gemm" and node.setting("transB", 0)) != is_turned


def channels_of(node: Node, *, of_input: bool) -> int | None:
    """The number of input or output channels of a layer; None if it has no constant weight."""
    weight = weight_of(node)
    if weight is None or weight.constant is None:
        return None
    return weight.constant.shape[0 if of_input != is_transposed(node) else 1]


def vector_operand(node: Node) -> tuple[int, int] | None:
    """The inputs (constant, data) of a node that combines a tensor with one number per channel; None otherwise."""
    for index in (0, 1):
        held, data = node.input(index), node.input(1 - index)
        if held is None or data is None or held.constant is None or data.constant is not None:
            continue
        shape = held.constant.shape
        if shape and shape[-1] > 1 and shape[-1] == np.prod(shape) and shape[-1] == width(data):
            return index, 1 - index
    return None


def width(value: Value | None) -> int | None:
    """The number of channels; where shapes do not tell, that of the layer that computes or reads the tensor."""
    if value is None:
        return None
    if value.constant is not None:
        return value.constant.shape[-1] if value.constant.shape else 1
    if value.shape and value.shape[-1] is not None:
        return value.shape[-1]
    if value.producer is not None and value is value.producer.outputs[0]:
        known = channels_of(value.producer, of_input=False)
        if known is not None:
            return known
    layers = (channels_of(node, of_input=True) for node, index in value.readers if index == 0 and not node.is_inner)
    return next((known for known in layers if known is not None), None)


class _Search:
    """The tensors of one graph, joined. Gains join nothing until it is known where each of them can go."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.parents: dict[Value, Value] = {}
        self.gains: list[Gain] = []
        self.norms: dict[Value, bool] = {}  # tensors that are normalized, and whether their mean is used
        # a constant that is added, and the tensor that it is added to
        self.constants: list[tuple[Node, int, Value]] = []
        self.commuting: dict[Node, set[int]] = {}  # the inputs of a node that a rotation goes through
        self.results: set[Value] = set()  # results of such nodes
        self.uses_mean: set[Value] = set()  # tensors that only some rotations go through
        for node in graph:
            rule = _RULES.get(node.op_type) if node.is_standard and not node.is_plumbing else None
            if rule is not None and node.outputs:
                rule(self, node)
        self._choose_gains()

    def streams(self) -> list[Stream]:
        """A stream for each group of tensors with a normalization."""
        groups = self._groups()
        roots = dict.fromkeys(self._root(value) for value in self.norms if value in self.parents)
        return [self._stream(groups[root]) for root in roots]

    # -- joining

    def pass_through(self, node: Node, indices: Iterable[int]) -> None:
        """Join these inputs of a node with its outputs. Constants among them are rotated too."""
        places = [(index, value) for index in indices if (value := node.input(index)) is not None]
        data = [value for _, value in places if value.constant is None]
        size = width(data[0]) if data else None
        if size is None or size == 1 or any(width(value) != size for _, value in places):
            return
        self.commuting.setdefault(node, set()).update(index for index, _ in places)
        results = list(node.outputs if node.op_type == "Split" else node.outputs[:1])
        for value in (*data, *results):
            self._union(data[0], value)
        self.results.update(results)
        self.constants += [(node, index, data[0]) for index, value in places if value.constant is not None]

    def add_gain(self, gain: Gain) -> None:
        """Note one factor per channel between two tensors."""
        self._union(gain.source, gain.source)
        self._union(gain.result, gain.result)
        self.gains.append(gain)

    def add_norm(self, value: Value, *, uses_mean: bool) -> None:
        """Note that a tensor is normalized over its channels."""
        self._union(value, value)
        self.norms[value] = self.norms.get(value, False) or uses_mean

    def _root(self, value: Value) -> Value:
        while self.parents[value] is not value:
            self.parents[value] = self.parents[self.parents[value]]
            value = self.parents[value]
        return value

    def _union(self, first: Value, second: Value) -> None:
        for value in (first, second):
            self.parents.setdefault(value, value)
        self.parents[self._root(second)] = self._root(first)

    def _groups(self) -> dict[Value, list[Value]]:
        """The tensors that are joined, in the order of the graph, by their root."""
        groups: dict[Value, list[Value]] = {}
        ordered = (value for node in self.graph for value in (*node.inputs, *node.outputs) if value is not None)
        for value in dict.fromkeys(ordered):
            if value in self.parents:
                groups.setdefault(self._root(value), []).append(value)
        return groups

    # -- gains

    def _choose_gains(self) -> None:
        """Join the tensors before and behind every gain that can go into layers.

        All are judged by the groups as they are without any gain, so that their order does not matter.
        """
        groups = self._groups()
        added: dict[Value, list[Place]] = {}
        for node, index, value in self.constants:
            added.setdefault(self._root(value), []).append((node, index))
        for gain in self.gains:
            before, behind = groups[self._root(gain.source)], groups[self._root(gain.result)]
            gain.constants = added.get(self._root(gain.result), [])
            if gain.is_trivial:
                continue
            if self._goes_forward(gain, behind):
                gain.layers = self._layers_reading(behind)
            elif self._goes_backward(gain, before):
                gain.is_forward = False
                gain.layers = [value.producer for value in before if value.producer and self._is_written(value)]
                gain.constants = added.get(self._root(gain.source), [])
        self.gains = [gain for gain in self.gains if gain.is_trivial or gain.layers]
        for gain in self.gains:
            self.commuting.setdefault(gain.node, set()).add(gain.data)
            self.results.add(gain.result)
            self._union(gain.source, gain.result)
        folded = {place for gain in self.gains if gain.layers and gain.is_forward for place in gain.constants}
        self.constants = [constant for constant in self.constants if (constant[0], constant[1]) not in folded]

    def _goes_forward(self, gain: Gain, behind: list[Value]) -> bool:
        """True if the gain is all that computes the tensors behind it, and layers are all that read them."""
        others = {other.result for other in self.gains if other is not gain}
        for value in behind:
            is_own = value is gain.result or (value in self.results and value not in others)
            if not is_own or value.outputs or value in self.uses_mean or value in self.norms or self._foreign(value):
                return False
        added = gain.constants
        if added and not (len(added) == 1 == len(gain.result.readers) and _is_added_vector(*added[0], gain)):
            return False
        is_shifted = bool(added) or gain.shift is not None
        return not is_shifted or all(_keeps_constants(value.producer) for value in behind if value is not gain.result)

    def _goes_backward(self, gain: Gain, before: list[Value]) -> bool:
        """True if layers are all that compute the tensors before the gain, and it is all that reads them."""
        if gain.is_norm:
            return False
        for value in before:
            is_own = self._is_written(value) or value in self.results
            others = [node for node, _ in self._foreign(value, with_layers=True) if node is not gain.node]
            if not is_own or value.outputs or value in self.uses_mean or value in self.norms or others:
                return False
        return True

    # -- ends

    def _layers_reading(self, values: Iterable[Value]) -> list[Node]:
        layers = (node for value in values for node, index in value.readers if index == 0 and _is_layer(node, value))
        return list(dict.fromkeys(layers))

    def _is_written(self, value: Value) -> bool:
        """True if a layer computes the tensor whose weight can be rotated at its output."""
        node = value.producer
        if node is None or node in self.commuting or value is not node.outputs[0]:
            return False
        bias = node.input(2) if node.op_type == "Gemm" else None
        return channels_of(node, of_input=False) == width(value) and (bias is None or bias.constant is not None)

    def _foreign(self, value: Value, *, with_layers: bool = False) -> list[Place]:
        """The readers that a rotation cannot go through, and that cannot take it either."""
        return [
            (node, index)
            for node, index in value.readers
            if index not in self.commuting.get(node, ())
            and node.op_type not in _SIZES
            and not (value in self.norms and _is_statistic(node, value))
            and (with_layers or not (index == 0 and _is_layer(node, value)))
        ]

    def _stream(self, values: list[Value]) -> Stream:
        tensors = set(values)
        stream = Stream(width(values[0]) or 0, values)
        stream.gains = [gain for gain in self.gains if gain.source in tensors]
        stream.constants = [(node, index) for node, index, value in self.constants if value in tensors]
        stream.readers = self._layers_reading(values)
        for value in values:
            places = self._foreign(value)
            if self._is_written(value) and value.producer is not None:
                stream.writers.append(value.producer)
            elif value not in self.results:
                stream.entries[value] = [place for place in value.readers if place not in places]
                continue
            if value.outputs or places:
                stream.exits[value] = places
        taken = {gain.source for gain in self.gains if gain.is_norm}
        decomposed = {value for value in self.norms if any(_is_statistic(node, value) for node, _ in value.readers)}
        normalized = [value for value in self.norms if value in tensors and (value in taken or value in decomposed)]
        stream.norms = len(normalized)
        is_centred = any(self.norms[value] for value in normalized)
        stream.needs_mean = is_centred or any(value in self.uses_mean for value in values)
        return stream


def _is_layer(node: Node, value: Value) -> bool:
    """True if the node is a layer that reads the tensor and whose weight can be rotated at its input."""
    is_product = node.op_type in PRODUCTS and not node.is_inner
    return is_product and channels_of(node, of_input=True) == width(value)


def _is_matrix(value: Value | None) -> bool:
    return value is not None and value.constant is not None and len(value.constant.shape) == 2 and value.is_number


def _is_added_vector(node: Node, index: int, gain: Gain) -> bool:
    """True if the constant is one number per channel that an Add adds to the result of the gain."""
    value = node.input(index)
    shape = () if value is None or value.constant is None else value.constant.shape
    is_vector = bool(shape) and shape[-1] == np.prod(shape) == width(gain.result)
    return is_vector and node.op_type == "Add" and node is gain.result.readers[0][0]


def _keeps_constants(node: Node | None) -> bool:
    """True if what is added to all positions before the node is added to all positions behind it."""
    if node is None:
        return False
    return node.op_type in (*_MOVES, "Identity", "Dropout", "Cast", "ReduceMean") or (
        node.op_type == "Add" and any(value is not None and value.constant is not None for value in node.inputs)
    )


# ---- which nodes a rotation goes through ----


def _axis_from_end(axis: int, value: Value | None) -> int | None:
    if axis < 0:
        return axis
    return None if value is None or value.rank is None else axis - value.rank


def _axes_from_end(node: Node, value: Value) -> list[int | None] | None:
    if node.op_type == _POOL:
        return None if value.rank is None else list(range(2 - value.rank, 0))
    axes = node.setting("axes")
    return None if axes is None else [_axis_from_end(int(axis), value) for axis in axes]


def _is_over_channels(node: Node, value: Value) -> bool:
    return _axes_from_end(node, value) == [-1]


def _is_square(node: Node) -> bool:
    if node.op_type == "Mul":
        return node.input(0) is node.input(1)
    exponent = node.input(1)
    array = None if node.op_type != "Pow" or exponent is None else exponent.array()
    return array is not None and array.size == 1 and float(array.reshape(())) == 2.0


def _is_statistic(node: Node, value: Value) -> bool:
    """True if the node computes the mean, or a sum of squares, over the channels of a tensor that is normalized."""
    if node.is_inner or not node.is_standard:
        return False
    if node.op_type in ("ReduceMean", _POOL, "ReduceL2", "ReduceSumSquare"):
        return _is_over_channels(node, value)
    return _is_square(node) and _is_summed(node.outputs[0])


def _is_summed(square: Value) -> bool:
    readers = [node for node, _ in square.readers if node.op_type in ("ReduceMean", "ReduceSum", _POOL)]
    is_all = len(readers) == len(square.readers) and bool(readers) and not square.outputs
    return is_all and all(_is_over_channels(node, square) for node in readers)


def _pass_first(search: _Search, node: Node) -> None:
    search.pass_through(node, [0])


def _pass_moved(search: _Search, node: Node) -> None:
    """Nodes that move positions, as long as the channels stay together at the end."""
    data, op_type = node.input(0), node.op_type
    if data is None or width(data) != width(node.outputs[0]):
        return
    axis = node.setting("axis", 0)
    if op_type == "Transpose":
        perm = node.setting("perm")
        if perm is None or perm[-1] != len(perm) - 1:
            return
    elif op_type == "Slice":
        axes = _axes_from_end(node, data)
        if axes is None or None in axes or -1 in axes:
            return
    elif op_type in ("Gather", "Split", "Concat") and _axis_from_end(int(axis), data) in (None, -1):
        return
    search.pass_through(node, range(len(node.inputs)) if op_type == "Concat" else [0])


def _pass_reduced(search: _Search, node: Node) -> None:
    """Means over positions; a mean over the channels belongs to a normalization."""
    data = node.input(0)
    axes = None if data is None else _axes_from_end(node, data)
    if data is None or axes is None:
        return
    if axes == [-1]:
        if node.op_type != "ReduceSum" and not (data.producer is not None and _is_square(data.producer)):
            search.add_norm(data, uses_mean=True)
    elif None not in axes and -1 not in axes:
        search.pass_through(node, [0])


def _pass_sum(search: _Search, node: Node) -> None:
    sizes = [width(node.input(0)), width(node.input(1))]
    if None in sizes:
        return
    if sizes[0] == sizes[1]:
        search.pass_through(node, [0, 1])
    elif 1 in sizes:  # x - mean(x) and the like: the same number for all channels
        index = 1 - sizes.index(1)
        value = node.input(index)
        if value is not None and value.constant is None:
            search.pass_through(node, [index])
            search.uses_mean.add(value)


def _pass_scaled(search: _Search, node: Node) -> None:
    first, second = node.input(0), node.input(1)
    if first is None or second is None:
        return
    if _is_square(node):
        _note_square(search, node)
        return
    operands = vector_operand(node) if node.op_type == "Mul" else None
    if operands is not None:
        factor, index = operands
        data = second if index else first
        search.add_gain(Gain(node, index, factor, data, node.outputs[0]))
    elif width(second) == 1 and first.constant is None:
        search.pass_through(node, [0])
    elif width(first) == 1 and second.constant is None and node.op_type == "Mul":
        search.pass_through(node, [1])


def _note_square(search: _Search, node: Node) -> None:
    data = node.input(0)
    if data is not None and data.constant is None and _is_square(node) and _is_summed(node.outputs[0]):
        search.add_norm(data, uses_mean=False)


def _note_length(search: _Search, node: Node) -> None:
    data = node.input(0)
    if data is not None and data.constant is None and _is_over_channels(node, data):
        search.add_norm(data, uses_mean=False)


def _pass_norm(search: _Search, node: Node) -> None:
    data, scale, shift = node.input(0), node.input(1), node.input(2)
    if data is None or _axis_from_end(int(node.setting("axis", -1)), data) != -1:
        return
    search.add_norm(data, uses_mean=node.op_type == "LayerNormalization")
    held = [value for value in (scale, shift) if value is not None]
    if any(value.constant is None or value.constant.shape != (width(data),) for value in held):
        return
    search.add_gain(Gain(node, 0, 1, data, node.outputs[0], None if shift is None else 2))


_MOVES = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Transpose", "Slice", "Split", "Gather", "Concat")
_RULES: dict[str, Callable[[_Search, Node], None]] = {
    **dict.fromkeys(("Identity", "Dropout", "Neg", "Cast"), _pass_first),
    **dict.fromkeys(_MOVES, _pass_moved),
    **dict.fromkeys(("ReduceMean", "ReduceSum", _POOL), _pass_reduced),
    **dict.fromkeys(("Add", "Sub"), _pass_sum),
    **dict.fromkeys(("Mul", "Div"), _pass_scaled),
    "Pow": _note_square,
    **dict.fromkeys(("ReduceL2", "ReduceSumSquare"), _note_length),
    **dict.fromkeys(NORMS, _pass_norm),
}

"""Where quantizers go: which reader of which tensor sees it quantized, before any scale is known.

A quantized node reads its data quantized, and what it computes is quantized for all its readers, except that

    - between an operator and the activation that it is computed with (`fused_activations`) there is nothing;
    - block formats in the placement 'compute' only go on the operands of products, and so do integers if weights have
      scales for groups: there are no integer kernels for those;
    - for ONNX Runtime, the result of a Gemm or MatMul stays float for nodes in float: its integer kernels can
      return float at no cost;
    - an operator that only moves values is quantized where a neighbour is, and shares the scale;
    - of LSTM, GRU and RNN the weights are quantized, and their data if blocks or floats are, or ONNX Runtime has a
      kernel for it; the state stays float, and so do results for readers in float;
    - a quantizer goes before a dropout, never behind it, because dropout enlarges values during training;
    - weights of convolutions in groups of 4 bits or fewer have 8 bits and a scale for each channel instead, if they
      are summed along an axis too short for a group, as those of depthwise convolutions are.

`ChoiceOptions.is_trained` says what is different if the network is trained afterwards. Tensors that must have the same
scale form a group; of a group, only those are measured that the others follow from.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from quark.decide.operators import (
    BOUNDS,
    OTHER,
    Kind,
    OperatorFacts,
    facts,
    has_dynamic_kernel,
    is_embedding,
    reduction_axis,
)
from quark.decide.options import ChoiceOptions, Target, TensorOverride
from quark.decide.selection import (
    facts_of,
    has_groups,
    is_compute_only,
    lone_table,
    named_nodes,
    select_nodes,
    tied_tables,
)
from quark.decide.specs import AffineSpec, BlockSpec, DynamicSpec, GroupRule, LayerSpec, TensorSpec
from quark.decide.view import Graph, Node, Value
from quark.plan import Reader, Role, SkippedNode

# Operators whose alignment is the user's choice; Flatten and similar operators go with Reshape. Other operators that
# move values always share the scale.
_ALIGNMENT_OPTION = {"Flatten": "Reshape", "Squeeze": "Reshape", "Unsqueeze": "Reshape"}
_OPTIONAL = ("Concat", "MaxPool", "AveragePool", "GlobalAveragePool", "Pad", "Slice", "Transpose", "Reshape")

WITH_BODIES = frozenset({"If", "Loop", "Scan"})
FEWEST_IN_GROUP = 16  # elements along the summed axis for which larger groups are formed

Member = TypeVar("Member", bound=Hashable)


class Groups(Generic[Member]):
    """Sets of things that share one decision.

    >>> groups = Groups()
    >>> groups.unite(["a", "b"])
    >>> groups.unite(["c", "b"])
    >>> groups.members("a"), groups.members("x")
    (['c', 'a', 'b'], ['x'])
    """

    def __init__(self) -> None:
        self._group: dict[Member, list[Member]] = {}

    def unite(self, members: Iterable[Member]) -> None:
        """Merge the groups of all these members."""
        together = list(dict.fromkeys(other for member in members for other in self.members(member)))
        for member in together:
            self._group[member] = together

    def members(self, member: Member) -> list[Member]:
        """Return the group of a member, which may be the member alone."""
        return self._group.get(member, [member])


@dataclass(frozen=True)
class Request:
    """A request that one reader sees a tensor quantized. The quantizer goes before `reader`; the tensor is read for
    `consumer`, which is another node if a dropout lies between. `first` is an earlier quantization of the tensor, for
    its writer (`ChoiceOptions.has_dual_pairs`)."""

    tensor: str
    spec: TensorSpec
    role: Role
    reader: Reader
    consumer: Reader
    first: TensorSpec | None = None


@dataclass(frozen=True)
class FusedActivation:
    """A tensor between an operator and its activation, which is not quantized itself."""

    tensor: str
    activation: str  # name of the node
    output: str


@dataclass(frozen=True, eq=False)
class Placement:
    """All requests, the groups of equal scales, the tensors left out inside fused pairs, and the skipped nodes."""

    requests: tuple[Request, ...]
    groups: Groups[tuple[str, TensorSpec]]
    fused: tuple[FusedActivation, ...]
    skipped: tuple[SkippedNode, ...]
    derived: frozenset[str] = field(default_factory=frozenset)  # tensors whose range follows from others of their group
    first_layers: tuple[str, ...] = ()  # names of nodes, if KeepFirstLast is set
    last_layers: tuple[str, ...] = ()


def place(graph: Graph, options: ChoiceOptions, vanished: Iterable[str] = ()) -> Placement:
    """Decide where quantizers go. The graph is not changed."""
    specs, skipped = select_nodes(graph, options, vanished)
    unquantized = named_nodes(graph, options.nodes_with_float_output, "NodesToExcludeOutputQuantization", vanished)
    receivers = tuple(name for override in options.overrides for name in override.receivers)
    named_nodes(graph, receivers, "TensorQuantOverrides, recv_nodes", vanished)
    placer = _Placer(graph, options, specs, unquantized)
    captured = [*placer.drop_captured_moves(), *placer.drop_captured_weights()]
    idle = placer.drop_idle_moves()
    for node in graph:
        if node.name in placer.specs:
            placer.place_inputs(node)
            placer.place_outputs(node)
            placer.align(node)
    placer.place_named()
    order = {node.label: i for i, node in reversed(list(enumerate(graph)))}
    requests = list(dict.fromkeys(placer.requests))
    return Placement(
        tuple(_by_value(graph, requests) if options.is_trained else requests),
        placer.groups,
        tuple(placer.fused.values()),
        tuple(sorted(skipped + captured + idle, key=lambda entry: order[entry.node])),
        frozenset(placer.derived),
        *(options.ends.layers(graph) if options.ends else ()),
    )


class _Placer:
    def __init__(
        self, graph: Graph, options: ChoiceOptions, specs: dict[str, LayerSpec], unquantized: Collection[str]
    ) -> None:
        self._graph = graph
        self._options = options
        self._is_trained = options.is_trained
        self._overrides = {override.tensor: override for override in options.overrides}
        self._unquantized = unquantized  # nodes whose outputs stay float for all readers
        self.specs = specs
        self.requests: list[Request] = []
        self.groups: Groups[tuple[str, TensorSpec]] = Groups()
        self.fused: dict[str, FusedActivation] = {}
        self.derived: set[str] = set()
        self._captured: set[str] = set()

    def drop_captured_moves(self) -> list[SkippedNode]:
        """Remove the moving operators on the way to the body of an If, Loop or Scan, which reads float; they read float
        too. ONNX Runtime propagates a DequantizeLinear through them and crashes at the body."""
        if self._is_trained:
            return []
        for node in reversed(list(self._graph)):
            known, behind = facts(node), [reader for value in node.outputs for reader, _ in value.readers]
            is_captured = any(reader.is_inner or reader.name in self._captured for reader in behind)
            if is_captured and known is not None and known.kind is Kind.PASS and not is_embedding(node):
                self._captured.add(node.name)
        dropped = [node for node in self._graph if node.name in self._captured and node.name in self.specs]
        for node in dropped:
            del self.specs[node.name]
        return [SkippedNode(node.label, node.op_type, "the body of an If, Loop or Scan reads it") for node in dropped]

    def drop_captured_weights(self) -> list[SkippedNode]:
        """Leave a layer in float if the body of an If, Loop or Scan reads its weight in float as well: the file would
        store the weight twice, in float and quantized. The body reads it in float if bodies are not quantized, or if
        the weight is passed to it as an input. For an NPU the layer stays quantized."""
        if self._is_trained or self._options.target is Target.NPU_CNN:
            return []
        has_bodies = self._options.selection.has_bodies

        def is_captured(node: Node) -> bool:
            weights = [node.input(index) for index in self._facts(node).weights]
            constants = [weight for weight in weights if weight is not None and weight.constant is not None]
            reading = [reader for value in constants for reader, _ in value.readers]
            return any(reader.op_type in WITH_BODIES or (reader.is_inner and not has_bodies) for reader in reading)

        dropped = [node for node in self._graph if node.name in self.specs and is_captured(node)]
        for node in dropped:
            del self.specs[node.name]
        reason = "an If, Loop or Scan reads its weight in float, which would be stored twice"
        return [SkippedNode(node.label, node.op_type, reason) for node in dropped]

    def drop_idle_moves(self) -> list[SkippedNode]:
        """Remove the moving operators with no quantized operator before or behind them, unless a user named them."""
        is_npu = self._options.target is Target.NPU_CNN and not self._is_trained
        if is_npu or self._options.has_forced_movers:
            return []
        wanted = self._options.selection.extra_op_types
        moving = [
            node
            for node in self._graph
            if node.name in self.specs
            and self._facts(node).kind is Kind.PASS
            and node.op_type not in wanted
            and not self._has_table(node)
            and not (self._options.selection.has_embeddings and is_embedding(node))
        ]
        useful = {name for name in self.specs if not self._has_float_around(self._graph.by_name[name])}
        useful -= {node.name for node in moving}

        def neighbours(node: Node) -> Iterator[Node]:
            for value in node.inputs:
                if value is not None and value.producer is not None:
                    yield value.producer
            for value in node.outputs:
                yield from (reader for reader, _ in value.readers)

        for ordered in (moving, reversed(moving)):  # forward from their inputs, backward from their outputs
            for node in ordered:
                around = list(neighbours(node))
                around += [far for near in around if near.is_transparent for far in neighbours(near)]
                if any(neighbour.name in useful for neighbour in around):
                    useful.add(node.name)
        idle = [node for node in moving if node.name not in useful]
        for node in idle:
            del self.specs[node.name]
        for node in self._tied_idle(idle):
            self.specs[node.name] = lone_table(self._options.default)
            idle.remove(node)
        return [SkippedNode(node.label, node.op_type, "only moves values between float nodes") for node in idle]

    def _facts(self, node: Node) -> OperatorFacts:
        """The facts about the operator of a quantized node."""
        return facts_of(node, self.specs.get(node.name), self._options) or OTHER

    def _has_float_around(self, node: Node) -> bool:
        """True for quantized nodes without integers around them: only their weights are quantized."""
        return self._facts(node).kind is Kind.RECURRENT or self._has_table(node)

    def _tied_idle(self, idle: list[Node]) -> list[Node]:
        """The embeddings among the nodes that share a table with a quantized product; otherwise, it would be stored
        twice."""
        weight = self._options.default.weight
        tables = [node for node in idle if is_embedding(node)]
        if self._is_trained or not tables or not isinstance(weight, AffineSpec) or weight.group_size is not None:
            return []
        tied = tied_tables(self._graph)
        return [node for node in tables if any(product.name in self.specs for product in tied.get(node.name, ()))]

    def place_inputs(self, node: Node) -> None:
        known, spec = self._facts(node), self.specs[node.name]
        for index, value in enumerate(node.inputs):
            if value is None or not value.is_quantizable or value.name in self.fused:
                continue
            role = self._role(node, known, index)
            reader = consumer = Reader(node.name, index)
            if role is Role.ACTIVATION:
                source, reader = self._source(value, reader)
                if source.constant is not None:
                    continue  # a copy of a parameter
                wanted, first = self._seen(source, self._wish(node, known, index))
                is_product = known.kind in (Kind.COMPUTE, Kind.RECURRENT)
                if wanted is not None and (is_product or self._options.goes_everywhere(wanted)):
                    self._request(source, wanted, role, reader, consumer, first)
            elif role is not None:
                constant = self._constant_spec(node, spec, role, known)
                if constant is not None:
                    self._request(value, constant, role, reader, consumer)

    def _seen(self, source: Value, wanted: TensorSpec | None) -> tuple[TensorSpec | None, TensorSpec | None]:
        """How a reader that wants `wanted` sees the tensor, and its earlier quantization, if any."""
        writer = None if source.producer is None else self.specs.get(source.producer.name)
        if self._is_trained or wanted is None or writer is None:
            return wanted, None
        if not self._options.has_dual_pairs:
            return writer.output or wanted, None
        written = self._written(source.producer, writer) if source.producer is not None else None
        return wanted, written if written is not None and _is_other_type(written, wanted) else None

    def _written(self, node: Node, spec: LayerSpec) -> TensorSpec | None:
        """How the outputs of a quantized node are quantized for readers without a preference."""
        if self._facts(node).kind is Kind.RECURRENT:
            return None
        if not self._is_trained and spec.output is None and (has_groups(spec) or has_groups(self._options.default)):
            return None  # the product is computed in float
        written = spec.output if self._is_trained else spec.output or spec.activation
        is_product = self._is_trained and self._facts(node).kind is Kind.COMPUTE
        if written is None or not (is_product or self._options.goes_everywhere(written)):
            return None
        if self._options.is_weights_only or node.op_type in self._options.op_types_with_float_output:
            return None
        return written

    def place_outputs(self, node: Node) -> None:
        """Quantize the outputs of quantized nodes for float readers and graph outputs too."""
        written = self._written(node, self.specs[node.name])
        for value in node.outputs if written is not None or self._is_trained else ():
            if not value.is_quantizable or self._fuse(node, value) or written is None:
                continue
            if isinstance(written, AffineSpec) and self._stays_float(node, value):
                continue
            for reader, consumer in self._float_readers(value):
                self._request(value, written, Role.ACTIVATION, reader, consumer)

    def place_named(self) -> None:
        """Quantize a tensor that is given blocks or floats by name for all its readers, even if the rules above would
        leave it out."""
        placed = {request.tensor for request in self.requests}
        named = {name for name, override in self._overrides.items() if override.spec is not None} - placed
        for value in (output for node in self._graph if named for output in node.outputs if output.name in named):
            override = self._overrides[value.name]
            if not value.is_quantizable or override.spec is None:
                continue
            self.fused.pop(value.name, None)
            readers = [reader for node, _, reader in self._readers(value) if not node.is_inner]
            for reader in [*readers, *(Reader("", index) for index in value.outputs)]:
                self._request(value, override.spec, Role.ACTIVATION, reader, reader)

    def align(self, node: Node) -> None:
        """Unite the tensors that this operator needs on one scale."""
        known, spec = self._facts(node), self.specs[node.name].activation
        if not isinstance(spec, AffineSpec):
            return
        option = _ALIGNMENT_OPTION.get(node.op_type, node.op_type)
        is_aligned = option in self._options.aligned if option in _OPTIONAL else known.kind is Kind.PASS
        if not is_aligned:
            return
        data = [
            value
            for index, value in enumerate(node.inputs)
            if value is not None and value.is_quantizable and (known.data is None or index in known.data)
        ]
        inputs = [value for value in data if value.constant is None]  # a constant has its own scale
        sources = [self._source(value, Reader("", 0))[0] for value in inputs]
        outputs = [value for value in node.outputs if value.is_quantizable and value.name not in self.fused]
        self.groups.unite((value.name, spec) for value in sources + outputs)
        if known.kind is not Kind.ARITHMETIC and sources and (self._is_trained or len(inputs) == len(data)):
            self.derived.update(value.name for value in outputs)

    def _wish(self, node: Node, known: OperatorFacts, index: int) -> TensorSpec | None:
        """The spec with which a quantized node reads that input; None if it has no preference."""
        spec = self.specs[node.name].activation
        if self._options.is_weights_only or self._role(node, known, index) is not Role.ACTIVATION:
            return None
        if self._is_trained and known.kind is Kind.ACTIVATION:
            source = node.inputs[0]
            if source is None or source.producer is None or source.producer.name not in self.specs:
                return None
        if known.kind is Kind.RECURRENT:
            is_read = has_dynamic_kernel(node) if isinstance(spec, DynamicSpec) else not isinstance(spec, AffineSpec)
            return spec if is_read else None
        return spec if known.kind is Kind.COMPUTE or self._options.goes_everywhere(spec) else None

    def _role(self, node: Node, known: OperatorFacts, index: int) -> Role | None:
        """The role of the input; None if it is never quantized. If the network is trained, the computed weight of a
        convolution stays float, and so does the bias of a Gemm with a computed weight."""
        value = node.inputs[index]
        is_constant = value is not None and value.constant is not None
        weight = None if known.weight is None else node.input(known.weight)
        is_computed = weight is not None and weight.constant is None and node.op_type != "MatMul"
        is_left = index == (known.bias if node.op_type == "Gemm" else known.weight)
        if self._is_trained and is_computed and is_left:
            return None
        if index in known.weights and (is_constant or known.kind is Kind.RECURRENT):
            return Role.WEIGHT if is_constant else None
        if index == known.weight:
            return Role.ACTIVATION
        if index == known.bias:
            return Role.BIAS if is_constant else None
        if known.data is not None and index not in known.data:
            return None
        return Role.WEIGHT if is_constant else Role.ACTIVATION

    def _float_readers(self, value: Value) -> Iterator[tuple[Reader, Reader]]:
        """The readers that make no request of their own: (where the quantizer goes, the reader)."""
        for node, index, reader in self._readers(value):
            if self._is_trained:
                known = facts(node)
                is_asking = node.name in self.specs and known is not None and self._wish(node, known, index) is not None
            else:
                is_asking = node.name in self.specs or bool(node.reads_float_for)
                if is_asking and self._facts(node).kind is Kind.RECURRENT:
                    is_asking = self._wish(node, self._facts(node), index) is not None
            if not is_asking and not node.is_inner and node.name not in self._captured:
                yield reader, Reader(node.name, index)
        yield from ((Reader("", index), Reader("", index)) for index in value.outputs)

    def _readers(self, value: Value) -> Iterator[tuple[Node, int, Reader]]:
        """The readers of the value, including those behind dropouts and copies."""
        for node, index in value.readers:
            reader = Reader(node.name, index)
            if node.is_transparent:
                yield from ((consumer, i, reader) for consumer, i, _ in self._readers(node.outputs[0]))
            else:
                yield node, index, reader

    def _source(self, value: Value, reader: Reader) -> tuple[Value, Reader]:
        """The value before dropouts and copies, and its reader there."""
        while value.producer is not None and value.producer.is_transparent and value.producer.inputs[0] is not None:
            reader = Reader(value.producer.name, 0)
            value = value.producer.inputs[0]
        return value, reader

    def _request(
        self,
        value: Value,
        spec: TensorSpec,
        role: Role,
        reader: Reader,
        consumer: Reader,
        first: TensorSpec | None = None,
    ) -> None:
        if value.producer is not None and value.producer.name in self._unquantized:
            return
        override = self._overrides.get(value.name)
        wanted = _with_override(spec, override)
        if override is not None and override.converted is not None and role is Role.ACTIVATION:
            seen = _with_override(spec, override.converted)
            if (not override.receivers or consumer.node in override.receivers) and seen != wanted:
                first, wanted = wanted, seen
        self.requests.append(Request(value.name, wanted, role, reader, consumer, first))

    def _fuse(self, node: Node, value: Value) -> bool:
        """True if the value goes to a single activation that is computed with this node."""
        spec = self.specs[node.name].activation
        is_block = isinstance(spec, BlockSpec) and self._options.has_fused_blocks
        if not isinstance(spec, AffineSpec) and not self._is_trained and not is_block:
            return False  # blocks and floats that are placed everywhere are placed here too
        is_join = self._facts(node).kind is Kind.JOIN and self._is_trained
        if self._facts(node).kind is Kind.PASS or is_join or len(value.readers) != 1 or value.outputs:
            return False
        activation, index = value.readers[0]
        is_pair = (node.op_type, activation.op_type) in self._options.unquantized_between
        if activation.op_type in BOUNDS:
            is_fused_type = (known := facts(activation)) is not None and known.kind is Kind.ACTIVATION
        else:
            is_fused_type = activation.op_type in self._options.fused_activations
        if not is_pair and (not is_fused_type or index != 0):
            return False
        if activation.name not in self.specs or activation.is_inner:
            return False
        self.fused[value.name] = FusedActivation(value.name, activation.name, activation.outputs[0].name)
        return True

    def _has_table(self, node: Node) -> bool:
        """True for an embedding that is selected for its table if otherwise only products are quantized."""
        spec = self.specs.get(node.name)
        return spec is not None and is_embedding(node) and is_compute_only(self._options, spec)

    def _constant_spec(self, node: Node, spec: LayerSpec, role: Role, known: OperatorFacts) -> TensorSpec | None:
        """The spec of a constant operand. Integer kernels require both operands of a sum or product in one type; beyond
        8 bits there are none, so the weight's type is used."""
        if role is Role.BIAS:
            return spec.bias if self._options.has_quantized_bias else None
        if known.kind is Kind.COMPUTE:
            return _without_short_groups(node, spec.weight)
        activation, weight = spec.activation, spec.weight
        if known.kind is Kind.RECURRENT or (not self._is_trained and self._has_table(node)):
            if not isinstance(weight, AffineSpec) or not isinstance(activation, DynamicSpec):
                return weight
            # scales for channels cost nothing here, but the kernel takes one zero point for all of them
            is_symmetric = weight.is_symmetric or has_dynamic_kernel(node)
            return replace(weight, is_per_channel=True, is_symmetric=is_symmetric)
        if isinstance(activation, (BlockSpec, DynamicSpec)) or self._options.is_weights_only:
            return None  # a constant operand of an Add or Mul has no reduction to block along
        if self._is_trained and known.kind is Kind.PASS:
            return None  # it gets the scale of its destination
        if not isinstance(activation, AffineSpec):
            return activation
        if activation.integer.bits <= 8 or self._options.has_activation_constants or not isinstance(weight, AffineSpec):
            return replace(activation, is_per_channel=False, group_size=None, axis=None, learning=None)
        return replace(weight, is_per_channel=False, group_size=None)

    def _stays_float(self, node: Node, value: Value) -> bool:
        """True if a product's result is only read in float, and the integer kernel can return it in float."""
        is_wanted = self._options.target is Target.ONNX_RUNTIME or self._options.has_float_products
        if not is_wanted or self._is_trained or node.op_type not in ("Gemm", "MatMul"):
            return False
        return all(reader.name not in self.specs for reader, _ in value.readers)


def _by_value(graph: Graph, requests: list[Request]) -> list[Request]:
    """Sort the requests in the order of the values that they are about, constants behind the value of their node.
    Quantizers are named in this order, and checkpoints of trained networks depend on the names."""
    positions = {node.name: i for i, node in enumerate(graph)}

    def key(request: Request) -> tuple[int, ...]:
        if request.role is not Role.ACTIVATION:
            return positions[request.consumer.node], 1, request.consumer.index
        reader, consumer = (positions.get(end.node, -1) for end in (request.reader, request.consumer))
        return positions.get(request.tensor, -1), 0, reader, request.reader.index, consumer, request.consumer.index

    return sorted(requests, key=key)


def _without_short_groups(node: Node, weight: TensorSpec | None) -> TensorSpec | None:
    """The spec of a weight without groups along a short axis: a scale for every few codes would take more than 8 bits
    per element, for less accuracy."""
    constant = None if (value := node.input(1)) is None else value.constant
    if not isinstance(weight, AffineSpec) or weight.group_size is None or constant is None:
        return weight
    axis = reduction_axis(node, 1) if weight.axis is None else weight.axis
    if (
        node.op_type not in ("Conv", "ConvTranspose")
        or weight.integer.bits > 4
        or axis is None
        or constant.shape[axis] >= min(FEWEST_IN_GROUP, weight.group_size)
    ):
        return weight
    return replace(
        weight,
        format="int8" if weight.integer.signed else "uint8",
        is_per_channel=True,
        group_size=None,
        axis=None,
        group_rule=GroupRule.RANGE,
    )


def _is_other_type(first: TensorSpec, second: TensorSpec) -> bool:
    return type(first) is not type(second) or first.format != second.format


def _with_override(spec: TensorSpec, override: TensorOverride | None) -> TensorSpec:
    """The spec in the type that the override requests."""
    if override is None:
        return spec
    if override.spec is not None and not (isinstance(spec, AffineSpec) and isinstance(override.spec, AffineSpec)):
        spec = override.spec
    if not isinstance(spec, AffineSpec):
        return spec
    is_symmetric = spec.is_symmetric if override.is_symmetric is None else override.is_symmetric
    is_reduced = spec.has_reduced_range if override.has_reduced_range is None else override.has_reduced_range
    format = override.format or spec.format
    return replace(spec, format=format, is_symmetric=is_symmetric, has_reduced_range=is_reduced)

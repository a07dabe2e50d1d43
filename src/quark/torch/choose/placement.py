"""Where quantizers go: which reader of which tensor sees it quantized, before any scale is known.

A quantized node reads its data as its input spec says, and what it computes is quantized by its output spec for whoever
has no wish of its own, except that

    - between an operator and the Relu or Clip that it is computed with there is nothing;
    - block formats and dynamic scales only go on the operands of products;
    - an operator that only moves values shares the scale of its input, as does a concatenation; for an NPU, pooling;
    - a dropout is no place: the quantizer goes before it, since it makes values larger while training.

Tensors that share a scale form a group, which gets one quantizer; of a group only those are observed that the others
follow from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import fx

from quark.formats.affine import integer_format
from quark.groups import Groups
from quark.npu.rules import POOLS
from quark.onnx.choose.operators import Kind
from quark.plan import Reader, Role, SkippedNode
from quark.ranges import MinMax
from quark.torch.choose.operators import is_transparent
from quark.torch.choose.selection import Selection
from quark.torch.graph import inputs_of, is_constant, is_float, module_of, outputs_of
from quark.torch.specs import AffineSpec, BlockSpec, Granularity, LayerSpecs, Settings, TensorSpec
from quark.torch.train.conv_batch_norm import ConvBatchNorm

_ENOUGH_BITS = 8  # for a bias that is rounded to the steps of the sums
WEIGHT, BIAS = 1, 2  # the places of weight and bias among a layer's inputs


@dataclass(frozen=True)
class Request:
    """One reader that is to see a tensor quantized: the place where the quantizer goes is `reader`, and what it is read
    for is `consumer`, which lies behind a dropout at times."""

    tensor: str
    spec: TensorSpec
    role: Role
    reader: Reader
    consumer: Reader


@dataclass(frozen=True, eq=False)
class Placement:
    """All requests, the groups of equal scales, and the skipped nodes; `derived` are tensors whose values are among
    those of others of their group, and `fused` is computed with the activation behind it."""

    requests: tuple[Request, ...]
    groups: Groups[tuple[str, TensorSpec]]
    skipped: tuple[SkippedNode, ...]
    derived: frozenset[str] = field(default_factory=frozenset)
    fused: frozenset[str] = field(default_factory=frozenset)


def place(network: fx.GraphModule, settings: Settings) -> Placement:
    """Decide where quantizers go; the network is not touched."""
    placer = _Placer(network, settings)
    for node in network.graph.nodes:
        if node.op in ("call_function", "call_module", "placeholder") and is_float(node):
            placer.place_value(node)
        if node in placer.selection.specs:
            placer.place_constants(node)
            placer.align(node)
    return Placement(
        tuple(dict.fromkeys(placer.requests)),
        placer.groups,
        tuple(placer.selection.skipped),
        frozenset(placer.derived),
        frozenset(placer.fused),
    )


class _Placer:
    def __init__(self, network: fx.GraphModule, settings: Settings) -> None:
        self._network = network
        self._settings = settings
        self.selection = Selection(network, settings)
        self._specs = self.selection.specs
        self._outputs = outputs_of(network.graph)
        self.requests: list[Request] = []
        self.groups: Groups[tuple[str, TensorSpec]] = Groups()
        self.derived: set[str] = set()
        self.fused: set[str] = set()

    def place_value(self, value: fx.Node) -> None:
        """Requests of all who read the value."""
        if is_transparent(self._network, value) or self._is_fused(value):
            return
        written = self._written_spec(value)
        for consumer, index, reader in self._readers(value):
            wanted = written if consumer is None else self._wanted(consumer, index) or written
            if wanted is not None:
                place = Reader("", index) if consumer is None else Reader(str(consumer.name), index)
                self.requests.append(Request(str(value.name), wanted, Role.ACTIVATION, reader, place))

    def place_constants(self, node: fx.Node) -> None:
        specs = self._specs[node]
        if self.selection.kind(node) is Kind.PASS:
            return  # a moved constant has the scale of where it goes
        for tensor, index, role in self._constants(node):
            wanted = specs.weight if role is Role.WEIGHT else self._bias_spec(specs)
            if self.selection.kind(node) is not Kind.COMPUTE:
                wanted = _of_constant(specs.input)
            if wanted is not None:
                reader = Reader(str(node.name), index)
                self.requests.append(Request(tensor, wanted, role, reader, reader))

    def _bias_spec(self, specs: LayerSpecs) -> TensorSpec | None:
        """What is asked for; where nothing is, integers are summed in 32 bits, and so is the bias: ONNX Runtime rounds
        a float one by itself. With fewer than 8 bits those steps would be coarse, and the bias stays float."""
        operands = (specs.input, specs.weight)
        integers = [each for each in operands if isinstance(each, AffineSpec) and not each.is_dynamic]
        has_sums = len(integers) == len(operands) and all(each.format.bits >= _ENOUGH_BITS for each in integers)
        if specs.bias is not None or not has_sums or self._settings.applies_npu_rules:
            return specs.bias
        return AffineSpec(integer_format("int32"), MinMax(), is_symmetric=True)

    def align(self, node: fx.Node) -> None:
        """Unite the tensors that this operator wants on one scale."""
        kind, spec = self.selection.kind(node), self._specs[node].input
        if not isinstance(spec, AffineSpec) or spec.is_dynamic or not self._is_aligned(node):
            return
        inputs = [self._source(each) for _, each in inputs_of(node) if is_float(each) and not is_constant(each)]
        names = [str(each.name) for each in (*inputs, node)]
        self.groups.unite((name, spec) for name in names)
        if kind in (Kind.PASS, Kind.JOIN):
            self.derived.add(str(node.name))

    def _is_aligned(self, node: fx.Node) -> bool:
        kind = self.selection.kind(node)
        is_pool = self._settings.applies_npu_rules and self.selection.operators[node].op_type in POOLS
        return kind in (Kind.PASS, Kind.JOIN) or is_pool

    def _wanted(self, consumer: fx.Node, index: int) -> TensorSpec | None:
        """How the consumer reads that input; None where it does not say."""
        specs = self._specs.get(consumer)
        known = self.selection.operators[consumer].facts
        if specs is None or known is None or (known.data is not None and index not in known.data):
            return None
        kind = known.kind
        if kind is Kind.COMPUTE:
            return specs.input
        if kind is Kind.ACTIVATION and not self._follows_quantized(consumer):
            return None
        return specs.input if _goes_anywhere(specs.input) else None

    def _follows_quantized(self, activation: fx.Node) -> bool:
        source = activation.args[0]
        return isinstance(source, fx.Node) and source in self._specs

    def _written_spec(self, value: fx.Node) -> TensorSpec | None:
        """How the node that computes the value wants it to be."""
        specs: LayerSpecs | None = self._specs.get(value)
        if specs is None:
            return None
        is_product = self.selection.kind(value) is Kind.COMPUTE
        return specs.output if is_product or _goes_anywhere(specs.output) else None

    def _is_fused(self, value: fx.Node) -> bool:
        """True where the value goes to one activation that is computed with this node."""
        if value not in self._specs or self.selection.kind(value) in (Kind.PASS, Kind.JOIN) or value in self._outputs:
            return False
        users = list(value.users)
        if len(users) != 1 or users[0] not in self._specs or self.selection.kind(users[0]) is not Kind.ACTIVATION:
            return False
        self.fused.add(str(value.name))
        return True

    def _readers(self, value: fx.Node) -> Iterator[tuple[fx.Node | None, int, Reader]]:
        """Who reads the value, through dropouts and copies too: (node, its input, the place for a quantizer); None is
        the graph's output."""
        for index, output in enumerate(self._outputs):
            if output is value:
                yield None, index, Reader("", index)
        for user in value.users:
            for index, source in inputs_of(user):
                if source is not value or user.op == "output":
                    continue
                reader = Reader(str(user.name), index)
                if is_transparent(self._network, user):
                    yield from ((each, i, reader) for each, i, _ in self._readers(user))
                else:
                    yield user, index, reader

    def _source(self, node: fx.Node) -> fx.Node:
        while is_transparent(self._network, node):
            node = node.all_input_nodes[0]
        return node

    def _constants(self, node: fx.Node) -> Iterator[tuple[str, int, Role]]:
        """The parameters that a node reads, or that its layer holds."""
        module = module_of(self._network, node)
        if isinstance(module, ConvBatchNorm):
            yield f"{node.target}.weight", WEIGHT, Role.WEIGHT
            yield f"{node.target}.bias", BIAS, Role.BIAS
            return
        known = self.selection.operators[node].facts
        for index, source in inputs_of(node):
            if known is None or not is_constant(source):
                continue
            if index == known.bias:
                yield str(source.target), index, Role.BIAS
            elif index == known.weight or known.data is None or index in known.data:
                yield str(source.target), index, Role.WEIGHT


def _goes_anywhere(spec: TensorSpec | None) -> bool:
    is_dynamic = isinstance(spec, AffineSpec) and spec.is_dynamic
    return spec is not None and not isinstance(spec, BlockSpec) and not is_dynamic


def _of_constant(spec: TensorSpec | None) -> TensorSpec | None:
    """How a constant operand of a sum or product is quantized: as the other operand, with a scale of its own."""
    if not isinstance(spec, AffineSpec):
        return spec if _goes_anywhere(spec) else None
    if spec.is_dynamic:
        return None
    return replace(spec, learning=None, granularity=Granularity.TENSOR, axis=None)

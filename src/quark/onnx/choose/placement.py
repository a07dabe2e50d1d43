"""Where quantizers go: which reader of which tensor sees it quantized, before any scale is known.

A quantized node reads its data quantized, and what it computes is quantized for whoever reads it, except that

    - between an operator and the activation that it is computed with (`fused_activations`) there is nothing;
    - block formats in the placement 'compute' only go on the operands of products;
    - for ONNX Runtime, what a Gemm or MatMul hands to nodes that stay in float stays float: its integer kernels give
      float at no cost;
    - an operator that only moves values is quantized where a neighbour is, and shares the scale.

Tensors that must have the same scale form a group; of a group, only those are measured that the others follow from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from quark.groups import Groups
from quark.onnx.choose.operators import BOUNDS, Kind, OperatorFacts, facts
from quark.onnx.choose.options import ChoiceOptions, Target
from quark.onnx.choose.overrides import with_override
from quark.onnx.choose.selection import QUANTIZABLE_TYPES, select_nodes
from quark.onnx.choose.specs import AffineSpec, BlockSpec, LayerSpec, TensorSpec
from quark.onnx.graph import READS_FLOAT, is_constant, readers
from quark.plan import Reader, Role, SkippedNode

# Operators whose alignment is the user's choice; Flatten and its like go with Reshape. Others that move values always
# share the scale.
_ALIGNMENT_OPTION = {"Flatten": "Reshape", "Squeeze": "Reshape", "Unsqueeze": "Reshape"}
_OPTIONAL = ("Concat", "MaxPool", "AveragePool", "GlobalAveragePool", "Pad", "Slice", "Transpose", "Reshape")


@dataclass(frozen=True)
class Request:
    """One reader that is to see a tensor quantized."""

    tensor: str
    spec: TensorSpec
    role: Role
    reader: Reader


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


def place(model: ir.Model, options: ChoiceOptions, vanished: Iterable[str] = ()) -> Placement:
    """Decide where quantizers go; the model is not touched."""
    specs, skipped = select_nodes(model, options, vanished)
    placer = _Placer(model, options, specs)
    placer.drop_idle_moves()
    for node in model.graph:
        if node.name in placer.specs:
            placer.place_inputs(node)
            placer.place_outputs(node)
            placer.align(node)
    return Placement(
        tuple(dict.fromkeys(placer.requests)),
        placer.groups,
        tuple(placer.fused.values()),
        tuple(sorted(skipped + placer.idle, key=placer.position)),
        frozenset(placer.derived),
    )


class _Placer:
    def __init__(self, model: ir.Model, options: ChoiceOptions, specs: dict[str, LayerSpec]) -> None:
        self._model = model
        self._options = options
        self._order = {node.name: i for i, node in enumerate(model.graph)}
        self._output_indices = {id(value): i for i, value in enumerate(model.graph.outputs)}
        self._is_compute_only = options.has_products_only
        self._overrides = {each.tensor: each for each in options.overrides}
        self.specs = specs
        self.requests: list[Request] = []
        self.groups: Groups[tuple[str, TensorSpec]] = Groups()
        self.fused: dict[str, FusedActivation] = {}
        self.idle: list[SkippedNode] = []
        self.derived: set[str] = set()

    def position(self, node: SkippedNode) -> int:
        return self._order[node.node]

    def drop_idle_moves(self) -> None:
        """Take out the moving operators with no quantized operator before or behind them."""
        if self._options.target is Target.NPU_CNN or self._options.has_forced_movers:
            return
        moving = [n for n in self._model.graph if n.name in self.specs and _facts(n).kind is Kind.PASS]
        useful = set(self.specs) - {node.name for node in moving}
        for ordered in (moving, reversed(moving)):  # forward from what is before them, backward from what is behind
            for node in ordered:
                neighbours = [v.producer() for v in node.inputs if v] + [n for v in node.outputs for n, _ in readers(v)]
                if any(n is not None and n.name in useful for n in neighbours):
                    useful.add(str(node.name))
        for node in moving:
            if node.name not in useful:
                del self.specs[str(node.name)]
                self.idle.append(SkippedNode(str(node.name), node.op_type, "only moves values between float nodes"))

    def place_inputs(self, node: ir.Node) -> None:
        known, spec = _facts(node), self._spec(node)
        for index, value in enumerate(node.inputs):
            if value is None or value.dtype not in QUANTIZABLE_TYPES:
                continue
            role = _role(known, index, value)
            wanted = self._wanted(spec, role, known)
            if role is None or wanted is None or self._is_internal(value):
                continue
            if role is Role.ACTIVATION:
                wanted = self._writer_spec(value) or wanted
                if not self._is_data_placed(known, wanted):
                    continue
            self._request(value, wanted, role, Reader(str(node.name), index))

    def place_outputs(self, node: ir.Node) -> None:
        """What a quantized node computes is quantized for float readers and graph outputs too."""
        known, spec = _facts(node), self._spec(node).output or self._spec(node).activation
        if not isinstance(spec, AffineSpec) and self._is_compute_only:
            return
        if spec is None or self._options.is_weights_only or node.op_type in self._options.op_types_with_float_output:
            return
        for value in node.outputs:
            if value.dtype not in QUANTIZABLE_TYPES or self._fuse(node, known, value):
                continue
            floats = [(n, i) for n, i in self._readers(value) if n.name not in self.specs and READS_FLOAT not in n.meta]
            rest = [Reader(str(n.name), i) for n, i in floats]
            if id(value) in self._output_indices:
                rest.append(Reader("", self._output_indices[id(value)]))
            if not (isinstance(spec, AffineSpec) and self._stays_float(node, value)):
                for reader in rest:
                    self._request(value, spec, Role.ACTIVATION, reader)

    def align(self, node: ir.Node) -> None:
        """Unite the tensors that this operator wants on one scale."""
        known, spec = _facts(node), self._spec(node).activation
        if not isinstance(spec, AffineSpec):
            return
        option = _ALIGNMENT_OPTION.get(node.op_type, node.op_type)
        is_aligned = option in self._options.aligned if option in _OPTIONAL else known.kind is Kind.PASS
        if not is_aligned:
            return
        data = [value for value in _data(node, known) if value.dtype in QUANTIZABLE_TYPES]
        inputs = [value for value in data if not is_constant(value)]  # a constant has its own scale
        outputs = [value for value in node.outputs if value.dtype in QUANTIZABLE_TYPES and not self._is_internal(value)]
        self.groups.unite((str(value.name), spec) for value in inputs + outputs)
        if known.kind is not Kind.ARITHMETIC and len(inputs) == len(data):
            self.derived.update(str(value.name) for value in outputs)

    def _request(self, value: ir.Value, spec: TensorSpec, role: Role, reader: Reader) -> None:
        wanted = with_override(spec, self._overrides.get(str(value.name)))
        self.requests.append(Request(str(value.name), wanted, role, reader))

    def _spec(self, node: ir.Node) -> LayerSpec:
        return self.specs[str(node.name)]

    def _readers(self, value: ir.Value) -> list[tuple[ir.Node, int]]:
        """Those in the main graph: what a branch of an If captures, it goes on reading in float."""
        return [(node, index) for node, index in readers(value) if node.graph is self._model.graph]

    def _writer_spec(self, value: ir.Value) -> TensorSpec | None:
        """What the node that computes the value wants its output to be, where it says so."""
        producer = value.producer()
        spec = None if producer is None else self.specs.get(str(producer.name))
        return None if spec is None else spec.output

    def _is_data_placed(self, known: OperatorFacts, spec: TensorSpec) -> bool:
        if self._options.is_weights_only:
            return False
        return known.kind is Kind.COMPUTE or isinstance(spec, AffineSpec) or not self._is_compute_only

    def _is_internal(self, value: ir.Value) -> bool:
        return value.name in self.fused

    def _fuse(self, node: ir.Node, known: OperatorFacts, value: ir.Value) -> bool:
        """True where the value goes to one activation that is computed with this node."""
        following = readers(value)
        if not isinstance(self._spec(node).activation, AffineSpec):
            return False  # blocks and floats that go everywhere go here too
        if known.kind is Kind.PASS or len(following) != 1 or id(value) in self._output_indices:
            return False
        activation = following[0][0]
        is_pair = (node.op_type, activation.op_type) in self._options.unquantized_between
        if not is_pair and (not self._is_fused_type(activation) or following[0][1] != 0):
            return False
        if activation.name not in self.specs or activation.graph is not self._model.graph:
            return False
        output = str(activation.outputs[0].name)
        self.fused[str(value.name)] = FusedActivation(str(value.name), str(activation.name), output)
        return True

    def _is_fused_type(self, activation: ir.Node) -> bool:
        if activation.op_type in BOUNDS:
            return _facts(activation).kind is Kind.ACTIVATION
        return activation.op_type in self._options.fused_activations

    def _wanted(self, spec: LayerSpec, role: Role | None, known: OperatorFacts) -> TensorSpec | None:
        if role is Role.BIAS:
            return spec.bias if self._options.has_quantized_bias else None
        if role is not Role.WEIGHT:
            return spec.activation
        if known.kind is Kind.COMPUTE:
            return spec.weight
        if isinstance(spec.activation, BlockSpec) or self._options.is_weights_only:
            return None  # a constant operand of an Add or Mul has no reduction to block along
        return self._constant_operand(spec)

    def _constant_operand(self, spec: LayerSpec) -> TensorSpec | None:
        """Integer kernels want both operands of one type; beyond 8 bits there are none, and the weight's will do."""
        activation, weight = spec.activation, spec.weight
        if not isinstance(activation, AffineSpec) or activation.integer.bits <= 8:
            return activation
        if self._options.has_activation_constants or not isinstance(weight, AffineSpec):
            return activation
        return replace(weight, is_per_channel=False, group_size=None)

    def _stays_float(self, node: ir.Node, value: ir.Value) -> bool:
        """True where a product's result is only read in float, and the integer kernel can give it so."""
        is_wanted = self._options.target is Target.ONNX_RUNTIME or self._options.has_float_products
        if not is_wanted or node.op_type not in ("Gemm", "MatMul"):
            return False
        return all(reader.name not in self.specs for reader, _ in readers(value))


def _facts(node: ir.Node) -> OperatorFacts:
    known = facts(node)
    assert known is not None, node.op_type
    return known


def _data(node: ir.Node, known: OperatorFacts) -> Iterator[ir.Value]:
    for index, value in enumerate(node.inputs):
        if value is not None and (known.data is None or index in known.data):
            yield value


def _role(known: OperatorFacts, index: int, value: ir.Value) -> Role | None:
    """What the input is to the node; None where it is nothing to quantize."""
    is_known = is_constant(value)
    if index == known.weight:
        return Role.WEIGHT if is_known else Role.ACTIVATION
    if index == known.bias:
        return Role.BIAS if is_known else None
    if known.data is not None and index not in known.data:
        return None
    return Role.WEIGHT if is_known else Role.ACTIVATION

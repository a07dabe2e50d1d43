"""The NPU's limits on positions: present the operators of a graph to the rules of `quark.npu`, and bring a plan within
the limits.

Positions belong to tensors, and the rules are about operators. Finding the operators is the same for a plan, for a file
with quantizers, and for a torch network, except for the position of an operand, which `Quantizers` looks up. An
operator whose output has no quantizer is computed with the activation behind it, or with the Mul that stands for the
NPU's constant; its output position is the one behind those.

In a plan, positions are read from the scales, exact powers of two. A tensor with any other scale, or one that its
readers see differently, does not take part. An activation has one position for all readers. A constant has one for each
reader, since quantizing it twice costs nothing at run time. Operators that only move values keep one position on both
sides if they had one. Zeros fit any position; they get a middling one first, so that they move nothing else. A bias of
32 bits has the scale of the products that it is added to, before and after.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, MutableMapping
from dataclasses import dataclass, replace
from typing import Protocol

from quark.account import AlgorithmFacts
from quark.decide.operators import Kind, facts
from quark.decide.options import PositionOptions
from quark.decide.placement import Groups
from quark.decide.view import Graph, Node, Value
from quark.formats.power_of_two import NON_OVERFLOW, scale_of_position
from quark.npu import Operation, is_npu_hard_sigmoid, rules_of, settle
from quark.plan import AffineChoice, QuantizationPlan, Reader, Role, SkippedNode, TensorChoice

# Operators that are computed with the one before them if nothing is quantized in between.
FOLLOWERS = frozenset({"Relu", "Clip", "LeakyRelu", "PRelu", "Gelu"})
# Operators whose result the NPU computes with another constant, which a Mul behind them stands for.
SCALED = frozenset({"AveragePool", "GlobalAveragePool", "HardSigmoid", "ReduceMean"})
_WEIGHTED = ("Conv", "Gemm")
_MANY_INPUTS = ("Concat", "Add", "Sub", "Mul")
_ONE_INPUT = ("MaxPool", "AveragePool", "GlobalAveragePool", "Pad", "Slice", "HardSigmoid")
_HARD_SIGMOID_DEFAULTS = 0.2, 0.5  # defaults of the standard

NAME = "npu positions"
_ZEROS = "a position for zeros"  # reported as the cause of a move that no rule caused
_PRODUCT = "the scale of the products"
_POSITION_OF_ZEROS = 7


class Quantizers(Protocol):
    """A lookup of positions."""

    def read(self, node: Node, index: int) -> Hashable | None:
        """The key of the position of an input; None if it is not quantized."""
        ...

    def written(self, value: Value) -> Hashable | None:
        """The key of the quantizer behind a value, if there is one."""
        ...

    def source(self, value: Value) -> Value:
        """The float value that this one is the quantized form of, or the value itself."""
        ...


def npu_operations(graph: Graph, quantizers: Quantizers) -> list[Operation]:
    """The operators that have rules, in the order of the graph."""
    operations = []
    for node in graph:
        op_type = node.op_type
        if not node.is_standard or not node.outputs:
            continue
        if op_type in _WEIGHTED:
            source, weight, bias = (quantizers.read(node, index) for index in range(3))
            operation = Operation(node.label, op_type, (source,), _output_key(node, quantizers), weight, bias)
            readers = (reader for reader, _ in node.outputs[0].readers)
            operation = replace(
                operation, is_before_leaky_relu=any(reader.op_type == "LeakyRelu" for reader in readers)
            )
        elif op_type in _MANY_INPUTS:
            tensors = [i for i, value in enumerate(node.inputs) if value is None or value.origin is not None]
            inputs = tuple(quantizers.read(node, index) for index in tensors)
            is_swish = op_type == "Mul" and len(node.inputs) == 2 and _is_swish(node, quantizers)
            operation = Operation(node.label, op_type, inputs, _output_key(node, quantizers), is_swish=is_swish)
        elif op_type in _ONE_INPUT:
            alpha, beta = _slope(node) if op_type == "HardSigmoid" else (0.0, 0.0)
            inputs, output = (quantizers.read(node, 0),), _output_key(node, quantizers)
            operation = Operation(node.label, op_type, inputs, output, alpha=alpha, beta=beta)
        else:
            continue
        operations.append(operation)
    return operations


def _output_key(node: Node, quantizers: Quantizers) -> Hashable | None:
    """The key of the node's first output, or of the output of what it is computed with."""
    while True:
        value = node.outputs[0]
        key = quantizers.written(value)
        if key is not None or len(value.readers) != 1 or value.outputs:
            return key
        reader, index = value.readers[0]
        if index != 0 or reader.is_inner or not reader.is_standard:
            return None
        if reader.op_type not in FOLLOWERS and not is_constant_factor(reader, quantizers):
            return None
        node = reader


def is_constant_factor(node: Node, quantizers: Quantizers) -> bool:
    """True if a Mul is by a single number and neither operand is quantized: it belongs to the operator before it."""
    if node.op_type != "Mul" or not node.is_standard or len(node.inputs) != 2:
        return False
    scaled, factor = node.inputs
    if scaled is None or scaled.producer is None or scaled.producer.op_type not in SCALED:
        return False
    is_number = factor is not None and factor.constant is not None and math.prod(factor.constant.shape) == 1
    return is_number and not any(quantizers.read(node, index) is not None for index in (0, 1))


def _slope(node: Node) -> tuple[float, float]:
    alpha, beta = _HARD_SIGMOID_DEFAULTS
    return float(node.setting("alpha", alpha)), float(node.setting("beta", beta))


def _is_swish(node: Node, quantizers: Quantizers) -> bool:
    """True if the operands of a Mul are x and HardSigmoid(x)."""
    values = [quantizers.source(value) for value in node.inputs if value is not None]
    for gate, x in (values, values[::-1]) if len(values) == 2 else ():
        writer = gate.producer
        if writer is not None and is_constant_factor(writer, quantizers) and writer.inputs[0] is not None:
            writer = writer.inputs[0].producer
        if writer is None or writer.op_type != "HardSigmoid" or not is_npu_hard_sigmoid(*_slope(writer)):
            continue
        source = writer.input(0)
        if source is not None and quantizers.source(source) is x:
            return True
    return False


@dataclass(frozen=True)
class PositionKey:
    """The position of an activation, identified by name, or of a constant, identified by name and reader."""

    tensor: str
    reader: Reader | None = None


def limit_positions(
    graph: Graph, plan: QuantizationPlan, options: PositionOptions
) -> tuple[QuantizationPlan, AlgorithmFacts]:
    """Move positions until they keep the rules; returns the plan and what was moved. The graph is not changed.

    The facts also list operators for which a rule does not hold after all rounds, because rules contradict each other.
    """
    quantizers = _PlanQuantizers(plan)
    ties = _ties(graph, quantizers)
    before = dict(quantizers.positions)
    positions = _TiedPositions(before, ties)
    zeros = [key for key, position in before.items() if position == NON_OVERFLOW.zero_position]
    positions.update(dict.fromkeys(zeros, _POSITION_OF_ZEROS))
    operations = npu_operations(graph, quantizers)
    settlement = settle(operations, positions, rules_of(options.rules), options.max_rounds)
    after = {key: positions[key] for key in before}
    for key in quantizers.product_biases & after.keys():  # biases of 32 bits follow the products
        assert key.reader is not None
        factors = [quantizers.at(key.reader.node, index) for index in (0, 1)]
        known = [after[factor] for factor in factors if factor is not None]
        if len(known) == len(factors):
            after[key] = sum(known)
    movers: dict[PositionKey, dict[str, None]] = {}  # the rules that moved each key, in order
    for move in settlement.moves:
        assert isinstance(move.key, PositionKey)
        for key in ties.members(move.key):
            movers.setdefault(key, {})[move.rule] = None
    rules = dict.fromkeys(zeros, _ZEROS) | {key: " and ".join(names) for key, names in movers.items()}
    tensors = [part for entry in plan for part in _moved(entry, before, after, rules)]
    op_types = {node.label: node.op_type for node in graph}
    left = [
        SkippedNode(
            violation.operation,
            op_types.get(violation.operation, ""),
            f"{violation.rule}: {violation}, after {options.max_rounds} rounds, because other rules contradict it",
        )
        for violation in settlement.violations
    ]
    roles = {key: entry.role.value for entry in plan for key, _ in _keys(entry)}
    changes = [
        f"{rules.get(key, _PRODUCT)} moved {roles[key]} {key.tensor} from {position} to {after[key]}"
        for key, position in before.items()
        if after[key] != position
    ]
    return replace(plan, tensors=tuple(tensors)), AlgorithmFacts(NAME, tuple(changes), tuple(left))


class _PlanQuantizers:
    """The positions of a plan before any is moved."""

    def __init__(self, plan: QuantizationPlan) -> None:
        self.positions: dict[PositionKey, int] = {}
        self.product_biases: set[PositionKey] = set()
        self._read: dict[tuple[str, int], PositionKey] = {}
        self._written: dict[str, PositionKey] = {}
        different: set[PositionKey] = set()
        for entry in plan:
            # the position, if the scale is one power of two
            position, choice = None, entry.choice
            if isinstance(choice, AffineChoice) and len(choice.scale) == 1 and choice.axis is None:
                significand, exponent = math.frexp(choice.scale[0])
                position = 1 - exponent if significand == 0.5 else None
            for key, reader in _keys(entry):
                if position is None or self.positions.setdefault(key, position) != position:
                    different.add(key)
                self._read[reader.node, reader.index] = key
                if key.reader is None:
                    self._written[key.tensor] = key
                elif entry.role is Role.BIAS and getattr(entry.choice, "format", "") == "int32":
                    self.product_biases.add(key)
        for key in different:
            self.positions.pop(key, None)

    def at(self, node: str, index: int) -> PositionKey | None:
        key = self._read.get((node, index))
        return key if key in self.positions else None

    def read(self, node: Node, index: int) -> PositionKey | None:
        key = self.at(node.name, index)
        return None if key in self.product_biases else key

    def written(self, value: Value) -> PositionKey | None:
        key = self._written.get(value.name)
        return key if key in self.positions else None

    def source(self, value: Value) -> Value:
        return value


class _TiedPositions(MutableMapping[Hashable, int]):
    """Positions in groups that change together."""

    def __init__(self, positions: dict[PositionKey, int], groups: Groups[PositionKey]) -> None:
        self._positions: dict[Hashable, int] = dict(positions.items())
        self._groups = groups

    def __getitem__(self, key: Hashable) -> int:
        return self._positions[key]

    def __setitem__(self, key: Hashable, position: int) -> None:
        assert isinstance(key, PositionKey)
        self._positions.update(dict.fromkeys(self._groups.members(key), position))

    def __delitem__(self, key: Hashable) -> None:
        del self._positions[key]

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)


def _keys(entry: TensorChoice) -> Iterator[tuple[PositionKey, Reader]]:
    for reader in entry.readers:
        yield PositionKey(entry.tensor, None if entry.role is Role.ACTIVATION else reader), reader


def _ties(graph: Graph, quantizers: _PlanQuantizers) -> Groups[PositionKey]:
    """Tensors on both sides of an operator that only moves values, if they have one position."""
    ties: Groups[PositionKey] = Groups()
    for node in graph:
        known = facts(node)
        source = quantizers.read(node, 0)
        if known is None or known.kind is not Kind.PASS or source is None or source.reader is not None:
            continue
        results = [key for value in node.outputs if (key := quantizers.written(value)) is not None]
        same = [key for key in results if quantizers.positions[key] == quantizers.positions[source]]
        ties.unite([source, *same])
    return ties


def _moved(
    entry: TensorChoice, before: dict[PositionKey, int], after: dict[PositionKey, int], rules: dict[PositionKey, str]
) -> Iterator[TensorChoice]:
    """The choice with its new scale; several choices if readers of a constant now want different ones."""
    parts: dict[tuple[int | None, str], list[Reader]] = {}
    for key, reader in _keys(entry):
        is_moved = key in before and before[key] != after[key]
        cause = f"{rules.get(key, _PRODUCT)} moved it from {before[key]} to {after[key]}" if is_moved else ""
        parts.setdefault((after[key] if is_moved else None, cause), []).append(reader)
    for (position, cause), readers in parts.items():
        if position is None:
            yield replace(entry, readers=tuple(readers))
            continue
        assert isinstance(entry.choice, AffineChoice)
        choice = replace(entry.choice, scale=(scale_of_position(position),))
        yield replace(entry, choice=choice, readers=tuple(readers), reason=f"{entry.reason}; {cause}")

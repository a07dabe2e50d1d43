"""Bring the positions of a plan within the NPU's limits.

The rules are those of `quark.npu`. Positions are read from the scales, exact powers of two; a tensor with any other
scale, or one that its readers see differently, does not take part. An activation has one position for all who read it;
a constant has one for each reader, since quantizing it twice costs nothing at run time. Operators that only move values
keep one position on both sides where they had one. Zeros fit any position, and get a middling one first, so that they
move nothing else.

A bias of 32 bits has the scale of the products that it is added to, before and after.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from quark.account import AlgorithmFacts
from quark.formats.power_of_two import NON_OVERFLOW, scale_of_position
from quark.groups import Groups
from quark.npu import Move, Settlement, rules_of, settle
from quark.onnx.choose.npu_operations import npu_operations
from quark.onnx.choose.operators import Kind, facts
from quark.onnx.choose.options import PositionOptions
from quark.plan import AffineChoice, QuantizationPlan, Reader, Role, SkippedNode, TensorChoice

NAME = "npu positions"
_ZEROS = "a position for zeros"  # what moves a key, where no rule does
_PRODUCT = "the scale of the products"
_POSITION_OF_ZEROS = 7


@dataclass(frozen=True)
class PositionKey:
    """An activation by its name; a constant by its name and who reads it."""

    tensor: str
    reader: Reader | None = None


def limit_positions(
    model: ir.Model, plan: QuantizationPlan, options: PositionOptions
) -> tuple[QuantizationPlan, AlgorithmFacts]:
    """A plan whose positions keep the rules, and what was moved; the model is not touched.

    What is left in the facts are operators for which a rule does not hold after all rounds: rules contradict there.
    """
    quantizers = _PlanQuantizers(plan)
    ties = _ties(model, quantizers)
    before = dict(quantizers.positions)
    positions = _TiedPositions(before, ties)
    zeros = [key for key, position in before.items() if position == NON_OVERFLOW.zero_position]
    positions.update(dict.fromkeys(zeros, _POSITION_OF_ZEROS))
    operations = npu_operations(model, quantizers)
    found = settle(operations, positions, rules_of(options.rules), options.max_rounds)
    after = {key: positions[key] for key in before}
    _follow_products(quantizers, after)
    rules = dict.fromkeys(zeros, _ZEROS) | _rules_by_key(found.moves, ties)
    tensors = [part for each in plan for part in _moved(each, before, after, rules)]
    op_types = {str(node.name): node.op_type for node in model.graph}
    return replace(plan, tensors=tuple(tensors)), AlgorithmFacts(
        NAME, tuple(_changes(plan, before, after, rules)), tuple(_left(found, op_types, options.max_rounds))
    )


class _PlanQuantizers:
    """The positions that a plan has, before any is moved."""

    def __init__(self, plan: QuantizationPlan) -> None:
        self.positions: dict[PositionKey, int] = {}
        self.product_biases: set[PositionKey] = set()
        self._read: dict[tuple[str, int], PositionKey] = {}
        self._written: dict[str, PositionKey] = {}
        different: set[PositionKey] = set()
        for each in plan:
            position = _position(each)
            for key, reader in _keys(each):
                if position is None or self.positions.setdefault(key, position) != position:
                    different.add(key)
                self._read[reader.node, reader.index] = key
                if key.reader is None:
                    self._written[key.tensor] = key
                elif each.role is Role.BIAS and getattr(each.choice, "format", "") == "int32":
                    self.product_biases.add(key)
        for key in different:
            self.positions.pop(key, None)

    def at(self, node: str, index: int) -> PositionKey | None:
        key = self._read.get((node, index))
        return key if key in self.positions else None

    def read(self, node: ir.Node, index: int) -> PositionKey | None:
        key = self.at(str(node.name), index)
        return None if key in self.product_biases else key

    def written(self, value: ir.Value) -> PositionKey | None:
        key = self._written.get(str(value.name))
        return key if key in self.positions else None

    def source(self, value: ir.Value) -> ir.Value:
        return value


class _TiedPositions(MutableMapping[Hashable, int]):
    """Positions of which those in a group change together."""

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


def _keys(each: TensorChoice) -> Iterator[tuple[PositionKey, Reader]]:
    for reader in each.readers:
        yield PositionKey(each.tensor, None if each.role is Role.ACTIVATION else reader), reader


def _position(each: TensorChoice) -> int | None:
    """The position of a choice whose scale is one power of two."""
    choice = each.choice
    if not isinstance(choice, AffineChoice) or len(choice.scale) != 1 or choice.axis is not None:
        return None
    significand, exponent = math.frexp(choice.scale[0])
    return 1 - exponent if significand == 0.5 else None


def _ties(model: ir.Model, quantizers: _PlanQuantizers) -> Groups[PositionKey]:
    """Tensors on both sides of an operator that only moves values, where they have one position."""
    ties: Groups[PositionKey] = Groups()
    for node in model.graph:
        known = facts(node)
        source = quantizers.read(node, 0)
        if known is None or known.kind is not Kind.PASS or source is None or source.reader is not None:
            continue
        results = [key for value in node.outputs if (key := quantizers.written(value)) is not None]
        same = [key for key in results if quantizers.positions[key] == quantizers.positions[source]]
        ties.unite([source, *same])
    return ties


def _follow_products(quantizers: _PlanQuantizers, positions: dict[PositionKey, int]) -> None:
    """Move the biases of 32 bits to where the products are now."""
    for key in quantizers.product_biases & positions.keys():
        assert key.reader is not None
        factors = [quantizers.at(key.reader.node, index) for index in (0, 1)]
        known = [positions[each] for each in factors if each is not None]
        if len(known) == len(factors):
            positions[key] = sum(known)


def _rules_by_key(moves: Sequence[Move], ties: Groups[PositionKey]) -> dict[PositionKey, str]:
    """Which rules moved a key, in order."""
    rules: dict[PositionKey, dict[str, None]] = {}
    for move in moves:
        assert isinstance(move.key, PositionKey)
        for key in ties.members(move.key):
            rules.setdefault(key, {})[move.rule] = None
    return {key: " and ".join(names) for key, names in rules.items()}


def _moved(
    each: TensorChoice, before: dict[PositionKey, int], after: dict[PositionKey, int], rules: dict[PositionKey, str]
) -> Iterator[TensorChoice]:
    """The choice with its new scale; several where readers of a constant now want it differently."""
    parts: dict[tuple[int | None, str], list[Reader]] = {}
    for key, reader in _keys(each):
        is_moved = key in before and before[key] != after[key]
        cause = f"{rules.get(key, _PRODUCT)} moved it from {before[key]} to {after[key]}" if is_moved else ""
        parts.setdefault((after[key] if is_moved else None, cause), []).append(reader)
    for (position, cause), readers in parts.items():
        if position is None:
            yield replace(each, readers=tuple(readers))
            continue
        assert isinstance(each.choice, AffineChoice)
        choice = replace(each.choice, scale=(scale_of_position(position),))
        yield replace(each, choice=choice, readers=tuple(readers), reason=f"{each.reason}; {cause}")


def _changes(
    plan: QuantizationPlan,
    before: dict[PositionKey, int],
    after: dict[PositionKey, int],
    rules: dict[PositionKey, str],
) -> Iterator[str]:
    roles = {key: each.role.value for each in plan for key, _ in _keys(each)}
    for key, position in before.items():
        if after[key] != position:
            cause = rules.get(key, _PRODUCT)
            yield f"{cause} moved {roles[key]} {key.tensor} from {position} to {after[key]}"


def _left(found: Settlement, op_types: dict[str, str], max_rounds: int) -> Iterator[SkippedNode]:
    for each in found.violations:
        reason = f"{each.rule}: {each}, after {max_rounds} rounds; other rules want it otherwise"
        yield SkippedNode(each.operation, op_types.get(each.operation, ""), reason)

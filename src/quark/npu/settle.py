"""Move positions until every rule holds.

A round goes over the rules in their order, and with each over all operations; rounds follow until one changes nothing.
Rules can contradict each other: a HardSigmoid wants its output at 7 or more, a Concat behind it all of its tensors
where the largest of them needs to be. After so many rounds the positions stay as they are, and what does not hold is
told.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping, Sequence
from dataclasses import dataclass

from quark.errors import InvalidValueError
from quark.npu.operation import Operation
from quark.npu.rules import RULES, Move, PositionRule, Violation

MAX_ROUNDS = 5


@dataclass(frozen=True)
class Settlement:
    """What was moved, in order, and what does not hold in the end."""

    moves: tuple[Move, ...]
    violations: tuple[Violation, ...]

    @property
    def is_settled(self) -> bool:
        return not self.violations


def settle(
    operations: Sequence[Operation],
    positions: MutableMapping[Hashable, int],
    rules: Sequence[PositionRule] = RULES,
    max_rounds: int = MAX_ROUNDS,
) -> Settlement:
    """Change `positions` in place so that the rules hold for all operations, in at most that many rounds.

    >>> positions = {"x": 5, "w": 13, "y": 1}
    >>> found = settle([Operation("conv", "Conv", ("x",), "y", "w")], positions)
    >>> positions["w"], [(move.rule, move.before, move.after) for move in found.moves]
    (12, [('AdjustShiftCut', 13, 12)])
    """
    if max_rounds < 0:
        raise InvalidValueError(f"max_rounds {max_rounds}: expected 0 or more")
    moves: list[Move] = []
    for _ in range(max_rounds):
        moved = [move for rule in rules for operation in operations for move in rule.fix(operation, positions)]
        moves += moved
        if not moved:
            break
    violations = [each for rule in rules for operation in operations for each in rule.check(operation, positions)]
    return Settlement(tuple(moves), tuple(violations))

"""The limits of AMD's NPU on positions, in the order in which they are applied, and `settle`, which enforces them.

Convolutions and sums run on integers. Going from one position to another is a bit shift, and the hardware limits its
size. With ipos, opos, wpos, bpos for the positions of input, output, weight and bias:

    AlignConcat          all inputs and the output are equal
    AlignPool            ipos = opos, of MaxPool, AveragePool, GlobalAveragePool
    AlignPad             ipos = opos
    AlignSlice           ipos = opos
    AdjustShiftRead      Add, Sub: max(ipos) - min(ipos) <= 7
    AdjustShiftWrite     Add: -7 <= min(ipos) - opos <= 25;  Mul: 0 <= sum(ipos) - opos <= 32
    AdjustShiftCut       Conv, Gemm: 0 <= wpos + ipos - opos <= 16
    AdjustShiftBias      Conv, Gemm: min(0, shift_cut - 16) <= wpos + ipos - bpos <= 15; from 0 before a LeakyRelu
    AdjustHardSigmoid    0 <= ipos <= 15, 7 <= opos, 0 <= 14 + ipos - opos <= 31
    AdjustShiftSwish     Mul of x and HardSigmoid(x): 0 <= ipos0 + ipos1 - opos <= 15

A rule yields its bounds on an operation one after the other. Each bounds a quantity that grows or falls by one with the
position of one key; fixing it moves that key just far enough. Alignment lowers to the smallest position, because the
largest scale clips nothing.

Positions are a mapping from keys to integers, scale = 2^-position. The caller chooses the keys; operators that read the
same tensor use the same key. An operand that is not quantized, or not with a power of two, has no key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from quark.errors import InvalidValueError, unknown_name

HARD_SIGMOID_ALPHA = 1 / 6
HARD_SIGMOID_BETA = 0.5
_TOLERANCE = 1e-6  # ONNX attributes are float32


@dataclass(frozen=True)
class Operation:
    """An operator as the rules see it. `inputs` are the keys of the operands other than weight and bias. `output` is
    that of a fused activation if nothing is quantized in between."""

    name: str
    op_type: str
    inputs: tuple[Hashable | None, ...] = ()
    output: Hashable | None = None
    weight: Hashable | None = None
    bias: Hashable | None = None
    is_before_leaky_relu: bool = False
    is_swish: bool = False  # True for a Mul of x and HardSigmoid(x)
    alpha: float = 0.0  # the alpha of HardSigmoid
    beta: float = 0.0


def is_npu_hard_sigmoid(alpha: float, beta: float) -> bool:
    """True for the HardSigmoid that the NPU has: max(0, min(1, x / 6 + 1 / 2))."""
    is_alpha = math.isclose(alpha, HARD_SIGMOID_ALPHA, rel_tol=_TOLERANCE)
    return is_alpha and math.isclose(beta, HARD_SIGMOID_BETA, rel_tol=_TOLERANCE)


Positions = Mapping[Hashable, int]


@dataclass(frozen=True)
class Bound:
    """`quantity` must be in lowest..highest (None: no limit); it changes by `direction` if `key` goes up by one."""

    quantity: str
    value: int
    lowest: int | None
    highest: int | None
    key: Hashable
    direction: int = 1

    @property
    def excess(self) -> int:
        """The excess of the quantity above its range; negative if it is below."""
        if self.lowest is not None and self.value < self.lowest:
            return self.value - self.lowest
        if self.highest is not None and self.value > self.highest:
            return self.value - self.highest
        return 0


@dataclass(frozen=True)
class Violation:
    """A bound that does not hold; the rule would move its key."""

    rule: str
    operation: str
    bound: Bound

    def __str__(self) -> str:
        bound = self.bound
        if bound.lowest is not None and bound.lowest == bound.highest:
            wanted = f"expected {bound.lowest}"
        elif bound.highest is None:
            wanted = f"expected at least {bound.lowest}"
        else:
            wanted = f"expected {bound.lowest} to {bound.highest}"
        return f"{bound.quantity} = {bound.value}, {wanted}"


@dataclass(frozen=True)
class Move:
    """A position that a rule moved because of an operation."""

    rule: str
    operation: str
    key: Hashable
    before: int
    after: int


@dataclass(frozen=True)
class PositionRule:
    """`bounds` yields what must hold for an operation; nothing if an operand has no position. It reads the positions
    just before it yields a bound, so that earlier fixes count."""

    name: str
    op_types: tuple[str, ...]
    bounds: Callable[[Operation, Positions], Iterator[Bound]]

    def check(self, operation: Operation, positions: Positions) -> tuple[Violation, ...]:
        """The bounds that do not hold."""
        if operation.op_type not in self.op_types:
            return ()
        return tuple(
            Violation(self.name, operation.name, bound) for bound in self.bounds(operation, positions) if bound.excess
        )

    def fix(self, operation: Operation, positions: MutableMapping[Hashable, int]) -> tuple[Move, ...]:
        """Move positions so that the rule holds for this operation, and return the moves."""
        moves = []
        if operation.op_type in self.op_types:
            for bound in self.bounds(operation, positions):
                if bound.excess:
                    before = positions[bound.key]
                    positions[bound.key] = before - bound.direction * bound.excess
                    moves.append(Move(self.name, operation.name, bound.key, before, positions[bound.key]))
        return tuple(moves)

    def __str__(self) -> str:
        return self.name


def _known(keys: Sequence[Hashable | None], positions: Positions) -> list[Hashable] | None:
    """The keys; None if one of them is missing or has no position."""
    known = [key for key in keys if key is not None and key in positions]
    return known if known and len(known) == len(keys) else None


def _aligned(operation: Operation, positions: Positions) -> Iterator[Bound]:
    """Inputs without a position are ignored; without a position of the output there is nothing to align."""
    if operation.output is None or operation.output not in positions:
        return
    inputs = [key for key in operation.inputs if key is not None and key in positions]
    keys = list(dict.fromkeys([operation.output, *inputs]))
    lowest = min(positions[key] for key in keys)
    for key in keys:
        quantity = "opos" if key == operation.output else "ipos"
        yield Bound(quantity, positions[key], lowest, lowest, key)


def _shift_read(operation: Operation, positions: Positions) -> Iterator[Bound]:
    inputs = _known(operation.inputs, positions)
    if inputs is None:
        return
    lowest = min(positions[key] for key in inputs)
    for key in dict.fromkeys(inputs):
        yield Bound("shift_read = max(ipos) - min(ipos)", positions[key] - lowest, 0, 7, key)


def _shift_write(operation: Operation, positions: Positions) -> Iterator[Bound]:
    inputs = _known(operation.inputs, positions)
    output = operation.output
    if inputs is None or output is None or output not in positions:
        return
    if operation.op_type == "Add":
        value = min(positions[key] for key in inputs) - positions[output]
        yield Bound("shift_write = min(ipos) - opos", value, -7, 25, output, -1)
    else:
        value = sum(positions[key] for key in inputs) - positions[output]
        yield Bound("shift_write = sum(ipos) - opos", value, 0, 32, output, -1)


def _shift_cut(operation: Operation, positions: Positions) -> Iterator[Bound]:
    known = _known((*operation.inputs, operation.weight, operation.output), positions)
    if known is not None:
        source, weight, output = known
        value = positions[weight] + positions[source] - positions[output]
        yield Bound("shift_cut = wpos + ipos - opos", value, 0, 16, weight)


def _shift_bias(operation: Operation, positions: Positions) -> Iterator[Bound]:
    known = _known((*operation.inputs, operation.weight, operation.output, operation.bias), positions)
    if known is not None:
        source, weight, output, bias = known
        product = positions[weight] + positions[source]
        lowest = 0 if operation.is_before_leaky_relu else min(0, product - positions[output] - 16)
        yield Bound("shift_bias = wpos + ipos - bpos", product - positions[bias], lowest, 15, bias, -1)


def _hard_sigmoid(operation: Operation, positions: Positions) -> Iterator[Bound]:
    known = _known((*operation.inputs, operation.output), positions)
    if known is None or not is_npu_hard_sigmoid(operation.alpha, operation.beta):
        return
    source, output = known
    yield Bound("ipos", positions[source], 0, 15, source)
    yield Bound("opos", positions[output], 7, None, output)
    value = 14 + positions[source] - positions[output]
    yield Bound("shift_sigmoid = 14 + ipos - opos", value, 0, 31, output, -1)


def _shift_swish(operation: Operation, positions: Positions) -> Iterator[Bound]:
    known = _known((*operation.inputs, operation.output), positions)
    if known is not None and operation.is_swish:
        *inputs, output = known
        value = sum(positions[key] for key in inputs) - positions[output]
        yield Bound("shift_swish = ipos0 + ipos1 - opos", value, 0, 15, output, -1)


POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool")

RULES: tuple[PositionRule, ...] = (
    PositionRule("AlignConcat", ("Concat",), _aligned),
    PositionRule("AlignPool", POOLS, _aligned),
    PositionRule("AlignPad", ("Pad",), _aligned),
    PositionRule("AlignSlice", ("Slice",), _aligned),
    PositionRule("AdjustShiftRead", ("Add", "Sub"), _shift_read),
    PositionRule("AdjustShiftWrite", ("Add", "Mul"), _shift_write),
    PositionRule("AdjustShiftCut", ("Conv", "Gemm"), _shift_cut),
    PositionRule("AdjustShiftBias", ("Conv", "Gemm"), _shift_bias),  # after the rule that moves the weight
    PositionRule("AdjustHardSigmoid", ("HardSigmoid",), _hard_sigmoid),
    PositionRule("AdjustShiftSwish", ("Mul",), _shift_swish),
)
RULE_NAMES = tuple(rule.name for rule in RULES)


def rules_of(names: Iterable[str]) -> tuple[PositionRule, ...]:
    """The rules of these names, in the order of `RULES`."""
    wanted = set(names)
    for name in sorted(wanted - set(RULE_NAMES)):
        raise unknown_name("position rule", name, RULE_NAMES)
    return tuple(rule for rule in RULES if rule.name in wanted)


MAX_ROUNDS = 5


@dataclass(frozen=True)
class Settlement:
    """All moves, in order, and the bounds that do not hold at the end."""

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

    A round applies the rules in their order, each to all operations; the last round changes nothing. Rules can
    contradict each other: a HardSigmoid needs its output at 7 or more, a Concat behind it needs all of its tensors at
    the position of the largest one. Violations that remain after `max_rounds` are returned.

    >>> positions = {"x": 5, "w": 13, "y": 1}
    >>> settled = settle([Operation("conv", "Conv", ("x",), "y", "w")], positions)
    >>> positions["w"], [(move.rule, move.before, move.after) for move in settled.moves]
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
    violations = [
        violation for rule in rules for operation in operations for violation in rule.check(operation, positions)
    ]
    return Settlement(tuple(moves), tuple(violations))

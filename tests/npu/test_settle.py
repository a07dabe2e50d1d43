"""Rules that pull at each other come to rest, or it is told that they do not."""

from __future__ import annotations

import numpy as np
import pytest

from quark.errors import InvalidValueError
from quark.npu import RULES, Operation, rules_of, settle


def chain():
    """A Mul whose output a pool lowers, which a convolution reads: every move makes the next."""
    return [
        Operation("mul", "Mul", ("a", "b"), "m"),
        Operation("pool", "MaxPool", ("m",), "p"),
        Operation("conv", "Conv", ("p",), "y", "w", "c"),
    ]


def test_one_move_makes_another():
    positions = {"a": 1, "b": 2, "m": 9, "p": 8, "w": 6, "y": 8, "c": 40}
    settlement = settle(chain(), positions)
    assert settlement.is_settled
    assert positions == {"a": 1, "b": 2, "m": 3, "p": 3, "w": 6, "y": 8, "c": 24}
    assert {move.rule for move in settlement.moves} == {"AlignPool", "AdjustShiftWrite", "AdjustShiftBias"}


def test_a_moved_mul_counts_as_a_change():
    """Alone in its round, it is followed by another, in which the pool follows."""
    positions = {"a": 1, "b": 2, "m": 9, "p": 9, "w": 8, "y": 8, "c": 9}
    settlement = settle(chain(), positions)
    assert positions["m"] == positions["p"] == 3
    assert settlement.is_settled


def test_what_holds_is_left_alone():
    positions = {"a": 4, "b": 4, "m": 5, "p": 5, "w": 8, "y": 4, "c": 9}
    before = dict(positions)
    assert settle(chain(), positions).moves == ()
    assert positions == before


def test_a_contradiction_is_told():
    """A gate wants its output at 7 or more; the Concat behind it wants it where the large tensor is."""
    operations = [
        Operation("gate", "HardSigmoid", ("x",), "g", alpha=1 / 6, beta=0.5),
        Operation("concat", "Concat", ("g", "boxes"), "y"),
    ]
    positions = {"x": 4, "g": 7, "boxes": -3, "y": -3}
    settlement = settle(operations, positions)
    assert not settlement.is_settled
    assert {(violation.rule, violation.operation) for violation in settlement.violations} == {("AlignConcat", "concat")}
    assert positions["boxes"] == -3  # raised, it would clip


def test_rounds_are_bounded():
    positions = {"a": 1, "b": 2, "m": 9, "p": 9, "w": 8, "y": 8, "c": 9}
    assert not settle(chain(), dict(positions), max_rounds=1).is_settled
    none = dict(positions)
    settlement = settle(chain(), none, max_rounds=0)
    assert none == positions
    assert settlement.violations
    with pytest.raises(InvalidValueError, match="-1"):
        settle(chain(), positions, max_rounds=-1)


def test_rules_that_are_off_move_nothing():
    positions = {"a": 1, "b": 2, "m": 9, "p": 8, "w": 60, "y": 8, "c": 40}
    settlement = settle(chain(), positions, rules_of(["AlignPool"]))
    assert positions == {"a": 1, "b": 2, "m": 8, "p": 8, "w": 60, "y": 8, "c": 40}
    assert settlement.is_settled  # of those that are on


@pytest.mark.parametrize("seed", range(20))
def test_random_networks_settle(seed):
    """Convolutions, sums and pools in a row, at positions as calibration finds them."""
    random = np.random.default_rng(seed)
    operations, positions = [], {"t0": int(random.integers(-2, 9))}
    for index in range(30):
        new, old = f"t{index + 1}", f"t{index}"
        positions[new] = int(random.integers(-2, 9))
        kind = random.choice(["Conv", "Add", "MaxPool", "Concat", "Pad"])
        if kind == "Conv":
            positions |= {f"w{index}": int(random.integers(2, 14)), f"b{index}": int(random.integers(-4, 128))}
            operations.append(Operation(new, "Conv", (old,), new, f"w{index}", f"b{index}"))
        elif kind in ("Add", "Concat"):
            other = f"t{random.integers(0, index + 1)}"
            operations.append(Operation(new, kind, (old, other), new))
        else:
            operations.append(Operation(new, kind, (old,), new))
    settlement = settle(operations, positions, max_rounds=30)
    assert settlement.is_settled
    assert not any(rule.check(operation, positions) for rule in RULES for operation in operations)

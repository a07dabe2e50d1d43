"""Each rule of the NPU: what it takes, what it complains of, where it moves what."""

from __future__ import annotations

import itertools

import pytest

from quark.errors import UnknownNameError
from quark.npu import RULE_NAMES, RULES, Operation, rules_of, settle

BY_NAME = {rule.name: rule for rule in RULES}
CONV = Operation("conv", "Conv", ("x",), "y", "w", "b")
LEAKY = Operation("conv", "Conv", ("x",), "y", "w", "b", is_before_leaky_relu=True)
SIGMOID = Operation("gate", "HardSigmoid", ("x",), "y", alpha=1 / 6, beta=0.5)


def moved(rule, operation, **positions):
    """The positions once the rule has fixed the operation, of those that it changed."""
    before = dict(positions)
    moves = BY_NAME[rule].fix(operation, positions)
    assert not BY_NAME[rule].check(operation, positions)
    assert all(move.rule == rule and move.operation == operation.name for move in moves)
    return {key: position for key, position in positions.items() if position != before[key]}


def test_the_rules_are_the_options_in_their_order():
    assert (
        *("AlignConcat", "AlignPool", "AlignPad", "AlignSlice", "AdjustShiftRead", "AdjustShiftWrite"),
        *("AdjustShiftCut", "AdjustShiftBias", "AdjustHardSigmoid", "AdjustShiftSwish"),
    ) == RULE_NAMES
    assert rules_of(["AlignPad", "AlignConcat"]) == (BY_NAME["AlignConcat"], BY_NAME["AlignPad"])
    with pytest.raises(UnknownNameError, match="AlignPool"):
        rules_of(["AlignPol"])


@pytest.mark.parametrize(
    ("rule", "op_type"),
    [
        *(("AlignPool", value) for value in ("MaxPool", "AveragePool", "GlobalAveragePool")),
        *(("AlignPad", "Pad"), ("AlignSlice", "Slice"), ("AlignConcat", "Concat")),
    ],
)
def test_alignment_lowers_to_the_smallest(rule, op_type):
    one = Operation("node", op_type, ("x",), "y")
    assert moved(rule, one, x=5, y=3) == {"x": 3}
    assert moved(rule, one, x=2, y=3) == {"y": 2}
    assert moved(rule, one, x=4, y=4) == {}
    others = [each for each in RULES if each.name != rule]
    assert not any(other.check(one, {"x": 5, "y": 3}) for other in others)


def test_concat_takes_the_smallest_of_inputs_and_output():
    concat = Operation("node", "Concat", ("a", "b", "a", "c"), "y")
    assert moved("AlignConcat", concat, a=5, b=2, c=4, y=3) == {"a": 2, "c": 2, "y": 2}
    partly = Operation("node", "Concat", ("a", None, "c"), "y")
    assert moved("AlignConcat", partly, a=5, c=4, y=6) == {"a": 4, "y": 4}


@pytest.mark.parametrize("op_type", ["Add", "Sub"])
def test_shift_read(op_type):
    node = Operation("node", op_type, ("a", "b"), "y")
    assert moved("AdjustShiftRead", node, a=0, b=7, y=0) == {}
    assert moved("AdjustShiftRead", node, a=0, b=8, y=0) == {"b": 7}
    assert moved("AdjustShiftRead", node, a=9, b=-3, y=0) == {"a": 4}
    assert moved("AdjustShiftRead", Operation("node", op_type, ("a", "a"), "y"), a=5, y=0) == {}


@pytest.mark.parametrize(("inputs", "output", "expected"), [
    ((3, 5), 10, None), ((3, 5), 11, 10), ((30, 31), 5, None), ((30, 31), 4, 5), ((-5, 5), 3, 2), ((0, 0), -25, None),
])  # fmt: skip
def test_shift_write_of_add(inputs, output, expected):
    add = Operation("node", "Add", ("a", "b"), "y")
    a, b = inputs
    assert moved("AdjustShiftWrite", add, a=a, b=b, y=output) == ({} if expected is None else {"y": expected})


@pytest.mark.parametrize(("inputs", "output", "expected"), [
    ((3, 5), 8, None), ((3, 5), 9, 8), ((16, 20), 4, None), ((16, 20), 3, 4), ((-4, 2), 0, -2),
])  # fmt: skip
def test_shift_write_of_mul(inputs, output, expected):
    mul = Operation("node", "Mul", ("a", "b"), "y")
    a, b = inputs
    assert moved("AdjustShiftWrite", mul, a=a, b=b, y=output) == ({} if expected is None else {"y": expected})
    assert moved("AdjustShiftWrite", Operation("node", "Mul", ("a", "a"), "y"), a=3, y=7) == {"y": 6}


def test_a_sub_has_no_limit_on_writing():
    assert not BY_NAME["AdjustShiftWrite"].check(Operation("node", "Sub", ("a", "b"), "y"), {"a": 0, "b": 0, "y": 99})


@pytest.mark.parametrize("op_type", ["Conv", "Gemm"])
@pytest.mark.parametrize(("x", "w", "y", "expected"), [
    (4, 3, 7, None), (4, 3, 8, 4), (4, 2, -10, None), (4, 3, -10, 2), (-3, 1, 5, 8), (6, 127, 5, 15),
])  # fmt: skip
def test_shift_cut_moves_the_weight(op_type, x, w, y, expected):
    node = Operation("node", op_type, ("x",), "y", "w", "b")
    assert moved("AdjustShiftCut", node, x=x, w=w, y=y, b=0) == ({} if expected is None else {"w": expected})


def test_other_products_have_no_limits():
    for op_type in ("ConvTranspose", "MatMul"):
        node = Operation("node", op_type, ("x",), "y", "w", "b")
        assert not any(rule.check(node, {"x": 50, "w": 50, "y": 0, "b": 0}) for rule in RULES)


@pytest.mark.parametrize(("node", "x", "w", "y", "b", "expected"), [
    (CONV, 5, 7, 4, -3, None),    # shift 15
    (CONV, 5, 7, 4, -4, -3),      # 16 is one too many
    (CONV, 5, 7, 4, 20, None),    # shift cut 8 leaves room down to -8
    (CONV, 5, 7, 4, 21, 20),
    (CONV, 10, 10, 4, 20, None),  # shift cut 16 leaves none
    (CONV, 10, 10, 4, 21, 20),
    (CONV, 10, 10, 2, 21, 20),    # nor does more of it
    (LEAKY, 5, 7, 4, 12, None),   # and before a LeakyRelu there never is any
    (LEAKY, 5, 7, 4, 13, 12),
])  # fmt: skip
def test_shift_bias_moves_the_bias(node, x, w, y, b, expected):
    assert moved("AdjustShiftBias", node, x=x, w=w, y=y, b=b) == ({} if expected is None else {"b": expected})


def test_a_layer_without_bias_has_no_limit_on_it():
    without = Operation("conv", "Conv", ("x",), "y", "w")
    assert not BY_NAME["AdjustShiftBias"].check(without, {"x": 0, "w": 0, "y": 0})


@pytest.mark.parametrize(("x", "y", "expected"), [
    (3, 7, {}), (-1, 7, {"x": 0}), (16, 8, {"x": 15}), (3, 6, {"y": 7}), (3, 17, {}), (3, 18, {"y": 17}),
    (0, 15, {"y": 14}), (-2, 15, {"x": 0, "y": 14}),
])  # fmt: skip
def test_hard_sigmoid(x, y, expected):
    assert moved("AdjustHardSigmoid", SIGMOID, x=x, y=y) == expected


def test_another_hard_sigmoid_is_not_the_npus():
    other = Operation("gate", "HardSigmoid", ("x",), "y", alpha=0.2, beta=0.5)
    assert not BY_NAME["AdjustHardSigmoid"].check(other, {"x": -1, "y": 0})


def test_shift_swish():
    swish = Operation("mul", "Mul", ("x", "gate"), "y", is_swish=True)
    assert moved("AdjustShiftSwish", swish, x=4, gate=7, y=11) == {}
    assert moved("AdjustShiftSwish", swish, x=4, gate=7, y=12) == {"y": 11}
    assert moved("AdjustShiftSwish", swish, x=4, gate=7, y=-5) == {"y": -4}
    plain = Operation("mul", "Mul", ("x", "gate"), "y")
    assert not BY_NAME["AdjustShiftSwish"].check(plain, {"x": 4, "gate": 7, "y": -5})


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_an_operand_without_a_position_leaves_nothing_to_say(rule):
    for op_type in rule.op_types:
        whole = {"inputs": ("a", "b"), "output": "y", "weight": "w", "bias": "c"}
        if op_type not in ("Concat", "Add", "Sub", "Mul"):
            whole["inputs"] = ("a",)
        facts = {"alpha": 1 / 6, "beta": 0.5, "is_swish": True}
        wild = {"a": -40, "b": 60, "y": 33, "w": -70, "c": 90}
        assert rule.check(Operation("node", op_type, **whole, **facts), wild)
        for without in ({"output": None}, {"inputs": tuple(None for _ in whole["inputs"])}):
            if without == {"output": None} and rule.name == "AdjustShiftRead":
                continue
            assert not rule.check(Operation("node", op_type, **{**whole, **without}, **facts), wild)


def test_a_violation_says_value_and_bounds():
    (found,) = BY_NAME["AdjustShiftCut"].check(CONV, {"x": 9, "w": 9, "y": 1, "b": 0})
    assert (found.rule, found.operation, found.bound.key) == ("AdjustShiftCut", "conv", "w")
    assert str(found) == "shift_cut = wpos + ipos - opos = 17, expected 0 to 16"
    (found,) = BY_NAME["AdjustHardSigmoid"].check(SIGMOID, {"x": 3, "y": 2})
    assert str(found) == "opos = 2, expected at least 7"
    (found,) = BY_NAME["AlignPad"].check(Operation("pad", "Pad", ("x",), "y"), {"x": 3, "y": 2})
    assert str(found) == "ipos = 3, expected 2"


def test_fixing_moves_no_further_than_needed():
    """Over all small positions: what a rule moves ends on a bound, and what holds stays."""
    for x, w, y, b in itertools.product(range(-2, 12, 3), range(-2, 12, 3), range(-8, 12, 3), range(-8, 30, 5)):
        positions = {"x": x, "w": w, "y": y, "b": b}
        settle([CONV], positions)
        cut, bias = positions["w"] + x - y, positions["w"] + x - positions["b"]
        assert 0 <= cut <= 16
        assert min(0, cut - 16) <= bias <= 15
        assert (positions["w"] == w) == (0 <= w + x - y <= 16)
        assert positions["w"] == w or cut in (0, 16)

"""What AMD's NPU computes with, as numbers: the limits on positions, and constants. No graph; see `docs/npu.md`.

operation     an operator as the rules see it: keys of positions, and a few facts
rules         the ten rules, in their order
settle        moves positions until the rules hold
factors       the constants that the NPU computes means and slopes with
"""

from quark.npu.factors import (
    HARD_SIGMOID_FACTOR,
    average_pool_factor,
    clip_bound,
    leaky_relu_alpha,
    mean_factor,
)
from quark.npu.operation import HARD_SIGMOID_ALPHA, HARD_SIGMOID_BETA, Operation, is_npu_hard_sigmoid
from quark.npu.rules import RULE_NAMES, RULES, Move, PositionRule, Violation, rules_of
from quark.npu.settle import MAX_ROUNDS, Settlement, settle

__all__ = [
    "HARD_SIGMOID_ALPHA",
    "HARD_SIGMOID_BETA",
    "HARD_SIGMOID_FACTOR",
    "MAX_ROUNDS",
    "RULES",
    "RULE_NAMES",
    "Move",
    "Operation",
    "PositionRule",
    "Settlement",
    "Violation",
    "average_pool_factor",
    "clip_bound",
    "is_npu_hard_sigmoid",
    "leaky_relu_alpha",
    "mean_factor",
    "rules_of",
    "settle",
]

"""The arithmetic of AMD's NPU: its limits on positions, and its constants. No graph; see `docs/npu.md`.

rules         the ten rules in their order, and `settle`, which moves positions until they hold
factors       the constants with which the NPU computes means and slopes
operators     the operators that the compiler takes in a network of bfloat16 numbers
"""

from quark.npu.factors import (
    EXPONENTIAL,
    HARD_SIGMOID_FACTOR,
    average_pool_factor,
    clip_bound,
    leaky_relu_alpha,
    mean_factor,
)
from quark.npu.operators import BF16_OPERATORS, LANGUAGE_OPERATORS, LIKELY_OPERATORS
from quark.npu.rules import (
    HARD_SIGMOID_ALPHA,
    HARD_SIGMOID_BETA,
    MAX_ROUNDS,
    RULE_NAMES,
    RULES,
    Move,
    Operation,
    PositionRule,
    Settlement,
    Violation,
    is_npu_hard_sigmoid,
    rules_of,
    settle,
)

__all__ = [
    "BF16_OPERATORS",
    "EXPONENTIAL",
    "HARD_SIGMOID_ALPHA",
    "HARD_SIGMOID_BETA",
    "HARD_SIGMOID_FACTOR",
    "LANGUAGE_OPERATORS",
    "LIKELY_OPERATORS",
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

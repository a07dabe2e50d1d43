"""An operator as the NPU's rules see it.

Positions are held in a mapping from keys to integers, scale = 2^-position. What a key is, the caller decides; operators
that read one tensor name one key. An operand that is not quantized, or not with a power of two, has no key.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

HARD_SIGMOID_ALPHA = 1 / 6
HARD_SIGMOID_BETA = 0.5
_TOLERANCE = 1e-6  # the standard keeps attributes in float32


@dataclass(frozen=True)
class Operation:
    """`inputs` are the keys of the operands but for weight and bias. The output's is that of the activation which the
    operator is computed with, where nothing is quantized in between."""

    name: str
    op_type: str
    inputs: tuple[Hashable | None, ...] = ()
    output: Hashable | None = None
    weight: Hashable | None = None
    bias: Hashable | None = None
    is_before_leaky_relu: bool = False
    is_swish: bool = False  # a Mul of x and HardSigmoid(x)
    alpha: float = 0.0  # of HardSigmoid
    beta: float = 0.0


def is_npu_hard_sigmoid(alpha: float, beta: float) -> bool:
    """That a HardSigmoid is the one that the NPU has: max(0, min(1, x / 6 + 1 / 2))."""
    is_alpha = math.isclose(alpha, HARD_SIGMOID_ALPHA, rel_tol=_TOLERANCE)
    return is_alpha and math.isclose(beta, HARD_SIGMOID_BETA, rel_tol=_TOLERANCE)

"""What accuracy algorithms did, in a line each.

An algorithm that changed nothing says so, with the commonest reason: "applied" would be true of it, and mislead. The
limits of an NPU are the other way round: nothing changed means that all is well, and what is left is a fault.
"""

from __future__ import annotations

import re
from collections import Counter

from quark.account import AlgorithmFacts
from quark.report.quantities import count_of, listed

CROSS_LAYER, SMOOTH, BIAS_CORRECTION = "cross-layer equalization", "SmoothQuant", "bias correction"
NPU_POSITIONS = "npu positions"
MIXED_PRECISION = "mixed precision"
MOST_REASONS = 2

_NAMES_AND_NUMBERS = re.compile(r"'[^']*'|[-+]?\d[\d.e+-]*")

# What is counted; of others it is changes.
_NOUNS = {
    CROSS_LAYER: "region",
    SMOOTH: "group",
    BIAS_CORRECTION: "layer",
    NPU_POSITIONS: "position",
    MIXED_PRECISION: "layer",
    "AdaRound": "layer",
    "AdaQuant": "layer",
}


def algorithm_line(facts: AlgorithmFacts) -> str:
    """What it did, and what it left and why.

    >>> algorithm_line(AlgorithmFacts(SMOOTH, ("fc1: into norm1",)))
    'SmoothQuant: 1 group'
    >>> algorithm_line(AlgorithmFacts(SMOOTH, ()))
    'SmoothQuant: found nothing to do'
    """
    return f"{facts.name}: {_outcome(facts)}"


def idle_remark(facts: AlgorithmFacts) -> str | None:
    """What a user must not miss: that an algorithm which was asked for did nothing, or that limits do not hold."""
    if facts.name == NPU_POSITIONS:
        return f"{count_of(len(facts.left), 'limit')} of the NPU not kept: {_reasons(facts)}" if facts.left else None
    return None if facts.changed else f"{facts.name} {_outcome(facts)}"


def _outcome(facts: AlgorithmFacts) -> str:
    if facts.name == NPU_POSITIONS and not facts.changed and not facts.left:
        return "all within the limits as they are"
    if facts.changed or facts.name == NPU_POSITIONS:
        done = count_of(len(facts.changed), _NOUNS.get(facts.name, "change"))
        return f"{done}; left {len(facts.left)}: {_reasons(facts)}" if facts.left else done
    if not facts.left:
        return "found nothing to do"
    return f"found nothing to do: {_by_reason(facts)[0][0]}"


def _reasons(facts: AlgorithmFacts) -> str:
    counts = _by_reason(facts)
    if len(counts) == 1:
        return counts[0][0]
    return listed((f"{reason} ({count})" for reason, count in counts), MOST_REASONS)


def _by_reason(facts: AlgorithmFacts) -> list[tuple[str, int]]:
    """How often each, the commonest first. Those that differ in names and numbers alone are one, told by the first."""
    told: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for each in facts.left:
        reason = each.reason.replace(f" {each.op_type}", "") if each.op_type else each.reason
        counts[_NAMES_AND_NUMBERS.sub("", reason)] += 1
        told.setdefault(_NAMES_AND_NUMBERS.sub("", reason), reason)
    return [(told[key], count) for key, count in counts.most_common()]

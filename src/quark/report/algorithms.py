"""One line about what each accuracy algorithm did.

For an algorithm that changed nothing, the line gives the most common reason instead, since "applied" would be
misleading. For the limits of an NPU, no change means that all is well, and operators left over are a problem.
"""

from __future__ import annotations

import re
from collections import Counter

from quark.account import AlgorithmFacts
from quark.features.order import FEATURES
from quark.report.quantities import count_of, listed

CROSS_LAYER, SMOOTH, BIAS_CORRECTION = "cross-layer equalization", "SmoothQuant", "bias correction"
NPU_POSITIONS = "npu positions"
MIXED_PRECISION = "mixed precision"
MOST_REASONS = 2

_NAMES_AND_NUMBERS = re.compile(r"'[^']*'|[-+]?\d[\d.e+-]*")

# the noun of what is counted; for other algorithms, changes
_NOUNS = {
    NPU_POSITIONS: "position",
    MIXED_PRECISION: "layer",
    **{name: noun for feature in FEATURES for name, noun in feature.nouns.items()},
}


def algorithm_line(facts: AlgorithmFacts) -> str:
    """Return what an algorithm did, and what it left unchanged and why.

    >>> algorithm_line(AlgorithmFacts(SMOOTH, ("fc1: into norm1",)))
    'SmoothQuant: 1 group'
    >>> algorithm_line(AlgorithmFacts(SMOOTH, ()))
    'SmoothQuant: found nothing to do'
    """
    return f"{facts.name}: {_outcome(facts)}"


def idle_remark(facts: AlgorithmFacts) -> str | None:
    """Return a remark if a requested algorithm did nothing, or if limits of the NPU do not hold.

    It is logged and written to the JSON; the summary omits it if the algorithm's line says the same.
    """
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
    return f"changed nothing: {_by_reason(facts)[0][0]}"


def _reasons(facts: AlgorithmFacts) -> str:
    counts = _by_reason(facts)
    if len(counts) == 1:
        return counts[0][0]
    return listed((f"{reason} ({count})" for reason, count in counts), MOST_REASONS)


def _by_reason(facts: AlgorithmFacts) -> list[tuple[str, int]]:
    """Return reasons and their counts, the most common first.

    Reasons that differ only in names and numbers are counted together, under the first one.
    """
    told: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for node in facts.left:
        reason = node.reason.replace(f" {node.op_type}", "") if node.op_type else node.reason
        counts[_NAMES_AND_NUMBERS.sub("", reason)] += 1
        told.setdefault(_NAMES_AND_NUMBERS.sub("", reason), reason)
    return [(told[key], count) for key, count in counts.most_common()]

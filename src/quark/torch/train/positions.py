"""Positions within the limits of AMD's NPU: scales are powers of two, and going from one to another is a shift."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace

from quark.account import AlgorithmFacts
from quark.npu import Operation, settle
from quark.plan import AffineChoice, Choice, SkippedNode


def settle_positions(
    operations: tuple[Operation, ...], choices: Mapping[str, Choice]
) -> tuple[dict[str, AffineChoice], AlgorithmFacts]:
    """Quantizers that have to be moved so that the rules hold, with their new choices, and an account of it."""
    positions: dict[Hashable, int] = {
        name: found for name, each in choices.items() if (found := _position(each)) is not None
    }
    before = dict(positions)
    outcome = settle(operations, positions)
    moved = {name: (before[name], positions[name]) for name in before if positions[name] != before[name]}
    facts = AlgorithmFacts(
        "NPU positions",
        tuple(f"{name} from {was} to {now}" for name, (was, now) in moved.items()),
        tuple(SkippedNode(each.operation, "", f"{each.rule}: {each}") for each in outcome.violations),
    )
    return {str(name): _at(choices[str(name)], now) for name, (_, now) in moved.items()}, facts


def _position(choice: Choice) -> int | None:
    """scale = 2^-position, where it is a power of two and one for the tensor."""
    if not isinstance(choice, AffineChoice) or len(choice.scale) != 1:
        return None
    fraction, exponent = math.frexp(choice.scale[0])
    return 1 - exponent if fraction == 0.5 else None


def _at(choice: Choice, position: int) -> AffineChoice:
    assert isinstance(choice, AffineChoice)
    return replace(choice, scale=(math.ldexp(1.0, -position),))

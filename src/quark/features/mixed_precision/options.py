"""The options of mixed precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from quark.decide.specs import LayerSpec
from quark.measures import Measure

LAYER_TYPES = ("Conv", "ConvTranspose", "Gemm", "MatMul")
SENSITIVITY_SAMPLES = 16
DISTANCE_SAMPLES = 128


class Method(str, Enum):
    """How layers are chosen for a budget."""

    GREEDY = "greedy"  # by harm per bit saved
    INTEGER = "integer"  # with the least possible harm, by integer programming


@dataclass(frozen=True)
class MixOptions:
    """Layers of `op_types` get the types of `low` instead of the default ones, as many as the targets allow.

    Targets of quality, all of which have to be met: `accuracy_drop` is the largest drop of `evaluate` against the float
    network, `measure_drop` the largest drop of `measure`, relative to the float network's value, `l2` the largest mean
    L2 distance of output `output_index` from float, `sqnr_db` its lowest signal to noise. Budgets, one of which is met
    with the least harm: `weight_bits` is the mean number of bits of a weight, `bit_operations` their number relative to
    that at the higher types. At most `layer_limit` layers are lowered.

    `included` and `excluded` are names or patterns of layers; nothing included means all. With `is_plan_given` the
    choices of `plan_file` are used as they are. If `sample_limit` is None, the usual numbers of samples are used."""

    low: LayerSpec
    op_types: frozenset[str] = frozenset(LAYER_TYPES)
    included: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    output_index: int = 0
    accuracy_drop: float | None = None
    evaluate: Callable[[Any], Any] | None = None
    measure: Measure | None = None
    measure_drop: float | None = None
    l2: float | None = None
    sqnr_db: float | None = None
    layer_limit: int | None = None
    weight_bits: float | None = None
    bit_operations: float | None = None
    method: Method = Method.GREEDY
    plan_file: Path | None = None
    is_plan_given: bool = False
    sample_limit: int | None = None

    @property
    def has_budget(self) -> bool:
        return self.weight_bits is not None or self.bit_operations is not None

    @property
    def has_quality(self) -> bool:
        targets = (self.accuracy_drop, self.measure_drop, self.l2, self.sqnr_db)
        return any(each is not None for each in targets)

    @property
    def sensitivity_samples(self) -> int:
        return self.sample_limit or SENSITIVITY_SAMPLES

    @property
    def distance_samples(self) -> int:
        return self.sample_limit or DISTANCE_SAMPLES

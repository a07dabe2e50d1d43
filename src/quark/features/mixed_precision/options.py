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
    """The way in which layers are chosen for a budget."""

    GREEDY = "greedy"  # in the order of harm per bit saved
    INTEGER = "integer"  # with the least possible harm, by integer programming


class ScoreKind(str, Enum):
    """The distance of a network from float; lower is better."""

    L2 = "l2"  # the mean over samples of the L2 distance
    KL = "kl"  # divergence of the outputs as distributions
    COSINE = "cosine"  # 1 - cosine
    SQNR = "sqnr"  # in decibels, with the other sign
    PSNR = "psnr"  # in decibels, with the other sign
    DISTANCE = "distance"  # the result of a function of both networks' outputs
    EVALUATION = "evaluation"  # the loss in the result of a function of one network's outputs


@dataclass(frozen=True)
class Score:
    """A score, which may be at most `limit`; None: any. `function` belongs to the last two kinds, and gets a list with
    a list of outputs for each sample, in the order of the samples."""

    kind: ScoreKind = ScoreKind.L2
    function: Callable[..., Any] | None = None
    limit: float | None = None


@dataclass(frozen=True)
class MixOptions:
    """Layers of `op_types` get the types of `low` instead of the default ones, as many as the targets allow.

    Targets of quality, all of which have to be met: `accuracy_drop` is the largest drop of `evaluate` against the float
    network, `measure_drop` the largest drop of `measure`, relative to the float network's value, `l2` the largest mean
    L2 distance of output `output_index` from float, `sqnr_db` its lowest signal to noise. Budgets, one of which is met
    with the least harm: `weight_bits` is the mean number of bits of a weight, `bit_operations` their number relative to
    that at the higher types. At most `layer_limit` layers are lowered.

    `included` and `excluded` are names or patterns of layers; nothing included means all. With `is_plan_given` the
    choices of `plan_file` are used as they are. If `sample_limit` is None, the usual numbers of samples are used.

    With `others`, a layer gets those of the types of `low` and `others` with which the network is closest to float;
    `by_layer` has the types of layers by name. With `is_upward`, the default types are the lower ones, and as few
    layers get the other ones as the targets allow. With `is_analysis_only`, layers are ranked and stay as they are.

    `tensors`, by name, get the types without any search, and so do the layers of the numbers `indices`, or all but
    `excluded_indices`. `subgraphs` is a file that says which layers are mixed together. `cache_file` keeps the scores
    of layers. With `skips_shared_inputs`, layers whose input others read too stay as they are. `has_dual_pairs`: see
    ChoiceOptions."""

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
    others: tuple[LayerSpec, ...] = ()
    by_layer: tuple[tuple[str, LayerSpec], ...] = ()
    score: Score | None = None
    is_upward: bool = False
    is_analysis_only: bool = False
    tensors: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    excluded_indices: tuple[int, ...] = ()
    subgraphs: Path | None = None
    cache_file: Path | None = None
    skips_shared_inputs: bool = False
    has_dual_pairs: bool = False

    @property
    def targets(self) -> tuple[LayerSpec, ...]:
        """The types that layers can be given."""
        return (self.low, *self.others)

    @property
    def has_budget(self) -> bool:
        return self.weight_bits is not None or self.bit_operations is not None

    @property
    def has_quality(self) -> bool:
        limit = None if self.score is None else self.score.limit
        targets = (self.accuracy_drop, self.measure_drop, self.l2, self.sqnr_db, limit)
        return any(target is not None for target in targets)

    @property
    def sensitivity_samples(self) -> int:
        return self.sample_limit or SENSITIVITY_SAMPLES

    @property
    def distance_samples(self) -> int:
        return self.sample_limit or DISTANCE_SAMPLES

"""From ranges to the final plan: choose, keep to an NPU's limits, correct biases, choose those anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from quark.account import AlgorithmFacts
from quark.onnx.calibrate import FloatRunner, survey
from quark.onnx.choose import Placement, RangeKey, choose, limit_positions, rechoose
from quark.onnx.data import Samples
from quark.onnx.quantization.prefix_correction import correct_from_prefix
from quark.onnx.quantization.settings import Settings
from quark.onnx.refine import CorrectionInputs, correct_biases, tensors_to_average
from quark.plan import QuantizationPlan, SkippedNode
from quark.ranges import TensorRange

Ranges = Mapping[RangeKey, TensorRange]


def decide(
    model: ir.Model,
    placement: Placement,
    ranges: Ranges,
    runner: FloatRunner,
    samples: Samples,
    expected: Sequence[Mapping[str, Any]],
    settings: Settings,
) -> tuple[QuantizationPlan, tuple[AlgorithmFacts, ...]]:
    """The plan that is carried out, and what algorithms did for it. Biases of the float model may change."""
    plan = choose(model, placement, ranges, settings.choose)
    plan, moved = _within_limits(model, plan, settings)
    if settings.refine.bias_correction is None:
        return plan, moved
    if samples.is_random or not samples.count:
        return plan, (*moved, _uncorrected())
    means = survey(
        runner,
        tensors_to_average(model, plan),
        samples,
        settings.calibrate,
        sample_limit=settings.refine.bias_correction.sample_limit,
        title="correcting biases",
    )
    corrected, changed = correct_biases(model, plan, means)
    facts = [corrected]
    if settings.refine.bias_correction.inputs is CorrectionInputs.QUANTIZED:
        limit = settings.refine.bias_correction.sample_limit
        followed, also = correct_from_prefix(model, plan, runner, samples, expected, limit)
        facts, changed = [*facts, followed], changed | also
    plan = rechoose(model, plan, placement, ranges, settings.choose, changed)
    plan, moved_again = _within_limits(model, plan, settings)
    return plan, (*map(_joined, moved, moved_again), *facts)


def _within_limits(
    model: ir.Model, plan: QuantizationPlan, settings: Settings
) -> tuple[QuantizationPlan, tuple[AlgorithmFacts, ...]]:
    if settings.choose.positions is None:
        return plan, ()
    limited, facts = limit_positions(model, plan, settings.choose.positions)
    return limited, (facts,)


def _joined(first: AlgorithmFacts, second: AlgorithmFacts) -> AlgorithmFacts:
    return replace(second, changed=(*first.changed, *second.changed))


def _uncorrected() -> AlgorithmFacts:
    reason = "no calibration data was given, and the mean of random numbers corrects nothing"
    return AlgorithmFacts("bias correction", (), (SkippedNode("", "", reason),))

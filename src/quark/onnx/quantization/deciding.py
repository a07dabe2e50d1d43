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
from quark.onnx.insert import insert
from quark.onnx.quantization.finetuning import finetune
from quark.onnx.quantization.output_error import output_error
from quark.onnx.quantization.prefix_correction import correct_from_prefix
from quark.onnx.quantization.settings import Settings
from quark.onnx.refine import CorrectionInputs, correct_biases, tensors_to_average
from quark.onnx.save import SaveOptions, finish
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
    exact: ir.Model | None,
) -> tuple[QuantizationPlan, tuple[AlgorithmFacts, ...]]:
    """The plan that is carried out, and what algorithms did for it. Weights and biases of the float model may change;
    `exact` is what it was, where that is wanted."""
    plan, facts = _corrected(model, placement, ranges, runner, samples, expected, settings)
    if settings.refine.finetune is None or exact is None:
        return plan, facts
    return plan, (*facts, _finetuned(model, exact, plan, samples, expected, settings))


def _finetuned(
    model: ir.Model,
    exact: ir.Model,
    plan: QuantizationPlan,
    samples: Samples,
    expected: Sequence[Mapping[str, Any]],
    settings: Settings,
) -> AlgorithmFacts:
    """Finetune weights and biases for this plan, whose scales they were fitted with. Where the whole network is no
    better for it, the last quarter of the layers is taken back, or the last half, and so on, up to all of them: a layer
    was fitted to those before it, and knows nothing of those behind."""
    before = _quantized_error(model, plan, samples, expected, settings)
    standing = {name: value.const_value for name, value in model.graph.initializers.items()}
    found = finetune(model, exact, plan, samples, settings)
    fitted = {name: model.graph.initializers[name].const_value for step in found.steps for name in step}
    count = len(found.steps)

    def error_of(kept: int) -> float:
        """With the first layers as they were fitted, and the others as they stood."""
        for number, step in enumerate(found.steps):
            for name in step:
                model.graph.initializers[name].const_value = (fitted if number < kept else standing)[name]
        return _quantized_error(model, plan, samples, expected, settings)

    after = error_of(count)
    if after <= before:
        return found.facts
    errors = {kept: error_of(kept) for kept in sorted({count * quarter // 4 for quarter in (1, 2, 3)})}
    kept = min(errors, key=lambda each: errors[each])
    kept = kept if errors[kept] < before else 0
    error_of(kept)
    reason = f"with it the network's outputs on held-out samples got worse: error {before:.4g} became {after:.4g}"
    taken_back = [SkippedNode(each.partition(": ")[0], "", reason) for each in found.facts.changed[kept:]]
    return replace(found.facts, changed=found.facts.changed[:kept], left=(*found.facts.left, *taken_back))


def _quantized_error(
    model: ir.Model,
    plan: QuantizationPlan,
    samples: Samples,
    expected: Sequence[Mapping[str, Any]],
    settings: Settings,
) -> float:
    """Of the network as it would be written; 0 where no samples were held out."""
    if not samples.held_out:
        return 0.0
    copy = model.clone()
    insert(copy, plan, settings.insert)
    runnable = finish(copy, {}, SaveOptions(has_portable_functions=False)).to_graph()
    return output_error(runnable, samples.held_out, expected)


def _corrected(
    model: ir.Model,
    placement: Placement,
    ranges: Ranges,
    runner: FloatRunner,
    samples: Samples,
    expected: Sequence[Mapping[str, Any]],
    settings: Settings,
) -> tuple[QuantizationPlan, tuple[AlgorithmFacts, ...]]:
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

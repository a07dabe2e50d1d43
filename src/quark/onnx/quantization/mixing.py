"""Mixed precision, from the model and its samples to the options that the plan is made by.

sensitivities   each layer lowered alone, once; or from the plan file, where they are of the same model and samples
search          as many layers as the targets of quality allow, or the least harm within a budget
plan file       written after every step forward, so that a run that breaks off leaves the best so far
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from quark.account import AlgorithmFacts
from quark.errors import InvalidValueError, ModelError, unknown_name
from quark.files.foreign import REPORT, read_json
from quark.mixed_precision import (
    Figure,
    LayerPrecision,
    Metric,
    MixedPlan,
    Precision,
    Trial,
    least_harm,
    least_harm_greedy,
    lower_most,
    rising,
)
from quark.mixed_precision.search import MOST_TRIALS
from quark.onnx.choose import ChoiceOptions, RangeKey
from quark.onnx.choose.specs import bits_of, words_of
from quark.onnx.data import Samples
from quark.onnx.message import Message
from quark.onnx.mix import Method, MixOptions
from quark.onnx.progress import Advance, track
from quark.onnx.quantization.mixing_networks import MixedNetworks, Network
from quark.onnx.quantization.mixing_quality import Quality, output_name
from quark.onnx.quantization.settings import Settings
from quark.onnx.save import write_text
from quark.plan import SkippedNode
from quark.ranges import TensorRange
from quark.report.algorithms import MIXED_PRECISION
from quark.report.mixed_precision import missed_remarks


@dataclass(frozen=True, eq=False)
class Mixed:
    """What mixing gives: the options to choose by, the ranges that were measured for it, and the account."""

    choose: ChoiceOptions
    ranges: Mapping[RangeKey, TensorRange]
    plan: MixedPlan
    notes: tuple[str, ...] = ()
    quality: Quality | None = None  # where what the pipeline does next changes how good the network is

    @property
    def facts(self) -> AlgorithmFacts:
        high = [each for each in self.plan.layers if each.choice is Precision.HIGH]
        changed = tuple(f"{name}: {self.plan.low}" for name in self.plan.lowered)
        return AlgorithmFacts(
            MIXED_PRECISION, changed, tuple(SkippedNode(each.layer, each.op_type, _reason(self.plan)) for each in high)
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        return (*self.notes, *missed_remarks(self.plan))

    def judged(self, message: Message, settings: Settings) -> Mixed:
        """The same with the figures of the network as it came out, where refining has changed it."""
        if self.quality is None:
            return self
        with Network(message.to_graph(), settings.calibrate.providers) as network:
            figures = {each.metric: each for each in self.quality.figures(network)}
        plan = replace(self.plan, figures=tuple(figures.get(each.metric, each) for each in self.plan.figures))
        if settings.mix is not None and settings.mix.plan_file is not None:
            write_text(plan.to_json(), settings.mix.plan_file)
        return replace(self, plan=plan, quality=None)


def _reason(plan: MixedPlan) -> str:
    return "stays at the higher types" if plan.lowered else "no layer can have the lower types within the targets"


def mix(
    model: ir.Model, original: ir.Model | None, samples: Samples, settings: Settings, vanished: Collection[str]
) -> Mixed:
    """Decide which layers have the lower types; the model is not touched. `original` is the network to compare with,
    where that is another function than the model is now. `vanished`: nodes that rewrites have removed."""
    options = settings.mix
    assert options is not None
    output_name(model, options.output_index)
    given = _read_plan(options)
    with MixedNetworks(model, samples, settings, vanished) as networks:
        types = words_of(settings.choose.default), words_of(options.low)
        plan = MixedPlan(networks.layers, *types, model=networks.model_digest() if options.plan_file else "")
        if not networks.layers:
            return Mixed(settings.choose, {}, plan)
        if options.is_plan_given:
            assert given is not None
            plan, notes = _as_given(plan, given)
            return Mixed(networks.options(plan.lowered), {}, plan, notes)
        networks.measure()
        quality = Quality(original or model, samples, options, settings.calibrate.providers)
        mixer = _Mixer(networks, quality, settings)
        plan = mixer.run(plan, given)
        is_changed_later = settings.refine != networks.refine and options.has_quality
        return Mixed(
            networks.options(plan.lowered),
            networks.ranges,
            plan,
            tuple(mixer.notes),
            quality if is_changed_later else None,
        )


class _Mixer:
    def __init__(self, networks: MixedNetworks, quality: Quality, settings: Settings) -> None:
        assert settings.mix is not None
        self._networks, self._quality, self._options = networks, quality, settings.mix
        self._high, self._low = bits_of(settings.choose.default), bits_of(settings.mix.low)
        self.notes: list[str] = []

    def run(self, plan: MixedPlan, given: MixedPlan | None) -> MixedPlan:
        plan = self._with_sensitivities(plan, given)
        self._write(plan)
        if self._options.has_budget:
            plan = self._within_budget(plan)
        elif self._options.has_quality:
            plan = self._searched(plan)
        else:
            plan = plan.with_lowered(rising(plan.layers)[: self._options.layer_limit])
        self._write(plan)
        return plan

    def _with_sensitivities(self, plan: MixedPlan, given: MixedPlan | None) -> MixedPlan:
        seen = self._quality.sensitive
        basis = ""
        if self._options.plan_file is not None:
            basis = self._networks.basis_digest(seen.samples(), seen.output)
        plan = replace(plan, basis=basis, samples=len(seen))
        known = {} if given is None else {each.layer: each.sensitivity for each in given.layers}
        if (
            given is not None
            and given.basis == basis
            and all(known.get(each.layer) is not None for each in plan.layers)
        ):
            return replace(plan, layers=tuple(replace(each, sensitivity=known[each.layer]) for each in plan.layers))
        if given is not None:
            self.notes.append(
                f"PlanFile '{self._options.plan_file}': its sensitivities are of another model, other types or other "
                "samples, and were measured anew"
            )
        with track(len(plan.layers), "measuring sensitivities") as advance:
            return replace(plan, layers=tuple(self._measured(each, advance) for each in plan.layers))

    def _measured(self, layer: LayerPrecision, advance: Advance) -> LayerPrecision:
        with self._networks.alone(layer.layer) as network:
            error = self._quality.error(network)
        advance()
        return replace(layer, sensitivity=error)

    def _searched(self, plan: MixedPlan) -> MixedPlan:
        with track(MOST_TRIALS, "mixing precisions") as advance:

            def judge(lowered: tuple[str, ...]) -> tuple[Figure, ...]:
                figures = self._figures(lowered)
                advance()
                return figures

            def remember(trial: Trial) -> None:
                self._write(plan.with_lowered(trial.lowered, trial.figures))

            best = lower_most(rising(plan.layers), judge, remember, self._options.layer_limit)
        return plan.with_lowered(best.lowered, best.figures)

    def _within_budget(self, plan: MixedPlan) -> MixedPlan:
        size, limit, metric = self._budget(plan)
        at_high, at_low = self._sizes(metric)
        saved = [each * (at_high - at_low) for each in size]
        harm = [each.sensitivity or 0.0 for each in plan.layers]
        solve = least_harm if self._options.method is Method.INTEGER else least_harm_greedy
        wanted = sum(size) * (at_high - limit)
        numbers = solve(harm, saved, wanted)
        if numbers is None:
            numbers = tuple(range(len(plan.layers)))  # as close as it gets
        lowered = tuple(plan.layers[i].layer for i in numbers)
        total = sum(size)
        reached = at_high - (sum(saved[i] for i in numbers) / total if total else 0.0)
        unit = at_high if metric is Metric.BIT_OPERATIONS else 1.0
        figure = Figure(metric, reached / unit, limit / unit, at_high / unit)
        quality = self._figures(lowered) if self._options.has_quality else ()
        return plan.with_lowered(lowered, (figure, *quality))

    def _budget(self, plan: MixedPlan) -> tuple[list[int], float, Metric]:
        """What counts of each layer, what each of those may cost on the average, and what it is called."""
        if self._options.weight_bits is not None:
            return [each.weights for each in plan.layers], self._options.weight_bits, Metric.BITS
        assert self._options.bit_operations is not None
        unknown = [each.layer for each in plan.layers if each.macs is None]
        if unknown:
            raise ModelError(
                f"AutoMixprecision.BitOperationsTarget: the shapes around layer '{unknown[0]}' are not known, so that "
                "its multiplications cannot be counted. Give them by FixShapes, or use BitsTarget"
            )
        at_high, _ = self._sizes(Metric.BIT_OPERATIONS)
        counts = [each.macs or 0 for each in plan.layers]
        return counts, self._options.bit_operations * at_high, Metric.BIT_OPERATIONS

    def _sizes(self, metric: Metric) -> tuple[float, float]:
        """Bits of a weight, or bits times bits of a multiplication, at the higher types and at the lower ones."""
        if metric is Metric.BITS:
            return self._high[1], self._low[1]
        return self._high[0] * self._high[1], self._low[0] * self._low[1]

    def _figures(self, lowered: tuple[str, ...]) -> tuple[Figure, ...]:
        with self._networks.mixed(lowered) as network:
            return self._quality.figures(network)

    def _write(self, plan: MixedPlan) -> None:
        if self._options.plan_file is not None:
            write_text(plan.to_json(), self._options.plan_file)


def _read_plan(options: MixOptions) -> MixedPlan | None:
    """What is in the plan file; None where there is none yet. One that is something else is not overwritten."""
    path = options.plan_file
    if path is None:
        return None
    if not path.exists():
        if options.is_plan_given:
            raise InvalidValueError(
                f"AutoMixprecision.PlanFile '{path}': there is no such file, and UsePlan asks for it"
            )
        if not path.parent.is_dir():
            raise InvalidValueError(f"AutoMixprecision.PlanFile '{path}': there is no folder '{path.parent}'")
        return None
    label = f"AutoMixprecision.PlanFile '{path}'"
    return MixedPlan.from_dict(read_json(path, label, REPORT), label)


def _as_given(plan: MixedPlan, given: MixedPlan) -> tuple[MixedPlan, tuple[str, ...]]:
    """The choices of a plan file for the layers of this model."""
    known = {each.layer: each for each in given.layers}
    names = [each.layer for each in plan.layers]
    for name in known:
        if name not in names:
            raise unknown_name("layer (AutoMixprecision.PlanFile) that can have the lower types", name, names)
    notes = []
    missing = [name for name in names if name not in known]
    if missing:
        notes.append(
            f"PlanFile says nothing of {len(missing)} layers, which stay at the higher types: {missing[0]} ..."
        )
    if given.model and given.model != plan.model:
        notes.append("PlanFile was made for another model, or the same after other rewrites; its choices were taken")
    for mine, theirs in ((plan.high, given.high), (plan.low, given.low)):
        if theirs and theirs != mine:
            notes.append(f"PlanFile was made for '{theirs}', and its choices were taken for '{mine}'")
    layers = tuple(
        replace(each, sensitivity=known[each.layer].sensitivity, choice=known[each.layer].choice)
        if each.layer in known
        else each
        for each in plan.layers
    )
    return replace(plan, layers=layers, basis=given.basis, samples=given.samples), tuple(notes)

"""Mixed precision, from the model and its samples to the options that the plan is made by.

sensitivities   each layer lowered alone, once; or from the plan file, if they are of the same model and samples
search          as many layers as the targets of quality allow, or the least harm within a budget
plan file       written after every improvement, so that an interrupted run leaves the best so far
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from quark.account import AlgorithmFacts
from quark.decide import ChoiceOptions, RangeKey
from quark.decide.specs import bits_of, words_of
from quark.errors import InvalidValueError, ModelError, unknown_name
from quark.features.mixed_precision.networks import MixedNetworks, Network
from quark.features.mixed_precision.options import Method, MixOptions
from quark.features.mixed_precision.plan import Figure, Metric, MixedPlan, Precision
from quark.features.mixed_precision.quality import Quality, output_name
from quark.features.mixed_precision.report import missed_remarks
from quark.features.mixed_precision.search import MOST_TRIALS, Trial, least_harm, least_harm_greedy, lower_most, rising
from quark.files.foreign import REPORT, read_json
from quark.onnx.data import Samples
from quark.onnx.large_tensors import Message
from quark.onnx.progress import track
from quark.onnx.save import write_text
from quark.onnx.settings import Settings
from quark.plan import SkippedNode
from quark.ranges import TensorRange
from quark.report.algorithms import MIXED_PRECISION


@dataclass(frozen=True, eq=False)
class Mixed:
    """The options to choose by, the ranges that were measured for them, and the plan for the report."""

    choose: ChoiceOptions
    ranges: Mapping[RangeKey, TensorRange]
    plan: MixedPlan
    notes: tuple[str, ...] = ()
    quality: Quality | None = None  # given if the pipeline still changes the network

    @property
    def facts(self) -> AlgorithmFacts:
        changed = tuple(f"{name}: {self.plan.low}" for name in self.plan.lowered)
        reason = "stays at the higher types" if changed else "no layer can have the lower types within the targets"
        high = (each for each in self.plan.layers if each.choice is Precision.HIGH)
        left = tuple(SkippedNode(each.layer, each.op_type, reason) for each in high)
        return AlgorithmFacts(MIXED_PRECISION, changed, left)

    @property
    def remarks(self) -> tuple[str, ...]:
        return (*self.notes, *missed_remarks(self.plan))

    def judged(self, message: Message, settings: Settings) -> Mixed:
        """The same with the figures of the final network, if later steps have changed it."""
        if self.quality is None:
            return self
        with Network(message.to_graph(), settings.calibrate.providers) as network:
            figures = {each.metric: each for each in self.quality.figures(network)}
        plan = replace(self.plan, figures=tuple(figures.get(each.metric, each) for each in self.plan.figures))
        if settings.mix is not None and settings.mix.plan_file is not None:
            write_text(plan.to_json(), settings.mix.plan_file)
        return replace(self, plan=plan, quality=None)


def mix(
    model: ir.Model, original: ir.Model | None, samples: Samples, settings: Settings, vanished: Collection[str]
) -> Mixed:
    """Decide which layers have the lower types; the model is not changed. `original` is the network to compare with,
    if rewrites have changed the function of the model. `vanished` are nodes that rewrites have removed."""
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
        trials = networks.trial_settings
        is_changed_later = (settings.refine, settings.features) != (trials.refine, {}) and options.has_quality
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
            with track(MOST_TRIALS, "mixing precisions") as advance:

                def judge(lowered: tuple[str, ...]) -> tuple[Figure, ...]:
                    figures = self._figures(lowered)
                    advance()
                    return figures

                def remember(trial: Trial) -> None:
                    self._write(plan.with_lowered(trial.lowered, trial.figures))

                best = lower_most(rising(plan.layers), judge, remember, self._options.layer_limit)
            plan = plan.with_lowered(best.lowered, best.figures)
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
        if given is not None:
            if given.basis == basis and all(known.get(each.layer) is not None for each in plan.layers):
                return replace(plan, layers=tuple(replace(each, sensitivity=known[each.layer]) for each in plan.layers))
            self.notes.append(
                f"PlanFile '{self._options.plan_file}': its sensitivities are of another model, other types or other "
                "samples, and were measured anew"
            )
        layers = []
        with track(len(plan.layers), "measuring sensitivities") as advance:
            for each in plan.layers:
                with self._networks.alone(each.layer) as network:
                    layers.append(replace(each, sensitivity=self._quality.error(network)))
                advance()
        return replace(plan, layers=tuple(layers))

    def _within_budget(self, plan: MixedPlan) -> MixedPlan:
        if self._options.weight_bits is not None:
            metric, unit, limit = Metric.BITS, 1.0, self._options.weight_bits
            at_high, at_low = self._high[1], self._low[1]  # bits of a weight
            sizes = [each.weights for each in plan.layers]
        else:
            assert self._options.bit_operations is not None
            unknown = [each.layer for each in plan.layers if each.macs is None]
            if unknown:
                raise ModelError(
                    f"AutoMixprecision.BitOperationsTarget: the shapes around layer '{unknown[0]}' are not known, so "
                    "that its multiplications cannot be counted. Give them by FixShapes, or use BitsTarget"
                )
            at_high, at_low = (activation * weight for activation, weight in (self._high, self._low))
            metric, unit, limit = Metric.BIT_OPERATIONS, at_high, self._options.bit_operations * at_high
            sizes = [each.macs or 0 for each in plan.layers]
        saved = [each * (at_high - at_low) for each in sizes]
        harm = [each.sensitivity or 0.0 for each in plan.layers]
        solve = least_harm if self._options.method is Method.INTEGER else least_harm_greedy
        total = sum(sizes)
        numbers = solve(harm, saved, total * (at_high - limit))
        if numbers is None:
            numbers = tuple(range(len(plan.layers)))  # as close as it gets
        lowered = tuple(plan.layers[i].layer for i in numbers)
        reached = at_high - (sum(saved[i] for i in numbers) / total if total else 0.0)
        figure = Figure(metric, reached / unit, limit / unit, at_high / unit)
        quality = self._figures(lowered) if self._options.has_quality else ()
        return plan.with_lowered(lowered, (figure, *quality))

    def _figures(self, lowered: tuple[str, ...]) -> tuple[Figure, ...]:
        with self._networks.mixed(lowered) as network:
            return self._quality.figures(network)

    def _write(self, plan: MixedPlan) -> None:
        if self._options.plan_file is not None:
            write_text(plan.to_json(), self._options.plan_file)


def _read_plan(options: MixOptions) -> MixedPlan | None:
    """Read the plan file; None if there is none yet. A file that is something else is an error, not overwritten."""
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

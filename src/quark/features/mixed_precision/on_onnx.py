"""Mixed precision, from the model and its samples to the options that the plan is made by.

sensitivities   each layer lowered alone, once; or from the plan file, if they are of the same model and samples
search          as many layers as the targets of quality allow, or the least harm within a budget
plan file       written after every improvement, so that an interrupted run leaves the best so far
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from quark.account import AlgorithmFacts
from quark.decide import ChoiceOptions, RangeKey
from quark.decide.options import TensorOverride
from quark.decide.specs import AffineSpec, bits_of, words_of
from quark.errors import InvalidValueError, ModelError, unknown_name
from quark.features.mixed_precision.networks import MixedNetworks, Network
from quark.features.mixed_precision.options import Method, MixOptions
from quark.features.mixed_precision.plan import Figure, Metric, MixedPlan, Precision
from quark.features.mixed_precision.quality import Quality, output_name
from quark.features.mixed_precision.report import missed_remarks
from quark.features.mixed_precision.score_file import UnitScore, read_scores, write_scores
from quark.features.mixed_precision.search import (
    MOST_TRIALS,
    Trial,
    least_harm,
    least_harm_greedy,
    lower_most,
    raise_least,
)
from quark.features.mixed_precision.subgraphs import UNGROUPED, read_subgraphs
from quark.files.foreign import REPORT, read_json
from quark.onnx.data import Samples
from quark.onnx.large_tensors import Message
from quark.onnx.progress import track
from quark.onnx.save import write_text
from quark.onnx.settings import Settings
from quark.onnx.view import tensor_names
from quark.plan import SkippedNode
from quark.ranges import TensorRange
from quark.report.algorithms import MIXED_PRECISION


@dataclass(frozen=True, eq=False)
class Mixed:
    """The options to choose by, the ranges that were measured for them, and the plan for the report. `given` are the
    layers that were changed, `types` what they could be given, in words."""

    choose: ChoiceOptions
    ranges: Mapping[RangeKey, TensorRange]
    plan: MixedPlan
    notes: tuple[str, ...] = ()
    quality: Quality | None = None  # given if the pipeline still changes the network
    types: tuple[str, ...] = ()
    given: Precision = Precision.LOW
    is_analysis_only: bool = False

    @property
    def facts(self) -> AlgorithmFacts:
        types = self.types or (self.plan.low,)
        changed = tuple(
            f"{planned.layer}: {types[planned.target]}" for planned in self.plan.layers if planned.choice is self.given
        )
        reason = "no layer can have the lower types within the targets"
        if self.is_analysis_only:
            reason = "layers were only ranked"
        elif self.given is Precision.HIGH:
            reason = "stays at the lower types"
        elif changed:
            reason = "stays at the higher types"
        others = (layer for layer in self.plan.layers if layer.choice is not self.given)
        left = tuple(SkippedNode(planned.layer, planned.op_type, reason) for planned in others)
        return AlgorithmFacts(MIXED_PRECISION, changed, left)

    @property
    def remarks(self) -> tuple[str, ...]:
        return (*self.notes, *missed_remarks(self.plan))

    def judged(self, message: Message, settings: Settings) -> Mixed:
        """The same with the figures of the final network, if later steps have changed it."""
        if self.quality is None:
            return self
        with Network(message.to_graph(), settings.calibrate.providers) as network:
            figures = {figure.metric: figure for figure in self.quality.figures(network)}
        plan = replace(self.plan, figures=tuple(figures.get(figure.metric, figure) for figure in self.plan.figures))
        if settings.mix is not None and settings.mix.plan_file is not None:
            write_text(plan.to_json(), settings.mix.plan_file)
        return replace(self, plan=plan, quality=None)


def mix(
    model: ir.Model, original: ir.Model | None, samples: Samples, settings: Settings, vanished: Collection[str]
) -> Mixed:
    """Decide which layers have the lower types; the model is not changed. `original` is the network to compare with,
    if rewrites have changed the function of the model, or the nodes that subgraphs name. `vanished` are nodes that
    rewrites have removed."""
    options = settings.mix
    assert options is not None
    output_name(model, options.output_index)
    given = _read_plan(options)
    with MixedNetworks(model, samples, settings, vanished) as networks:
        base, targets = words_of(settings.choose.default), tuple(map(words_of, options.targets))
        types = (" or ".join(targets), base) if options.is_upward else (base, " or ".join(targets))
        plan = MixedPlan(networks.layers, *types, model=networks.model_digest() if options.plan_file else "")
        if options.tensors:
            return _of_tensors(plan, networks, model, options, settings.choose)
        if not networks.layers:
            return Mixed(settings.choose, {}, plan)
        if options.is_plan_given:
            assert given is not None
            plan, notes = _as_given(plan, given, len(targets))
            chosen = networks.options(_mixed_layers(plan, options))
            return Mixed(chosen, {}, plan, notes, None, targets, _given(options))
        networks.measure()
        quality = Quality(original or model, samples, options, settings.calibrate.providers)
        mixer = _Mixer(networks, quality, settings, _units(networks, original or model, options))
        plan = mixer.run(plan, given)
        trials = networks.trial_settings
        is_changed_later = (settings.refine, settings.features) != (trials.refine, {}) and options.has_quality
        return Mixed(
            networks.options(_mixed_layers(plan, options)),
            networks.ranges,
            plan,
            tuple(mixer.notes),
            quality if is_changed_later else None,
            targets,
            _given(options),
            options.is_analysis_only,
        )


def _given(options: MixOptions) -> Precision:
    """The precision of layers that do not keep the default one."""
    return Precision.HIGH if options.is_upward else Precision.LOW


def _mixed_layers(plan: MixedPlan, options: MixOptions) -> dict[str, int]:
    """The layers that get other types than the default ones, with the number of these types."""
    return {planned.layer: planned.target for planned in plan.layers if planned.choice is _given(options)}


def _units(networks: MixedNetworks, model: ir.Model, options: MixOptions) -> dict[str, tuple[str, ...]]:
    """The layers that are mixed together, by the name of their subgraph; single layers if there is no such file."""
    names = [planned.layer for planned in networks.layers]
    if options.subgraphs is None:
        return {name: (name,) for name in names}
    units = {}
    for name, nodes in read_subgraphs(options.subgraphs, model).items():
        units[name] = tuple(layer for layer in names if layer in nodes)
    grouped = {layer for unit in units.values() for layer in unit}
    units[UNGROUPED] = tuple(layer for layer in names if layer not in grouped)
    return {name: unit for name, unit in units.items() if unit}


def _of_tensors(
    plan: MixedPlan, networks: MixedNetworks, model: ir.Model, options: MixOptions, choose: ChoiceOptions
) -> Mixed:
    """The tensors that are named get the types, and so do the layers among the names."""
    layers = {planned.layer for planned in plan.layers}
    tensors = tensor_names(model)
    for name in options.tensors:
        if name not in tensors and name not in layers:
            raise unknown_name("tensor or layer (AutoMixprecision.TargetTensors)", name, sorted(tensors | layers))
    spec = options.low.activation
    overrides = []
    for name in options.tensors:
        if name in tensors and isinstance(spec, AffineSpec) and isinstance(choose.default.activation, AffineSpec):
            overrides.append(TensorOverride(name, spec.format, spec.is_symmetric))
        elif name in tensors and spec is not None:
            overrides.append(TensorOverride(name, spec=spec))
    plan = plan.with_lowered([name for name in options.tensors if name in layers])
    lowered = networks.options(dict.fromkeys(plan.lowered, 0))
    return Mixed(replace(lowered, overrides=(*lowered.overrides, *overrides)), {}, plan)


class _Mixer:
    def __init__(
        self, networks: MixedNetworks, quality: Quality, settings: Settings, units: Mapping[str, tuple[str, ...]]
    ) -> None:
        assert settings.mix is not None
        self._networks, self._quality, self._options, self._units = networks, quality, settings.mix, units
        self._high, self._low = bits_of(settings.choose.default), bits_of(settings.mix.low)
        self._pinned: set[str] = set()  # units that the user keeps as they are
        self.notes: list[str] = []

    def run(self, plan: MixedPlan, given: MixedPlan | None) -> MixedPlan:
        options = self._options
        if options.indices or options.excluded_indices:
            plan = self._with_mixed(plan, self._numbered(plan))
            self._write(plan)
            return plan
        plan = self._with_sensitivities(plan, given)
        self._write(plan)
        if options.is_analysis_only:
            return self._with_mixed(plan, ())
        if options.has_budget:
            plan = self._within_budget(plan)
        elif options.has_quality:
            plan = self._within_quality(plan)
        else:
            plan = self._with_mixed(plan, self._order(plan)[: options.layer_limit])
        self._write(plan)
        return plan

    def _within_quality(self, plan: MixedPlan) -> MixedPlan:
        with track(MOST_TRIALS, "mixing precisions") as advance:

            def judge(units: tuple[str, ...]) -> tuple[Figure, ...]:
                figures = self._figures(self._targets(plan, units))
                advance()
                return figures

            def remember(trial: Trial) -> None:
                self._write(self._with_mixed(plan, trial.lowered, trial.figures))

            search = raise_least if self._options.is_upward else lower_most
            best = search(self._order(plan), judge, remember, self._options.layer_limit)
        return self._with_mixed(plan, best.lowered, best.figures)

    def _numbered(self, plan: MixedPlan) -> list[str]:
        """The layers that the user numbers, in the order of the graph."""
        names = [planned.layer for planned in plan.layers]
        wanted = self._options.indices or self._options.excluded_indices
        for index in wanted:
            if index >= len(names):
                option = "TargetIndices" if self._options.indices else "ExcludeIndices"
                self.notes.append(f"AutoMixprecision.{option} {index}: there are {len(names)} layers, from 0 on")
        if self._options.indices:
            return [name for number, name in enumerate(names) if number in wanted]
        return [name for number, name in enumerate(names) if number not in wanted]

    def _order(self, plan: MixedPlan) -> list[str]:
        """The units by rising rank, without those that the user keeps as they are."""
        ranks = {planned.layer: planned.rank for planned in plan.layers}
        order = sorted(self._units, key=lambda unit: ranks[self._units[unit][0]])
        return [unit for unit in order if unit not in self._pinned]

    def _layers(self, units: Iterable[str]) -> list[str]:
        return [layer for unit in units for layer in self._units.get(unit, (unit,))]

    def _targets(self, plan: MixedPlan, units: Iterable[str]) -> dict[str, int]:
        targets = {planned.layer: planned.target for planned in plan.layers}
        return {layer: targets[layer] for layer in self._layers(units)}

    def _with_mixed(self, plan: MixedPlan, units: Iterable[str], figures: tuple[Figure, ...] = ()) -> MixedPlan:
        layers = self._layers(units)
        if self._options.is_upward:
            layers = [planned.layer for planned in plan.layers if planned.layer not in layers]
        return plan.with_lowered(layers, figures)

    def _with_sensitivities(self, plan: MixedPlan, given: MixedPlan | None) -> MixedPlan:
        seen = self._quality.sensitive
        basis = ""
        if self._options.plan_file is not None or self._options.cache_file is not None:
            basis = self._networks.basis_digest(seen.samples(), seen.output)
        plan = replace(plan, basis=basis, samples=len(seen))
        options = self._options
        if options.score or options.others or options.subgraphs is not None or options.cache_file is not None:
            return self._with_scores(plan, basis)
        known = {} if given is None else {planned.layer: planned.sensitivity for planned in given.layers}
        if given is not None:
            if given.basis == basis and all(known.get(planned.layer) is not None for planned in plan.layers):
                return replace(
                    plan, layers=tuple(replace(planned, sensitivity=known[planned.layer]) for planned in plan.layers)
                )
            self.notes.append(
                f"PlanFile '{self._options.plan_file}': its sensitivities are of another model, other types or other "
                "samples, so they were measured again"
            )
        layers = []
        with track(len(plan.layers), "measuring sensitivities") as advance:
            for planned in plan.layers:
                with self._networks.alone([planned.layer]) as network:
                    layers.append(replace(planned, sensitivity=self._quality.error(network)))
                advance()
        return replace(plan, layers=tuple(layers))

    def _with_scores(self, plan: MixedPlan, basis: str) -> MixedPlan:
        """The layers with the scores of their units, from the file if it has them."""
        score, path = self._options.score, self._options.cache_file
        kind = "error" if score is None else score.kind.value
        content = f"{basis};{kind};{self._options.is_upward};{sorted(self._units.items())}"
        key = hashlib.sha256(content.encode()).hexdigest()
        known = None if path is None else read_scores(path)
        scores = known[1] if known is not None and known[0] == key else None
        if known is not None and scores is None:
            self.notes.append(
                f"SensitivityCacheFile '{path}': its scores are of another model, other types, layers or samples, so "
                "they were measured again"
            )
        if scores is None or set(scores) != set(self._units):
            scores = self._measured_scores()
            if path is not None:
                write_scores(path, key, list(scores.values()))
        self._pinned = {name for name, score in scores.items() if not score.is_enabled}
        by_layer = {layer: scores[unit] for unit, layers in self._units.items() for layer in layers}
        layers = []
        for planned in plan.layers:
            value, target = by_layer[planned.layer].score, by_layer[planned.layer].target
            is_error = score is None  # the errors of layers are their sensitivities
            known_error, known_score = (value, None) if is_error else (None, value)
            layers.append(replace(planned, sensitivity=known_error, score=known_score, target=target))
        return replace(plan, layers=tuple(layers))

    def _measured_scores(self) -> dict[str, UnitScore]:
        measure = self._quality.error if self._options.score is None else self._quality.score
        targets = range(len(self._options.targets))
        measured = {}
        with track(len(self._units) * len(targets), "measuring sensitivities") as advance:
            for name, layers in self._units.items():
                scores = []
                for target in targets:
                    # the gain of the higher types shows only in the quantized network
                    is_upward, mixed = self._options.is_upward, dict.fromkeys(layers, target)
                    opened = self._networks.mixed(mixed) if is_upward else self._networks.alone(layers, target)
                    with opened as network:
                        scores.append(measure(network))
                    advance()
                measured[name] = UnitScore(name, layers, tuple(scores), scores.index(min(scores)))
        return measured

    def _within_budget(self, plan: MixedPlan) -> MixedPlan:
        if self._options.weight_bits is not None:
            metric, unit, limit = Metric.BITS, 1.0, self._options.weight_bits
            at_high, at_low = self._high[1], self._low[1]  # bits of a weight
            sizes = [layer.weights for layer in plan.layers]
        else:
            assert self._options.bit_operations is not None
            unknown = [planned.layer for planned in plan.layers if planned.macs is None]
            if unknown:
                raise ModelError(
                    f"AutoMixprecision.BitOperationsTarget: the shapes around layer '{unknown[0]}' are not known, so "
                    "that its multiplications cannot be counted. Give them by FixShapes, or use BitsTarget"
                )
            at_high, at_low = (activation * weight for activation, weight in (self._high, self._low))
            metric, unit, limit = Metric.BIT_OPERATIONS, at_high, self._options.bit_operations * at_high
            sizes = [layer.macs or 0 for layer in plan.layers]
        saved = [size * (at_high - at_low) for size in sizes]
        harm = [0.0 if layer.rank == math.inf else layer.rank for layer in plan.layers]
        solve = least_harm if self._options.method is Method.INTEGER else least_harm_greedy
        total = sum(sizes)
        numbers = solve(harm, saved, total * (at_high - limit))
        if numbers is None:
            numbers = tuple(range(len(plan.layers)))  # the closest there is
        lowered = tuple(plan.layers[i].layer for i in numbers)
        reached = at_high - (sum(saved[i] for i in numbers) / total if total else 0.0)
        figure = Figure(metric, reached / unit, limit / unit, at_high / unit)
        quality = self._figures(dict.fromkeys(lowered, 0)) if self._options.has_quality else ()
        return plan.with_lowered(lowered, (figure, *quality))

    def _figures(self, mixed: Mapping[str, int]) -> tuple[Figure, ...]:
        with self._networks.mixed(mixed) as network:
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


def _as_given(plan: MixedPlan, given: MixedPlan, targets: int) -> tuple[MixedPlan, tuple[str, ...]]:
    """The choices of a plan file for the layers of this model, which can have so many types."""
    known = {planned.layer: planned for planned in given.layers}
    names = [planned.layer for planned in plan.layers]
    for name in known:
        if name not in names:
            raise unknown_name("layer (AutoMixprecision.PlanFile) that can have the lower types", name, names)
    notes = []
    for planned in known.values():
        if planned.target >= targets:
            raise InvalidValueError(
                f"AutoMixprecision.PlanFile: layer '{planned.layer}' has the types number {planned.target}, and the "
                f"config has {targets}, from 0 on"
            )
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
        replace(known[planned.layer], op_type=planned.op_type, weights=planned.weights, macs=planned.macs)
        if planned.layer in known
        else planned
        for planned in plan.layers
    )
    return replace(plan, layers=layers, basis=given.basis, samples=given.samples), tuple(notes)

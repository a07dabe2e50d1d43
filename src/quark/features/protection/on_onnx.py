"""Measure what breaks a network in 8 bits, and protect that: better ranges, layers in float, float between products.

Everything is judged by the network's outputs on a few samples, with the parts of each output judged for themselves
(`quark.compare`). The steps, until the outputs are well within what counts as ok:

    ranges       each method for all tensors; then, for stretches of the network, the method that did nearly as well
    layers       the layers that cost most when they alone are quantized, as long as the budget lasts
    placement    everything but products in float

How much is tried depends on the numbers of samples and layers, never on the clock: the same input gives the same file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Protocol, TypeVar

import onnx_ir as ir

from quark.account import ProtectedLayer, ProtectionFacts
from quark.compare import OutputFidelity, Verdict, overall_verdict, worst_text
from quark.decide import (
    AffineSpec,
    BlockSpec,
    ChoiceOptions,
    LayerSpec,
    RangeKey,
    Target,
    place,
    tensors_to_measure,
)
from quark.decide.operators import RECURRENT_TYPES, Kind
from quark.decide.specs import bits_of
from quark.features.order import call
from quark.features.protection.options import ProtectMode, ProtectOptions
from quark.features.protection.structures import Structures, find_structures
from quark.inspect.diagnose.sensitivity import find_sensitivities
from quark.inspect.diagnose.sites import find_sites
from quark.onnx.calibrate import FloatRunner, Wanted, calibrate_candidates
from quark.onnx.comparing import compare_outputs
from quark.onnx.data import Sample
from quark.onnx.deciding import Decision, Work, decide, measure
from quark.onnx.graph import readers
from quark.onnx.insert import insert
from quark.onnx.large_tensors import Message
from quark.onnx.macs import PRODUCTS, layer_macs, multiplications, tensors_to_size, weight_count
from quark.onnx.progress import track
from quark.onnx.save import SaveOptions, finish
from quark.onnx.settings import RefineOptions, Settings
from quark.onnx.simulate import simulate
from quark.onnx.view import operator_facts, view_of
from quark.ranges import TensorRange
from quark.report.quantities import count_of

MOST_BITS = 9  # of an activation, including its share of a block's scale
# 1 is the bound of ok, and 0 is equal to float. Results on other samples are worse than on those that choices are made
# by, hence the margin. A classifier's answers to a few samples are too coarse for one.
TARGET_SEVERITY = 0.4
GOAL_SEVERITY = 0.3  # the goal of a search, once it has started
CLASSES = "classes"
MOST_SAMPLES = 8
CORRECTION_SAMPLES = 4
STRETCHES = 2  # parts of the network that may have different ranges
CLEAR_GAIN = 0.97  # the least gain of a change, as a factor on the distance
SENSITIVITY_SAMPLES = 4
FIRST_SHARE = 0.5  # the share of the error that the first step removes
MOST_LAYER_TRIALS = 3
BETWEEN_PRODUCTS = "between products, where measuring showed that 8 bits break the network"
SENSITIVE = "the output is sensitive to it"
WIDER_PRESETS = ("A16W8", "MXINT8", "BF16")

Ranges = dict[RangeKey, TensorRange]


def is_protectable(settings: Settings) -> bool:
    """True if the configuration quantizes activations to about 8 bits, with types that are fixed before the network
    runs."""
    activation = settings.choose.default.activation
    if settings.mix is not None or settings.choose.is_weights_only:
        return False
    if isinstance(activation, BlockSpec):
        return bits_of(settings.choose.default)[0] <= MOST_BITS
    return isinstance(activation, AffineSpec) and activation.integer.bits <= MOST_BITS


def needs_protection(outputs: Sequence[OutputFidelity], most: float = TARGET_SEVERITY) -> bool:
    """True if an output is not ok, or so close to the bound that it might not be on other samples."""
    if overall_verdict(outputs) in (Verdict.DEGRADED, Verdict.COLLAPSED):
        return True
    parts = (part for output in outputs for part in output.parts if part.kind != CLASSES)
    return any(part.severity > most for part in parts)


def is_better(outputs: Sequence[OutputFidelity], others: Sequence[OutputFidelity]) -> bool:
    """True if the first network is closer to float than the other."""

    def key(fidelities: Sequence[OutputFidelity]) -> tuple[float, float]:
        # below 1 everything is ok, and the distance says more
        severity = max((output.severity for output in fidelities), default=0.0)
        return max(severity, 1.0), max((output.distance for output in fidelities), default=0.0)

    return key(outputs) < key(others)


def runs_on_npu(options: ChoiceOptions) -> bool:
    """True if the target is an NPU for convolutional networks, where a float node is a detour through the processor."""
    activation = options.default.activation
    has_positions = isinstance(activation, AffineSpec) and activation.is_power_of_two
    return options.target is Target.NPU_CNN or has_positions


def protect_structures(model: ir.Model, settings: Settings) -> tuple[ChoiceOptions, Structures]:
    """Return the options with the nodes in float that the form of the graph calls for, unless protection is off."""
    options = settings.choose
    if settings.protect.mode is ProtectMode.NONE or not isinstance(options.default.activation, AffineSpec):
        return options, Structures()
    if not is_protectable(settings):
        return options, Structures()
    structures = find_structures(model, Target.NPU_CNN if runs_on_npu(options) else options.target)
    selection = replace(options.selection, kept_float=tuple(structures.kept_float.items()))
    aligned = options.aligned - {"Concat"} if structures.has_own_concat_scales else options.aligned
    has_float_products = options.has_float_products or structures.has_float_products
    weight_only = LayerSpec(None, options.default.weight)
    protected = replace(
        options,
        selection=selection,
        aligned=aligned,
        has_float_products=has_float_products,
        by_plan=(*options.by_plan, *((name, weight_only) for name in structures.weights_only)),
    )
    return protected, structures


def structure_facts(model: ir.Model, structures: Structures) -> ProtectionFacts | None:
    """The report on a network for which the form of the graph was enough.

    No sample has run yet, so layers whose shapes are not in the file count as no multiply-accumulates.
    """
    if not structures.kept_float:
        return None
    macs = {str(node.name): multiplications(node) or 0 for node in model.graph}
    kept = [node for node in model.graph if str(node.name) in structures.kept_float]
    return ProtectionFacts(
        structures=tuple(structures.kept_float),
        float_mac_share=sum(macs[str(node.name)] for node in kept) / (sum(macs.values()) or 1),
        extra_weight_bytes=_extra_bytes(kept),
    )


@dataclass(frozen=True, eq=False)
class Protected:
    """The options and ranges that protection settled on, and the report on it."""

    choose: ChoiceOptions
    ranges: Ranges
    facts: ProtectionFacts


@dataclass(frozen=True, eq=False)
class _Trial:
    """A network that was tried. `distance` ranks trials, `severity` says whether the outputs are ok (up to 1)."""

    name: str
    choose: ChoiceOptions
    ranges: Ranges
    outputs: tuple[OutputFidelity, ...]

    @property
    def distance(self) -> float:
        return max((output.distance for output in self.outputs), default=math.inf)

    @property
    def severity(self) -> float:
        return max((output.severity for output in self.outputs), default=math.inf)

    def beats(self, other: _Trial) -> bool:
        """True if this trial is clearly better. Outputs that are not ok are compared by severity."""
        if max(self.severity, other.severity) > 1 and abs(self.severity - other.severity) > 0.05:
            return self.severity < other.severity
        return self.distance < CLEAR_GAIN * other.distance

    def __str__(self) -> str:
        return f"{self.name}: {self.severity:.2f} {overall_verdict(self.outputs).value}, {worst_text(self.outputs)}"


def protection_remarks(settings: Settings) -> list[str]:
    """Remarks on options of protection that have no effect."""
    options, remarks = settings.protect, []
    if options.mode is not ProtectMode.NONE and not is_protectable(settings):
        remarks.append("Protect: only activations of 8 bits are protected, and not together with mixed precision")
    if options.mode is ProtectMode.STRUCTURES and isinstance(settings.choose.default.activation, BlockSpec):
        remarks.append("Protect 'structures': blocks only go on the operands of products, where no structure breaks")
    if options.mac_budget != ProtectOptions().mac_budget and runs_on_npu(settings.choose):
        remarks.append("ProtectBudget: for an NPU no layer is left in float, so that there is nothing for it to limit")
    return remarks


class Run(Protocol):
    """A quantized network: its comparison with float in the verdict (`outputs`) and on all judged samples, the ranges
    that it was made from, and whether it was trained."""

    @property
    def outputs(self) -> tuple[OutputFidelity, ...]: ...

    @property
    def judged(self) -> tuple[OutputFidelity, ...]: ...

    @property
    def ranges(self) -> Ranges: ...

    @property
    def is_trained(self) -> bool: ...


AnyRun = TypeVar("AnyRun", bound=Run)
Stops = Callable[[Sequence[OutputFidelity]], bool]


def protected_run(
    work: Work,
    known: Ranges,
    vanished: Collection[str],
    carry_out: Callable[[ir.Model, Settings, Ranges, Stops | None], AnyRun],
    settings_of: Callable[[str], Settings],
) -> tuple[AnyRun, Settings, ProtectionFacts | None]:
    """Quantize the model by `carry_out`, with structures in float. If protection is automatic and the outputs are not
    close enough to float, search for better options and quantize once more. Returns the settings of the result as well.

    Training fits the layers that remain in 8 bits, so it comes last: `carry_out` stops before training if protection is
    needed. `known` ranges are not measured again. `vanished` are the names of nodes that rewrites removed, and
    `settings_of` returns the settings of a preset.
    """
    model, samples, settings = work.model, work.samples, work.settings
    choose, structures = protect_structures(model, settings)
    settings = replace(settings, choose=choose)
    facts = structure_facts(model, structures)
    if settings.protect.mode is not ProtectMode.AUTO or not is_protectable(settings) or samples.is_random:
        return carry_out(model, settings, known, None), settings, facts
    run = carry_out(model.clone(), settings, known, needs_protection)
    known = run.ranges
    if not run.is_trained and needs_protection(run.outputs):
        plain = settings.without_training()
        protected = protect(Work(model, samples, plain), run.ranges, structures, vanished, settings_of)
        second = carry_out(model.clone(), replace(plain, choose=protected.choose), protected.ranges, None)
        if is_better(second.judged, run.judged):
            run, facts, known = second, protected.facts, protected.ranges
            settings = replace(settings, choose=protected.choose)
        else:  # the search had no effect
            of_search = protected.facts
            facts = replace(
                facts or ProtectionFacts(),
                before=of_search.before,
                tried=of_search.tried,
                alternatives=of_search.alternatives,
            )
    if settings.trains and not run.is_trained:
        run = carry_out(model, settings, known, None)
    return run, settings, facts


def protect(
    work: Work,
    ranges: Mapping[RangeKey, TensorRange],
    structures: Structures,
    vanished: Collection[str],
    settings_of: Callable[[str], Settings],
) -> Protected:
    """Find options and ranges that keep the network usable, without changing the float model.

    `settings.choose` already has the structures in float, and `ranges` were measured for it.
    """
    model, settings = work.model, work.settings
    placements = [
        place(view_of(model), options, vanished)
        for options in (settings.choose, _between_products(model, settings.choose))
    ]
    wanted = list(dict.fromkeys(key for placement in placements for key in tensors_to_measure(placement)))
    watched = call("onnx", "watched", Work(model, work.samples, settings.for_trials()))
    names = dict.fromkeys([*(name for name, _ in wanted), *tensors_to_size(model), *watched])
    with FloatRunner(model, names, providers=settings.calibrate.providers) as runner:
        search = _Search(work, dict(ranges), wanted, vanished, runner)
        search.try_ranges()
        if not search.is_done:
            search.try_layers()
        if not search.is_done:
            search.try_configured_ranges()
        if search.best.severity > 1:
            search.try_float_between_products()
        alternatives = search.alternatives(settings_of) if search.best.severity > 1 else ()
        return search.result(structures, alternatives)


def _between_products(model: ir.Model, options: ChoiceOptions) -> ChoiceOptions:
    """The options with float everywhere except for products and operators that only move their values."""
    known = ((str(node.name), operator_facts(node)) for node in model.graph)
    rest = [name for name, operator in known if operator and operator.kind is Kind.ARITHMETIC]
    return replace(_with_float(options, rest, BETWEEN_PRODUCTS), has_float_products=True)


def _with_float(options: ChoiceOptions, names: Iterable[str], reason: str) -> ChoiceOptions:
    """The options with more nodes in float; nodes that already are in float keep their reason."""
    kept = dict(options.selection.kept_float)
    for name in names:
        kept.setdefault(name, reason)
    return replace(options, selection=replace(options.selection, kept_float=tuple(kept.items())))


class _Search:
    """The best network so far, and what was tried. Networks run on the samples that choices are made by."""

    def __init__(
        self, work: Work, ranges: Ranges, wanted: list[RangeKey], vanished: Collection[str], runner: FloatRunner
    ) -> None:
        self._model, self._samples, self._settings = work.model, work.samples, work.settings
        self._wanted, self._vanished, self._runner = wanted, vanished, runner
        # not the samples of the verdict, unless there are too few others
        total = self._samples.count
        count = min(MOST_SAMPLES, total // 2)
        chosen = {i * total // count for i in range(count)} if count >= MOST_SAMPLES else set()
        seen: list[Sample] = list(compress(self._samples, (i in chosen for i in range(total))))
        self._seen = seen or list(self._samples.held_out)
        self._expected = runner.outputs_of(self._seen)
        tensors = runner.tensors(self._seen[0], tensors_to_size(self._model))
        shapes = {name: tuple(tensor.array.shape) for name, tensor in tensors.items()}
        shapes |= {name: array.shape for name, array in self._seen[0].items()}
        self._macs = layer_macs(self._model, shapes)
        self._nodes = {str(node.name): node for node in self._model.graph}
        missing = [key for key in wanted if key not in ranges]
        self._ranges = ranges | measure(runner, missing, self._samples, self._settings)
        self._tried: list[_Trial] = []
        self._layers: list[ProtectedLayer] = []
        self._first = self.best = self._judged("as configured", self._settings.choose, self._ranges)

    @property
    def is_done(self) -> bool:
        return not needs_protection(self.best.outputs, GOAL_SEVERITY)

    def try_ranges(self) -> None:
        """Try other ranges: for all tensors, then for stretches of the network."""
        if not self._ranges:
            return  # these formats need no ranges
        methods = self._candidates()
        with track(len(methods) + STRETCHES, "trying ranges") as advance:
            by_method: list[tuple[_Trial, Ranges]] = []
            for name, ranges in methods.items():
                by_method.append((self._judged(f"ranges by {name}", self.best.choose, ranges), ranges))
                advance()
            by_method.append((self._first, self._ranges))
            by_method.sort(key=lambda attempt: (attempt[0].severity > 1, attempt[0].distance))
            if by_method[0][0].beats(self.best):
                self.best = by_method[0][0]
            rival = next((ranges for trial, ranges in by_method if trial is not self.best), None)
            if rival is None or self.best.severity <= 1:
                return
            places = {str(value.name): i for i, node in enumerate(self._model.graph) for value in node.outputs}
            ordered = sorted({name for name, _ in self._ranges}, key=lambda name: places.get(name, -1))
            size = math.ceil(len(ordered) / STRETCHES) or 1
            for number, start in enumerate(range(0, len(ordered), size), start=1):
                tensors, now = set(ordered[start : start + size]), self.best.ranges.items()
                changed = {key: rival.get(key, range_) if key[0] in tensors else range_ for key, range_ in now}
                self._try(f"other ranges in part {number} of {STRETCHES}", self.best.choose, changed)
                advance()

    def try_float_between_products(self) -> None:
        options = _between_products(self._model, self.best.choose)
        if not runs_on_npu(options) and options != self.best.choose:
            self._try("everything but products in float", options, dict(self.best.ranges))

    def try_layers(self) -> None:
        """Try the most sensitive layers in float, within the budget of multiply-accumulates.

        A few samples do not tell well when to stop, so layers that cause half of the error come first, together.
        """
        if runs_on_npu(self.best.choose):
            return  # the NPU would not run a layer in float
        costs = self._costs()
        total = sum(self._macs.values()) or 1
        ranked: list[tuple[str, ...]] = []
        spent, covered, first_count = 0, 0.0, 0
        for nodes in sorted(costs, key=lambda nodes: -costs[nodes]):
            macs = sum(self._macs.get(name, 0) for name in nodes)
            if spent + macs <= self._settings.protect.mac_budget * total and costs[nodes] > 0:
                ranked.append(nodes)
                spent += macs
                covered += costs[nodes]
                if not first_count and covered >= FIRST_SHARE * sum(costs.values()):
                    first_count = len(ranked)
        if not ranked:
            return
        start, taken, count = self.best, 0, first_count or len(ranked)
        with track(MOST_LAYER_TRIALS, "protecting layers") as advance:
            for _ in range(MOST_LAYER_TRIALS):
                options = _with_float(start.choose, (name for nodes in ranked[:count] for name in nodes), SENSITIVE)
                if self._try(f"{count_of(count, 'sensitive layer')} in float", options, dict(start.ranges)):
                    taken = count
                advance()
                if self.is_done or count == len(ranked):
                    break
                count = min(len(ranked), 3 * count)
        for nodes in ranked[:taken]:
            share = sum(self._macs.get(name, 0) for name in nodes) / total
            self._layers.append(ProtectedLayer(nodes[0], self._nodes[nodes[0]].op_type, "float", SENSITIVE, share))

    def try_configured_ranges(self) -> None:
        """Try the configured ranges again, now that layers are in float.

        A range that clips outliers may be better while a sensitive layer has 8 bits, and worse once it has not.
        """
        is_changed = any(self.best.ranges.get(key, range_) != range_ for key, range_ in self._ranges.items())
        if self._layers and is_changed:
            self._try("the same layers, ranges as configured", self.best.choose, dict(self._ranges))

    def alternatives(self, settings_of: Callable[[str], Settings]) -> tuple[str, ...]:
        """Presets with wider types that are ok for this network."""
        lines = []
        for name in WIDER_PRESETS:
            # without features, because the runner does not watch the tensors they need
            wider = replace(settings_of(name), refine=RefineOptions())
            trial = self._judged(name, wider.choose, {}, wider)
            if overall_verdict(trial.outputs) is Verdict.OK:
                lines.append(str(trial))
        return tuple(lines)

    def result(self, structures: Structures, alternatives: tuple[str, ...]) -> Protected:
        best, total = self.best, sum(self._macs.values()) or 1
        kept = dict(best.choose.selection.kept_float)
        methods = Counter(range_.method or str(spec.method) for (_, spec), range_ in best.ranges.items())
        facts = ProtectionFacts(
            structures=tuple(structures.kept_float),
            layers=tuple(self._layers),
            is_float_between_products=BETWEEN_PRODUCTS in kept.values(),
            methods=dict(methods) if any(range_.method for range_ in best.ranges.values()) else {},
            float_mac_share=sum(count for name, count in self._macs.items() if name in kept) / total,
            extra_weight_bytes=_extra_bytes(self._nodes[name] for name in kept if name in self._nodes),
            before=str(self._first).partition(": ")[2],
            after=str(best).partition(": ")[2],
            tried=tuple(map(str, self._tried)),
            alternatives=alternatives,
        )
        return Protected(best.choose, best.ranges, facts)

    def _try(self, name: str, options: ChoiceOptions, ranges: Ranges) -> bool:
        """Judge a network; returns True if it is the best so far."""
        trial = self._judged(name, options, ranges)
        is_best = trial.beats(self.best)
        if is_best:
            self.best = trial
        return is_best

    def _judged(self, name: str, options: ChoiceOptions, ranges: Ranges, settings: Settings | None = None) -> _Trial:
        """Quantize with these options, and otherwise with `settings` (by default those of the run), and compare.

        Ranges of tensors that only these options quantize are measured and added to `ranges`.
        """
        providers = self._settings.calibrate.providers
        wanted = tensors_to_measure(place(view_of(self._model), options, self._vanished))
        missing = [key for key in wanted if key not in ranges]
        if missing:
            with FloatRunner(self._model, [tensor for tensor, _ in missing], providers=providers) as runner:
                ranges |= measure(runner, missing, self._samples, self._settings, ranges)
        message = self._quantized(replace(settings or self._settings, choose=options), ranges)
        trial = _Trial(name, options, ranges, compare_outputs(message, self._seen, self._expected, providers))
        self._tried.append(trial)
        return trial

    def _quantized(self, settings: Settings, ranges: Ranges) -> Message:
        """The network as it would be written, with biases corrected on a few samples, and without finetuning."""
        copy = self._model.clone()
        placement = place(view_of(copy), settings.choose, self._vanished)
        simulate(copy, settings.simulate, [skipped.node for skipped in placement.skipped])
        settings = settings.for_trials(CORRECTION_SAMPLES)
        decision = Decision(copy, self._samples, settings, placement, ranges, self._runner)
        decide(decision)
        insert(copy, decision.plan, settings.insert)
        return finish(copy, {}, SaveOptions(has_portable_functions=False))

    def _candidates(self) -> dict[str, Ranges]:
        """The ranges of all tensors by each method, by the name of the method."""
        if any(range_.position is not None for range_ in self._ranges.values()):
            return {
                name: {
                    key: replace(range_, position=range_.position + step, method=f"{key[1].method}, {name}")
                    for key, range_ in self._ranges.items()
                    if range_.position is not None
                }
                for name, step in (("one position coarser", -1), ("one position finer", 1))
            }
        watched = {name for name, _ in self._wanted}
        wanted = {
            name: Wanted(spec.method, spec.integer, spec.is_symmetric)
            for name, spec in reversed(list(self._ranges))
            if name in watched
        }
        observed = {name: range_.observed for (name, _), range_ in self._ranges.items() if range_.observed is not None}
        candidates = calibrate_candidates(self._runner, wanted, observed, self._samples, self._settings.calibrate)
        self._runner.release()
        own = {str(spec.method) for _, spec in self._ranges}
        return {
            method: {
                key: candidates[key[0]][method] if key[0] in candidates else range_
                for key, range_ in self._ranges.items()
            }
            for method in dict.fromkeys(method for range_by_method in candidates.values() for method in range_by_method)
            if method not in own
        }

    def _costs(self) -> dict[tuple[str, ...], float]:
        """The distance of the outputs if one layer alone is quantized, by the nodes of the layer."""
        settings = replace(self._settings, choose=self.best.choose)
        quantized = self._quantized(settings, self.best.ranges).to_graph()
        sites = find_sites(self._model, quantized)
        layers = max(len(sites.sites), 1)
        count = max(1, min(SENSITIVITY_SAMPLES, len(self._seen), 2 * self._samples.count // layers))
        sensitivities = find_sensitivities(self._model, quantized, sites, {}, self._seen[:count])
        kept = dict(self.best.choose.selection.kept_float)
        costs: dict[tuple[str, ...], float] = {}
        by_name = {site.name: site for site in sites.sites}
        for site in sites.sites:
            # the result of a float node is rounded for the layers that read it, so the cost is theirs
            owners = [site]
            if site.name in kept and site.name in self._nodes:
                uses = (node for value in self._nodes[site.name].outputs for node, _ in readers(value))
                owners = [by_name[str(node.name)] for node in uses if str(node.name) in by_name]
            for owner in owners:
                if owner.name in self._nodes and owner.name not in kept:
                    nodes = tuple(name for name in owner.nodes if name in self._nodes)
                    costs[nodes] = costs.get(nodes, 0.0) + sensitivities.values.get(site.tensor, 0.0)
        return costs


def _extra_bytes(nodes: Iterable[ir.Node]) -> int:
    """The extra bytes of layers' weights in float instead of 8 bits; a weight shared by several nodes counts once."""
    counts = {node.inputs[1]: weight_count(node) for node in nodes if node.op_type in PRODUCTS | RECURRENT_TYPES}
    return 3 * sum(counts.values())

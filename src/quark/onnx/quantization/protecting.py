"""Measure what breaks a network in 8 bits, and protect that: better ranges, layers in float, float between products.

Everything is judged by the network's outputs on a few samples, with the parts of each output judged for themselves
(`quark.fidelity`). The steps, until the outputs are well within what counts as ok:

    ranges       each method for all tensors; then, for stretches of the network, the method that did nearly as well
    layers       the layers that cost most when they alone are quantized, as long as the budget lasts
    placement    everything but products in float

How much is tried depends on the numbers of samples and layers, never on the clock: the same input gives the same file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

import onnx_ir as ir

from quark.account import ProtectedLayer, ProtectionFacts
from quark.fidelity import OutputFidelity, Verdict, overall_verdict, worst_text
from quark.onnx.calibrate import FloatRunner, Wanted, calibrate_candidates
from quark.onnx.choose import (
    AffineSpec,
    BlockSpec,
    ChoiceOptions,
    Placement,
    RangeKey,
    Target,
    place,
    tensors_to_measure,
)
from quark.onnx.choose.operators import Kind, facts
from quark.onnx.choose.specs import bits_of
from quark.onnx.data import Sample, Samples
from quark.onnx.diagnose.sensitivity import find_sensitivities
from quark.onnx.diagnose.sites import find_sites
from quark.onnx.graph import readers
from quark.onnx.insert import insert
from quark.onnx.message import Message
from quark.onnx.mix.candidates import multiplications, weight_count
from quark.onnx.progress import track
from quark.onnx.protect import ProtectMode, Structures, find_structures
from quark.onnx.protect.macs import layer_macs, tensors_to_size
from quark.onnx.protect.structures import PRODUCTS
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.deciding import decide
from quark.onnx.quantization.measuring import measure
from quark.onnx.quantization.settings import Settings
from quark.onnx.quantization.verdict import compare_outputs
from quark.onnx.refine import CorrectionInputs, RefineOptions, layer_inputs
from quark.onnx.save import SaveOptions, finish
from quark.onnx.simulate import simulate
from quark.ranges import TensorRange
from quark.report.quantities import count_of

MOST_BITS = 9  # of an activation, with its part of a block's scale
# 1 is the bound of ok, 0 is equal to float. Other samples are worse than those that choices are made by, hence the
# margin; the answers of a classifier to a few samples are too coarse for one.
TARGET_SEVERITY = 0.4
GOAL_SEVERITY = 0.3  # once there is a search
CLASSES = "classes"
MOST_SAMPLES = 8
CORRECTION_SAMPLES = 4
STRETCHES = 2  # of the network, that may have other ranges
CLEAR_GAIN = 0.97  # of the distance: what a change must at least bring
SENSITIVITY_SAMPLES = 4
FIRST_SHARE = 0.5  # of the error of all layers, that is taken out at once
MOST_LAYER_TRIALS = 3
BETWEEN_PRODUCTS = "between products, where measuring showed that 8 bits break the network"
SENSITIVE = "the output is sensitive to it"
WIDER_PRESETS = ("A16W8", "MXINT8", "BF16")

Ranges = dict[RangeKey, TensorRange]


def is_protectable(settings: Settings) -> bool:
    """True if the configuration has activations of about 8 bits whose types are fixed before the network runs."""
    activation = settings.choose.default.activation
    if settings.mix is not None or settings.choose.is_weights_only:
        return False
    if isinstance(activation, BlockSpec):
        return bits_of(settings.choose.default)[0] <= MOST_BITS
    return isinstance(activation, AffineSpec) and activation.integer.bits <= MOST_BITS


def needs_protection(outputs: Sequence[OutputFidelity], most: float = TARGET_SEVERITY) -> bool:
    """True if an output is not ok, or so little better that other samples might not be."""
    if overall_verdict(outputs) in (Verdict.DEGRADED, Verdict.COLLAPSED):
        return True
    parts = (part for output in outputs for part in output.parts if part.kind != CLASSES)
    return any(part.severity > most for part in parts)


def is_better(outputs: Sequence[OutputFidelity], others: Sequence[OutputFidelity]) -> bool:
    """True if the first network is closer to float than the other."""

    def key(fidelities: Sequence[OutputFidelity]) -> tuple[float, float]:
        # below 1 all is ok, and the distance tells more
        severity = max((output.severity for output in fidelities), default=0.0)
        return max(severity, 1.0), max((output.distance for output in fidelities), default=0.0)

    return key(outputs) < key(others)


def without_effect(found: ProtectionFacts, structures: ProtectionFacts | None) -> ProtectionFacts:
    """The account of a search whose result was no better on the held-out samples, and was not taken."""
    return replace(
        structures or ProtectionFacts(), before=found.before, tried=found.tried, alternatives=found.alternatives
    )


def runs_on_npu(options: ChoiceOptions) -> bool:
    """True if the network is for an NPU that computes convolutional networks, for which a node in float is a detour."""
    activation = options.default.activation
    has_positions = isinstance(activation, AffineSpec) and activation.is_power_of_two
    return options.target is Target.NPU_CNN or has_positions


def protect_structures(model: ir.Model, settings: Settings) -> tuple[ChoiceOptions, Structures]:
    """The options with the nodes in float that the form of the graph says should be, unless protection is off."""
    options = settings.choose
    if settings.protect.mode is ProtectMode.NONE or not isinstance(options.default.activation, AffineSpec):
        return options, Structures()
    if not is_protectable(settings):
        return options, Structures()
    found = find_structures(model, Target.NPU_CNN if runs_on_npu(options) else options.target)
    selection = replace(options.selection, kept_float=tuple(found.kept_float.items()))
    aligned = options.aligned - {"Concat"} if found.has_own_concat_scales else options.aligned
    has_float_products = options.has_float_products or found.has_float_products
    protected = replace(options, selection=selection, aligned=aligned, has_float_products=has_float_products)
    return protected, found


def structure_facts(model: ir.Model, structures: Structures) -> ProtectionFacts | None:
    """The account of a network for which the form of the graph was enough.

    No sample has run yet, so that layers whose shapes the file does not tell count as no multiply-accumulates.
    """
    if not structures.kept_float:
        return None
    macs = {str(node.name): multiplications(node) or 0 for node in model.graph}
    kept = [node for node in model.graph if str(node.name) in structures.kept_float]
    return ProtectionFacts(
        structures=tuple(structures.kept_float),
        float_mac_share=sum(macs[str(node.name)] for node in kept) / (sum(macs.values()) or 1),
        extra_weight_bytes=sum(_extra_bytes(node) for node in kept),
    )


@dataclass(frozen=True, eq=False)
class Protected:
    """What protection settled on: the options to choose by, the ranges, and the account of it."""

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
        """True if this trial is clearly better: outputs that are worse than ok are compared by how bad they are."""
        if max(self.severity, other.severity) > 1 and abs(self.severity - other.severity) > 0.05:
            return self.severity < other.severity
        return self.distance < CLEAR_GAIN * other.distance

    def __str__(self) -> str:
        return f"{self.name}: {self.severity:.2f} {overall_verdict(self.outputs).value}, {worst_text(self.outputs)}"


def protect(
    model: ir.Model,
    samples: Samples,
    settings: Settings,
    ranges: Mapping[RangeKey, TensorRange],
    structures: Structures,
    vanished: Collection[str],
) -> Protected:
    """Find options and ranges that keep the network usable. The float model is not touched.

    `settings.choose` has the structures in float already; `ranges` are those that were measured for it. `vanished` are
    the names of nodes that rewrites have removed.
    """
    with _Trials(model, samples, settings, vanished) as trials:
        search = _Search(trials, settings, dict(ranges))
        search.try_ranges()
        if not search.is_done:
            search.try_layers()
        if not search.is_done:
            search.try_configured_ranges()
        if search.best.severity > 1:
            search.try_float_between_products()
        return search.result(structures)


class _Trials:
    """Runs networks that differ in options and ranges on the samples that choices are made by."""

    def __init__(self, model: ir.Model, samples: Samples, settings: Settings, vanished: Collection[str]) -> None:
        self.model, self.samples, self.settings, self.vanished = model, samples, settings, vanished
        # not the samples of the verdict, unless there are too few others
        count = min(MOST_SAMPLES, samples.count // 2)
        chosen = {i * samples.count // count for i in range(count)} if count >= MOST_SAMPLES else set()
        self.seen: list[Sample] = list(compress(samples, (i in chosen for i in range(samples.count))))
        self.seen = self.seen or list(samples.held_out)
        self.nodes = {str(node.name): node for node in model.graph}
        placements = [place(model, settings.choose, vanished), self.placed_between_products(settings.choose)]
        self.wanted: list[RangeKey] = list(
            dict.fromkeys(key for each in placements for key in tensors_to_measure(each))
        )
        sized = tensors_to_size(model)
        corrected = layer_inputs(model) if settings.refine.bias_correction is not None else []
        names = dict.fromkeys([*(name for name, _ in self.wanted), *sized, *corrected])
        self.runner = FloatRunner(model, names, providers=settings.calibrate.providers)
        self.expected = [self.runner.outputs(sample) for sample in self.seen]
        tensors = self.runner.tensors(self.seen[0], sized)
        shapes = {name: tuple(tensor.array.shape) for name, tensor in tensors.items()}
        shapes |= {name: array.shape for name, array in self.seen[0].items()}
        self.macs = layer_macs(model, shapes)

    def placed_between_products(self, options: ChoiceOptions) -> Placement:
        return place(self.model, self.between_products(options), self.vanished)

    def between_products(self, options: ChoiceOptions) -> ChoiceOptions:
        """The options with everything but products, and operators that only move their values, in float."""
        rest = [name for name, node in self.nodes.items() if (known := facts(node)) and known.kind is Kind.ARITHMETIC]
        return self.with_float(options, rest, BETWEEN_PRODUCTS, has_float_products=True)

    def with_float(
        self, options: ChoiceOptions, names: Collection[str], reason: str, has_float_products: bool = False
    ) -> ChoiceOptions:
        kept = dict(options.selection.kept_float) | {
            name: reason for name in names if name not in dict(options.selection.kept_float)
        }
        selection = replace(options.selection, kept_float=tuple(kept.items()))
        return replace(
            options, selection=selection, has_float_products=options.has_float_products or has_float_products
        )

    def quantized(self, settings: Settings, ranges: Ranges) -> Message:
        """The network as it would be written, with biases corrected by a few samples, and without finetuning."""
        copy = self.model.clone()
        placement = place(copy, settings.choose, self.vanished)
        simulate(copy, settings.simulate, [each.node for each in placement.skipped])
        correction = settings.refine.bias_correction
        if correction is not None:
            correction = replace(correction, inputs=CorrectionInputs.FLOAT, sample_limit=CORRECTION_SAMPLES)
        settings = replace(settings, refine=RefineOptions(correction))
        plan, _ = decide(copy, placement, ranges, self.runner, self.samples, (), settings, None)
        insert(copy, plan, settings.insert)
        return finish(copy, {}, SaveOptions(has_portable_functions=False))

    def judge(self, name: str, options: ChoiceOptions, ranges: Ranges, settings: Settings | None = None) -> _Trial:
        """Quantize by these options, and everything else by `settings` (those of the run), and compare."""
        self._measure_missing(place(self.model, options, self.vanished), ranges)
        message = self.quantized(replace(settings or self.settings, choose=options), ranges)
        outputs = compare_outputs(message, self.seen, self.expected, self.settings.calibrate.providers)
        return _Trial(name, options, ranges, outputs)

    def _measure_missing(self, placement: Placement, ranges: Ranges) -> None:
        """Ranges of tensors that only this placement quantizes, measured into `ranges`."""
        missing = [key for key in tensors_to_measure(placement) if key not in ranges]
        if missing:
            with FloatRunner(
                self.model, [name for name, _ in missing], providers=self.settings.calibrate.providers
            ) as runner:
                ranges |= measure(runner, missing, self.samples, self.settings, ranges)

    def __enter__(self) -> _Trials:
        return self

    def __exit__(self, *error: object) -> None:
        self.runner.close()


@dataclass(eq=False)
class _Search:
    """The best network so far, and what was tried on the way."""

    trials: _Trials
    settings: Settings
    ranges: Ranges
    tried: list[_Trial] = field(default_factory=list)
    layers: list[ProtectedLayer] = field(default_factory=list)
    best: _Trial = field(init=False)
    first: _Trial = field(init=False)

    def __post_init__(self) -> None:
        missing = [key for key in self.trials.wanted if key not in self.ranges]
        self.ranges |= measure(self.trials.runner, missing, self.trials.samples, self.settings)
        self.first = self.best = self._judged("as configured", self.settings.choose, self.ranges)

    @property
    def is_done(self) -> bool:
        return not needs_protection(self.best.outputs, GOAL_SEVERITY)

    def try_ranges(self) -> None:
        """Other ranges: for all tensors, then for stretches of the network."""
        if not self.ranges:
            return  # formats that need none
        methods = self._candidates()
        by_method: list[tuple[_Trial, Ranges]] = []
        with track(len(methods) + STRETCHES, "trying ranges") as advance:
            for name, ranges in methods.items():
                trial = self._judged(f"ranges by {name}", self.best.choose, ranges)
                by_method.append((trial, ranges))
                advance()
            by_method.append((self.first, self.ranges))
            by_method.sort(key=lambda each: (each[0].severity > 1, each[0].distance))
            if by_method[0][0].beats(self.best):
                self.best = by_method[0][0]
            rival = next((ranges for trial, ranges in by_method if trial is not self.best), None)
            if rival is not None and self.best.severity > 1:
                for number, tensors in enumerate(self._stretches()):
                    now = self.best.ranges.items()
                    changed = {key: rival.get(key, each) if key[0] in tensors else each for key, each in now}
                    trial = self._judged(f"other ranges in part {number + 1} of {STRETCHES}", self.best.choose, changed)
                    if trial.beats(self.best):
                        self.best = trial
                    advance()

    def try_float_between_products(self) -> None:
        options = self.trials.between_products(self.best.choose)
        if runs_on_npu(options) or options == self.best.choose:
            return
        trial = self._judged("everything but products in float", options, dict(self.best.ranges))
        if trial.beats(self.best):
            self.best = trial

    def try_layers(self) -> None:
        """The most sensitive layers in float, within the budget of multiply-accumulates.

        A few samples do not tell well when to stop, so that layers which cause half of the error come first, together.
        """
        if runs_on_npu(self.best.choose):
            return  # a layer in float is one that the NPU does not run
        costs = self._costs()
        total = sum(self.trials.macs.values()) or 1
        budget = self.settings.protect.mac_budget * total
        ranked: list[tuple[str, ...]] = []
        spent, covered = 0, 0.0
        first_count = 0
        for nodes in sorted(costs, key=lambda nodes: -costs[nodes]):
            macs = sum(self.trials.macs.get(name, 0) for name in nodes)
            if spent + macs <= budget and costs[nodes] > 0:
                ranked.append(nodes)
                spent += macs
                covered += costs[nodes]
                if not first_count and covered >= FIRST_SHARE * sum(costs.values()):
                    first_count = len(ranked)
        if not ranked:
            return
        start, taken = self.best, 0
        count = first_count or len(ranked)
        with track(MOST_LAYER_TRIALS, "protecting layers") as advance:
            for _ in range(MOST_LAYER_TRIALS):
                names = [name for nodes in ranked[:count] for name in nodes]
                options = self.trials.with_float(start.choose, names, SENSITIVE)
                trial = self._judged(f"{count_of(count, 'sensitive layer')} in float", options, dict(start.ranges))
                advance()
                if trial.beats(self.best):
                    self.best, taken = trial, count
                if self.is_done or count == len(ranked):
                    break
                count = min(len(ranked), 3 * count)
        for nodes in ranked[:taken]:
            node = self.trials.nodes[nodes[0]]
            share = sum(self.trials.macs.get(name, 0) for name in nodes) / total
            self.layers.append(ProtectedLayer(nodes[0], node.op_type, "float", SENSITIVE, share))

    def try_configured_ranges(self) -> None:
        """The configured ranges again, now that layers are in float.

        A range that clips outliers may be better while a sensitive layer has 8 bits, and worse once it has not.
        """
        is_changed = any(self.best.ranges.get(key, each) != each for key, each in self.ranges.items())
        if self.layers and is_changed:
            trial = self._judged("the same layers, ranges as configured", self.best.choose, dict(self.ranges))
            if trial.beats(self.best):
                self.best = trial

    def result(self, structures: Structures) -> Protected:
        macs = self.trials.macs
        total = sum(macs.values()) or 1
        kept = dict(self.best.choose.selection.kept_float)
        share = sum(count for name, count in macs.items() if name in kept) / total
        extra = sum(_extra_bytes(self.trials.nodes[name]) for name in kept if name in self.trials.nodes)
        methods: dict[str, int] = {}
        for (_, spec), found in self.best.ranges.items():
            name = found.method or str(spec.method)
            methods[name] = methods.get(name, 0) + 1
        alternatives = () if self.best.severity <= 1 else tuple(self._alternatives())  # these are tried as well
        facts_found = ProtectionFacts(
            structures=tuple(structures.kept_float),
            layers=tuple(self.layers),
            is_float_between_products=BETWEEN_PRODUCTS in kept.values(),
            methods=methods if any(each.method for each in self.best.ranges.values()) else {},
            float_mac_share=share,
            extra_weight_bytes=extra,
            before=str(self.first).partition(": ")[2],
            after=str(self.best).partition(": ")[2],
            tried=tuple(map(str, self.tried)),
            alternatives=alternatives,
        )
        return Protected(self.best.choose, self.best.ranges, facts_found)

    def _judged(self, name: str, options: ChoiceOptions, ranges: Ranges) -> _Trial:
        trial = self.trials.judge(name, options, ranges)
        self.tried.append(trial)
        return trial

    def _candidates(self) -> dict[str, Ranges]:
        """The ranges of all tensors by each method, by the name of the method."""
        is_position = any(each.position is not None for each in self.ranges.values())
        if is_position:
            return {
                name: {key: _moved(each, step, f"{key[1].method}, {name}") for key, each in self.ranges.items()}
                for name, step in (("one position coarser", -1), ("one position finer", 1))
            }
        wanted = {
            name: Wanted(spec.method, spec.integer, spec.is_symmetric) for name, spec in reversed(list(self.ranges))
        }
        observed = {name: each.observed for (name, _), each in self.ranges.items() if each.observed is not None}
        watched = {name for name, _ in self.trials.wanted}
        wanted = {name: each for name, each in wanted.items() if name in watched}
        calibration = self.settings.calibrate
        found = calibrate_candidates(self.trials.runner, wanted, observed, self.trials.samples, calibration)
        self.trials.runner.release()
        names = dict.fromkeys(method for each in found.values() for method in each)
        own = {str(spec.method) for _, spec in self.ranges}
        return {
            method: {key: found[key[0]][method] if key[0] in found else each for key, each in self.ranges.items()}
            for method in names
            if method not in own
        }

    def _stretches(self) -> list[set[str]]:
        """The tensors in parts of about the same number, in the order of the network."""
        places = {str(value.name): i for i, node in enumerate(self.trials.model.graph) for value in node.outputs}
        ordered = sorted({name for name, _ in self.ranges}, key=lambda name: places.get(name, -1))
        size = math.ceil(len(ordered) / STRETCHES) or 1
        return [set(ordered[i : i + size]) for i in range(0, len(ordered), size)]

    def _costs(self) -> dict[tuple[str, ...], float]:
        """How far the outputs move if a layer alone is quantized, by the nodes of the layer."""
        settings = replace(self.settings, choose=self.best.choose)
        quantized = self.trials.quantized(settings, self.best.ranges).to_graph()
        sites = find_sites(self.trials.model, quantized)
        layers = max(len(sites.sites), 1)
        count = max(1, min(SENSITIVITY_SAMPLES, len(self.trials.seen), 2 * self.trials.samples.count // layers))
        found = find_sensitivities(self.trials.model, quantized, sites, {}, self.trials.seen[:count])
        kept = dict(self.best.choose.selection.kept_float)
        costs: dict[tuple[str, ...], float] = {}
        by_name = {site.name: site for site in sites.sites}
        for site in sites.sites:
            # what a node in float hands on is rounded for the layers that read it: theirs is the cost
            owners = [site]
            if site.name in kept and site.name in self.trials.nodes:
                uses = (node for value in self.trials.nodes[site.name].outputs for node, _ in readers(value))
                owners = [by_name[str(node.name)] for node in uses if str(node.name) in by_name]
            for owner in owners:
                if owner.name in self.trials.nodes and owner.name not in kept:
                    nodes = tuple(name for name in owner.nodes if name in self.trials.nodes)
                    costs[nodes] = costs.get(nodes, 0.0) + found.values.get(site.tensor, 0.0)
        return costs

    def _alternatives(self) -> list[str]:
        """Presets with wider types and what was measured of them, for a network that 8 bits do not suit."""
        found = []
        for name in WIDER_PRESETS:
            wider = settings_of(name)
            wider = replace(wider, refine=RefineOptions())  # the runner watches other tensors
            trial = self.trials.judge(name, wider.choose, {}, wider)
            self.tried.append(trial)
            if overall_verdict(trial.outputs) is Verdict.OK:
                found.append(str(trial))
        return found


def _extra_bytes(node: ir.Node) -> int:
    """What the weight of a product takes in float beyond 8 bits."""
    return 3 * weight_count(node) if node.op_type in PRODUCTS else 0


def _moved(found: TensorRange, step: int, method: str) -> TensorRange:
    assert found.position is not None
    return replace(found, position=found.position + step, method=method)

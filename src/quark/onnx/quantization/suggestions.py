"""Changes that could make a quantized file better, tried: quantize again with each, and measure what it gains.

    suggest    the changes that are worth a try, by a Diagnosis and the configuration of the file
    try_all    quantize again with one after the other, judge each on held-out samples, and combine the best two

The file, the float model and the data are those of a report. A quarter of the samples is held out to judge by, at most
16; the rest is calibrated on. Each change is compared with the file's own configuration on the same samples, so that
what the change does is all that is measured. Finetuning is left out of both, because it takes too long.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import onnx_ir as ir

from quark.card import Card
from quark.compare import OutputFidelity, outputs_without_numbers, overall_verdict, worst_output
from quark.compare.verdict import figure_text
from quark.decide import AffineSpec
from quark.diagnosis import Action, Diagnosis, LayerDiagnosis, Outcome, Step, Suggestion
from quark.errors import InvalidValueError, QuarkError
from quark.features.protection.on_onnx import is_protectable
from quark.features.protection.options import ProtectMode
from quark.files.foreign import parse_yaml
from quark.onnx.comparing import judge_outputs, session_run
from quark.onnx.data import Sample, Samples, input_infos, open_samples
from quark.onnx.load import load
from quark.onnx.quantization.config.config import QConfig, QuantizationConfig, get_default_config
from quark.onnx.quantization.config.files import Change, changed, config_from
from quark.onnx.quantization.data import Data
from quark.onnx.quantization.making import read_card
from quark.onnx.quantization.pipeline import quantize_graph
from quark.onnx.quantization.reproduction import settings_from
from quark.onnx.session import open_session, release_memory
from quark.onnx.settings import Settings
from quark.report.quantities import count_of
from quark.text import one_line, setting, shell_command

PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
WORST_LAYERS = 10  # layers whose remedies are candidates
UNQUANTIZED = ("BatchNormalization", "Constant", "Shape", "Cast")  # folded, or not quantized anyway
EXCLUDED_COUNTS = (1, 3, 5)
LARGEST_REGION = 16  # nodes around a layer that go with it
LEAST_SHARE = 0.02  # share of all sensitivity that more layers in float must add
LARGEST_GROUP = 0.4  # share of all parameters
MOST_REMEDIES = 3
HELD_OUT_EVERY = 4
MOST_HELD_OUT = 16
MOST_BYTES = 256 << 20  # bytes of held-out samples
WIDER = {"integers": ("A16W8", "MXINT8", "BF16"), "wide": ("BF16",), "blocks": ("MXINT8", "BF16")}
MOST_PRESETS = 2
CLEAR_GAIN = 0.9  # factor on the distance below which a change has helped
SAME_SEVERITY = 0.02
LEAST_SECONDS = 10.0
LONG_TIMES = 5  # the duration of a long trial, relative to the others
# factor on the allowed time within which a wider preset is still tried if nothing else gave a verdict of ok
OVERTIME = 1.5

Say = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Candidate:
    """A change to try: another preset if `preset` is given, else changes to the file's own configuration.

    `is_long` is True if it takes several times as long as the others, `count` is the number of layers that it is about.
    """

    text: str
    changes: tuple[Change, ...] = ()
    preset: str = ""
    is_long: bool = False
    count: int = 0

    @property
    def is_sure(self) -> bool:
        """True if the change works for most networks, so that it is worth some overtime."""
        return bool(self.preset) or self.is_long

    @property
    def arguments(self) -> str:
        """The change as arguments of `quark quantize`, quoted for a shell."""
        if self.preset:
            return shell_command(["--config", self.preset])
        return shell_command(part for key, value in self.changes for part in ("--set", setting(key, value)))


@dataclass(frozen=True, eq=False)
class Making:
    """How the file was made, so that it can be rebuilt with a change."""

    card: Card
    config: QuantizationConfig | QConfig
    settings: Settings

    @staticmethod
    def of(quantized: Path) -> Making:
        """Raises InvalidValueError if the file does not say how it was made, or was made with Python functions."""
        card = read_card(quantized).card
        if card.functions:
            raise InvalidValueError(f"{', '.join(card.functions)} was a Python function, which a card cannot hold")
        return Making(card, config_from(dict(card.config)), settings_from(card))

    def settings_with(self, candidate: Candidate) -> Settings:
        """The settings of the candidate, without training and without anything written to disk."""
        if candidate.preset:
            config: QuantizationConfig | QConfig = get_default_config(candidate.preset)
            name = candidate.preset
        else:
            config, name = changed(self.config, candidate.changes), ""
        settings = settings_from(replace(self.card, config=config.to_dict(), config_name=name))
        return settings.without_training()


@dataclass(frozen=True)
class Tried:
    """All suggestions, those that helped first. `note` says what a reader should know about the trials."""

    suggestions: tuple[Suggestion, ...]
    note: str = ""

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps that helped, with their gain; or a sentence if none did."""
        helped = [suggestion for suggestion in self.suggestions if suggestion.outcome is Outcome.HELPED]
        count = sum(suggestion.outcome in (Outcome.HELPED, Outcome.NO_GAIN) for suggestion in self.suggestions)
        if helped:
            return tuple(suggestion.step for suggestion in helped)
        if count:
            return (Step(f"none of the {count} changes that were tried helped"),)
        return tuple(suggestion.step for suggestion in self.suggestions)


def untried(diagnosis: Diagnosis, reason: str) -> Tried:
    """The suggestions by guess, for a file that cannot be made again."""
    suggestions: dict[str, Suggestion] = {}
    for layer in _worst(diagnosis):
        for remedy in layer.remedies:
            if remedy.option and remedy.action is not Action.EXCLUDE:
                suggestions.setdefault(remedy.option, Suggestion(remedy.text, remedy.arguments, reason=reason))
    excluded = [_exclude(diagnosis, count, (), ()) for count in EXCLUDED_COUNTS]
    first = [
        Suggestion(candidate.text, candidate.arguments, reason=reason)
        for candidate in excluded
        if candidate is not None
    ][:1]
    return Tried((*first, *list(suggestions.values())[:MOST_REMEDIES]), f"suggestions were not tried: {reason}")


def try_all(
    diagnosis: Diagnosis,
    float_model: str | os.PathLike[str],
    quantized: str | os.PathLike[str],
    data: Any,
    *,
    seconds: float,
    num_samples: int | None = None,
    preprocessing: Any = "auto",
    say: Say | None = None,
) -> Tried:
    """Try the promising changes for about the given number of seconds, at least one.

    `say` is told the number of the change, the number of all, and what it is.
    """
    if diagnosis.basis.is_random:
        return untried(diagnosis, "there is no data to calibrate on")
    try:
        making = Making.of(Path(quantized))
    except InvalidValueError as error:
        return untried(diagnosis, f"the file does not say how to rebuild it ({error})")
    candidates = suggest(diagnosis, making, load(float_model, making.settings.load).model)
    with _Trials(making, float_model, data, num_samples, preprocessing) as trials:
        return trials.run(Path(quantized), candidates, max(seconds, LEAST_SECONDS), say or (lambda *_: None))


# ---------------------------------------------------------------- what to try
def suggest(diagnosis: Diagnosis, making: Making, model: ir.Model) -> list[Candidate]:
    """The promising changes, most likely first. `model` is the float model as the quantizer reads it."""
    candidates = [*_own_changes(diagnosis, making, model)] if isinstance(making.config, QuantizationConfig) else []
    settings = making.settings
    activation = settings.choose.default.activation
    kind = "blocks"
    if isinstance(activation, AffineSpec):
        kind = "integers" if activation.integer.bits <= 8 else "wide"
    presets = [name for name in WIDER[kind] if name != settings.name][:MOST_PRESETS]
    wider = [Candidate(f"use the preset {name}", preset=name) for name in presets]
    first = next((index for index, candidate in enumerate(candidates) if candidate.is_long), len(candidates))
    return [*candidates[:first], *wider[:1], *candidates[first:], *wider[1:]]


def _own_changes(diagnosis: Diagnosis, making: Making, model: ir.Model) -> Iterator[Candidate]:
    config, settings = making.config, making.settings
    assert isinstance(config, QuantizationConfig)
    known = [str(node.name) for node in model.graph]
    in_float = {skipped.node for skipped in diagnosis.skipped}
    excluded = [_exclude(diagnosis, count, config.nodes_to_exclude, in_float, model) for count in EXCLUDED_COUNTS]
    yield from filter(None, excluded[:-1])
    others = {layer.op_type for layer in diagnosis.layers} - {*PRODUCTS, "LSTM", "GRU", "RNN"}
    if others and not config.op_types_to_quantize and not config.nodes_to_quantize:
        present = sorted({node.op_type for node in model.graph} & set(PRODUCTS))
        yield Candidate("quantize products only", (("op_types_to_quantize", present),))
    remedies = list(_remedies(diagnosis, config, making))
    if remedies and "TensorQuantOverrides" in dict(remedies[0].changes):
        yield remedies.pop(0)
    group = _group(diagnosis, config.nodes_to_exclude, in_float, known)
    if group is not None:
        yield group
    if is_protectable(settings) and settings.protect.mode is not ProtectMode.AUTO:
        protect = (("Protect", ProtectMode.AUTO.value),)
        yield Candidate("protect the layers that break the network", protect, is_long=True)
    if excluded[-1] is not None:
        yield excluded[-1]
    yield from remedies


def _exclude(
    diagnosis: Diagnosis, count: int, existing: Sequence[str], in_float: Collection[str], model: ir.Model | None = None
) -> Candidate | None:
    """Leave the `count` most sensitive layers in float; None if fewer layers have nearly as much of the sensitivity.

    With them go the nodes around them that are not products. Otherwise what the layers read would still be quantized,
    for the other nodes that read it.
    """
    nodes = None if model is None else {str(node.name): node for node in model.graph}
    layers = [
        layer
        for layer in _worst(diagnosis)
        if layer.share
        and layer.name not in in_float
        and not any(_is_match(pattern, layer.name) for pattern in existing)
        and (nodes is None or layer.name in nodes)
    ]
    if len(layers) < count:
        return None
    shares = [layer.share or 0.0 for layer in layers]
    smaller = max((fewer for fewer in EXCLUDED_COUNTS if fewer < count), default=0)
    if sum(shares[smaller:count]) < LEAST_SHARE:
        return None
    if nodes is None:
        names = [name for layer in layers[:count] for name in layer.nodes]
    else:
        names = [name for layer in layers[:count] for name in _surroundings(nodes[layer.name])]
    what = "most sensitive layer" if count == 1 else f"{count} most sensitive layers"
    parameters = sum(layer.parameters for layer in diagnosis.layers) or 1
    cost = 100 * sum(layer.parameters for layer in layers[:count]) / parameters
    text = f"leave the {what} in float ({100 * sum(shares[:count]):.0f} % of all sensitivity, {cost:.1f} % of weights)"
    return Candidate(text, (("nodes_to_exclude", [*existing, *dict.fromkeys(names)]),), count=count)


def _surroundings(layer: ir.Node) -> list[str]:
    """The names of a node and of the nodes around it, up to the next products, the nearest first."""
    around = {id(layer): layer}
    waiting = [layer]
    while waiting and len(around) < LARGEST_REGION:
        node = waiting.pop(0)
        makers = [value.producer() for value in node.inputs if value is not None]
        readers = [use.node for value in node.outputs for use in value.uses()]
        for other in [*makers, *readers]:
            is_new = other is not None and id(other) not in around and other.graph is layer.graph
            if other is not None and is_new and other.op_type not in (*PRODUCTS, *UNQUANTIZED):
                around[id(other)] = other
                waiting.append(other)
    return [str(node.name) for node in around.values()]


def _group(
    diagnosis: Diagnosis, existing: Sequence[str], in_float: Collection[str], known: Collection[str]
) -> Candidate | None:
    """Leave the module in float whose layers have most of the sensitivity, by the names of the nodes."""
    parameters = sum(layer.parameters for layer in diagnosis.layers) or 1
    shares: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for layer in diagnosis.layers:
        for end in (match.end() for match in re.finditer(r"/|\.(?!\d+$)", layer.name)):
            prefix = layer.name[:end]
            if prefix.strip("/."):
                shares[prefix] = shares.get(prefix, 0.0) + (layer.share or 0.0)
                sizes[prefix] = sizes.get(prefix, 0) + layer.parameters
    fitting = [name for name in shares if sizes[name] <= LARGEST_GROUP * parameters and shares[name] >= 5 * LEAST_SHARE]
    members = {name: [node for node in known if node.startswith(name)] for name in fitting}
    fitting = [name for name in fitting if len(members[name]) > 1 and not set(members[name]) <= set(in_float)]
    if not fitting:
        return None
    best = max(fitting, key=lambda name: (shares[name], len(name)))
    pattern = f"{re.escape(best)}.*"
    if pattern in existing:
        return None
    cost = f"{100 * shares[best]:.0f} % of all sensitivity, {100 * sizes[best] / parameters:.1f} % of weights"
    return Candidate(f"leave '{best}' in float ({cost})", (("nodes_to_exclude", [*existing, pattern]),))


def _remedies(diagnosis: Diagnosis, config: QuantizationConfig, making: Making) -> Iterator[Candidate]:
    """The remedies of the worst layers, each option once, then options that help many networks and are not in use."""
    options = config.extra_options
    overrides: dict[str, Any] = {}
    plain: dict[str, Candidate] = {}
    for layer in _worst(diagnosis):
        for remedy in layer.remedies:
            key, _, value = remedy.option.partition("=")
            if key == "TensorQuantOverrides":
                overrides |= parse_yaml(value, "a suggested value")
            elif remedy.option and remedy.action not in (Action.EXCLUDE, Action.ADAROUND):
                plain.setdefault(key, Candidate(remedy.text, ((key, parse_yaml(value, "a suggested value")),)))
    if overrides:
        merged = {**options.get("TensorQuantOverrides", {}), **overrides}
        text = f"16 bits for the inputs of the most sensitive layers ({len(overrides)} tensors)"
        yield Candidate(text, (("TensorQuantOverrides", merged),))
    op_types = {layer.op_type for layer in diagnosis.layers}
    activation = making.settings.choose.default.activation
    is_affine = isinstance(activation, AffineSpec) and activation.integer.bits <= 8
    method = str(config.calibrate_method)
    other_method = "CalibrationMethod.MinMax" if "Percentile" in method else "CalibrationMethod.Percentile"
    if "PowerOfTwoMethod" in method:
        other_method = "PowerOfTwoMethod.NonOverflow" if "MinMSE" in method else "PowerOfTwoMethod.MinMSE"
    is_linear = bool(op_types & {"MatMul", "Gemm"}) and "Conv" not in op_types
    usual: tuple[tuple[str, Any, str, bool], ...] = (
        ("calibrate_method", other_method, f"find ranges by {other_method.split('.')[1]}", True),
        (
            "include_cle",
            True,
            "even out channels between neighbouring layers",
            "Conv" in op_types and not config.include_cle,
        ),
        ("include_sq", True, "move outliers of activations into the weights", is_linear and not config.include_sq),
        (
            "BiasCorrection",
            True,
            "correct the biases for what rounding shifts",
            making.settings.refine.bias_correction is None,
        ),
    )
    for key, change, text, is_useful in usual:
        if is_affine and is_useful:
            plain.setdefault(key, Candidate(text, ((key, change),)))
    yield from itertools.islice(plain.values(), MOST_REMEDIES)


def _worst(diagnosis: Diagnosis) -> Sequence[LayerDiagnosis]:
    """The most sensitive layers; by local error if sensitivities were not measured."""
    if diagnosis.ranked:
        return diagnosis.ranked[:WORST_LAYERS]
    compared = [layer for layer in diagnosis.layers if layer.local is not None]
    return sorted(compared, key=lambda layer: layer.local.sqnr_db if layer.local else math.inf)[:WORST_LAYERS]


def _is_match(pattern: str, name: str) -> bool:
    """True if the pattern is that name, or a regular expression for it."""
    try:
        return pattern == name or re.fullmatch(pattern, name) is not None
    except re.error:  # a name that is not a regular expression
        return False


# ---------------------------------------------------------------- trying it
@dataclass(frozen=True)
class _Figures:
    """The outputs of one model, for the held-out samples."""

    outputs: tuple[OutputFidelity, ...]

    @property
    def severity(self) -> float:
        return max((output.severity for output in self.outputs), default=0.0)

    @property
    def distance(self) -> float:
        return sum(output.distance for output in self.outputs)

    def beats(self, other: _Figures) -> bool:
        """True if the outputs are clearly closer to the float model's."""
        if abs(self.severity - other.severity) > SAME_SEVERITY and max(self.severity, other.severity) > 1:
            return self.severity < other.severity
        return self.distance < CLEAR_GAIN * other.distance

    @property
    def rank(self) -> tuple[float, float]:
        return max(self.severity, 1.0), self.distance


_Result: TypeAlias = tuple[Candidate, _Figures | None, Suggestion]


def _includes(candidate: Candidate, other: Candidate) -> bool:
    """True if the candidate does all that the other does, and more."""
    if candidate == other or not other.changes:
        return False
    own = dict(candidate.changes)
    for key, part in other.changes:
        value = own.get(key)
        is_held = set(part) <= set(value) if isinstance(value, list) and isinstance(part, list) else value == part
        if key not in own or not is_held:
            return False
    return True


class _Trials:
    """Quantizes and judges on the same samples, again and again."""

    def __init__(
        self, making: Making, float_model: str | os.PathLike[str], data: Any, count: int | None, preprocessing: Any
    ) -> None:
        self._making = making
        self._source = float_model
        model = load(float_model, making.settings.load).model
        batch_size = making.card.data.batch_size
        self._samples: Samples = open_samples(
            data, input_infos(model), count=count, batch_size=batch_size, preprocessing=preprocessing
        )
        self._held_out, self._indices = self._split()
        self._providers = making.settings.calibrate.providers
        session = open_session(model, providers=self._providers)
        run, names = session_run(session, "the model"), [output.name for output in session.get_outputs()]
        self._expected = [run(sample, names) for sample in self._held_out]

    def __enter__(self) -> _Trials:
        return self

    def __exit__(self, *_: object) -> None:
        self._held_out, self._expected = [], []
        release_memory()

    def run(self, quantized: Path, candidates: Sequence[Candidate], seconds: float, say: Say) -> Tried:
        start = time.monotonic()
        note = f"suggestions were judged on {count_of(len(self._held_out), 'sample')} not calibrated on"
        say(0, len(candidates), "the same configuration")
        again = Candidate("quantize again with the same configuration and these samples")
        before = self._figures(again)
        results: list[_Result] = []
        if self._making.settings.trains:
            note += ", without training"
        else:
            result = self._compared(again, self._judged(os.fspath(quantized)), before)
            # other samples change a little, always
            is_better = result[2].verdict_after is not result[2].verdict_before
            results += [result] if result[2].outcome is Outcome.HELPED and is_better else []
        skipped: list[Suggestion] = []
        quick: list[float] = []  # seconds of the trials that are not long
        for candidate in candidates:
            usual = sum(quick) / len(quick) if quick else 0.0
            expected = time.monotonic() - start + usual * (LONG_TIMES if candidate.is_long else 1)
            reason = self._reason_to_skip(candidate, results, expected if quick else 0.0, seconds)
            if reason:
                skipped.append(Suggestion(candidate.text, candidate.arguments, reason=reason))
                continue
            say(len(results) + len(skipped) + 1, len(candidates), candidate.text)
            begun = time.monotonic()
            results.append(self._tried(candidate, before, results))
            if not candidate.is_long:
                quick.append(time.monotonic() - begun)
        pair = self._best_pair(results, before)
        if pair is not None and time.monotonic() - start < OVERTIME * seconds:
            say(len(results) + 1, len(candidates) + 1, pair.text)
            results.append(self._tried(pair, before, results))
        order = {Outcome.HELPED: 0, Outcome.NO_GAIN: 1, Outcome.FAILED: 2, Outcome.UNTRIED: 3}

        def key(result: _Result) -> tuple[int, float, bool, float]:
            """By severity. If equal, presets come last, because they cost more than a change to few layers."""
            candidate, figures, suggestion = result
            severity, distance = figures.rank if figures else (math.inf, math.inf)
            return order[suggestion.outcome], severity, bool(candidate.preset), distance

        results.sort(key=key)
        if skipped:
            note += f"; {len(results)} of {len(results) + len(skipped)} were tried"
        return Tried((*(suggestion for *_, suggestion in results), *skipped), note)

    def _reason_to_skip(self, candidate: Candidate, results: Sequence[_Result], expected: float, seconds: float) -> str:
        """The reason not to try a change, or nothing. It would be done after `expected` of the `seconds` allowed."""
        for tried, _, suggestion in results:
            is_exclusion = [key for key, _ in tried.changes] == ["nodes_to_exclude"] and tried.count > 1
            if is_exclusion and suggestion.outcome is Outcome.NO_GAIN and _includes(candidate, tried):
                return "more layers in float had gained nothing"
        works = [tried for tried, figures, _ in results if figures is not None and figures.severity <= 1]
        if candidate.preset and any(tried.preset for tried in works):
            return "another preset works"
        allowed = seconds * (OVERTIME if candidate.is_sure and not works else 1.0)
        return "there was no time" if expected > allowed else ""

    def _best_pair(self, results: Sequence[_Result], before: _Figures) -> Candidate | None:
        """Both of the two best changes, if they are about different options."""
        helped = [
            (figures.rank, candidate)
            for candidate, figures, _ in results
            if figures is not None and not candidate.is_sure and figures.beats(before)
        ]
        helped.sort(key=lambda pair: pair[0])
        for (_, first), (_, second) in itertools.combinations(helped[:3], 2):
            if not {key for key, _ in first.changes} & {key for key, _ in second.changes}:
                return Candidate(f"{first.text}, and {second.text}", (*first.changes, *second.changes))
        return None

    def _tried(self, candidate: Candidate, before: _Figures, results: Sequence[_Result]) -> _Result:
        """Try a change. It helped if it beats the file, and every part of it that was tried alone."""
        try:
            after = self._figures(candidate)
        except QuarkError as error:
            reason = one_line(error)
            return candidate, None, Suggestion(candidate.text, candidate.arguments, Outcome.FAILED, reason=reason)
        rivals = [figures for tried, figures, _ in results if figures is not None and _includes(candidate, tried)]
        return self._compared(candidate, before, after, rivals)

    def _compared(
        self, candidate: Candidate, before: _Figures, after: _Figures, rivals: Sequence[_Figures] = ()
    ) -> _Result:
        measure, figures = _compared_part(before.outputs, after.outputs)
        suggestion = Suggestion(
            candidate.text,
            candidate.arguments,
            Outcome.HELPED if all(after.beats(rival) for rival in (before, *rivals)) else Outcome.NO_GAIN,
            overall_verdict(before.outputs),
            overall_verdict(after.outputs),
            measure,
            *figures,
            before.severity,
            after.severity,
            before.distance,
            after.distance,
        )
        return candidate, after, suggestion

    def _figures(self, candidate: Candidate) -> _Figures:
        settings = self._making.settings_with(candidate)
        samples = (sample for index, sample in enumerate(self._samples.in_order()) if index in self._indices)
        outcome = quantize_graph(self._source, Data(samples), settings)
        figures = self._judged(outcome.message.to_graph())
        release_memory()
        return figures

    def _split(self) -> tuple[list[Sample], set[int]]:
        """The samples to judge by, and the numbers of those to calibrate on; a lone sample serves both."""
        held_out: list[Sample] = []
        calibrated: set[int] = set()
        size, total = 0, sum(1 for _ in self._samples.in_order())
        every = HELD_OUT_EVERY if total >= HELD_OUT_EVERY**2 else 2
        for index, sample in enumerate(self._samples.in_order()):
            bytes_ = sum(array.nbytes for array in sample.values())
            is_wanted = index % every == every - 1 and len(held_out) < MOST_HELD_OUT
            if is_wanted and (not held_out or size + bytes_ <= MOST_BYTES):
                held_out.append(sample)
                size += bytes_
            else:
                calibrated.add(index)
        if not held_out:
            held_out = list(self._samples.in_order())
        return held_out, calibrated

    def _judged(self, model: ir.Model | str) -> _Figures:
        run = session_run(open_session(model, providers=self._providers), "the model")
        left_out = outputs_without_numbers(self._expected)
        return _Figures(judge_outputs(run, self._held_out, self._expected, left_out))


def _compared_part(before: Sequence[OutputFidelity], after: Sequence[OutputFidelity]) -> tuple[str, tuple[str, str]]:
    """The measure of the part that decides the verdict before, and its figures before and after."""
    output = worst_output(before)
    if output is None:
        return "", ("", "")
    other = next(fidelity for fidelity in after if fidelity.name == output.name)
    part = output.worst_part
    if part is None:
        return "SQNR", (f"{output.sqnr_db:.1f} dB", f"{other.sqnr_db:.1f} dB")
    same = [candidate for candidate in other.parts if (candidate.name, candidate.measure) == (part.name, part.measure)]
    if not same:  # a part of several figures may be decided by another one now
        same = [candidate for candidate in other.parts if candidate.name == part.name]
    if not same or same[0].measure != part.measure:
        return "SQNR of the output", (f"{output.sqnr_db:.1f} dB", f"{other.sqnr_db:.1f} dB")
    return part.measure, (figure_text(part), figure_text(same[0]))

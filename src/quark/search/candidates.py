"""Candidates of a search, cheapest first: presets and changes to them.

    direct      presets of every width, unchanged
    recipe      a preset with an additional algorithm that takes seconds
    mixed       two precisions, by the sensitivity of the layers
    finetuned   presets with AdaRound, or with AdaQuant if their numbers have no scale to round by

Every candidate except direct and mixed ones has a base, whose result tells whether it is worth trying. A variant of a
format has the size of its base. `reason_to_skip` therefore skips it if the base

    was skipped or failed
    is beyond the size budget
    is within the drop budget already, or lost nothing if there is no such budget
    is no smaller than a trial that is within all budgets
    is beaten by another trial: finetuning is for those of the front

and skips any candidate that cannot be small enough by the bits of its weights, finished in time, or, without torch,
trained.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from quark.decide.specs import bits_of
from quark.errors import UnknownNameError, unknown_name
from quark.onnx.quantization.config.config import QuantizationConfig, get_default_config
from quark.onnx.quantization.config.content import merged
from quark.onnx.quantization.config.data_type import MXFP4E2M1
from quark.onnx.quantization.config.finetune_options import is_torch_installed
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.presets import PRESETS, unknown_preset
from quark.onnx.quantization.targets import Target
from quark.report.quantities import size_text
from quark.search.trial import Limits, Stage, Trial, is_within, pareto_front

Change = tuple[str, Any]

DIRECT = (
    *("BF16", "A16W8", "INT8_CNN_DEFAULT", "A8W8", "S8S8_AAWS", "XINT8", "MXINT8", "MX9", "BFP16", "FP8E4M3"),
    *("MXFP8E4M3", "MXFP8E5M2", "MX6", "MXFP6E2M3", "MXFP6E3M2", "MXFP8E4M3_MXFP4E2M1", "A8W4", "NVFP4", "MXFP4E2M1"),
    "MX4",
)
FOR_TRANSFORMERS = ("INT8_TRANSFORMER_DEFAULT", "MATMUL_NBITS", "INT4_WEIGHT_ONLY_GPTQ")
MIXED = ("S16S16_MIXED_S8S8", "BF16_MIXED_MXINT8")
_MIXED_BITS = (6.0, 5.0)  # average bits of a weight
COSTS: Mapping[Stage, float] = {Stage.DIRECT: 1.0, Stage.RECIPE: 1.5, Stage.MIXED: 6.0, Stage.FINETUNED: 20.0}
STAGES = tuple(Stage)
WEIGHTS: tuple[Change, ...] = (("WeightsOnly", True),)


@dataclass(frozen=True)
class Candidate:
    """A preset with changes, as given by --config and --set. `bits` are those of a weight in its format."""

    name: str
    preset: str
    stage: Stage
    changes: tuple[Change, ...] = ()
    base: str = ""
    bits: float = 32.0
    format: str = ""

    def config(self) -> QuantizationConfig:
        """Return a new config with the changes applied."""
        content = get_default_config(self.preset).to_dict()
        for key, value in self.changes:
            place = content if key in content else content["extra_options"]
            place.update(merged(place, {key: value}))
        return QuantizationConfig.from_dict(content)

    def digest(self) -> str:
        """Return a hash of the whole config: a preset with other options in another version is another candidate."""
        return hashlib.sha256(json.dumps(self.config().to_dict(), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Traits:
    """Properties of the network that decide which algorithms apply."""

    op_types: frozenset[str] = frozenset()

    @property
    def has_layer_norms(self) -> bool:
        # decomposed norms have a mean and a root, and hardly anything else does
        norms = {"LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "SkipLayerNormalization"}
        return bool(norms & self.op_types) or {"ReduceMean", "Sqrt"} <= self.op_types

    @property
    def has_products(self) -> bool:
        return bool(self.op_types & {"MatMul", "Attention"})

    @property
    def has_convolutions(self) -> bool:
        return bool(self.op_types & {"Conv", "ConvTranspose"})


def ladder(traits: Traits, formats: Sequence[str] = ()) -> list[Candidate]:
    """Return all candidates for a network; with `formats`, those whose weights have one of them."""
    names = [*DIRECT, *(FOR_TRANSFORMERS if traits.has_products else ())]
    direct = [_candidate(name, name, Stage.DIRECT) for name in names]
    known = dict.fromkeys(candidate.format for candidate in direct)
    for name in formats:
        if name not in known:
            raise unknown_name("format of weights in the search", name, known)
    direct = [candidate for candidate in direct if not formats or candidate.format in formats]
    others = [candidate for base in direct for candidate in _recipes(base, traits)]
    others += [candidate for candidate in _mixed() if not formats or candidate.format in formats]
    others += [candidate for base in direct for candidate in _finetuned(base)]
    return [*direct, *others]


def ladder_for(target: Target, is_transformer: bool, has_products: bool, has_measure: bool) -> list[Candidate]:
    """Return the candidates of `quark.search.auto` in the order to try: the one expected to be best first."""
    rows: list[Candidate] = []

    def add(preset: str, suffix: str = "", changes: tuple[Change, ...] = (), base: str = "") -> None:
        rows.append(_candidate(preset + suffix, preset, Stage.DIRECT, changes, base))

    if target is Target.CPU:
        pair = ("INT8_CNN_DEFAULT", "INT8_TRANSFORMER_DEFAULT")
        first, second = reversed(pair) if is_transformer else pair
        add(first)
        if has_measure:  # protection follows the verdict; the measure may need less of it
            add(first, "+UNPROTECTED", (("Protect", "none"),), first)
        add(second)
        if has_products:
            add("UINT8_DYNAMIC_QUANT")
        add(first, "+BUDGET30", (("ProtectBudget", 0.3),), first)
        add(first, "+BUDGET50", (("ProtectBudget", 0.5),), first)
        for name in ("MXINT8", "FP16", "BF16"):
            add(name, "+WEIGHTS", WEIGHTS)  # the runtime would only simulate activations in these formats
    elif target is Target.NPU:
        of_cnns = ("XINT8", "A8W8", "A16W8", "BF16")
        of_transformers = ("INT8_TRANSFORMER_DEFAULT", "A16W8", "INT16_TRANSFORMER_DEFAULT", "BF16")
        for name in of_transformers if is_transformer else of_cnns:
            add(name)
    elif target is Target.GPU:
        for name in ("MXFP8E4M3", "MXINT8", "FP8E4M3"):
            add(name)
        rows.append(_candidate("BF16_MIXED_MXINT8", "BF16_MIXED_MXINT8", Stage.MIXED))
        add("FP16")
        add("BF16")
    else:
        for name in ("MX4", "MXFP4E2M1", "NVFP4", "MX6", "MXFP6E2M3", "MXFP6E3M2", "MXINT8", "MX9"):
            add(name, "+WEIGHTS", WEIGHTS)
        if has_products:
            add("MATMUL_NBITS")
            add("INT4_WEIGHT_ONLY_GPTQ")
        add("INT8_TRANSFORMER_DEFAULT" if is_transformer else "INT8_CNN_DEFAULT")
        add("FP16", "+WEIGHTS", WEIGHTS)
        rows += [
            _candidate(f"{candidate.name}+WEIGHTS", candidate.preset, candidate.stage, (*candidate.changes, *WEIGHTS))
            for candidate in _mixed()
            if candidate.preset == "MXINT8"
        ]
        rows.sort(key=lambda row: row.bits)
    return rows


def named(presets: Iterable[str]) -> list[Candidate]:
    """Return these presets as candidates without a base."""
    candidates = []
    for name in dict.fromkeys(presets):
        if name not in PRESETS:
            raise unknown_preset(name)
        stage = Stage.DIRECT
        if PRESETS[name].is_trained:
            stage = Stage.FINETUNED
        elif PRESETS[name].fields.get("include_auto_mp"):
            stage = Stage.MIXED
        candidates.append(_candidate(name, name, stage))
    if not candidates:
        raise UnknownNameError("no presets to search among: give some, or leave the option out for all")
    return candidates


def in_order(candidates: Iterable[Candidate], has_small_first: bool) -> list[Candidate]:
    """Sort candidates, cheapest first; equally cheap ones with the fewest bits first, or with the most."""
    sign = 1 if has_small_first else -1
    return sorted(candidates, key=lambda candidate: (STAGES.index(candidate.stage), sign * candidate.bits))


def _candidate(name: str, preset: str, stage: Stage, changes: tuple[Change, ...] = (), base: str = "") -> Candidate:
    bare = Candidate(name, preset, stage, changes, base)
    settings = settings_of(bare.config())
    weight = settings.choose.default.weight
    bits = bits_of(settings.choose.default)[1]
    if settings.mix is not None:  # a lower bound: the target, or else the lower precision
        bits = max(bits_of(settings.mix.low)[1], settings.mix.weight_bits or 0.0)
    return replace(bare, bits=bits, format="float" if weight is None else weight.format)


def _recipes(base: Candidate, traits: Traits) -> Iterator[Candidate]:
    fields, options = PRESETS[base.preset].fields, PRESETS[base.preset].options
    is_integer = base.format.startswith(("int", "uint"))
    if base.preset in FOR_TRANSFORMERS and "UseMatMulNBits" in options:
        return
    if traits.has_convolutions and not fields.get("include_cle"):
        changes: tuple[Change, ...] = (("include_cle", True), ("CLESteps", 1))
        yield _candidate(f"{base.name}+CLE", base.preset, Stage.RECIPE, changes, base.name)
    if not options.get("BiasCorrection"):
        yield _candidate(f"{base.name}+BIAS", base.preset, Stage.RECIPE, (("BiasCorrection", True),), base.name)
    if base.format.startswith("mxfp6") and "WeightScaleRule" not in options:  # at 8 bits it changes next to nothing
        yield _candidate(f"{base.name}+MSE", base.preset, Stage.RECIPE, (("WeightScaleRule", "mse"),), base.name)
    if is_integer and "CalibMovingAverage" in options and base.preset != "INT8_TRANSFORMER_DEFAULT":
        percentile = (("calibrate_method", "CalibrationMethod.Percentile"), ("Percentile", 99.999))
        yield _candidate(f"{base.name}+PERCENTILE", base.preset, Stage.RECIPE, percentile, base.name)
    if is_integer and traits.has_layer_norms and not fields.get("include_sq"):
        yield _candidate(f"{base.name}+SMOOTH", base.preset, Stage.RECIPE, (("include_sq", True),), base.name)


def _mixed() -> Iterator[Candidate]:
    """Yield the mixed presets, and MXINT8 with the least sensitive layers in MXFP4, for each average of bits."""
    for name in MIXED:
        yield _candidate(name, name, Stage.MIXED)
    for bits in _MIXED_BITS:
        target = {
            "ActTargetQuantType": "ExtendedQuantType.QMX",
            "WeightTargetQuantType": "ExtendedQuantType.QMX",
            "TargetMXAttributes": dict(MXFP4E2M1.attributes),
            "BitsTarget": bits,
        }
        changes: tuple[Change, ...] = (("include_auto_mp", True), ("AutoMixprecision", target))
        yield _candidate(f"MXINT8_MIXED_MXFP4_{bits:g}", "MXINT8", Stage.MIXED, changes)


def _finetuned(base: Candidate) -> Iterator[Candidate]:
    for suffix in ("_ADAROUND", "_ADAQUANT"):
        if base.preset + suffix in PRESETS:
            name = base.preset + suffix
            # settings_of needs torch for these, and the formats are those of the base anyway
            yield Candidate(name, name, Stage.FINETUNED, (), base.name, base.bits, base.format)
            return


@dataclass(frozen=True)
class Situation:
    """State of a search. `weights` is the number of weights of the float network."""

    trials: Sequence[Trial]
    limits: Limits
    weights: int
    seconds_left: float = math.inf


def reason_to_skip(candidate: Candidate, now: Situation) -> str | None:
    """Return the reason not to try a candidate, or None."""
    if now.seconds_left <= 0:
        return "the time is up"
    if candidate.stage is Stage.FINETUNED and not is_torch_installed():
        return "finetuning needs torch, which is not installed: pip install torch"
    smallest = now.weights * candidate.bits / 8
    if smallest > now.limits.size_bytes:
        return f"weights of {candidate.bits:g} bits take {size_text(int(smallest))}: more than the size budget"
    if candidate.base:
        reason = _reason_of_base(candidate, now)
        if reason is not None:
            return reason
    usual = [trial.seconds for trial in now.trials if trial.stage is Stage.DIRECT and trial.measured is not None]
    expected = COSTS[candidate.stage] * median(usual) if usual else 0.0
    if expected <= now.seconds_left:
        return None
    return f"it would take about {expected:.0f} s, and {now.seconds_left:.0f} s are left"


def _reason_of_base(candidate: Candidate, now: Situation) -> str | None:
    base = next((trial for trial in now.trials if trial.name == candidate.base), None)
    if base is None or base.measured is None:
        return f"{candidate.base} {'was not tried' if base is None else 'failed'}"
    size, limits = base.measured.size_bytes, now.limits
    if size > limits.size_bytes:
        return f"{base.name} has the same size, which is beyond the budget"
    if base.measured.drop <= (limits.drop if limits.drop < math.inf else 0.0):
        return f"{base.name} is within the drop budget" if limits.drop < math.inf else f"{base.name} lost nothing"
    if limits.drop < math.inf:
        fitting = (trial for trial in now.trials if is_within(trial, limits))
        better = next((trial for trial in fitting if trial.figures.size_bytes <= size), None)
        if better is not None:
            return f"{better.name} is as small and within all budgets"
    if candidate.stage is Stage.FINETUNED and base not in pareto_front(now.trials):
        return f"{base.name} is beaten in size, drop and latency"
    return None

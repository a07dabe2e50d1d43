"""What is tried, from cheap to dear: a ladder of presets, and of changes to them.

    direct      presets of every width, as they are
    recipe      the same with an algorithm that their recipe does not have and that takes seconds
    mixed       two precisions, by the layers' sensitivity
    finetuned   the presets with AdaRound, or AdaQuant where the numbers have no scale to round by

Every candidate but a direct or mixed one has a base, whose result tells whether it is worth its time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from quark.errors import UnknownNameError, unknown_name
from quark.onnx.choose.specs import bits_of
from quark.onnx.quantization.config.config import QuantizationConfig
from quark.onnx.quantization.config.data_type import MXFP4E2M1
from quark.onnx.quantization.config.files import merged
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.presets import PRESETS, unknown_preset
from quark.onnx.quantization.settings import Settings
from quark.search.trial import Stage

Change = tuple[str, Any]

DIRECT = (
    *("BF16", "A16W8", "INT8_CNN_DEFAULT", "A8W8", "S8S8_AAWS", "XINT8", "MXINT8", "MX9", "BFP16"),
    *("MXFP8E4M3", "MXFP8E5M2", "MX6", "MXFP6E2M3", "MXFP6E3M2", "MXFP4E2M1", "MX4"),
)
FOR_TRANSFORMERS = ("INT8_TRANSFORMER_DEFAULT", "MATMUL_NBITS")
MIXED = ("S16S16_MIXED_S8S8", "BF16_MIXED_MXINT8")
_MIXED_BITS = (6.0, 5.0)  # of a weight, on the mean
STAGES = tuple(Stage)
WEIGHTS: tuple[Change, ...] = (("WeightsOnly", True),)


class Target(str, Enum):
    """What a network is to run on, for `quark.search.auto`."""

    ONNXRUNTIME = "onnxruntime"  # its integer kernels on this machine's processor
    NPU = "npu"  # AMD's
    GPU = "gpu"  # one that computes in 16-bit floats or microscaling formats
    SIZE = "size"  # anything: only the size of the file counts


@dataclass(frozen=True)
class Candidate:
    """A preset with changes, as --config and --set say it. `bits` of a weight are what the format has."""

    name: str
    preset: str
    stage: Stage
    changes: tuple[Change, ...] = ()
    base: str = ""
    bits: float = 32.0
    format: str = ""

    def config(self) -> QuantizationConfig:
        """A fresh config with the changes made."""
        content = PRESETS[self.preset].config().to_dict()
        for key, value in self.changes:
            place = content if key in content else content["extra_options"]
            place.update(merged(place, {key: value}))
        return QuantizationConfig.from_dict(content)

    def digest(self) -> str:
        """A hash of the whole config: a preset that another version gives other options is another candidate."""
        return hashlib.sha256(json.dumps(self.config().to_dict(), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Traits:
    """What the network has that algorithms are for."""

    op_types: frozenset[str] = frozenset()

    @property
    def has_layer_norms(self) -> bool:
        # decomposed ones have these two, and hardly anything else does
        return "LayerNormalization" in self.op_types or {"ReduceMean", "Sqrt"} <= self.op_types

    @property
    def has_products(self) -> bool:
        return bool(self.op_types & {"MatMul", "Attention"})

    @property
    def has_convolutions(self) -> bool:
        return bool(self.op_types & {"Conv", "ConvTranspose"})


def ladder(traits: Traits, formats: Sequence[str] = ()) -> list[Candidate]:
    """All candidates for such a network; those whose weights have one of the `formats`, where some are given."""
    names = [*DIRECT, *(FOR_TRANSFORMERS if traits.has_products else ())]
    direct = [_candidate(name, name, Stage.DIRECT) for name in names]
    known = dict.fromkeys(each.format for each in direct)
    for name in formats:
        if name not in known:
            raise unknown_name("format of weights in the search", name, known)
    direct = [each for each in direct if not formats or each.format in formats]
    others = [candidate for each in direct for candidate in _recipes(each, traits)]
    others += [each for each in _mixed() if not formats or each.format in formats]
    others += [candidate for each in direct for candidate in _finetuned(each)]
    return [*direct, *others]


def ladder_for(target: Target, is_transformer: bool, has_products: bool, has_measure: bool) -> list[Candidate]:
    """The candidates of `quark.search.auto` in the order in which they are tried: the one that should be best first."""
    rows: list[Candidate] = []

    def add(preset: str, suffix: str = "", changes: tuple[Change, ...] = (), base: str = "") -> None:
        rows.append(_candidate(preset + suffix, preset, Stage.DIRECT, changes, base))

    if target is Target.ONNXRUNTIME:
        pair = ("INT8_CNN_DEFAULT", "INT8_TRANSFORMER_DEFAULT")
        first, second = reversed(pair) if is_transformer else pair
        add(first)
        if has_measure:  # what is protected goes by the verdict; the measure may be content with less
            add(first, "+UNPROTECTED", (("Protect", "none"),), first)
        add(second)
        if has_products:
            add("UINT8_DYNAMIC_QUANT")
        add(first, "+BUDGET30", (("ProtectBudget", 0.3),), first)
        add(first, "+BUDGET50", (("ProtectBudget", 0.5),), first)
        for name in ("MXINT8", "FP16", "BF16"):
            add(name, "+WEIGHTS", WEIGHTS)  # the runtime would only simulate activations of these formats
    elif target is Target.NPU:
        of_cnns = ("XINT8", "A8W8", "A16W8", "BF16")
        of_transformers = ("INT8_TRANSFORMER_DEFAULT", "A16W8", "INT16_TRANSFORMER_DEFAULT", "BF16")
        for name in of_transformers if is_transformer else of_cnns:
            add(name)
    elif target is Target.GPU:
        for name in ("MXFP8E4M3", "MXINT8"):
            add(name)
        rows.append(_candidate("BF16_MIXED_MXINT8", "BF16_MIXED_MXINT8", Stage.MIXED))
        add("FP16")
        add("BF16")
    else:
        for name in ("MX4", "MXFP4E2M1", "MX6", "MXFP6E2M3", "MXFP6E3M2", "MXINT8", "MX9"):
            add(name, "+WEIGHTS", WEIGHTS)
        if has_products:
            add("MATMUL_NBITS")
        add("INT8_CNN_DEFAULT")
        add("FP16", "+WEIGHTS", WEIGHTS)
        rows += [
            _candidate(f"{each.name}+WEIGHTS", each.preset, each.stage, (*each.changes, *WEIGHTS))
            for each in _mixed()
            if each.preset == "MXINT8"
        ]
        rows.sort(key=lambda each: each.bits)
    return rows


def named(presets: Iterable[str]) -> list[Candidate]:
    """These presets and nothing else; each is its own base."""
    found = []
    for name in dict.fromkeys(presets):
        if name not in PRESETS:
            raise unknown_preset(name)
        stage = Stage.DIRECT
        if PRESETS[name].fields.get("include_fast_ft"):
            stage = Stage.FINETUNED
        elif PRESETS[name].fields.get("include_auto_mp"):
            stage = Stage.MIXED
        found.append(_candidate(name, name, stage))
    if not found:
        raise UnknownNameError("no presets to search among: give some, or leave the option out for all")
    return found


def in_order(candidates: Iterable[Candidate], has_small_first: bool) -> list[Candidate]:
    """From cheap to dear; equally dear ones with the fewest bits first, or with the most."""
    sign = 1 if has_small_first else -1
    return sorted(candidates, key=lambda each: (STAGES.index(each.stage), sign * each.bits))


def _candidate(name: str, preset: str, stage: Stage, changes: tuple[Change, ...] = (), base: str = "") -> Candidate:
    bare = Candidate(name, preset, stage, changes, base)
    settings = settings_of(bare.config())
    weight = settings.choose.default.weight
    return Candidate(name, preset, stage, changes, base, _bits(settings), "float" if weight is None else weight.format)


def _bits(settings: Settings) -> float:
    """Of a weight; where two precisions are mixed, of the target, else of the lower one: it is a lower bound."""
    high = bits_of(settings.choose.default)[1]
    if settings.mix is None:
        return high
    low = bits_of(settings.mix.low)[1]
    return low if settings.mix.weight_bits is None else max(low, settings.mix.weight_bits)


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
    """Presets, and MXINT8 whose least sensitive layers are MXFP4, with so many bits left on the mean."""
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
            yield _candidate(name, name, Stage.FINETUNED, (), base.name)
            return

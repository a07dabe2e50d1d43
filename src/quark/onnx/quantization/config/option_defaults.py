"""What an extra option is where nothing is said of it, for the document that lists them all.

For options of True or False the code tells by itself: the default is the value that gives the same settings as none.
An option may matter to some formats only, so that a few configs are tried until the two values differ; one that steers
an algorithm is tried with the algorithm on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quark.errors import QuarkError
from quark.onnx.choose.options import BlockPlacement, PositionOptions
from quark.onnx.equalize.options import CrossLayerOptions, SmoothOptions
from quark.onnx.quantization.config.config import QuantizationConfig
from quark.onnx.quantization.config.option_kinds import BOOL
from quark.onnx.quantization.config.option_treatments import Option, Steers, default_rewrites
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.quant_types import CalibrationMethod
from quark.onnx.quantization.config.spec_options import MOVING_AVERAGE_CONSTANT
from quark.onnx.quantization.config.tensor_specs import SpecOptions
from quark.onnx.quantization.presets import get_default_config
from quark.onnx.quantization.settings import Settings
from quark.onnx.refine.options import BiasCorrectionOptions

NPU_PRESET = "XINT8"
PRESETS_TO_TRY = ("INT8_CNN_DEFAULT", "BF16", "MXINT8", "VINT8", NPU_PRESET)

BOTH = [True, False]

OTHER_DEFAULTS: Mapping[str, Any] = {
    "BlockPlacement": BlockPlacement.COMPUTE.value,
    "Percentile": SpecOptions().percentile,
    "PercentileCandidates": list(SpecOptions().percentile_candidates),
    "CalibMovingAverageConstant": MOVING_AVERAGE_CONSTANT,
    "MinMSEModePof2Scale": "All",
    "WeightCalibrateMethod": CalibrationMethod.MinMax,
    "CLESteps": CrossLayerOptions().steps,
    "CLETotalLayerDiffThreshold": CrossLayerOptions().settled_at,
    "CLEWeightThreshold": CrossLayerOptions().weight_threshold,
    "CLEClip": CrossLayerOptions().clip.value,
    "SmoothAlpha": SmoothOptions().alpha,
    "BiasCorrectionInputs": BiasCorrectionOptions().inputs.value,
    "BiasCorrectionSamples": BiasCorrectionOptions().sample_limit,
    "MaxLoopNum": PositionOptions(frozenset()).max_rounds,
}


@dataclass(frozen=True)
class Default:
    """What an option is where it is left out, None where that is like no value of it; `on_npu` where it is something
    else for convolutions on an NPU."""

    value: Any
    on_npu: Any = None


def default_of(option: Option) -> Default | None:
    """The default of an option that is carried out; None where leaving it out is not the same as any value of it."""
    if option.name in OTHER_DEFAULTS:
        return Default(OTHER_DEFAULTS[option.name])
    if option.kind is not BOOL:
        return None
    same = {preset: _same_as_none(preset, option) for preset in PRESETS_TO_TRY}
    usual = next((same[preset] for preset in PRESETS_TO_TRY if len(same[preset]) < len(BOTH)), BOTH)
    on_npu = same[NPU_PRESET] if len(same[NPU_PRESET]) == 1 and same[NPU_PRESET] != usual else [None]
    if len(usual) == 1:
        return Default(usual[0], on_npu[0])
    return Default(None, on_npu[0]) if on_npu[0] is not None else None


def _same_as_none(preset: str, option: Option) -> list[bool]:
    """The values that change nothing: both where the option does not matter, none where it is the third way."""
    return [value for value in BOTH if is_default(preset, option, value)]


def is_default(preset: str, option: Option, value: Any) -> bool:
    """That the option with this value changes nothing about the preset, where the algorithm that it steers is on."""
    config = get_default_config(preset)
    config.extra_options.pop(option.name, None)
    if isinstance(option.treatment, Steers):
        _switch_on(config, option.treatment.flag)
    try:
        return _content(config) == _content(replace(config, extra_options={**config.extra_options, option.name: value}))
    except QuarkError:
        return False  # a value that is refused is not what happens anyway


def _switch_on(config: QuantizationConfig, flag: str) -> None:
    if flag in vars(config):
        setattr(config, flag, True)
    else:
        config.extra_options[flag] = True


def _content(config: QuantizationConfig) -> Settings:
    """The settings, with the rewrites that run in one set, and without the names and remarks that go with them."""
    settings = settings_of(config)
    wanted = settings.optimize
    runs = (default_rewrites() | wanted.enabled) - wanted.disabled
    optimize = replace(wanted, enabled=runs, disabled=frozenset())
    return replace(settings, optimize=optimize, name="", config={}, remarks=())

"""What an extra option is where nothing is said of it, for the document that lists them all.

For options of True or False the code tells by itself: the default is the value that gives the same settings as none.
An option may matter to some formats only, so that a few configs are tried until the two values differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quark.errors import QuarkError
from quark.onnx.choose.options import BlockPlacement
from quark.onnx.quantization.config.config import QuantizationConfig
from quark.onnx.quantization.config.option_kinds import BOOL
from quark.onnx.quantization.config.option_treatments import Option, default_rewrites
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.quant_types import CalibrationMethod
from quark.onnx.quantization.config.spec_options import MOVING_AVERAGE_CONSTANT
from quark.onnx.quantization.config.tensor_specs import SpecOptions
from quark.onnx.quantization.presets import get_default_config
from quark.onnx.quantization.settings import Settings

NPU_PRESET = "XINT8"
PRESETS_TO_TRY = ("INT8_CNN_DEFAULT", "BF16", "MXINT8", NPU_PRESET)

OTHER_DEFAULTS: Mapping[str, Any] = {
    "BlockPlacement": BlockPlacement.COMPUTE.value,
    "Percentile": SpecOptions().percentile,
    "PercentileCandidates": list(SpecOptions().percentile_candidates),
    "CalibMovingAverageConstant": MOVING_AVERAGE_CONSTANT,
    "MinMSEModePof2Scale": "All",
    "WeightCalibrateMethod": CalibrationMethod.MinMax,
}


@dataclass(frozen=True)
class Default:
    """What an option is where it is left out; `on_npu` where it is something else for convolutions on an NPU."""

    value: Any
    on_npu: Any = None


def default_of(option: Option) -> Default | None:
    """The default of an option that is carried out; None where leaving it out is not the same as any value of it."""
    if option.name in OTHER_DEFAULTS:
        return Default(OTHER_DEFAULTS[option.name])
    if option.kind is not BOOL:
        return None
    found = {preset: _default_in(preset, option.name) for preset in PRESETS_TO_TRY}
    known = [value for value in found.values() if value is not None]
    if not known:
        return None
    on_npu = found[NPU_PRESET]
    return Default(known[0], None if on_npu == known[0] else on_npu)


def _default_in(preset: str, name: str) -> bool | None:
    same = [value for value in (True, False) if is_default(preset, name, value)]
    return same[0] if len(same) == 1 else None


def is_default(preset: str, name: str, value: Any) -> bool:
    """That the option with this value changes nothing about the preset."""
    config = get_default_config(preset)
    config.extra_options.pop(name, None)
    try:
        return _content(config) == _content(replace(config, extra_options={**config.extra_options, name: value}))
    except QuarkError:
        return False  # a value that is refused is not what happens anyway


def _content(config: QuantizationConfig) -> Settings:
    """The settings, with the rewrites that run in one set, and without the names and remarks that go with them."""
    settings = settings_of(config)
    wanted = settings.optimize
    runs = (default_rewrites() | wanted.enabled) - wanted.disabled
    optimize = replace(wanted, enabled=runs, disabled=frozenset())
    return replace(settings, optimize=optimize, name="", config={}, remarks=())

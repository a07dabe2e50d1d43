"""Specs of all kinds, by name, as the steps of the torch road read them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quark.decide.specs import AffineSpec, Algorithm, BlockSpec, DynamicSpec, FloatSpec, LayerSpec, Learning, TensorSpec
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.formats.spec import BlockFormat
from quark.ranges import MinMax, NonOverflow, PowerOfTwoMinMSE, RangeMethod
from quark.torch.specs import Settings


def affine(
    format: str = "int8", method: RangeMethod | None = None, is_symmetric: bool = True, **rest: Any
) -> AffineSpec:
    return AffineSpec(format, method or MinMax(), is_symmetric, **rest)


def blocks(format: str) -> BlockSpec:
    fmt = get_format(format)
    assert isinstance(fmt, BlockFormat)
    return BlockSpec(BlockQuantizer(fmt))


def everywhere(spec: TensorSpec) -> LayerSpec:
    return LayerSpec(spec, spec, spec, spec)


_FLOAT8 = FloatSpec("fp8_e4m3", is_saturating=True, is_scaled=True)
_CHANNELS = affine(is_per_channel=True)
_UNSIGNED = affine("uint8", is_symmetric=False)
_TQT = affine(is_power_of_two=True, learning=Learning(Algorithm.TQT))
_LSQ = affine("int4", learning=Learning(Algorithm.LSQ))

SPECS: dict[str, LayerSpec] = {
    "int8": LayerSpec(affine(), affine(), affine("int32"), affine()),
    "uint8 and channels": LayerSpec(_UNSIGNED, _CHANNELS, affine("int32"), _UNSIGNED),
    "int16": LayerSpec(affine("int16"), affine(), affine("int32"), affine("int16")),
    "non-overflow": everywhere(affine(method=NonOverflow(), is_power_of_two=True)),
    "power-of-two mse": everywhere(affine(method=PowerOfTwoMinMSE(), is_power_of_two=True)),
    "tqt": everywhere(_TQT),
    "lsq": LayerSpec(_LSQ, affine("int4", is_per_channel=True, learning=_LSQ.learning), output=_LSQ),
    "int4 groups": LayerSpec(None, affine("int4", group_size=4)),
    "dynamic": LayerSpec(DynamicSpec("uint8"), affine()),
    "fp8_e4m3": LayerSpec(_FLOAT8, replace(_FLOAT8, is_per_channel=True)),
    "fp8_e5m2": LayerSpec(*[replace(_FLOAT8, format="fp8_e5m2")] * 2),
    "int8 and int4 groups": LayerSpec(affine(), affine("int4", group_size=8), output=affine()),
    "bfloat16": everywhere(FloatSpec("bfloat16")),
    **{name: LayerSpec(blocks(name), blocks(name)) for name in ("mxfp4_e2m1", "mxint8", "mx6", "bfp16", "nvfp4")},
}
POWERS_OF_TWO = ("non-overflow", "power-of-two mse", "tqt")


def settings(name: str, **rest: Any) -> Settings:
    """What a configuration of that kind becomes; powers of two are for an NPU."""
    return Settings(SPECS[name], applies_npu_rules=name in POWERS_OF_TWO, **rest)

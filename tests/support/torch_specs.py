"""Specs of all kinds, by name, as the steps of the torch road read them."""

from __future__ import annotations

from typing import Any

from quark.formats.affine import integer_format
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.formats.spec import BlockFormat
from quark.ranges import MinMax, NonOverflow, PowerOfTwoMinMSE, RangeMethod
from quark.torch.specs import (
    AffineSpec,
    Algorithm,
    BlockSpec,
    FloatSpec,
    Granularity,
    LayerSpecs,
    Learning,
    Settings,
    TensorSpec,
)


def affine(
    format: str = "int8", method: RangeMethod | None = None, is_symmetric: bool = True, **rest: Any
) -> AffineSpec:
    return AffineSpec(integer_format(format), method or MinMax(), is_symmetric, **rest)


def blocks(format: str) -> BlockSpec:
    fmt = get_format(format)
    assert isinstance(fmt, BlockFormat)
    return BlockSpec(BlockQuantizer(fmt))


def everywhere(spec: TensorSpec) -> LayerSpecs:
    return LayerSpecs(spec, spec, spec, spec)


_CHANNELS = affine(granularity=Granularity.CHANNEL)
_UNSIGNED = affine("uint8", is_symmetric=False)
_TQT = affine(is_power_of_two=True, learning=Learning(Algorithm.TQT))
_LSQ = affine("int4", learning=Learning(Algorithm.LSQ))

SPECS: dict[str, LayerSpecs] = {
    "int8": LayerSpecs(affine(), affine(), affine(), affine("int32")),
    "uint8 and channels": LayerSpecs(_UNSIGNED, _UNSIGNED, _CHANNELS, affine("int32")),
    "int16": LayerSpecs(affine("int16"), affine("int16"), affine(), affine("int32")),
    "non-overflow": everywhere(affine(method=NonOverflow(), is_power_of_two=True)),
    "power-of-two mse": everywhere(affine(method=PowerOfTwoMinMSE(), is_power_of_two=True)),
    "tqt": everywhere(_TQT),
    "lsq": LayerSpecs(_LSQ, _LSQ, affine("int4", granularity=Granularity.CHANNEL, learning=_LSQ.learning)),
    "int4 groups": LayerSpecs(weight=affine("int4", granularity=Granularity.GROUP, group_size=4)),
    "dynamic": LayerSpecs(affine("uint8", is_symmetric=False, is_dynamic=True), weight=affine()),
    "bfloat16": everywhere(FloatSpec("bfloat16")),
    **{name: LayerSpecs(blocks(name), weight=blocks(name)) for name in ("mxfp4_e2m1", "mxint8", "mx6", "bfp16")},
}
POWERS_OF_TWO = ("non-overflow", "power-of-two mse", "tqt")


def settings(name: str, **rest: Any) -> Settings:
    """What a configuration of that kind becomes; powers of two are for an NPU."""
    return Settings(SPECS[name], applies_npu_rules=name in POWERS_OF_TWO, **rest)

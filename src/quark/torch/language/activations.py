"""Quantizers of what linear layers read and return."""

from __future__ import annotations

import torch
from torch import nn

from quark.decide.scales import choice_of_range
from quark.decide.specs import AffineSpec, BlockSpec, DynamicSpec, FloatSpec, TensorSpec
from quark.errors import UnsupportedOptionError
from quark.plan import BlockChoice, DynamicChoice, FloatChoice, Role
from quark.ranges import TensorRange
from quark.torch.language.float8 import Float8Quantizer, scale_of
from quark.torch.train.quantizers import AffineQuantizer, BlockFakeQuantizer, DynamicQuantizer, FloatFakeQuantizer


def quantizer_of(spec: TensorSpec, range_: TensorRange | None, name: str) -> nn.Module:
    """The module that quantizes an activation; `range_` is its range, for types that need one."""
    if isinstance(spec, BlockSpec):
        return BlockFakeQuantizer(name, Role.ACTIVATION, BlockChoice(spec.quantizer, -1, spec.to_bfloat16_first))
    if isinstance(spec, DynamicSpec):
        return DynamicQuantizer(name, Role.ACTIVATION, DynamicChoice(spec.format), spec.is_symmetric, spec.is_per_row)
    if isinstance(spec, FloatSpec) and not spec.is_scaled:
        return FloatFakeQuantizer(name, Role.ACTIVATION, FloatChoice(spec.format, spec.is_saturating))
    if isinstance(spec, FloatSpec) and spec.is_eight_bits:
        highest = None if range_ is None else torch.tensor(max(-range_.lowest, range_.highest, 0.0))
        return Float8Quantizer(name, spec, None if highest is None else float(scale_of(highest, spec.format)))
    if not isinstance(spec, AffineSpec) or spec.learning is not None:
        raise UnsupportedOptionError(f"'{name}': {spec} is not available for the activations of a language model")
    assert range_ is not None
    return AffineQuantizer(name, Role.ACTIVATION, choice_of_range(spec, range_), ())

"""Scale and zero point of one tensor from its range or its values, by the functions of the ONNX side."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import torch

from quark.onnx.choose.affine_choices import Array, ChannelAxis, choice_of_range, choice_of_weight
from quark.onnx.choose.specs import AffineSpec as OnnxSpec
from quark.ops.fake_quantize import lsq_initial_scale
from quark.plan import AffineChoice
from quark.ranges import MinMax, TensorRange, range_of, ranges_of_channels
from quark.torch.methods import observed_method
from quark.torch.specs import AffineSpec, Algorithm

_SMALLEST_THRESHOLD = 2.0**-100


def choice_for_range(spec: AffineSpec, found: TensorRange) -> AffineChoice:
    """The choice for a tensor with that range; what learns has zero point 0 and uses all codes."""
    fmt = spec.format
    if spec.learning is not None and spec.learning.algorithm is Algorithm.TQT:
        threshold = max(-found.lowest, found.highest, _SMALLEST_THRESHOLD)
        scale = math.ldexp(1.0, math.ceil(math.log2(threshold)) - fmt.qmax.bit_length())
        return AffineChoice(fmt.name, (scale,), (0,))
    if spec.learning is not None:
        return AffineChoice(fmt.name, (max(found.highest / fmt.qmax, float(np.finfo(np.float32).tiny)),), (0,))
    if spec.is_power_of_two and found.position is None:
        return _in_powers_of_two(choice_of_range(onnx_spec(spec, is_power_of_two=False), found))
    return choice_of_range(onnx_spec(spec), found)


def choice_for_weight(spec: AffineSpec, values: Array, channels: ChannelAxis | None) -> AffineChoice:
    """The choice for a constant: one scale, or one for each channel or group."""
    if spec.learning is not None:
        return _learned_start(spec, values, channels)
    if channels is None and spec.is_power_of_two:
        return choice_for_range(spec, range_of(values, spec.method, spec.format, spec.is_symmetric))
    if spec.is_power_of_two and channels is not None and channels.group_size is None:
        low, high = ranges_of_channels(values, channels.axis, spec.method, spec.format, spec.is_symmetric)
        plain = onnx_spec(replace(spec, method=MinMax()), is_power_of_two=False)
        both = np.stack((low, high), axis=1)
        return _in_powers_of_two(choice_of_weight(plain, ir.Tensor(both), ChannelAxis(0)), axis=channels.axis)
    plain = onnx_spec(spec, is_power_of_two=False)
    choice = choice_of_weight(plain, ir.Tensor(np.ascontiguousarray(values)), channels)
    return _in_powers_of_two(choice) if spec.is_power_of_two else choice


def _learned_start(spec: AffineSpec, values: Array, channels: ChannelAxis | None) -> AffineChoice:
    assert spec.learning is not None
    if spec.learning.algorithm is Algorithm.TQT:
        method = observed_method(spec, is_weight=True)
        return choice_for_range(spec, range_of(values, method, spec.format, spec.is_symmetric))
    axis = None if channels is None else channels.axis
    scale = lsq_initial_scale(torch.from_numpy(values), spec.format.bits, spec.format.signed, axis)
    steps = tuple(scale.double().reshape(-1).tolist())
    return AffineChoice(spec.format.name, steps, (0,) * len(steps), axis)


def _in_powers_of_two(choice: AffineChoice, axis: int | None = None) -> AffineChoice:
    """The smallest powers of two that are no finer, so that nothing is clipped that was not before."""
    scale = tuple(math.ldexp(1.0, math.ceil(math.log2(each))) for each in choice.scale)
    return replace(choice, scale=scale, axis=choice.axis if axis is None else axis)


def onnx_spec(spec: AffineSpec, is_power_of_two: bool | None = None) -> OnnxSpec:
    """The same as the ONNX side says it."""
    powers = spec.is_power_of_two if is_power_of_two is None else is_power_of_two
    return OnnxSpec(spec.format.name, spec.method, spec.is_symmetric, is_power_of_two=powers)

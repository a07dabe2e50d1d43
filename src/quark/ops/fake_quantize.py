"""Quantizers that a network can be trained through.

Each computes the values of the quantized network, and a gradient in place of the true one, which is 0 almost
everywhere:

    block     x_hat = quantize_dequantize(x)             dx_hat/dx = 1
    affine    x_hat = quantize_dequantize_affine(x)      dx_hat/dx = 1 where the rounded code is in range, else 0

    LSQ       u = v / s                 v_hat = round(clip(u, -Qn, Qp)) * s
              dv_hat/dv = 1 where -Qn < u < Qp, else 0
              dv_hat/ds = g * (round(u) - u inside, -Qn below, Qp above),   g = 1 / sqrt(N * Qp)

    TQT       r = round(x / s)          x_hat = clip(r, n, p) * s,   s = 2^ceil(log2 t) / 2^(b-1), / 2^b if unsigned
              dx_hat/dx = 1 where n <= r <= p, else 0
              dx_hat/dlog2 t = s ln 2 * (r - x/s inside, n below, p above)

LSQ learns the step s (arXiv 1902.08153), TQT the threshold t in the log domain (arXiv 1903.08066). Rounding is half to
even. With `axis`, each channel has its own step or threshold, with the gradient of that channel alone: N counts the
elements that share a step. float16 and bfloat16 are computed in float32 and rounded back, under autocast too; gradients
have the type of their tensor. NaN passes through LSQ and TQT and has no gradient.

All of them run on any device and compile without graph breaks. The composition of tensor operations here is the
definition. If x is plain memory of the CPU or of a CUDA device, compiled code does the same in one pass
(`fused_fake_quantize`). It reads x again in the backward pass, so x must not be written to in between.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from quark.errors import InvalidValueError, MissingDependencyError
from quark.formats.affine import AffineParameters, Granularity, is_in_range, quantize_dequantize_affine
from quark.formats.arrays import array_kind, as_index, normalize_axis
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.formats.native import ELEMENTS_PER_THREAD, FakeKind, FakeQuantizer, quantize_dequantize_native
from quark.formats.quantize import choose_quantizer, quantize_dequantize
from quark.formats.rounding import exp2
from quark.formats.spec import BlockFormat, Format

try:
    import torch

    from quark.ops.fused_fake_quantize import Parameters, fused_fake_quantize, is_plain, quantize_dequantize_on_cuda
except ImportError as error:
    raise MissingDependencyError(
        "quark.ops.fake_quantize needs torch, which is not installed: pip install torch"
    ) from error

# Here both the step and its inverse are normal float32 numbers.
MIN_STEP_EXPONENT, MAX_STEP_EXPONENT = -126, 126

_MAX_FUSED_BITS = 21  # more bits need float64

_FUSED_TYPES = (torch.float32, torch.float16, torch.bfloat16)

_chosen_quantizer = functools.lru_cache(maxsize=256)(choose_quantizer)

_Composed = Callable[[torch.Tensor, torch.Tensor, FakeQuantizer, int | None], torch.Tensor]


def block_fake_quantize(x: torch.Tensor, format: str | Format, axis: int = -1, **options: Any) -> torch.Tensor:
    """x quantized to any format, with the gradient passed through; the options are those of `quantize_dequantize`.

    >>> x = torch.tensor([0.1, -0.7, 3.3, 6.1], requires_grad=True)
    >>> block_fake_quantize(x, "mxfp4_e2m1").detach()
    tensor([ 0.0000, -0.5000,  3.0000,  6.0000])
    """
    values = _compiled_blocks(x.detach(), format, axis, options)
    if values is None:
        values = quantize_dequantize(x.detach(), format, axis, **options)
    return _applied(_StraightThrough, x, values)


def _compiled_blocks(x: torch.Tensor, format: str | Format, axis: int, options: dict[str, Any]) -> torch.Tensor | None:
    """x quantized to a block format by one kernel, in the memory order of x; None if there is no such kernel."""
    fmt = get_format(format)
    if not isinstance(fmt, BlockFormat) or x.dtype not in _FUSED_TYPES or not is_plain(x):
        return None
    quantizer = _chosen_quantizer(fmt, **options)
    position = normalize_axis(axis, x.dim())
    if x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        values = _blocks_on_device(x.permute(0, 2, 3, 1), (0, 3, 1, 2)[position], quantizer)
        return None if values is None else values.permute(0, 3, 1, 2)
    return _blocks_on_device(x, position, quantizer)


def _blocks_on_device(x: torch.Tensor, axis: int, quantizer: BlockQuantizer) -> torch.Tensor | None:
    if x.device.type == "cuda":
        return quantize_dequantize_on_cuda(x, axis, quantizer)
    threads = max(1, min(torch.get_num_threads(), x.numel() // ELEMENTS_PER_THREAD))
    values: torch.Tensor | None = quantize_dequantize_native(x, axis, quantizer, threads)
    return values


def affine_fake_quantize(x: torch.Tensor, parameters: AffineParameters) -> torch.Tensor:
    """x quantized with fixed affine parameters; values that saturate get no gradient, nor does NaN."""
    fmt, granularity = parameters.format, parameters.granularity
    fused = None
    if fmt.bits <= _MAX_FUSED_BITS:
        numbers = Parameters(
            FakeQuantizer(FakeKind.AFFINE, fmt.qmin, fmt.qmax), parameters.scale, parameters.zero_point
        )
        fused = fused_fake_quantize(x, numbers, granularity, lambda x, _: _composed_affine(x, parameters))
    return _composed_affine(x, parameters) if fused is None else fused


def _composed_affine(x: torch.Tensor, parameters: AffineParameters) -> torch.Tensor:
    values = quantize_dequantize_affine(x.detach(), parameters)
    return _applied(_Masked, x, values, is_in_range(x.detach(), parameters))


def lsq(
    v: torch.Tensor, scale: torch.Tensor, bits: int = 8, signed: bool = True, axis: int | None = None
) -> torch.Tensor:
    """v quantized with a learned step: `scale` has one element, or one per channel along `axis`.

    If an optimizer moves the step to 0 or below, it counts as the smallest normal number: every value but 0 then
    saturates, and the gradient of the step is that of saturated values.
    """
    return _learned(v, scale, FakeQuantizer(FakeKind.STEP, *code_limits(bits, signed)), axis, _composed_lsq)


def _composed_lsq(v: torch.Tensor, scale: torch.Tensor, quantizer: FakeQuantizer, axis: int | None) -> torch.Tensor:
    lowest, highest = quantizer.lowest, quantizer.highest
    spread = _spread(scale, v, axis)
    wide = _wide(v.detach())
    step = spread.detach().to(wide.dtype).clamp(min=torch.finfo(wide.dtype).tiny)
    steps = wide / step
    is_inside = (steps > lowest) & (steps < highest)
    clipped = steps.clamp(lowest, highest)
    slope = torch.where(is_inside, torch.round(steps) - steps, clipped)
    values = _applied(_Masked, v, (torch.round(clipped) * step).to(v.dtype), is_inside)
    return _with_slope(values, spread, slope, quantizer.slope_factor(v.numel() // max(1, scale.numel())))


def lsq_initial_scale(v: torch.Tensor, bits: int = 8, signed: bool = True, axis: int | None = None) -> torch.Tensor:
    """LSQ's initial step, 2 * mean|v| / sqrt(Qp): a scalar, or one per channel along `axis`.

    Never below the smallest normal number, so that zeros have a step too.
    """
    magnitude = _wide(v.detach()).abs()
    if axis is not None:
        magnitude = magnitude.movedim(normalize_axis(axis, v.dim()), 0).flatten(1)
    mean = magnitude.mean() if axis is None else magnitude.mean(1)
    scale = 2 * mean / math.sqrt(code_limits(bits, signed)[1])
    return scale.clamp(min=torch.finfo(scale.dtype).tiny)


def tqt(
    x: torch.Tensor, log2_threshold: torch.Tensor, bits: int = 8, signed: bool = True, axis: int | None = None
) -> torch.Tensor:
    """x quantized with a power-of-two step that follows a learned threshold.

    `log2_threshold` has one element, or one per channel along `axis`. The step is limited to 2^-126..2^126.
    """
    return _learned(
        x, log2_threshold, FakeQuantizer(FakeKind.THRESHOLD, *code_limits(bits, signed)), axis, _composed_tqt
    )


def _composed_tqt(
    x: torch.Tensor, log2_threshold: torch.Tensor, quantizer: FakeQuantizer, axis: int | None
) -> torch.Tensor:
    lowest, highest = quantizer.lowest, quantizer.highest
    spread = _spread(log2_threshold, x, axis)
    kind = array_kind(x)
    precision = kind.precision(x)
    wanted = torch.ceil(_wide(spread.detach())) - quantizer.step_shift
    exponents = kind.as_int(wanted.clamp(MIN_STEP_EXPONENT, MAX_STEP_EXPONENT), precision)
    step, inverse = exp2(kind, exponents, precision), exp2(kind, -exponents, precision)
    steps = _wide(x.detach()) * inverse  # exact, unlike a compiler's division
    rounded = torch.round(steps)
    is_inside = (rounded >= lowest) & (rounded <= highest)
    clipped = rounded.clamp(lowest, highest)
    slope = torch.where(is_inside, rounded - steps, clipped)
    values = _applied(_Masked, x, (clipped * step).to(x.dtype), is_inside)
    return _with_slope(values, spread, slope, step * math.log(2))


def _learned(
    x: torch.Tensor, parameter: torch.Tensor, quantizer: FakeQuantizer, axis: int | None, composed: _Composed
) -> torch.Tensor:
    """Use compiled code if there is some, else the composed operations."""
    numbers = Parameters(quantizer, parameter)
    fused = fused_fake_quantize(x, numbers, Granularity(axis), lambda x, p: composed(x, p, quantizer, axis))
    return composed(x, parameter, quantizer, axis) if fused is None else fused


def code_limits(bits: int, signed: bool) -> tuple[int, int]:
    """(-Qn, Qp), for TQT (n, p): the full range of the integer.

    >>> code_limits(8, signed=True)
    (-128, 127)
    """
    if not 2 <= as_index("bits", bits) <= 32:
        raise InvalidValueError(f"bits {bits}: expected 2 to 32")
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)


# Values for a backward pass are computed beforehand and passed in. torch 2.11 compiles a Function that computes its
# gradient from saved inputs into one with wrong gradients.


class _StraightThrough(torch.autograd.Function):
    """The given values, with the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Masked(torch.autograd.Function):
    """The given values, with the gradient of x where the mask holds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (mask,) = ctx.saved_tensors
        return torch.where(mask, grads[0], 0.0), None, None


class _Sloped(torch.autograd.Function):
    """The given values, with gradient `slope` for a parameter that was expanded to their shape."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, expanded: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slope)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (slope,) = ctx.saved_tensors
        return grads[0], grads[0] * slope, None


def _with_slope(values: torch.Tensor, parameter: torch.Tensor, slope: torch.Tensor, factor: Any) -> torch.Tensor:
    """The values, with a gradient for the parameter: the sum of the slopes, NaN left out, times the factor."""
    # only the gradient of this product is used: it multiplies the finished sum
    expanded = (parameter.to(slope.dtype) * factor).expand(values.shape)
    return _applied(_Sloped, values, expanded, torch.where(slope == slope, slope, 0.0))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """x in the working type."""
    kind = array_kind(x)
    wide: torch.Tensor = kind.widen(x, kind.precision(x))
    return wide


def _spread(parameter: torch.Tensor, x: torch.Tensor, axis: int | None) -> torch.Tensor:
    """The parameter in a shape that broadcasts with x; its gradient has the original shape."""
    if axis is None and parameter.numel() != 1:
        raise InvalidValueError(
            f"a parameter of shape {tuple(parameter.shape)} without axis: expected one element, or name the axis"
        )
    spread: torch.Tensor = Granularity(axis).spread(array_kind(x), parameter, tuple(x.shape))
    return spread


def _applied(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result

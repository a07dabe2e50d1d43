"""Quantizers to train through in one pass over memory: forward one, backward one.

`fused_fake_quantize` does what the functions of `fake_quantize` compose from tensor operations, in compiled code: ours
on the CPU (float32), Triton's on CUDA (float32, float16, bfloat16). It saves its input, and computes again in the
backward pass what a mask would have told: reading x costs no more than reading masks, and what x came from has often
saved it anyway.

It declines, with None, what it does not take: other types and devices, tensors that are not plain memory (under a
compiler, a tracer, a function transform), groups that end early. There the composed operations serve, as they do in a
backward pass that is itself to be differentiated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from quark.formats.arrays import TorchKind, array_kind
from quark.formats.granularity import Granularity
from quark.formats.native_fake_quantize import FakeKind, NativeFakeQuantize, Rows, native_fake_quantize
from quark.ops.fused_cuda import triton_fake_quantize
from quark.ops.fused_parameters import Parameters

Composed = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Backend(Protocol):
    """Where the arithmetic is done. Tensors are dense, and those of one shape have the same strides."""

    def takes(self, x: torch.Tensor, rows: Rows) -> bool: ...

    def values(self, x: torch.Tensor, parameters: Parameters, rows: Rows) -> torch.Tensor: ...

    def gradients(
        self, x: torch.Tensor, gradient: torch.Tensor, parameters: Parameters, rows: Rows
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of x, and of a learned parameter, in float32."""
        ...


class _Native:
    """The CPU."""

    def __init__(self, native: NativeFakeQuantize) -> None:
        self._native = native

    def takes(self, x: torch.Tensor, rows: Rows) -> bool:
        return x.dtype == torch.float32

    def values(self, x: torch.Tensor, parameters: Parameters, rows: Rows) -> torch.Tensor:
        out = torch.empty_like(x)
        held = _as_float32(parameters)
        self._native.values(
            *(parameters.quantizer, rows, _addresses(held), x.data_ptr(), out.data_ptr(), torch.get_num_threads())
        )
        return out

    def gradients(
        self, x: torch.Tensor, gradient: torch.Tensor, parameters: Parameters, rows: Rows
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out = torch.empty_like(x)
        held = _as_float32(parameters)
        slopes = None if parameters.quantizer.kind is FakeKind.AFFINE else torch.empty_like(held.parameter)
        self._native.gradients(
            *(parameters.quantizer, rows, _addresses(held)),
            *((x.data_ptr(), gradient.data_ptr(), out.data_ptr()), _address(slopes), torch.get_num_threads()),
        )
        return out, slopes


def _as_float32(parameters: Parameters) -> Parameters:
    """The numbers in the type of the compiled code; to be held as long as their addresses are used."""
    quantizer, parameter, zero_point = parameters
    if parameter.dtype != torch.float32:
        parameter = parameter.detach().to(torch.float32)
    return Parameters(quantizer, parameter, None if zero_point is None else zero_point.to(torch.float32))


def _addresses(parameters: Parameters) -> tuple[int, int]:
    return parameters.parameter.data_ptr(), _address(parameters.zero_point)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def fused_fake_quantize(
    x: torch.Tensor, parameters: Parameters, granularity: Granularity, composed: Composed
) -> torch.Tensor | None:
    """x quantized, with gradients for x and a learned parameter; None where the composed operations have to do it.

    `composed` is that other way, of x and the parameter; it is asked where second derivatives are wanted.
    """
    if not is_plain(x):
        return None
    backend = _backend(x)
    rows = _rows(x, granularity)
    if backend is None or rows is None or not backend.takes(x, rows) or not _fit(parameters, x, granularity):
        return None
    dense = _dense(x, granularity)
    how = _How(backend, parameters, rows, composed)
    result: torch.Tensor = _Fused.apply(dense, parameters.parameter, how)  # type: ignore[no-untyped-call]
    return result


def is_plain(x: torch.Tensor) -> bool:
    """That x is its own memory, and nothing traces, compiles or transforms what is done to it."""
    kind = array_kind(x)
    return isinstance(kind, TorchKind) and kind.is_eager(x)


def _backend(x: torch.Tensor) -> Backend | None:
    if x.device.type == "cpu":
        return _native()
    return triton_fake_quantize() if x.device.type == "cuda" else None


@functools.cache
def _native() -> _Native | None:
    native = native_fake_quantize()
    return None if native is None else _Native(native)


class _How(NamedTuple):
    backend: Backend
    parameters: Parameters
    rows: Rows
    composed: Composed


class _Fused(torch.autograd.Function):
    """Values by the backend, and gradients by it too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor, how: _How) -> torch.Tensor:
        ctx.how = how
        ctx.save_for_backward(x, parameter)
        return how.backend.values(x, how.parameters, how.rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, parameter = ctx.saved_tensors
        how: _How = ctx.how
        if torch.is_grad_enabled() or not is_plain(grads[0]):
            return *_composed_gradients(how.composed, x, parameter, grads[0], ctx.needs_input_grad), None
        gradient = grads[0]
        if gradient.stride() != x.stride() or gradient.dtype != x.dtype:
            gradient = torch.empty_like(x).copy_(gradient)
        x_gradient, slopes = how.backend.gradients(x, gradient, how.parameters, how.rows)
        if slopes is None or not ctx.needs_input_grad[1]:
            return x_gradient, None, None
        return x_gradient, slopes if slopes.dtype == parameter.dtype else slopes.to(parameter.dtype), None


def _composed_gradients(
    composed: Composed, x: torch.Tensor, parameter: torch.Tensor, gradient: torch.Tensor, is_needed: tuple[bool, ...]
) -> list[torch.Tensor | None]:
    """The same by tensor operations, so that they can be differentiated in the gradient."""
    with torch.enable_grad():
        sources = [
            tensor.detach().requires_grad_(needed) for tensor, needed in zip((x, parameter), is_needed, strict=False)
        ]
        values = composed(sources[0], sources[1])
    wanted = [source for source in sources if source.requires_grad]
    found = iter(torch.autograd.grad(values, wanted, gradient, create_graph=torch.is_grad_enabled(), allow_unused=True))
    return [next(found) if source.requires_grad else None for source in sources]


def _fit(parameters: Parameters, x: torch.Tensor, granularity: Granularity) -> bool:
    """That there is a parameter for each channel, where x is; the composed operations say what is wrong if not."""
    parameter, zero_point = parameters.parameter, parameters.zero_point
    if parameter.device != x.device or not parameter.is_floating_point() or not parameter.is_contiguous():
        return False
    if zero_point is not None and (zero_point.device != x.device or not zero_point.is_contiguous()):
        return False
    if granularity.axis is None:
        return parameter.numel() == 1
    return tuple(parameter.shape) == granularity.parameter_shape(tuple(x.shape))


def _rows(x: torch.Tensor, granularity: Granularity) -> Rows | None:
    """How the memory of `_dense(x)` falls into channels; None where they are not runs of neighbours."""
    if granularity.axis is None:
        return Rows(1, 1, x.numel())
    axis = granularity.axis % max(1, x.dim())
    shape = tuple(x.shape) or (1,)
    if granularity.group_size is None:
        return Rows(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))
    if axis != len(shape) - 1 or shape[axis] % granularity.group_size:
        return None
    return Rows(1, x.numel() // granularity.group_size, granularity.group_size)


def _dense(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """x without gaps, contiguous unless any order will do: that of elements alike, or alike within the first axis."""
    if x.is_contiguous():
        return x
    is_any_order = granularity.axis in (None, 0, -x.dim()) and granularity.group_size is None
    if is_any_order and (
        (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
        or (x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d))
    ):
        return x
    return x.contiguous()

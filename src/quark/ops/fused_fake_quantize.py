"""Quantizers to train through, in one pass over memory forward and one backward.

`fused_fake_quantize` computes what the functions of `fake_quantize` compose from tensor operations: in compiled code on
the CPU (float32), with Triton on CUDA (float32, float16, bfloat16). It saves its input, and in the backward pass
recomputes what a mask would have stored: reading x costs no more than reading masks, and x is often saved anyway.

It returns None for everything else: other types and devices, tensors that are not plain memory (under a compiler, a
tracer, a function transform), groups with a shorter last one. The composed operations are used there, and in a backward
pass that is itself differentiated.

Eager training of small networks waits for launches, not for the GPU, so the number of kernels counts, and the Python
code around each of them. Nothing on the host depends on numbers on the device, so nothing waits, and a step can be
captured as a CUDA graph.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, Union

import torch

from quark.formats.affine import Granularity
from quark.formats.arrays import FLOAT32, TorchKind, array_kind
from quark.formats.block import BlockQuantizer, find_tensor_scale
from quark.formats.native import FakeKind, FakeQuantizer, NativeFakeQuantize, Rows, native_fake_quantize
from quark.formats.spec import NonFinite, Rounding, ScaleRule

Composed = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Backend: TypeAlias = Union["NativeBackend", "TritonBackend"]

_CUDA_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_BLOCK = 2048  # elements that a program holds at a time
_WHOLE_SPAN = 1 << 15  # channels up to this size are summed by one program: a second launch would take longer
_SUMS_BLOCK = 1024
_TILE = 2048  # elements of a tile of blocks
_MAX_ROWS = 1024
_EXACT = {"enable_fp_fusion": False}
_CURRENT_DEVICE = contextlib.nullcontext()


class Parameters(NamedTuple):
    """A quantizer with its numbers: one for each channel, on the device of the data, contiguous."""

    quantizer: FakeQuantizer
    parameter: torch.Tensor
    zero_point: torch.Tensor | None = None


def fused_fake_quantize(
    x: torch.Tensor, parameters: Parameters, granularity: Granularity, composed: Composed
) -> torch.Tensor | None:
    """x quantized, with gradients for x and a learned parameter; None if the composed operations have to do it.

    `composed` computes the same from x and the parameter; it is used for second derivatives.
    """
    if not is_plain(x):
        return None
    backend = _backend(x)
    rows = _rows(x, granularity)
    if backend is None or rows is None or not backend.takes(x, rows) or not _fit(parameters, x, granularity):
        return None
    # x without gaps; contiguous, unless the order of elements does not matter, or only that of the first axis does
    is_any_order = granularity.axis in (None, 0, -x.dim()) and granularity.group_size is None
    is_dense = x.is_contiguous() or (
        is_any_order
        and (
            (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
            or (x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d))
        )
    )
    how = _How(backend, parameters, rows, composed)
    result: torch.Tensor = _Fused.apply(x if is_dense else x.contiguous(), parameters.parameter, how)  # type: ignore[no-untyped-call]
    return result


def is_plain(x: torch.Tensor) -> bool:
    """True if x is plain memory, and nothing traces, compiles or transforms the operations on it."""
    kind = array_kind(x)
    return isinstance(kind, TorchKind) and kind.is_eager(x)


def _backend(x: torch.Tensor) -> Backend | None:
    if x.device.type == "cpu":
        return native_backend()
    return triton_backend() if x.device.type == "cuda" else None


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
    """The same gradients by tensor operations, which can be differentiated again."""
    with torch.enable_grad():
        sources = [
            tensor.detach().requires_grad_(needed) for tensor, needed in zip((x, parameter), is_needed, strict=False)
        ]
        values = composed(sources[0], sources[1])
    wanted = [source for source in sources if source.requires_grad]
    gradients = iter(
        torch.autograd.grad(values, wanted, gradient, create_graph=torch.is_grad_enabled(), allow_unused=True)
    )
    return [next(gradients) if source.requires_grad else None for source in sources]


def _fit(parameters: Parameters, x: torch.Tensor, granularity: Granularity) -> bool:
    """True if each channel has a parameter on the device of x; if not, the composed operations raise the error."""
    parameter, zero_point = parameters.parameter, parameters.zero_point
    if parameter.device != x.device or not parameter.is_floating_point() or not parameter.is_contiguous():
        return False
    if zero_point is not None and (zero_point.device != x.device or not zero_point.is_contiguous()):
        return False
    if granularity.axis is None:
        return parameter.numel() == 1
    return tuple(parameter.shape) == granularity.parameter_shape(tuple(x.shape))


def _rows(x: torch.Tensor, granularity: Granularity) -> Rows | None:
    """How the memory of x, which has no gaps, divides into channels or groups; None if they are not contiguous."""
    if granularity.axis is None:
        return Rows(1, 1, x.numel())
    axis = granularity.axis % max(1, x.dim())
    shape = tuple(x.shape) or (1,)
    if granularity.group_size is None:
        return Rows(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))
    if axis != len(shape) - 1 or shape[axis] % granularity.group_size:
        return None
    return Rows(1, x.numel() // granularity.group_size, granularity.group_size)


# The arguments of the compiled quantizers for training, on every device.


class NativeBackend:
    """The compiled code for the CPU. Tensors are dense, and those of one shape have the same strides."""

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
    """The numbers in the type of the compiled code; keep the result while its addresses are used."""
    quantizer, parameter, zero_point = parameters
    if parameter.dtype != torch.float32:
        parameter = parameter.detach().to(torch.float32)
    return Parameters(quantizer, parameter, None if zero_point is None else zero_point.to(torch.float32))


def _addresses(parameters: Parameters) -> tuple[int, int]:
    return parameters.parameter.data_ptr(), _address(parameters.zero_point)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def native_backend() -> NativeBackend | None:
    """The backend for the CPU; None without compiled code."""
    native = native_fake_quantize()
    return None if native is None else NativeBackend(native)


class TritonBackend:
    """Affine, LSQ and TQT quantizers on CUDA: one kernel forward, one or two backward."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def takes(self, x: torch.Tensor, rows: Rows) -> bool:
        return x.dtype in _CUDA_TYPES and rows.outer == 1 and x.numel() > 0

    def values(self, x: torch.Tensor, parameters: Parameters, rows: Rows) -> torch.Tensor:
        out = torch.empty_like(x)
        block = _block(rows.inner)
        pieces = -(-rows.inner // block)
        how = parameters.quantizer
        with _on_device(x):
            self._kernels.values_kernel[(rows.channels * pieces,)](
                *(x, out, parameters.parameter, parameters.zero_point),
                *(rows.inner, pieces, float(how.lowest), float(how.highest)),
                kind=int(how.kind),
                step_shift=how.step_shift,
                block=block,
                **_EXACT,
            )
        return out

    def gradients(
        self, x: torch.Tensor, gradient: torch.Tensor, parameters: Parameters, rows: Rows
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out = torch.empty_like(x)
        how = parameters.quantizer
        is_learned = how.kind is not FakeKind.AFFINE
        block = _block(rows.inner)
        is_whole = not is_learned or rows.inner <= _WHOLE_SPAN
        rounds = _rounds(rows.inner, block) if is_learned and is_whole else 1
        pieces = -(-rows.inner // (rounds * block))
        slopes = torch.empty_like(parameters.parameter, dtype=torch.float32) if is_learned else None
        sums = None if is_whole else torch.empty(rows.channels * pieces, dtype=torch.float64, device=x.device)
        factor = how.slope_factor(rows.outer * rows.inner)
        shared = {"kind": int(how.kind), "step_shift": how.step_shift, **_EXACT}
        with _on_device(x):
            self._kernels.gradients_kernel[(rows.channels * pieces,)](
                *(x, gradient, out, parameters.parameter, parameters.zero_point, sums, slopes),
                *(rows.inner, pieces, float(how.lowest), float(how.highest), factor),
                is_whole=is_whole,
                rounds=rounds,
                block=block,
                **shared,
            )
            if not is_whole:
                self._kernels.slopes_kernel[(rows.channels,)](
                    *(sums, slopes, parameters.parameter, pieces, factor),
                    rounds=_rounds(pieces, _SUMS_BLOCK),
                    block=_SUMS_BLOCK,
                    **shared,
                )
        return out, slopes


@functools.cache
def triton_backend() -> TritonBackend | None:
    """The backend for CUDA; None without Triton."""
    kernels = _triton_kernels()
    return None if kernels is None else TritonBackend(kernels)


@functools.cache
def _triton_kernels() -> Any:
    """The module of kernels; None without Triton."""
    try:
        return importlib.import_module("quark.ops.triton_kernels")
    except ImportError:
        return None


def quantize_dequantize_on_cuda(x: torch.Tensor, axis: int, quantizer: BlockQuantizer) -> torch.Tensor | None:
    """x quantized along blocks; None if the kernel does not support it: float64, scale rule `mse`, blocks of more than
    1024 elements, no Triton. `axis` is counted from the front."""
    kernels = _triton_kernels() if x.dtype in _CUDA_TYPES and x.numel() else None
    shape = tuple(x.shape) or (1,)
    size = min(quantizer.format.block_size, shape[axis])
    rows = 1 << (size - 1).bit_length()
    if kernels is None or rows > _MAX_ROWS or quantizer.scale_rule is ScaleRule.MSE:
        return None
    constants = _constants(quantizer, rows)
    if constants is None:
        return None
    source = x.contiguous()
    out = torch.empty_like(source)
    inner = math.prod(shape[axis + 1 :])
    blocks_in_row = -(-shape[axis] // size)
    lanes = math.prod(shape[:axis]) * blocks_in_row * inner
    tile = max(1, _TILE // rows)
    grid = quantizer.format.element.grid
    scale_grid = None if quantizer.format.scale is None else quantizer.format.scale.grid
    tensor_scale = find_tensor_scale(array_kind(x), source, quantizer, FLOAT32)
    with _on_device(x):
        kernels.blocks_kernel[(-(-lanes // tile),)](
            *(source, out, source if tensor_scale is None else tensor_scale),
            *(shape[axis], inner, blocks_in_row, lanes, size),
            *(grid.lowest, grid.highest, 2.0**grid.min_exponent),
            *((0.0, 1.0) if scale_grid is None else (scale_grid.highest, 2.0**scale_grid.min_exponent)),
            scale_mantissa_bits=0 if scale_grid is None else scale_grid.mantissa_bits,
            has_float_scale=scale_grid is not None,
            axis=1 if inner == 1 else 0,
            rows=rows,
            tile=tile,
            is_long=lanes * rows >= 1 << 30,
            **constants,
            **_EXACT,
        )
    return out


@functools.lru_cache(maxsize=256)
def _constants(quantizer: BlockQuantizer, rows: int) -> dict[str, Any] | None:
    """The compile-time arguments of the kernel; None if sub-blocks do not divide a block of `rows`."""
    fmt = quantizer.format
    sub_block = min(fmt.sub_blocks.size, rows) if fmt.sub_blocks else 0
    if sub_block & (sub_block - 1):
        return None
    return {
        "increment": quantizer.increment(FLOAT32),
        "emax": fmt.element.emax,
        "mantissa_bits": fmt.element.grid.mantissa_bits,
        "is_uniform": fmt.element.grid.is_uniform,
        "sub_block": sub_block,
        "max_shift": fmt.sub_blocks.max_shift if fmt.sub_blocks else 0,
        "flushes": fmt.flush_subnormals,
        "carries": fmt.carry,
        "rounding": tuple(Rounding).index(quantizer.rounding),
        "passes": quantizer.nonfinite is NonFinite.PASSTHROUGH,
    }


def _block(inner: int) -> int:
    return min(_MAX_BLOCK, 1 << max(4, (inner - 1).bit_length()))


def _rounds(count: int, block: int) -> int:
    """The number of blocks, rounded up to a power of two: a kernel is compiled for each number."""
    return 1 << (-(-count // block) - 1).bit_length()


def _on_device(x: torch.Tensor) -> Any:
    """Switch to the device of x if needed: Triton launches on the current one."""
    return _CURRENT_DEVICE if x.device.index == torch.cuda.current_device() else torch.cuda.device(x.device)

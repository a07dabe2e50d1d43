"""Launches of the Triton kernels: quantizers to train through on CUDA, one kernel forward and one or two backward.

Eager training of small networks waits for launches, not for the GPU: what counts here is the number of kernels, and
the Python around each. Nothing is computed on the host that depends on numbers of the device, so that nothing waits,
and a step can be captured as a CUDA graph.

Without Triton the functions here say so with None, and the composed operations of `fake_quantize` serve.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from quark.formats.arrays import FLOAT32
from quark.formats.block import BlockQuantizer
from quark.formats.native_fake_quantize import FakeKind, Rows
from quark.formats.spec import NonFinite, Rounding, ScaleRule
from quark.ops.fused_parameters import Parameters

_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_BLOCK = 2048  # elements that a program holds at a time
_WHOLE_SPAN = 1 << 15  # up to so many, a channel is summed by one program: a second launch would take longer
_SUMS_BLOCK = 1024
_TILE = 2048  # elements of a tile of blocks
_MAX_ROWS = 1024
_ROUNDINGS = (Rounding.HALF_AWAY, Rounding.HALF_UP, Rounding.HALF_EVEN)
_EXACT = {"enable_fp_fusion": False}


class TritonFakeQuantize:
    """Affine, LSQ and TQT quantizers; the backend of `fused_fake_quantize` for CUDA."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def takes(self, x: torch.Tensor, rows: Rows) -> bool:
        return x.dtype in _TYPES and rows.outer == 1 and x.numel() > 0

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
def triton_fake_quantize() -> TritonFakeQuantize | None:
    kernels = _kernels("triton_steps")
    return None if kernels is None else TritonFakeQuantize(kernels)


def quantize_dequantize_on_cuda(x: torch.Tensor, axis: int, quantizer: BlockQuantizer) -> torch.Tensor | None:
    """x quantized along blocks; None where the kernel does not take it: float64, the search for the least error, blocks
    of thousands, no Triton. `axis` is counted from the front."""
    kernels = _kernels("triton_blocks") if x.dtype in _TYPES and x.numel() else None
    shape = tuple(x.shape) or (1,)
    size = min(quantizer.format.block_size, shape[axis])
    rows = 1 << (size - 1).bit_length()
    if kernels is None or rows > _MAX_ROWS or quantizer.scale_rule is ScaleRule.MSE:
        return None
    known = _known(quantizer, rows)
    if known is None:
        return None
    source = x.contiguous()
    out = torch.empty_like(source)
    inner = math.prod(shape[axis + 1 :])
    blocks_in_row = -(-shape[axis] // size)
    lanes = math.prod(shape[:axis]) * blocks_in_row * inner
    tile = max(1, _TILE // rows)
    grid = quantizer.format.element.grid
    with _on_device(x):
        kernels.blocks_kernel[(-(-lanes // tile),)](
            *(source, out, shape[axis], inner, blocks_in_row, lanes, size),
            *(grid.lowest, grid.highest, 2.0**grid.min_exponent),
            axis=1 if inner == 1 else 0,
            rows=rows,
            tile=tile,
            is_long=lanes * rows >= 1 << 30,
            **known,
            **_EXACT,
        )
    return out


@functools.lru_cache(maxsize=256)
def _known(quantizer: BlockQuantizer, rows: int) -> dict[str, Any] | None:
    """What the kernel is compiled for; None where sub-blocks do not divide a block of `rows`."""
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
        "rounding": _ROUNDINGS.index(quantizer.rounding),
        "passes": quantizer.nonfinite is NonFinite.PASSTHROUGH,
    }


@functools.cache
def _kernels(name: str) -> Any:
    """The module of that name, which imports Triton; None where there is no Triton."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    import importlib

    return importlib.import_module(f"quark.ops.{name}")


def _block(inner: int) -> int:
    return min(_MAX_BLOCK, 1 << max(4, (inner - 1).bit_length()))


def _rounds(count: int, block: int) -> int:
    """Blocks for so many elements, rounded up to a power of two: kernels are compiled for each number of them."""
    return 1 << (-(-count // block) - 1).bit_length()


def _on_device(x: torch.Tensor) -> Any:
    """Triton launches on the current device, which need not be that of x."""
    return _NOWHERE_ELSE if x.device.index == torch.cuda.current_device() else torch.cuda.device(x.device)


class _NowhereElse:
    """A context that changes nothing; made once, since it is entered at every launch."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


_NOWHERE_ELSE = _NowhereElse()

"""The compiled kernels, called on numpy arrays and CPU tensors without leaving the process.

The library is built with the package and lies in it; nothing is compiled at import. Where it is missing (a source
tree that was never built) or was switched off by the environment variable QUARK_NO_NATIVE=1, the array
implementation does the same work, slower.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from quark.formats.arrays import TorchKind, array_kind
from quark.formats.block import BlockQuantizer
from quark.formats.spec import NonFinite, Rounding, ScaleRule

FILE_NAME = {"win32": "quark_ops.dll", "darwin": "libquark_ops.dylib"}.get(sys.platform, "libquark_ops.so")

_RULES = (ScaleRule.FLOOR, ScaleRule.CEIL, ScaleRule.EVEN, ScaleRule.RCEIL, ScaleRule.MSE)
_ROUNDINGS = (Rounding.HALF_AWAY, Rounding.HALF_UP, Rounding.HALF_EVEN)
_POLICIES = (NonFinite.BLOCK_NAN, NonFinite.PASSTHROUGH)
_STORAGE = {"float32": 0, "float16": 1}
_OUT_OF_MEMORY = 2
ELEMENTS_PER_THREAD = 1 << 18  # below this, starting a thread costs more than it saves


class _BlockParameters(ctypes.Structure):
    """quark::BlockParameters of csrc/formats/block_parameters.h, field by field."""

    _fields_ = (
        ("block_size", ctypes.c_int64),
        ("sub_block_size", ctypes.c_int32),
        ("max_shift", ctypes.c_int32),
        ("mantissa_bits", ctypes.c_int32),
        ("min_exponent", ctypes.c_int32),
        ("max_exponent", ctypes.c_int32),
        ("lowest", ctypes.c_float),
        ("highest", ctypes.c_float),
        ("flush_subnormals", ctypes.c_int32),
        ("carry", ctypes.c_int32),
        ("round_to_bfloat16", ctypes.c_int32),
        ("scale_rule", ctypes.c_int32),
        ("rounding", ctypes.c_int32),
        ("nonfinite", ctypes.c_int32),
    )


def library_file() -> Path | None:
    """The compiled library that came with the package, or None when there is none."""
    beside = Path(__file__).resolve().parents[1] / "native" / FILE_NAME
    if beside.is_file():
        return beside
    try:  # an editable install keeps compiled files apart from the sources
        installed = importlib.metadata.distribution("quark-quantizer").locate_file(f"quark/native/{FILE_NAME}")
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(installed))
    return path if path.is_file() else None


@functools.cache
def load_library() -> ctypes.CDLL | None:
    path = library_file()
    if path is None or os.environ.get("QUARK_NO_NATIVE") == "1":
        return None
    library = ctypes.CDLL(str(path))
    size = ctypes.c_int64
    library.quark_quantize_dequantize.argtypes = [
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, size, size, size),
        *(ctypes.POINTER(_BlockParameters), ctypes.c_int32),
    ]
    library.quark_quantize_dequantize.restype = ctypes.c_int
    library.quark_instruction_set.restype = ctypes.c_char_p
    return library


def instruction_set() -> str | None:
    """The instruction set that the compiled code chose on this processor; None where the code is not used."""
    library = load_library()
    return None if library is None else str(library.quark_instruction_set().decode())


def quantize_dequantize_native(x: Any, axis: int, quantizer: BlockQuantizer, threads: int | None = None) -> Any:
    """x quantized by the compiled code, or None where that does not take it: float64, a tensor not on the CPU, one
    under a compiler, no library. `threads=None` uses the processors that this process may run on."""
    source = _as_numpy(x)
    library = None if source is None else load_library()
    if source is None or library is None:
        return None
    contiguous = np.require(source, requirements=["C_CONTIGUOUS", "ALIGNED"])  # a copy only of what is not
    storage = _STORAGE.get(contiguous.dtype.name)
    widened = contiguous.astype(np.float32) if storage is None else contiguous
    out = np.empty(widened.shape, widened.dtype)
    shape = (1,) if not source.shape else source.shape
    status = library.quark_quantize_dequantize(
        *(widened.ctypes.data, out.ctypes.data, storage or 0, *_rows(shape, axis)),
        *(ctypes.byref(_parameters(quantizer, max(1, shape[axis]))), _thread_count(out.size, threads)),
    )
    if status == _OUT_OF_MEMORY:
        raise MemoryError(f"quantizing an array of {out.nbytes} bytes")
    if status != 0:
        raise RuntimeError(f"the compiled code refused {quantizer}")  # a disagreement of the two sides: our mistake
    with np.errstate(over="ignore"):
        return _like(out.astype(source.dtype, copy=False), x)


def _as_numpy(x: Any) -> Any:
    """x as a numpy array that shares its memory; None where that cannot be, or the type is not taken."""
    kind = array_kind(x)
    if kind.name == "numpy":
        return None if x.dtype == np.float64 else np.asarray(x)
    torch = kind.xp
    if not isinstance(kind, TorchKind) or not kind.is_eager(x) or x.device.type != "cpu" or x.dtype == torch.float64:
        return None
    tensor = x.detach().resolve_neg()
    return (tensor.float() if x.dtype == torch.bfloat16 else tensor).numpy()  # numpy knows no bfloat16


def _like(result: Any, x: Any) -> Any:
    kind = array_kind(x)
    return result if kind.name == "numpy" else kind.xp.from_numpy(result).to(x.dtype)


def _rows(shape: tuple[int, ...], axis: int) -> tuple[int, int, int]:
    """The array as (outer, n, inner) with n along the axis."""
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def _thread_count(elements: int, threads: int | None) -> int:
    if threads is not None:
        return threads
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(processors, elements // ELEMENTS_PER_THREAD))


@functools.lru_cache(maxsize=256)
def _parameters(quantizer: BlockQuantizer, longest: int) -> _BlockParameters:
    """The quantizer for an axis of that length, which a block cannot be longer than."""
    fmt = quantizer.format
    grid = fmt.element.grid
    return _BlockParameters(
        block_size=min(fmt.block_size, longest),
        sub_block_size=min(fmt.sub_blocks.size, longest) if fmt.sub_blocks else 0,
        max_shift=fmt.sub_blocks.max_shift if fmt.sub_blocks else 0,
        mantissa_bits=grid.mantissa_bits,
        min_exponent=grid.min_exponent,
        max_exponent=grid.max_exponent,
        lowest=grid.lowest,
        highest=grid.highest,
        flush_subnormals=fmt.flush_subnormals,
        carry=fmt.carry,
        round_to_bfloat16=False,
        scale_rule=_RULES.index(quantizer.scale_rule),
        rounding=_ROUNDINGS.index(quantizer.rounding),
        nonfinite=_POLICIES.index(quantizer.nonfinite),
    )

"""The compiled quantizers to train through, of csrc/formats/fake_quantize.h, on memory that the caller answers for."""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from quark.formats.native import load_library

_OUT_OF_MEMORY = 2


class FakeKind(IntEnum):
    """What the parameter of a quantizer is, by the numbers of the compiled code."""

    AFFINE = 0  # a fixed scale, with a zero point
    STEP = 1  # LSQ: the step
    THRESHOLD = 2  # TQT: log2 of the threshold


@dataclass(frozen=True)
class FakeQuantizer:
    """A quantizer to train through, all but the parameters themselves. `lowest` and `highest` are codes."""

    kind: FakeKind
    lowest: int
    highest: int

    @property
    def step_shift(self) -> int:
        """TQT's step is the threshold over 2^step_shift: the number of codes on the positive side, 0 among them."""
        return self.highest.bit_length()

    def slope_factor(self, elements: int) -> float:
        """LSQ's g, for a step that so many elements share."""
        return 1 / math.sqrt(max(1, elements) * self.highest)


class Rows(NamedTuple):
    """Contiguous memory seen as (outer, channels, inner), each channel with parameters of its own."""

    outer: int
    channels: int
    inner: int


class _FakeQuantizer(ctypes.Structure):
    """quark::FakeQuantizer of csrc/formats/fake_quantize.h, field by field."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("step_shift", ctypes.c_int32),
        ("lowest", ctypes.c_float),
        ("highest", ctypes.c_float),
        ("slope_factor", ctypes.c_double),
        ("parameter", ctypes.c_void_p),
        ("zero_point", ctypes.c_void_p),
    )


class NativeFakeQuantize:
    """The functions of the library. Addresses are of float32 numbers, 0 where there are none."""

    def __init__(self, library: ctypes.CDLL) -> None:
        size, address, threads = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32
        self._values = library.quark_fake_quantize
        self._values.argtypes = (address, address, size, size, size, address, threads)
        self._gradients = library.quark_fake_quantize_gradients
        self._gradients.argtypes = (*(address,) * 4, size, size, size, address, threads)

    def values(
        self, quantizer: FakeQuantizer, rows: Rows, parameters: tuple[int, int], x: int, out: int, threads: int
    ) -> None:
        """x quantized into `out`. `parameters` are the addresses of the channels' parameters and zero points."""
        how = _described(quantizer, rows, parameters)
        status = self._values(x, out, rows.outer, rows.channels, rows.inner, ctypes.addressof(how), threads)
        _raise_for(status, quantizer, rows)

    def gradients(
        self,
        quantizer: FakeQuantizer,
        rows: Rows,
        parameters: tuple[int, int],
        x: tuple[int, int, int],
        parameter_gradient: int,
        threads: int,
    ) -> None:
        """From x and the gradient of its values that of x: three addresses; and that of a learned parameter."""
        how = _described(quantizer, rows, parameters)
        status = self._gradients(
            *x, parameter_gradient, rows.outer, rows.channels, rows.inner, ctypes.addressof(how), threads
        )
        _raise_for(status, quantizer, rows)


@functools.cache
def native_fake_quantize() -> NativeFakeQuantize | None:
    """None where the compiled code is missing, from an earlier version, or switched off."""
    library = load_library()
    return None if library is None or not hasattr(library, "quark_fake_quantize") else NativeFakeQuantize(library)


def _described(quantizer: FakeQuantizer, rows: Rows, parameters: tuple[int, int]) -> _FakeQuantizer:
    return _FakeQuantizer(
        quantizer.kind,
        quantizer.step_shift,
        quantizer.lowest,
        quantizer.highest,
        quantizer.slope_factor(rows.outer * rows.inner),
        *parameters,
    )


def _raise_for(status: int, quantizer: FakeQuantizer, rows: Rows) -> None:
    if status == _OUT_OF_MEMORY:
        raise MemoryError(f"gradients of {rows}")
    if status != 0:
        raise RuntimeError(f"the compiled code refused {quantizer} on {rows}")  # a disagreement of the two sides

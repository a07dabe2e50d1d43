"""The differences between numpy and torch, so that every algorithm is written once.

`array_kind(x)` returns the `ArrayKind` of x. The algorithms work in float32 or float64 (`Precision`), on values whose
bits they may read. float16 and bfloat16 inputs are widened to float32, which is exact, and the result is rounded back
to nearest even. torch is never imported here: a caller that passes a tensor has loaded it.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import bfloat16 as numpy_bfloat16

from quark.errors import InvalidValueError, UnsupportedTypeError

CHUNK_ELEMENTS = 1 << 17  # processed at a time on a CPU: temporaries fit its caches, and calls are few


@dataclass(frozen=True)
class Precision:
    """The bit layout of a working float type."""

    mantissa_bits: int
    exponent_bias: int
    bits: int

    @property
    def exponent_mask(self) -> int:
        """The bits of Inf: the exponent field, all ones."""
        return int((2 * self.exponent_bias + 1) << self.mantissa_bits)

    @property
    def magnitude_mask(self) -> int:
        return int((1 << (self.bits - 1)) - 1)


FLOAT32 = Precision(mantissa_bits=23, exponent_bias=127, bits=32)
FLOAT64 = Precision(mantissa_bits=52, exponent_bias=1023, bits=64)


class ArrayKind:
    """numpy arrays. Subclassed for torch."""

    name = "numpy"

    def __init__(self) -> None:
        self.xp: Any = np
        self.floats: dict[Any, Precision] = {
            np.dtype(np.float32): FLOAT32,
            np.dtype(np.float16): FLOAT32,
            np.dtype(numpy_bfloat16): FLOAT32,
            np.dtype(np.float64): FLOAT64,
        }
        self._float_of = {FLOAT32: np.dtype(np.float32), FLOAT64: np.dtype(np.float64)}
        self._int_of: dict[Precision, Any] = {FLOAT32: np.dtype(np.int32), FLOAT64: np.dtype(np.int64)}

    def precision(self, x: Any) -> Precision:
        """The working precision for x's type; other types than floats are refused."""
        if x.dtype not in self.floats:
            raise UnsupportedTypeError(
                f"x: expected float32, float16, bfloat16 or float64 in the machine's byte order, got {x.dtype}; "
                "convert it first if that is meant"
            )
        return self.floats[x.dtype]

    def detach(self, x: Any) -> Any:
        """x without its autograd history."""
        return x

    def widen(self, x: Any, precision: Precision) -> Any:
        """x in the working type; not a copy if it has that type."""
        return x.astype(self._float_of[precision], copy=False)

    def narrow(self, x: Any, like: Any) -> Any:
        """x in the type of `like`; finite values beyond float16's or bfloat16's range become Inf."""
        with np.errstate(over="ignore"):
            return x.astype(like.dtype, copy=False)

    def bits(self, x: Any, precision: Precision) -> Any:
        """The same memory as signed integers."""
        return x.view(self._int_of[precision])

    def from_bits(self, bits: Any, precision: Precision) -> Any:
        return bits.view(self._float_of[precision])

    def as_int(self, x: Any, precision: Precision) -> Any:
        """x converted to the working integer type."""
        return x.astype(self._int_of[precision])

    def rint(self, x: Any) -> Any:
        return np.rint(x)

    def divide(self, x: Any, divisor: Any) -> Any:
        """x / divisor in the type of x, a float, correctly rounded. The divisor is an array or a Python float."""
        return x / divisor

    def scalar(self, value: float, x: Any, precision: Precision) -> Any:
        """An array of shape (1, 1) in the working type, where x is."""
        return np.full((1, 1), value, self._float_of[precision])

    def pad_end(self, x: Any, axis: int, count: int) -> Any:
        """x with `count` zeros appended along axis; x itself for a count of 0."""
        if not count:
            return x
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, count)
        return np.pad(x, widths)

    def contiguous(self, x: Any) -> Any:
        # ascontiguousarray would turn a scalar array into one of rank 1
        return x if x.flags.c_contiguous else np.ascontiguousarray(x)

    def empty_like(self, x: Any) -> Any:
        return np.empty(x.shape, x.dtype)

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        """A context without numpy's warnings about NaN and Inf, which the caller handles; torch never warns."""
        return np.errstate(all="ignore")

    def may_hold(self, condition: Any) -> bool:
        """False if `condition` is known to be true nowhere, so that work for rare cases can be skipped."""
        return bool(condition.any())

    def chunk_elements(self, x: Any) -> int:
        _keep_freed_memory()
        return CHUNK_ELEMENTS


class TorchKind(ArrayKind):
    """torch tensors, on any device."""

    name = "torch"

    def __init__(self, torch: Any) -> None:
        self.xp = torch
        self.floats = {torch.float32: FLOAT32, torch.float16: FLOAT32, torch.bfloat16: FLOAT32, torch.float64: FLOAT64}
        self._float_of = {FLOAT32: torch.float32, FLOAT64: torch.float64}
        self._int_of = {FLOAT32: torch.int32, FLOAT64: torch.int64}

    def detach(self, x: Any) -> Any:
        return x.detach()

    def widen(self, x: Any, precision: Precision) -> Any:
        return x.to(self._float_of[precision])

    def narrow(self, x: Any, like: Any) -> Any:
        return x.to(like.dtype)

    def as_int(self, x: Any, precision: Precision) -> Any:
        return x.to(self._int_of[precision])

    def rint(self, x: Any) -> Any:
        return self.xp.round(x)

    def divide(self, x: Any, divisor: Any) -> Any:
        if x.device.type == "cpu":
            return x / divisor
        # Elsewhere, division by a number becomes a product, and compilers approximate quotients of float32. A quotient
        # of float64 is rounded correctly, and again when it is rounded to float32 (53 >= 2 * 24 + 2 bits).
        torch = self.xp
        wide = divisor.double() if isinstance(divisor, torch.Tensor) else x.new_full((), divisor, dtype=torch.float64)
        return (x.double() / wide).to(x.dtype)

    def scalar(self, value: float, x: Any, precision: Precision) -> Any:
        return x.new_full((1, 1), value, dtype=self._float_of[precision])

    def pad_end(self, x: Any, axis: int, count: int) -> Any:
        if not count:
            return x
        shape = list(x.shape)
        shape[axis] = count
        return self.xp.cat([x, x.new_zeros(shape)], dim=axis)

    def contiguous(self, x: Any) -> Any:
        return x.contiguous()

    def empty_like(self, x: Any) -> Any:
        return self.xp.empty_like(x)

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def may_hold(self, condition: Any) -> bool:
        # reading the answer would wait for a GPU, and is impossible under a compiler
        return bool(condition.any()) if self._is_eager_cpu(condition) else True

    def chunk_elements(self, x: Any) -> int:
        # GPUs prefer one large launch, and so does a compiler, which fuses the temporaries
        if not self._is_eager_cpu(x):
            return max(1, int(x.numel()))
        _keep_freed_memory()
        return CHUNK_ELEMENTS

    def _is_eager_cpu(self, x: Any) -> bool:
        return x.device.type == "cpu" and self.is_eager(x)

    def is_eager(self, x: Any) -> bool:
        """False if x stands for other values: under a compiler, a tracer or a function transform."""
        torch = self.xp
        if torch.compiler.is_compiling():
            return False
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(x):
            return False
        return not torch.jit.is_tracing() and not torch._C._len_torch_dispatch_stack()


@functools.cache
def _keep_freed_memory() -> None:
    """Let the C library keep the memory of temporaries for the next ones.

    glibc returns it to the system and requests it again, page by page, which costs as much as the arithmetic. After a
    large array was allocated and freed, it keeps up to twice that much. Elsewhere this has no effect.
    """
    np.empty(1 << 24, np.uint8)


_NUMPY = ArrayKind()
_TORCH: list[TorchKind] = []


def array_kind(x: object) -> ArrayKind:
    """The kind of array that x is; anything but numpy arrays and torch tensors is refused."""
    if isinstance(x, (np.ndarray, np.generic)):
        if type(x) not in (np.ndarray, np.memmap) and not isinstance(x, np.generic):
            raise UnsupportedTypeError(
                f"x: expected a plain numpy array, got {type(x).__name__}, whose arithmetic may be its own; "
                "pass np.asarray(x) if its values are meant"
            )
        return _NUMPY
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        if not _TORCH:
            _TORCH.append(TorchKind(torch))
        return _TORCH[0]
    raise UnsupportedTypeError(f"x: expected a numpy array or a torch tensor, got {type(x).__name__}")


def normalize_axis(axis: int, rank: int) -> int:
    """The axis, counted from the front; a scalar has one element along axis 0."""
    axis = as_index("axis", axis)
    dims = max(rank, 1)
    if not -dims <= axis < dims:
        raise InvalidValueError(
            f"axis {axis} is out of range for an array of rank {rank}: expected {-dims}..{dims - 1}"
        )
    return axis % dims


def as_index(name: str, value: object) -> int:
    """value as a Python integer; floats and bools are refused."""
    if isinstance(value, bool):
        raise UnsupportedTypeError(f"{name}: expected an integer, got {value!r}")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UnsupportedTypeError(f"{name}: expected an integer, got {value!r}") from None

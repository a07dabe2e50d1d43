"""Affine quantization: integer codes that stand for evenly spaced numbers.

    q     = saturate(round(x / scale) + zero_point)
    x_hat = (q - zero_point) * scale

The division, the rounding and the product are those of ONNX QuantizeLinear and DequantizeLinear, bit for bit in
float32. NaN becomes the zero point, that is 0; Inf saturates.

A range is first widened to include 0, so that zero is exact. Then

    asymmetric    scale = (highest - lowest) / (qmax - qmin)     zero_point = round(qmin - lowest / scale)
    symmetric     scale = 2 * max|x| / (qmax - qmin)             zero_point = round((qmin + qmax) / 2)

where a symmetric signed format does not use its lowest code (int8: max|x| / 127), unless the full range is asked for.
The middle zero point of uint8 is 128. All of this is computed in float64, and the scale is then rounded once.

The whole array, a channel or a group shares one scale: see `Granularity`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.formats.arrays import FLOAT32, FLOAT64, ArrayKind, Precision, array_kind, as_index, normalize_axis
from quark.formats.catalog import get_format, parse_choice
from quark.formats.rounding import round_to_spacing
from quark.formats.spec import Format, IntFormat, Rounding

# torch has no arithmetic for these; the next wider signed type holds every code
_TORCH_SUBSTITUTES = {"uint16": "int32", "uint32": "int64"}


@dataclass(frozen=True)
class Granularity:
    """What shares one scale: the whole array; with an axis, each of its channels; with a group size too, that many
    neighbours along the axis.

    Arrays of parameters have the shapes of ONNX: () or one element for the whole array, (channels,) for channels, and
    for groups the shape of the data with `axis` counting groups, the last of which may be shorter.
    """

    axis: int | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.group_size is None:
            return
        if self.axis is None:
            raise InvalidValueError(f"group_size {self.group_size} without axis: name the axis that groups run along")
        if as_index("group_size", self.group_size) < 1:
            raise InvalidValueError(f"group_size {self.group_size}: expected at least 1")

    def parameter_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the parameters of an array of `shape`."""
        if self.axis is None:
            return ()
        axis = normalize_axis(self.axis, len(shape))
        n = shape[axis] if len(shape) else 1
        if self.group_size is None:
            return (n,)
        return (*shape[:axis], -(-n // self.group_size), *shape[axis + 1 :])

    def spread(self, kind: ArrayKind, values: Any, shape: tuple[int, ...]) -> Any:
        """Parameters in a shape that broadcasts with an array of `shape`."""
        if self.axis is None:
            return values.reshape(())
        expected = self.parameter_shape(shape)
        if tuple(values.shape) != expected:
            raise InvalidValueError(
                f"parameters of shape {tuple(values.shape)} do not fit an array of shape {tuple(shape)} along axis "
                f"{self.axis}: expected {expected}"
            )
        axis = normalize_axis(self.axis, len(shape))
        if self.group_size is None:
            return values.reshape(expected[: len(shape)] + (1,) * (len(shape) - axis - 1))
        outer, n, inner = self._rows_shape(shape)
        groups = expected[axis]
        size = self.group_size
        repeated = kind.xp.broadcast_to(values.reshape(outer, groups, 1, inner), (outer, groups, size, inner))
        return repeated.reshape(outer, groups * size, inner)[:, :n].reshape(shape)

    def extremes(self, kind: ArrayKind, x: Any) -> tuple[Any, Any]:
        """The lowest and highest element of everything that shares a parameter; 0 and 0 without elements."""
        if self.axis is None:
            flat = x.reshape(-1)
            return _extremes(kind, kind.pad_end(flat, 0, int(not flat.shape[0])), 0)
        outer, n, inner = self._rows_shape(x.shape)
        rows = x.reshape(outer, n, inner)
        if self.group_size is None:
            rows = kind.pad_end(kind.pad_end(rows, 0, int(not outer)), 2, int(not inner))
            return _extremes(kind, rows, (0, 2))
        size = self.group_size
        whole = n - n % size
        lowest, highest = _extremes(kind, rows[:, :whole].reshape(outer, whole // size, size, inner), 2)
        if whole < n:
            last_lowest, last_highest = _extremes(kind, rows[:, None, whole:], 2)
            lowest = kind.xp.concatenate([lowest, last_lowest], 1)
            highest = kind.xp.concatenate([highest, last_highest], 1)
        shape = self.parameter_shape(x.shape)
        return lowest.reshape(shape), highest.reshape(shape)

    def _rows_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """(outer, n, inner) with n along the axis; a scalar is one element."""
        assert self.axis is not None
        axis = normalize_axis(self.axis, len(shape))
        return math.prod(shape[:axis]), shape[axis] if len(shape) else 1, math.prod(shape[axis + 1 :])


def _extremes(kind: ArrayKind, x: Any, axes: int | tuple[int, ...]) -> tuple[Any, Any]:
    return kind.xp.amin(x, axes), kind.xp.amax(x, axes)


@dataclass(frozen=True, eq=False)
class AffineParameters:
    """Scales and zero points, two arrays of the same shape and of the same kind as the data.

    >>> x = np.array([[0.0, 1.0], [-2.0, 6.0]], np.float32)
    >>> scale, zero_point = choose_affine(*find_ranges(x, axis=0), "int8", symmetric=True)
    >>> quantize_affine(x, AffineParameters(scale, zero_point, integer_format("int8"), axis=0))
    array([[  0, 127],
           [-42, 127]], dtype=int8)
    """

    scale: Any
    zero_point: Any
    format: IntFormat
    axis: int | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        integer_format(self.format)
        kind = array_kind(self.scale)
        kind.precision(self.scale)
        if array_kind(self.zero_point) is not kind or not _is_integer(self.zero_point):
            raise UnsupportedTypeError(
                f"zero_point: expected an integer {kind.name} array like scale, got {type(self.zero_point).__name__} "
                f"of {self.zero_point.dtype}"
            )
        shape = tuple(self.scale.shape)
        if tuple(self.zero_point.shape) != shape:
            raise InvalidValueError(f"zero_point of shape {tuple(self.zero_point.shape)} with scale of shape {shape}")
        if self.granularity.axis is None and math.prod(shape) != 1:
            raise InvalidValueError(f"scale of shape {shape} without axis: expected one element, or name the axis")
        if self.axis is not None and self.group_size is None and len(shape) != 1:
            raise InvalidValueError(f"scale of shape {shape} for channels of axis {self.axis}: expected rank 1")
        # values on an accelerator are not checked, which would wait for it
        # negative ones turn the codes around, so that the largest magnitude of a group can have the lowest code
        if not kind.may_hold((kind.xp.isfinite(self.scale) & (self.scale != 0)).all()):
            raise InvalidValueError("scale: expected finite numbers other than 0; choose_affine gives such")
        zero_point = kind.as_int(self.zero_point, FLOAT64)
        if not kind.may_hold(((zero_point >= self.format.qmin) & (zero_point <= self.format.qmax)).all()):
            raise InvalidValueError(
                f"zero_point: expected codes of '{self.format}', {self.format.qmin}..{self.format.qmax}"
            )

    @property
    def granularity(self) -> Granularity:
        return Granularity(self.axis, self.group_size)


def integer_format(format: str | Format) -> IntFormat:
    """The plain integer format of that name; other formats, which have no zero point, are refused."""
    fmt = get_format(format)
    if isinstance(fmt, IntFormat) and fmt.fraction_bits == 0:
        return fmt
    raise InvalidValueError(f"format '{fmt}' has no affine codes: expected a plain integer, such as int8 or uint4")


def find_ranges(x: Any, axis: int | None = None, group_size: int | None = None) -> tuple[Any, Any]:
    """(lowest, highest) element of x, of each channel, or of each group, in float32 or float64.

    NaN and Inf are not skipped: they end up in the ranges, where `choose_affine` reports their place. Without elements
    the range is 0..0.

    >>> find_ranges(np.array([[1.0, -2.0, 3.0], [4.0, 0.0, 0.0]], np.float32), axis=0)
    (array([-2.,  0.], dtype=float32), array([3., 4.], dtype=float32))
    """
    kind = array_kind(x)
    return Granularity(axis, group_size).extremes(kind, kind.widen(x, kind.precision(x)))


def choose_affine(
    lowest: Any, highest: Any, format: str | Format, *, symmetric: bool = False, full_range: bool = False
) -> tuple[Any, Any]:
    """(scale, zero_point) for ranges of any shape, to be passed to `AffineParameters`.

    The scale is a positive finite number of the ranges' working type. If it would be below the smallest normal number,
    it is 1 and, if asymmetric, the zero point 0, as in ONNX Runtime. `full_range` makes a symmetric signed format use
    its lowest code too: int8 then has 2 max|x| / 255.

    >>> choose_affine(np.float32([-1.0]), np.float32([3.0]), "uint8")
    (array([0.01568628], dtype=float32), array([64], dtype=uint8))
    """
    fmt = integer_format(format)
    kind = array_kind(lowest)
    precision = kind.precision(lowest)
    if tuple(lowest.shape) != tuple(highest.shape) or kind.precision(highest) is not precision:
        raise InvalidValueError(
            f"lowest is {lowest.dtype} of shape {tuple(lowest.shape)}, highest {highest.dtype} of shape "
            f"{tuple(highest.shape)}: expected the same"
        )
    bad = ~(kind.xp.isfinite(lowest) & kind.xp.isfinite(highest) & (lowest <= highest))
    if bool(bad.any()):
        index = tuple(int(i) for i in np.argwhere(np.asarray(bad.tolist()))[0])
        raise InvalidValueError(
            f"range {lowest[index].item()}..{highest[index].item()} at {index}: expected finite numbers in order; "
            "look for NaN or Inf in the data"
        )
    low = kind.xp.clip(kind.widen(lowest, FLOAT64), None, 0.0)
    high = kind.xp.clip(kind.widen(highest, FLOAT64), 0.0, None)
    if symmetric:
        high = kind.xp.maximum(-low, high)
        low = -high
    qmin, qmax = -fmt.qmax if symmetric and not full_range and fmt.signed else fmt.qmin, fmt.qmax
    if qmin == qmax:
        raise InvalidValueError(f"format '{fmt}' has no codes on both sides of zero: use 2 bits or more")
    scale = (0.5 * high - 0.5 * low) / (0.5 * (qmax - qmin))  # halves: the width of a range may overflow
    limits = np.finfo(np.float32 if precision is FLOAT32 else np.float64)
    is_narrow = scale < float(limits.tiny)
    scale = kind.xp.clip(kind.xp.where(is_narrow, 1.0, scale), None, float(limits.max))
    if symmetric:
        zero_point = 0 * scale + round((qmin + qmax) / 2)
    else:
        zero_point = kind.xp.where(is_narrow, 0.0, kind.xp.clip(kind.rint(qmin - low / scale), qmin, qmax))
    return kind.widen(scale, precision), _cast(kind, zero_point, code_dtype(kind, fmt))


def quantize_affine(x: Any, parameters: AffineParameters, rounding: str | Rounding = Rounding.HALF_EVEN) -> Any:
    """The integer codes of x, in the narrowest type that holds the format.

    Codes of 2 to 8 bits are int8 or uint8, wider ones have 16 or 32 bits. torch cannot compute with uint16 and uint32:
    its tensors hold such codes in int32 and int64.

    >>> parameters = AffineParameters(np.float32(0.5), np.uint8(128), integer_format("uint8"))
    >>> quantize_affine(np.array([0.0, 0.75, -1e9, np.nan], np.float32), parameters)
    array([128, 130,   0, 128], dtype=uint8)
    """
    kind = array_kind(x)
    levels = _levels(kind, x, parameters, parse_choice(Rounding, rounding, "rounding mode"))
    zero_point = parameters.granularity.spread(kind, parameters.zero_point, x.shape)
    return _cast(kind, levels + zero_point, code_dtype(kind, parameters.format))


def dequantize_affine(codes: Any, parameters: AffineParameters) -> Any:
    """The values of the codes, in the type of the scale."""
    kind = array_kind(codes)
    if not _is_integer(codes):
        raise UnsupportedTypeError(f"codes: expected integers, got {codes.dtype}; quantize_affine gives such")
    # the difference of two codes needs one more bit than a code
    integers = FLOAT32 if parameters.format.bits < FLOAT32.bits - 1 else FLOAT64
    zero_point = parameters.granularity.spread(kind, parameters.zero_point, codes.shape)
    levels = kind.as_int(codes, integers) - kind.as_int(zero_point, integers)
    return _times_scale(kind, levels, parameters, parameters.scale)


def quantize_dequantize_affine(
    x: Any, parameters: AffineParameters, rounding: str | Rounding = Rounding.HALF_EVEN
) -> Any:
    """x rounded to codes, in the type of x; for float32 the same bits as quantizing and then dequantizing."""
    kind = array_kind(x)
    levels = _levels(kind, x, parameters, parse_choice(Rounding, rounding, "rounding mode"))
    return _times_scale(kind, levels, parameters, x)


def is_in_range(x: Any, parameters: AffineParameters) -> Any:
    """True where the code of x, rounded half to even, needs no saturation; False for NaN."""
    kind = array_kind(x)
    steps, lowest, highest = _steps(kind, x, parameters)
    rounded = kind.rint(steps)
    return (rounded >= lowest) & (rounded <= highest)


def code_dtype(kind: ArrayKind, fmt: IntFormat) -> Any:
    """The narrowest integer type, of numpy or torch, that holds the codes of the format."""
    width = next((bits for bits in (8, 16, 32) if fmt.bits <= bits), None)
    if width is None:
        raise InvalidValueError(f"format '{fmt}' has {fmt.bits} bits: expected at most 32")
    name = f"{'' if fmt.signed else 'u'}int{width}"
    return getattr(kind.xp, name if kind.name == "numpy" else _TORCH_SUBSTITUTES.get(name, name))


def _exact_precision(precision: Precision, fmt: IntFormat) -> Precision:
    """The float type in which the format's levels are rounded and counted exactly."""
    return precision if fmt.bits < precision.mantissa_bits - 1 else FLOAT64


def _steps(kind: ArrayKind, x: Any, parameters: AffineParameters) -> tuple[Any, Any, Any]:
    """x / scale, and the limits of q - zero_point."""
    precision = kind.precision(x)
    fmt = parameters.format
    exact = _exact_precision(precision, fmt)
    scale = kind.widen(parameters.granularity.spread(kind, parameters.scale, x.shape), precision)
    zero_point = kind.widen(parameters.granularity.spread(kind, parameters.zero_point, x.shape), exact)
    with kind.quiet():
        steps = kind.widen(kind.widen(x, precision) / scale, exact)
    return steps, fmt.qmin - zero_point, fmt.qmax - zero_point


def _levels(kind: ArrayKind, x: Any, parameters: AffineParameters, rounding: Rounding) -> Any:
    """q - zero_point, exactly, as floats."""
    steps, lowest, highest = _steps(kind, x, parameters)
    exact = _exact_precision(kind.precision(x), parameters.format)
    with kind.quiet():
        clipped = kind.xp.clip(steps, lowest, highest)
        rounded = round_to_spacing(kind, clipped, 1.0, 0, rounding, exact)
        return kind.xp.where(clipped == clipped, rounded, 0.0)


def _times_scale(kind: ArrayKind, levels: Any, parameters: AffineParameters, like: Any) -> Any:
    """levels * scale, computed in the working type of `like` and returned in its type."""
    precision = kind.precision(like)
    scale = kind.widen(parameters.granularity.spread(kind, parameters.scale, levels.shape), precision)
    with kind.quiet():
        return kind.narrow(kind.widen(levels, precision) * scale, like)


def _is_integer(x: Any) -> bool:
    return str(x.dtype).rpartition(".")[2].startswith(("int", "uint"))


def _cast(kind: ArrayKind, x: Any, dtype: Any) -> Any:
    return x.astype(dtype) if kind.name == "numpy" else x.to(dtype)

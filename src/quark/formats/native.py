"""The compiled kernels, called through ctypes: block formats on numpy arrays and CPU tensors, trained quantizers, the
iterations of finetuning, and compensation.

The library is part of the installed package; nothing is compiled at import. If it is missing (a source tree that was
never built) or switched off by the environment variable QUARK_NO_NATIVE=1, the array implementation does the same work,
slower.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import math
import os
import sys
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quark.formats.arrays import TorchKind, array_kind
from quark.formats.block import BlockQuantizer
from quark.formats.spec import NonFinite, Rounding, ScaleRule

FILE_NAME = {"win32": "quark_ops.dll", "darwin": "libquark_ops.dylib"}.get(sys.platform, "libquark_ops.so")

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
        ("scale_mantissa_bits", ctypes.c_int32),
        ("scale_min_exponent", ctypes.c_int32),
        ("scale_highest", ctypes.c_float),
        ("tensor_scale", ctypes.c_float),
    )


def library_file() -> Path | None:
    """The compiled library of the package; None if there is none."""
    beside = Path(__file__).resolve().parents[1] / "native" / FILE_NAME
    if beside.is_file():
        return beside
    try:  # an editable install keeps compiled files in another folder
        installed = importlib.metadata.distribution("quark-quantizer").locate_file(f"quark/native/{FILE_NAME}")
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(installed))
    return path if path.is_file() else None


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Load the compiled library; None if it is missing or switched off."""
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


@functools.cache
def cuda_problem() -> str | None:
    """The reason why the library's operators cannot run on NVIDIA GPUs; None if they can."""
    path = library_file()
    if path is None:
        return "the library was not compiled"
    problem = getattr(ctypes.CDLL(str(path)), "quark_cuda_problem", None)
    if problem is None:
        return "the library has no kernels for CUDA"
    problem.restype = ctypes.c_char_p
    return str(problem().decode()) or None


def instruction_set() -> str | None:
    """The instruction set that the compiled code uses on this processor; None if the code is not used."""
    library = load_library()
    return None if library is None else str(library.quark_instruction_set().decode())


def quantize_dequantize_native(x: Any, axis: int, quantizer: BlockQuantizer, threads: int | None = None) -> Any:
    """x quantized by the compiled code; None if that does not support it: float64, tensors on other devices or under a
    compiler, no library. `threads=None` uses the processors that this process may run on."""
    source = _as_numpy(x)
    library = None if source is None else load_library()
    if source is None or library is None:
        return None
    contiguous = np.require(source, requirements=["C_CONTIGUOUS", "ALIGNED"])  # copies only if needed
    storage = _STORAGE.get(contiguous.dtype.name)
    widened = contiguous.astype(np.float32) if storage is None else contiguous
    out = np.empty(widened.shape, widened.dtype)
    shape = (1,) if not source.shape else source.shape
    if threads is None:
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = max(1, min(processors, out.size // ELEMENTS_PER_THREAD))
    status = library.quark_quantize_dequantize(
        *(widened.ctypes.data, out.ctypes.data, storage or 0),
        *(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])),
        *(ctypes.byref(_parameters(quantizer, max(1, shape[axis]))), threads),
    )
    if status == _OUT_OF_MEMORY:
        raise MemoryError(f"quantizing an array of {out.nbytes} bytes")
    if status != 0:
        raise RuntimeError(f"the compiled code refused {quantizer}")  # Python and C++ disagree: our mistake
    with np.errstate(over="ignore"):
        result = out.astype(source.dtype, copy=False)
    kind = array_kind(x)
    return result if kind.name == "numpy" else kind.xp.from_numpy(result).to(x.dtype)


def _as_numpy(x: Any) -> Any:
    """x as a numpy array that shares its memory if possible; None if the compiled code does not support it."""
    kind = array_kind(x)
    if kind.name == "numpy":
        return None if x.dtype == np.float64 else np.asarray(x)
    torch = kind.xp
    if not isinstance(kind, TorchKind) or not kind.is_eager(x) or x.device.type != "cpu" or x.dtype == torch.float64:
        return None
    tensor = x.detach().resolve_neg()
    return (tensor.float() if x.dtype == torch.bfloat16 else tensor).numpy()  # numpy has no bfloat16


@functools.lru_cache(maxsize=256)
def _parameters(quantizer: BlockQuantizer, longest: int) -> _BlockParameters:
    """The quantizer for an axis of that length, which limits the block size."""
    fmt = quantizer.format
    grid, scale = fmt.element.grid, None if fmt.scale is None else fmt.scale.grid
    tensor_scale = quantizer.tensor_scale
    if tensor_scale is None:
        tensor_scale = -1.0 if fmt.has_tensor_scale else 1.0
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
        scale_rule=tuple(ScaleRule).index(quantizer.scale_rule),
        rounding=tuple(Rounding).index(quantizer.rounding),
        nonfinite=tuple(NonFinite).index(quantizer.nonfinite),
        scale_mantissa_bits=0 if scale is None else scale.mantissa_bits,
        scale_min_exponent=0 if scale is None else scale.min_exponent,
        scale_highest=0.0 if scale is None else scale.highest,
        tensor_scale=tensor_scale,
    )


class FakeKind(IntEnum):
    """The meaning of a quantizer's parameter, with the numbers of the compiled code."""

    AFFINE = 0  # fixed scale and zero point
    STEP = 1  # LSQ: the step
    THRESHOLD = 2  # TQT: log2 of the threshold


@dataclass(frozen=True)
class FakeQuantizer:
    """A quantizer to train through, without its parameters. `lowest` and `highest` are codes."""

    kind: FakeKind
    lowest: int
    highest: int

    @property
    def step_shift(self) -> int:
        """TQT's step is the threshold over 2^step_shift, the number of codes on the positive side including 0."""
        return self.highest.bit_length()

    def slope_factor(self, elements: int) -> float:
        """LSQ's g, for a step shared by that many elements."""
        return 1 / math.sqrt(max(1, elements) * self.highest)


class Rows(NamedTuple):
    """Contiguous memory as (outer, channels, inner), where each channel has its own parameters."""

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
    """The functions of csrc/formats/fake_quantize.h. Addresses are of float32 numbers, 0 if there are none; the caller
    guarantees that the memory is valid."""

    def __init__(self, library: ctypes.CDLL) -> None:
        size, address, threads = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32
        self._values = library.quark_fake_quantize
        self._values.argtypes = (address, address, size, size, size, address, threads)
        self._gradients = library.quark_fake_quantize_gradients
        self._gradients.argtypes = (*(address,) * 4, size, size, size, address, threads)

    def values(
        self, quantizer: FakeQuantizer, rows: Rows, parameters: tuple[int, int], x: int, out: int, threads: int
    ) -> None:
        """Quantize x into `out`. `parameters` are the addresses of the channels' parameters and zero points."""
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
        """Compute the gradients of x and of a learned parameter. `x` are the addresses of x, of the gradient of its
        values, and of the gradient of x, which is written."""
        how = _described(quantizer, rows, parameters)
        status = self._gradients(
            *x, parameter_gradient, rows.outer, rows.channels, rows.inner, ctypes.addressof(how), threads
        )
        _raise_for(status, quantizer, rows)


@functools.cache
def native_fake_quantize() -> NativeFakeQuantize | None:
    """None if the compiled code is missing, from an earlier version, or switched off."""
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
        raise RuntimeError(f"the compiled code refused {quantizer} on {rows}")  # Python and C++ disagree


class StepKind(IntEnum):
    """The kinds of training steps of a weight, numbered as in the compiled code."""

    PLAIN = 0  # anything, by Adam alone
    AFFINE = 1  # AdaQuant: the weight, rounded with a fixed scale
    ADAROUND = 2  # AdaRound: which of two neighbours


class WeightStep(ctypes.Structure):
    """quark::WeightStep of csrc/formats/weight_step.h, field by field. Pointers are addresses of float32 numbers, 0 if
    the kind has none; the caller guarantees that the memory is valid."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("step_size", ctypes.c_float),
        ("root", ctypes.c_float),
        ("exponent", ctypes.c_float),
        ("regularization", ctypes.c_float),
        ("factor", ctypes.c_float),
        ("count", ctypes.c_int64),
        ("gradient", ctypes.c_void_p),
        ("parameter", ctypes.c_void_p),
        ("mean", ctypes.c_void_p),
        ("square", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("third", ctypes.c_void_p),
    )


# what differs from one iteration to the next, float32: quark::RowIteration of csrc/formats/row_training.h
ROW_ITERATION = ("weight_step_size", "bias_step_size", "root", "exponent", "regularization")


class RowTraining(ctypes.Structure):
    """quark::RowTraining of csrc/formats/row_training.h, field by field. Pointers as in WeightStep."""

    _fields_ = (
        ("groups", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("batches", ctypes.c_int64),
        ("has_own_inputs", ctypes.c_int64),
        ("input_group", ctypes.c_int64),
        ("input_row", ctypes.c_int64),
        ("input_column", ctypes.c_int64),
        ("target_group", ctypes.c_int64),
        ("target_row", ctypes.c_int64),
        ("inputs", ctypes.c_void_p),
        ("targets", ctypes.c_void_p),
        ("lowest", ctypes.c_void_p),
        ("highest", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("bias_scale", ctypes.c_void_p),
        ("bias_lowest", ctypes.c_void_p),
        ("bias_highest", ctypes.c_void_p),
        ("origin", ctypes.c_void_p),
        ("cross", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("weights", WeightStep),
        ("bias_step", WeightStep),
    )


class RowGather(ctypes.Structure):
    """The rows of a convolution, field by field as in csrc/formats/row_gather.cc. Pointers are addresses of float32
    and int64 numbers; the caller guarantees that the memory is valid, and that sources and places lie within it."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("planes", ctypes.c_int64),
        ("plane_size", ctypes.c_int64),
        ("sources", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("picks", ctypes.c_int64),
        ("taps", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("row", ctypes.c_int64),
        ("tap_step", ctypes.c_int64),
        ("plane_step", ctypes.c_int64),
    )


class NativeFinetuning:
    """The functions of csrc/formats/weight_step.h, row_training.h and row_gather.cc. They run on the thread that calls
    them, without Python's lock."""

    def __init__(self, library: ctypes.CDLL) -> None:
        training, size, address = ctypes.POINTER(RowTraining), ctypes.c_int64, ctypes.c_void_p
        self._step = library.quark_weight_step
        self._step.argtypes = (ctypes.POINTER(WeightStep),)
        self._workspace = library.quark_row_training_workspace
        self._workspace.argtypes = (training,)
        self._workspace.restype = size
        self._train = library.quark_train_rows
        self._train.argtypes = (training, address, address, size)
        self._errors = library.quark_row_errors
        self._errors.argtypes = (training, size, address)
        self._gradient = library.quark_row_gradient
        self._gradient.argtypes = (training, size, address, address)
        self._gram = library.quark_row_gram
        self._gram.argtypes = (training, size, address)
        self._gather = library.quark_gather_rows
        self._gather.argtypes = (ctypes.POINTER(RowGather),)

    def step(self, step: WeightStep) -> None:
        """Move the parameter by Adam, and compute the weights of the next iteration."""
        if self._step(step):
            raise RuntimeError(f"the compiled code refused a step of kind {step.kind} with {step.count} weights")

    def workspace(self, training: RowTraining) -> int:
        """The numbers of workspace that training needs."""
        return int(self._workspace(training))

    def train(self, training: RowTraining, iterations: int, starts: int, count: int) -> None:
        """Move weights and bias by one iteration after the other. The addresses are of ROW_ITERATION numbers of each,
        and of the first rows of their batches, as int64."""
        _check(self._train(training, iterations, starts, count), training)

    def errors(self, training: RowTraining, count: int, squares: int) -> None:
        """Add the squared errors of the first rows to those of each output, float64 numbers at that address."""
        _check(self._errors(training, count, squares), training)

    def gradient(self, training: RowTraining, count: int, of_weights: int, of_bias: int) -> None:
        """Add the gradient of half the squared error of the first rows to float32 numbers at those addresses."""
        _check(self._gradient(training, count, of_weights, of_bias), training)

    def gram(self, training: RowTraining, count: int, gram: int) -> None:
        """Add the Gram matrix of the first rows, each with a one behind it, to float32 numbers at that address."""
        _check(self._gram(training, count, gram), training)

    def gather(self, gather: RowGather) -> None:
        """Write the rows."""
        if self._gather(gather):
            raise RuntimeError(f"the compiled code refused {gather.picks} rows of {gather.taps} x {gather.planes}")


def _check(status: int, training: RowTraining) -> None:
    if status:
        sizes = f"{training.groups} x {training.length} x {training.outputs} weights, {training.rows} rows"
        raise RuntimeError(f"the compiled code refused {sizes}")  # Python and C++ disagree: our mistake


@functools.cache
def native_finetuning() -> NativeFinetuning | None:
    """None if the compiled code is missing, from an earlier version, or switched off."""
    library = load_library()
    return None if library is None or not hasattr(library, "quark_gather_rows") else NativeFinetuning(library)


class _RowProducts(ctypes.Structure):
    """quark::RowProducts of csrc/formats/row_products.h, field by field."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("own", ctypes.c_void_p),
        ("exact", ctypes.c_void_p),
        ("inner", ctypes.c_void_p),
        ("cross", ctypes.c_void_p),
        ("rounding", ctypes.POINTER(ctypes.c_float)),
    )


class NativeRowProducts:
    """The function of csrc/formats/row_products.h. It runs on the thread that calls it, without Python's lock."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._add = library.quark_add_products_of_rows
        self._add.argtypes = (ctypes.POINTER(_RowProducts),)
        self._add.restype = ctypes.c_int

    def add(
        self, own: Any, exact: Any, inner: Any, cross: Any, rounding: tuple[float, float, float] | None = None
    ) -> None:
        """Add own' own to `inner`, right of its diagonal and on it, and exact' own to `cross` if that is not None.

        Rows are contiguous float32 arrays [rows, groups, columns], sums likewise [groups, columns, columns]. `rounding`
        is the scale, the lowest and the highest whole number that `own` is rounded to on the way.
        """
        arrays = (own, exact, inner, cross) if cross is not None else (own, None, inner, None)
        addresses = (None if array is None else array.ctypes.data for array in arrays)
        how = None if rounding is None else (ctypes.c_float * 3)(*rounding)
        status = self._add(_RowProducts(*own.shape, *addresses, how))
        if status == _OUT_OF_MEMORY:
            raise MemoryError(f"products of rows {own.shape}")
        if status != 0:
            raise RuntimeError(f"the compiled code refused rows {own.shape}")  # Python and C++ disagree: our mistake


@functools.cache
def native_row_products() -> NativeRowProducts | None:
    """None if the compiled code is missing, from an earlier version, or switched off."""
    library = load_library()
    return None if library is None or not hasattr(library, "quark_add_products_of_rows") else NativeRowProducts(library)


class _ColumnRounding(ctypes.Structure):
    """quark::ColumnRounding of csrc/formats/column_rounding.h, field by field."""

    _fields_ = (
        ("columns", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("scale", ctypes.c_void_p),
        ("zero_point", ctypes.c_void_p),
        ("lowest", ctypes.c_double),
        ("highest", ctypes.c_double),
        ("factors", ctypes.c_void_p),
        ("divisor", ctypes.c_void_p),
        ("before", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("block", ctypes.POINTER(_BlockParameters)),
    )


class NativeColumnRounding:
    """The function of csrc/formats/column_rounding.h, for matrices of one group with these scales, zero points
    [columns, outputs] and codes. Arrays are contiguous float64 ones."""

    def __init__(self, round_columns: Any, scale: Any, zero_point: Any, codes: tuple[int, int]) -> None:
        self._round = round_columns
        self._scale, self._zero_point, self._codes = scale, zero_point, codes

    def compensate(self, columns: Any, values: Any, upper: Any, errors: Any) -> None:
        """Round columns one after the other. Those behind them in `values` are changed for their errors, which are
        written to `errors`, over the diagonal of `upper`."""
        self._call(columns, np.ascontiguousarray(upper), np.ascontiguousarray(np.diagonal(upper)), None, values, errors)

    def descend(self, columns: Any, pull: Any, inner: Any, diagonal: Any, before: Any, now: Any) -> None:
        """Write the best values of columns to `now`, one after the other, given the others. `pull` is changed."""
        self._call(columns, np.ascontiguousarray(inner.T), diagonal, before, pull, now)

    def _call(self, columns: Any, factors: Any, divisor: Any, before: Any, values: Any, result: Any) -> None:
        scale, zero_point = self._scale[columns], self._zero_point[columns]
        arrays = (factors, divisor, before, values, result)
        addresses = (None if array is None else array.ctypes.data for array in arrays)
        job = _ColumnRounding(*scale.shape, scale.ctypes.data, zero_point.ctypes.data, *self._codes, *addresses)
        if self._round(job):
            raise RuntimeError(f"the compiled code refused columns {scale.shape}")  # Python and C++ disagree


class NativeBlockRounding:
    """The same for columns that together are one block of a block format."""

    def __init__(self, round_columns: Any, quantizer: BlockQuantizer) -> None:
        self._round, self._quantizer = round_columns, quantizer

    def compensate(self, columns: Any, values: Any, upper: Any, errors: Any) -> None:
        """See NativeColumnRounding."""
        block = _parameters(self._quantizer, max(1, len(values)))
        factors, divisor = np.ascontiguousarray(upper), np.ascontiguousarray(np.diagonal(upper))
        addresses = (array.ctypes.data for array in (values, errors))
        job = _ColumnRounding(
            *values.shape, None, None, 0, 0, factors.ctypes.data, divisor.ctypes.data, None, *addresses
        )
        job.block = ctypes.pointer(block)
        status = self._round(job)
        if status == _OUT_OF_MEMORY:
            raise MemoryError(f"rounding a block of {values.shape}")
        if status != 0:
            raise RuntimeError(f"the compiled code refused {self._quantizer}")  # Python and C++ disagree: our mistake


@functools.cache
def _round_columns() -> Any:
    """The compiled function; None if it is missing, from an earlier version, or switched off."""
    library = load_library()
    if library is None or not hasattr(library, "quark_compensate_columns"):
        return None
    library.quark_compensate_columns.argtypes = (ctypes.POINTER(_ColumnRounding),)
    library.quark_compensate_columns.restype = ctypes.c_int
    return library.quark_compensate_columns


def native_column_rounding(scale: Any, zero_point: Any, codes: tuple[int, int]) -> NativeColumnRounding | None:
    """None without compiled code."""
    function = _round_columns()
    return None if function is None else NativeColumnRounding(function, scale, zero_point, codes)


def native_block_rounding(quantizer: BlockQuantizer) -> NativeBlockRounding | None:
    """None without compiled code."""
    function = _round_columns()
    return None if function is None else NativeBlockRounding(function, quantizer)

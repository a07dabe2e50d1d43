"""Samples: what a model takes as inputs, user data checked against that, and the samples of a run.

Checks are strict about values: a numpy or torch array of another type is refused, because a silent cast would hide
wrong preprocessing. They are lenient about form: a single array for a single input, (inputs, labels) of a loader, plain
Python numbers, a missing batch axis.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from quark.card import value_bytes
from quark.errors import InvalidValueError, ModelError, OutputError, UnsupportedTypeError
from quark.files.output import is_disk_forbidden, temporary_file

if TYPE_CHECKING:
    from quark.onnx.data.images import ImageLoader

HELD_OUT_EVERY = 8
HELD_OUT_LIMIT = 16
HELD_OUT_BYTES = 256 << 20
MEMORY_BYTES = 2 << 20  # bytes of samples in memory; more are kept in a file

Sample: TypeAlias = dict[str, npt.NDArray[Any]]

_MOST_LEVELS = 64  # levels of nested lists, the most axes that an array can have

# ---- the inputs of a model ----


@dataclass(frozen=True)
class InputInfo:
    """One input. A dimension of `shape` is a size, a name, or None if nothing is known; `shape` None: any rank."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int | str | None, ...] | None

    @property
    def batch(self) -> int | None:
        """The fixed size of the first axis; None if it is free."""
        return self.shape[0] if self.shape and isinstance(self.shape[0], int) else None

    def __str__(self) -> str:
        dims = "any shape" if self.shape is None else "x".join("?" if d is None else str(d) for d in self.shape)
        return f"'{self.name}' ({self.type_name}, {dims or 'scalar'})"

    @property
    def type_name(self) -> str:
        """The type of the values; numpy calls strings objects."""
        return "string" if self.dtype == object else self.dtype.name


def input_infos(model: ir.Model) -> tuple[InputInfo, ...]:
    """The inputs that a user has to feed, in the order of the graph; those with an initializer are optional."""
    infos = []
    for value in model.graph.inputs:
        if value.name in model.graph.initializers:
            continue
        if value.dtype is None or value.dtype == ir.DataType.UNDEFINED:
            raise ModelError(
                f"input '{value.name}' has no type of tensor; only tensors can be fed. Export the model again"
            )
        shape = None
        if value.shape is not None:
            shape = tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
        infos.append(InputInfo(value.name or "", np.dtype(value.dtype.numpy()), shape))
    return tuple(infos)


def list_inputs(inputs: Sequence[InputInfo]) -> str:
    """The inputs as error messages list them."""
    return ", ".join(str(info) for info in inputs)


# ---- checking user data ----


def as_sample(item: Any, inputs: Sequence[InputInfo], index: int) -> Sample:
    """Item number `index` of the data as a dict of arrays that the model takes."""
    where = f"calibration sample {index}"
    named = _name_arrays(item, inputs, where)
    unknown = [name for name in named if name not in {info.name for info in inputs}]
    missing = [info.name for info in inputs if info.name not in named]
    if unknown or missing:
        told = [f"no input is called {', '.join(map(repr, unknown))}"] if unknown else []
        told += [f"nothing for {', '.join(map(repr, missing))}"] if missing else []
        raise InvalidValueError(f"{where}: {'; '.join(told)}. The model's inputs: {list_inputs(inputs)}")
    sample = {}
    for info in inputs:
        value, what = named[info.name], f"{where}, input '{info.name}'"
        if isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "detach") or hasattr(value, "__array__"):
            array = as_numpy(value, what)
        else:
            try:
                array = np.asarray(value, dtype=info.dtype)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                raise UnsupportedTypeError(
                    f"{what}: expected an array of {info.dtype.name}, got {type(value).__name__}"
                ) from error
        sample[info.name] = _check(array, info, what)
    return sample


def _name_arrays(item: Any, inputs: Sequence[InputInfo], where: str) -> Mapping[str, Any]:
    if isinstance(item, Mapping):
        return item
    first = item
    for _ in range(_MOST_LEVELS):  # a list may contain itself
        if not isinstance(first, (tuple, list)) or not first:
            break
        first = first[0]
    if isinstance(item, (tuple, list)) and not isinstance(first, (int, float, bool)):
        if item and isinstance(item[0], Mapping):
            return item[0]
        if len(item) < len(inputs):
            raise InvalidValueError(
                f"{where}: {len(item)} arrays for {len(inputs)} inputs; expected {list_inputs(inputs)}"
            )
        return {info.name: value for info, value in zip(inputs, item, strict=False)}  # labels may follow
    if len(inputs) == 1:
        return {inputs[0].name: item}
    raise UnsupportedTypeError(
        f"{where}: a lone {type(item).__name__} for a model with {len(inputs)} inputs; give a dict with "
        f"{list_inputs(inputs)}"
    )


def as_numpy(value: Any, what: str) -> npt.NDArray[Any]:
    """Return a numpy or torch array, or a number of either, as a numpy array of the same type. `what` names it."""
    try:
        if hasattr(value, "detach"):  # a torch tensor, whether or not torch can be imported
            value = value.detach().cpu()
            if str(value.dtype) == "torch.bfloat16":  # numpy has none of its own, and torch does not convert it
                return np.asarray(value.float().numpy()).astype(ml_dtypes.bfloat16)
            value = value.numpy()
        return np.asarray(value)
    except Exception as error:  # torch, and objects with an __array__ of their own, raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnsupportedTypeError(
            f"{what}: {type(value).__name__} cannot be made an array of numpy: {reason}"
        ) from error


def _check(array: npt.NDArray[Any], info: InputInfo, what: str) -> npt.NDArray[Any]:
    """The array, with a batch axis added if it is missing. Raises if its type, shape or values are unsuitable."""
    if (
        info.dtype == object and array.dtype.kind == "U"
    ):  # .npz files hold strings like that; ONNX Runtime wants objects
        array = array.astype(object)
    if array.dtype != info.dtype and (
        info.dtype == object or array.dtype.kind in "OSUMmc" or array.dtype.type is np.void
    ):
        kind = "structured" if array.dtype.names else array.dtype.name  # its numbers cannot just be cast
        raise UnsupportedTypeError(f"{what}: {kind} values, the model takes {info.type_name}; expected {info}")
    if array.dtype != info.dtype:
        raise UnsupportedTypeError(
            f"{what}: {array.dtype}, the model takes {info.dtype.name}; preprocess as for inference, or convert with "
            f".astype('{info.dtype.name}') where the values are right already"
        )
    if not array.size:
        raise InvalidValueError(
            f"{what}: shape {array.shape} holds no value, and calibration learns nothing from it; leave the sample "
            f"out, or give it a size. The model takes {info}"
        )
    if info.shape is not None and array.ndim == len(info.shape) - 1 and info.batch in (None, 1):
        array = array[None]
    sizes = zip(array.shape[1:], (info.shape or ())[1:], strict=False)
    fits = info.shape is None or (
        array.ndim == len(info.shape) and not any(isinstance(dim, int) and size != dim for size, dim in sizes)
    )
    if fits and info.shape and info.batch is not None:  # several batches are fed one after the other
        fits = info.batch > 0 and array.shape[0] % info.batch == 0
    if not fits:
        hint = ""
        if 0 in (info.shape or ()):
            hint = ". No array with values fits an axis of 0: export the model with the axis at its size, or free"
        raise InvalidValueError(f"{what}: shape {array.shape}, the model takes {info}{hint}")
    if array.dtype.kind in "fc" or array.dtype == ml_dtypes.bfloat16:
        bad = int(array.size - np.count_nonzero(np.isfinite(array)))
        if bad:
            raise InvalidValueError(
                f"{what}: {bad} of {array.size} values are NaN or Inf; they cannot be used for calibration"
            )
    return np.ascontiguousarray(array) if array.ndim else array


# ---- the samples of a run ----


def held_out_count(count: int) -> int:
    """The number of samples to hold out in addition to `count` calibration samples."""
    return min(HELD_OUT_LIMIT, max(1, count // HELD_OUT_EVERY))


class Samples:
    """Iterates over the calibration samples, as often as wanted; each is a dict of the model's inputs, and may be a
    batch: `count` are the batches, `rows` the samples in them. A few others are held out for the verdict.

    If there are more samples than asked for, the held-out ones come from the rest, and all that were asked for are used
    to calibrate. Otherwise every eighth is held out; of fewer than eight the last; a single one serves both purposes
    (`is_held_out_shared`). `source` says where the samples come from, `is_random` that they are random numbers.
    `evaluated` are those that EvalMetrics compares outputs on, which may be these; None if it is not asked for.
    """

    evaluated: Samples | None = None

    def __init__(
        self,
        store: SampleStore,
        source: str,
        *,
        spare: int = 0,
        is_random: bool = False,
        images: ImageLoader | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        """The last `spare` samples of the store are beyond those asked for. `images` is how image files were read,
        `sizes` are the rows of each sample if it is a batch."""
        self.images = images
        self.source = source
        self.is_random = is_random
        self._store = store
        total = len(store)
        self._in_order = total - spare or total  # if all are for the verdict alone, these
        self.is_held_out_shared = total == 1 and not spare
        if spare:
            chosen = range(total - spare, total)
        elif total < HELD_OUT_EVERY:
            chosen = range(total - 1, total)
        else:
            chosen = range(HELD_OUT_EVERY - 1, total, HELD_OUT_EVERY)
        held: dict[int, Sample] = {}
        size = 0
        for i in chosen[:HELD_OUT_LIMIT]:  # the most that may be in memory, at least one
            sample = store[i]
            size += sum(array.nbytes for array in sample.values())
            if held and size > HELD_OUT_BYTES:
                break
            held[i] = sample
        self._indices = [i for i in range(total - spare) if i not in held or self.is_held_out_shared]
        self.held_out = list(held.values())
        self._orders: dict[str, Sequence[int]] = {}
        self._joined: list[Sample] = []
        rows = sizes or [1] * total
        self.rows = sum(rows[i] for i in self._indices)
        self._held_out_sizes = [rows[i] for i in held]

    @property
    def held_out_rows(self) -> int:
        """The rows of the samples that are still held out."""
        return sum(self._held_out_sizes[: len(self.held_out)])

    @property
    def count(self) -> int:
        return len(self._indices)

    def __len__(self) -> int:
        return self.count

    def batches(self, limit: int) -> int:
        """The number of batches with `limit` samples, by the mean size of a batch; at least one."""
        return max(1, -(-limit * self.count // max(1, self.rows)))

    def __iter__(self) -> Iterator[Sample]:
        return (self._ordered(self._store[i]) for i in self._indices)

    def in_order(self) -> Iterator[Sample]:
        """All samples that were asked for, including those held out, in their original order."""
        return (self._ordered(self._store[i]) for i in range(self._in_order))

    def transpose(self, orders: Mapping[str, Sequence[int]]) -> None:
        """Return these inputs with their axes in that order from now on."""
        self._orders = dict(orders)
        if self.evaluated is not None and self.evaluated is not self:
            self.evaluated.transpose(orders)
        self.held_out = [self._ordered(sample) for sample in self.held_out]

    def _ordered(self, sample: Sample) -> Sample:
        turned = {name: np.ascontiguousarray(sample[name].transpose(order)) for name, order in self._orders.items()}
        return {**sample, **turned}

    def hold_out_at_most(self, count: int) -> None:
        """Drop held-out samples beyond that number. The calibration samples stay the same."""
        del self.held_out[count:]

    def judge_at_least(self, rows: int, most: int) -> None:
        """Add calibration samples to the verdict, evenly spaced, until it has about `rows` samples. Adds at most
        `most`, and no more than may be in memory beside those held out."""
        mean = max(1.0, self.rows / max(1, self.count))
        missing = min(math.ceil((rows - self.held_out_rows) / mean), most, self.count)
        if not self.held_out or self.is_held_out_shared or self.is_random or missing <= 0:
            return
        size = sum(array.nbytes for sample in self.held_out for array in sample.values())
        for place in range(missing):
            sample = self._ordered(self._store[self._indices[(2 * place + 1) * self.count // (2 * missing)]])
            size += sum(array.nbytes for array in sample.values())
            if size > HELD_OUT_BYTES:
                break
            self._joined.append(sample)

    @property
    def judged(self) -> list[Sample]:
        """The held-out samples, then the calibration samples that `judge_at_least` added."""
        return [*self.held_out, *self._joined]

    def hold_none_out(self) -> None:
        """Drop the held-out samples, as there will be no verdict. The calibration samples stay the same."""
        self.held_out, self.is_held_out_shared = [], False

    def constants(self) -> dict[str, float]:
        """The inputs of floats with their value, if each of them has one value throughout all samples; else nothing.

        A mask may well be constant as long as another input is not.
        """
        first = next(self.in_order())
        values = {
            name: float(array.flat[0])
            for name, array in first.items()
            if array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16
        }
        constant = set(values)
        for sample in self.in_order():
            constant = {name for name in constant if np.all(sample[name] == values[name])}
            if len(constant) < len(values):  # usually after the first sample
                return {}
        return values

    def digest(self) -> str:
        """A hash of every value of the calibration samples."""
        state = hashlib.sha256()
        for sample in self:
            for name, array in sorted(sample.items()):
                state.update(f"{name}:{array.dtype}:{array.shape};".encode())
                state.update(value_bytes(array))
        return state.hexdigest()


class SampleStore:
    """A list of samples with at most `memory_bytes` of them in memory, the rest in an anonymous temporary file. Reading
    is safe from several threads.

    User data is read only once: a generator cannot be rewound, a loader that shuffles returns something else the second
    time, and decoding an image costs as much as running a small network on it.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._left = memory_bytes
        self._entries: list[Sample | list[tuple[str, np.dtype[Any], tuple[int, ...], int]]] = []
        self._file: IO[bytes] | None = None
        self._end = 0
        self._lock = threading.Lock()

    def append(self, sample: Sample, *, is_own: bool = False) -> None:
        """Keep a sample; `is_own` promises that no other code writes to its arrays, which then need not be copied."""
        size = sum(array.nbytes for array in sample.values())
        has_text = any(array.dtype == object for array in sample.values())  # whose bytes are addresses
        if size <= self._left or is_disk_forbidden() or has_text:
            self._left = max(0, self._left - size)
            # a reader may reuse its own array
            self._entries.append(dict(sample) if is_own else {name: array.copy() for name, array in sample.items()})
            return
        self._left = 0
        entry = []
        try:
            if self._file is None:
                self._file = temporary_file("quark-samples-")
            for name, array in sample.items():
                entry.append((name, array.dtype, array.shape, self._end))
                self._file.seek(self._end)
                self._end += self._file.write(np.ascontiguousarray(array).tobytes())
            self._file.flush()  # so that a full disk raises here, not when the samples are read
        except OSError as error:
            raise OutputError(
                f"{len(self)} samples are read, and there is no room for more in the folder for temporary files: "
                f"{error.strerror or error}; set TMPDIR to another disk, or give fewer samples"
            ) from error
        self._entries.append(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Sample:
        entry = self._entries[index]
        if isinstance(entry, dict):
            return dict(entry)
        sample = {}
        for name, dtype, shape, start in entry:
            assert self._file is not None
            with self._lock:
                self._file.seek(start)
                content = self._file.read(math.prod(shape) * dtype.itemsize)
            sample[name] = np.frombuffer(content, dtype).reshape(shape)
        return sample

    def close(self) -> None:
        self._entries.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

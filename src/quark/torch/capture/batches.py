"""Calibration data as whoever has it: a DataLoader, a list of tensors, a generator; with labels or without.

Batches are read once and kept: generators do not rewind, loaders shuffle. Beyond `MOST_IN_MEMORY` they lie in a
temporary file that has no name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
import torch

from quark.errors import InvalidValueError

MOST_IN_MEMORY = 1 << 30  # bytes
_LABELS = ("label", "labels", "target", "targets", "y")
Batch = tuple[torch.Tensor, ...]


class Batches:
    """The batches of a loader, in its order, as often as wanted. `names` are the inputs of the model."""

    def __init__(self, loader: Iterable[Any], names: Sequence[str], most_in_memory: int = MOST_IN_MEMORY) -> None:
        self._kept: list[_Kept] = []
        self._file: IO[bytes] | None = None
        held = 0
        for number, item in enumerate(_items(loader), 1):
            batch = inputs_of_batch(item, names, f"batch {number} of the calibration data")
            held += sum(each.nbytes for each in batch)
            self._kept.append(_Kept(batch, self._spill() if held > most_in_memory else None))
        if not self._kept:
            raise InvalidValueError(
                "the calibration data is empty: expected at least one batch; look at the loader's dataset and at "
                "drop_last, and remember that a generator can be read only once"
            )
        if not self.samples:
            raise InvalidValueError("the calibration data has batches without samples: expected at least one sample")

    def __iter__(self) -> Iterator[Batch]:
        return (kept.tensors() for kept in self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def samples(self) -> int:
        """The number of samples, where the first axis counts them."""
        return sum(kept.samples for kept in self._kept)

    def _spill(self) -> IO[bytes]:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the batches
        return self._file


class _Kept:
    def __init__(self, batch: Batch, file: IO[bytes] | None) -> None:
        self.samples = int(batch[0].shape[0]) if batch[0].dim() else 1
        self._batch = batch if file is None else None
        self._file = file
        self._places: list[tuple[int, tuple[int, ...], torch.dtype]] = []
        if file is not None:
            for each in batch:
                self._places.append((file.seek(0, 2), tuple(each.shape), each.dtype))
                file.write(each.contiguous().view(torch.uint8).numpy().tobytes())

    def tensors(self) -> Batch:
        if self._batch is not None or self._file is None:
            return self._batch or ()
        return tuple(self._read(self._file, *place) for place in self._places)

    @staticmethod
    def _read(file: IO[bytes], start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = int(np.prod(shape)) * dtype.itemsize
        file.seek(start)
        return torch.frombuffer(bytearray(file.read(count)), dtype=dtype).reshape(shape)


def inputs_of_batch(item: Any, names: Sequence[str], what: str = "the batch") -> Batch:
    """The model's inputs in what a loader gave, on the CPU: a tensor, a tuple with labels behind, a dictionary.

    >>> [each.shape for each in inputs_of_batch((torch.rand(2, 3), torch.tensor([0, 1])), ["x"])]
    [torch.Size([2, 3])]
    """
    if isinstance(item, Mapping):
        values = _of_mapping(item, names, what)
    elif isinstance(item, (list, tuple)):
        values = list(item[0]) if item and isinstance(item[0], (list, tuple)) else list(item)
    else:
        values = [item]
    if len(values) < len(names):
        raise InvalidValueError(
            f"{what} holds {len(values)} tensors, and the model has the inputs {', '.join(names)}: hand over tuples in "
            "this order, or dictionaries by these names"
        )
    return tuple(_tensor(value, name, what) for value, name in zip(values, names, strict=False))


def _of_mapping(item: Mapping[str, Any], names: Sequence[str], what: str) -> list[Any]:
    if all(name in item for name in names):
        return [item[name] for name in names]
    rest = [value for key, value in item.items() if key not in _LABELS]
    if len(names) == 1 and len(rest) == 1:
        return rest
    raise InvalidValueError(
        f"{what} has the keys {', '.join(map(str, item))}, and the model has the inputs {', '.join(names)}: name them "
        "alike, or hand over tuples in the order of the inputs"
    )


def _tensor(value: Any, name: str, what: str) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, torch.Tensor):
        raise InvalidValueError(
            f"{what}: expected a tensor for input '{name}', got {type(value).__name__}; what is no tensor belongs into "
            "the model: wrap it in a module whose forward takes the tensors and sets the rest"
        )
    if value.is_meta:
        raise InvalidValueError(f"{what}: input '{name}' is on the meta device and has no values; hand over real data")
    if value.layout is not torch.strided:
        kind = str(value.layout).removeprefix("torch.")
        raise InvalidValueError(f"{what}: input '{name}' is {kind}: expected a dense tensor; hand over x.to_dense()")
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise InvalidValueError(f"{what}: input '{name}' holds NaN or Inf; look at how the data is prepared")
    return value.detach().cpu()


def _items(loader: Any) -> Iterator[Any]:
    if isinstance(loader, torch.Tensor):
        yield loader
        return
    if not isinstance(loader, Iterable):
        raise InvalidValueError(
            f"calibration data: expected a DataLoader or another iterable of batches, got {type(loader).__name__}"
        )
    yield from loader

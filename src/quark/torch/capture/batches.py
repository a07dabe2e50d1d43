"""Calibration data in any common form: a DataLoader, a list of tensors, a generator; with or without labels.

Batches are read once and kept, because generators do not rewind and loaders shuffle. Beyond `MOST_IN_MEMORY` they go to
an unnamed temporary file.
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
    """The batches of a loader, in its order; can be iterated repeatedly. `names` are the inputs of the model."""

    def __init__(self, loader: Iterable[Any], names: Sequence[str], most_in_memory: int = MOST_IN_MEMORY) -> None:
        if not isinstance(loader, Iterable):
            raise InvalidValueError(
                f"calibration data: expected a DataLoader or another iterable of batches, got {type(loader).__name__}"
            )
        self._kept: list[Batch | list[tuple[int, torch.Size, torch.dtype]]] = []  # a list: places in the file
        self._file: IO[bytes] | None = None
        self.samples = 0  # if the first axis counts them
        held = 0
        for number, item in enumerate([loader] if isinstance(loader, torch.Tensor) else loader, 1):
            batch = inputs_of_batch(item, names, f"batch {number} of the calibration data")
            self.samples += int(batch[0].shape[0]) if batch[0].dim() else 1
            held += sum(tensor.nbytes for tensor in batch)
            if held <= most_in_memory:
                self._kept.append(batch)
                continue
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the batches
            places = []
            for tensor in batch:
                places.append((self._file.seek(0, 2), tensor.shape, tensor.dtype))
                self._file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            self._kept.append(places)
        if not self._kept:
            raise InvalidValueError(
                "the calibration data is empty: expected at least one batch; check the loader's dataset and "
                "drop_last, and remember that a generator can be read only once"
            )
        if not self.samples:
            raise InvalidValueError("the calibration data has batches without samples: expected at least one sample")

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._kept:
            if isinstance(batch, tuple):
                yield batch
                continue
            assert self._file is not None
            tensors = []
            for start, shape, dtype in batch:
                self._file.seek(start)
                content = bytearray(self._file.read(shape.numel() * dtype.itemsize))
                tensors.append(torch.frombuffer(content, dtype=dtype).reshape(shape))
            yield tuple(tensors)

    def __len__(self) -> int:
        return len(self._kept)


def inputs_of_batch(item: Any, names: Sequence[str], what: str = "the batch") -> Batch:
    """Return the model's inputs in what a loader gave, on the CPU: a tensor, a tuple with labels last, a dictionary.

    >>> [each.shape for each in inputs_of_batch((torch.rand(2, 3), torch.tensor([0, 1])), ["x"])]
    [torch.Size([2, 3])]
    """
    if isinstance(item, Mapping):
        others = [value for key, value in item.items() if key not in _LABELS]
        if all(name in item for name in names):
            values = [item[name] for name in names]
        elif len(names) == len(others) == 1:
            values = others
        else:
            raise InvalidValueError(
                f"{what} has the keys {', '.join(map(str, item))}, and the model has the inputs {', '.join(names)}: "
                "use the same names, or pass tuples in the order of the inputs"
            )
    elif isinstance(item, (list, tuple)):
        values = list(item[0]) if item and isinstance(item[0], (list, tuple)) else list(item)
    else:
        values = [item]
    if len(values) < len(names):
        raise InvalidValueError(
            f"{what} holds {len(values)} tensors, and the model has the inputs {', '.join(names)}: pass tuples in this "
            "order, or dictionaries with these names"
        )
    tensors = []
    for value, name in zip(values, names, strict=False):
        tensor = torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value
        if not isinstance(tensor, torch.Tensor):
            raise InvalidValueError(
                f"{what}: expected a tensor for input '{name}', got {type(tensor).__name__}; arguments that are not "
                "tensors belong in the model: wrap it in a module whose forward takes the tensors and sets the rest"
            )
        if tensor.is_meta:
            raise InvalidValueError(f"{what}: input '{name}' is on the meta device and has no values; pass real data")
        if tensor.layout is not torch.strided:
            kind = str(tensor.layout).removeprefix("torch.")
            raise InvalidValueError(f"{what}: input '{name}' is {kind}: expected a dense tensor; pass x.to_dense()")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InvalidValueError(f"{what}: input '{name}' holds NaN or Inf; check how the data is prepared")
        tensors.append(tensor.detach().cpu())
    return tuple(tensors)

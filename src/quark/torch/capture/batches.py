"""Calibration data in any common form: a DataLoader, a list of tensors, a generator; with or without labels.

Batches are read once and kept, because generators do not rewind and loaders shuffle. Beyond `MOST_IN_MEMORY` they go to
an unnamed temporary file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

import numpy as np
import torch
from torch.export import Dim

from quark.errors import InvalidValueError
from quark.text import get_logger
from quark.torch.capture.program import DynamicShapes
from quark.torch.capture.signature import PLAIN, Call, CallSignature

MOST_IN_MEMORY = 1 << 30  # bytes
LABELS = ("label", "labels", "target", "targets", "y")
_LOSS_LABELS = ("label", "labels")  # optional parameters from which models of Hugging Face compute a loss
Batch = tuple[torch.Tensor, ...]
_LOG = get_logger(__name__)


class Batches:
    """The batches of a loader, in its order; can be iterated repeatedly. `call` says which inputs they hold."""

    call: Call

    def __init__(self, loader: Iterable[Any], signature: CallSignature, most_in_memory: int = MOST_IN_MEMORY) -> None:
        if not isinstance(loader, Iterable):
            raise InvalidValueError(
                f"calibration data: expected a DataLoader or another iterable of batches, got {type(loader).__name__}"
            )
        self._kept: list[Batch | list[tuple[int, torch.Size, torch.dtype]]] = []  # a list of places in the file
        self._file: IO[bytes] | None = None
        self._sizes: list[list[set[int]]] = []  # the sizes of every axis of every input
        self.samples = 0  # if the first axis counts them
        held = 0
        is_single = isinstance(loader, (torch.Tensor, Mapping))
        for number, item in enumerate([loader] if is_single else loader, 1):
            what = f"batch {number} of the calibration data"
            call, batch = read_batch(item, signature, what)
            if number == 1:
                self.call = call
                self._sizes = [[set() for _ in tensor.shape] for tensor in batch]
            elif (call.names, call.constants) != (self.call.names, self.call.constants):
                raise InvalidValueError(
                    f"{what} holds {_described(call)}, and batch 1 holds {_described(self.call)}: a graph is captured "
                    "for one set of inputs, so every batch has to hold the same"
                )
            for axes, tensor in zip(self._sizes, batch, strict=True):
                for sizes, size in zip(axes, tensor.shape, strict=False):
                    sizes.add(int(size))
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

    @property
    def dynamic_shapes(self) -> DynamicShapes | None:
        """The free axes of every input if sizes behind the first axis differ between batches: those that differ, the
        first one, and the length of token ids. None if all batches are alike."""
        first = next(iter(self))
        shapes: dict[str, dict[int, Any]] = {}
        is_varying = False
        for name, tensor, axes in zip(self.call.names, first, self._sizes, strict=True):
            differing = {axis for axis, sizes in enumerate(axes) if axis and len(sizes) > 1}
            is_varying |= bool(differing)
            has_batch = tensor.dim() > 0 and tensor.shape[0] == first[0].shape[0]
            is_tokens = tensor.dim() == 2 and not tensor.is_floating_point()
            free = differing | ({0} if has_batch else set()) | ({1} if is_tokens else set())
            shapes[name] = dict.fromkeys(sorted(free), Dim.AUTO)
        return shapes if is_varying else None

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


def _described(call: Call) -> str:
    return ", ".join((*call.names, *(f"{name}={value!r}" for name, value in call.constants.items())))


def read_batch(item: Any, signature: CallSignature, what: str = "the batch") -> tuple[Call, Batch]:
    """Return the inputs that a loader gave, on the CPU, and the call that they make.

    A dictionary is read by the names of the parameters, a tuple in their order. Labels are left out: 'label', 'labels',
    and 'target' or 'y' if the model does not take them; and what a tuple holds behind its inputs. Any other tensor
    that the model does not take is an error.

    >>> signature = CallSignature(("x",))
    >>> [tensor.shape for tensor in read_batch((torch.rand(2, 3), torch.tensor([0, 1])), signature)[1]]
    [torch.Size([2, 3])]
    """
    given = _by_name(item, signature, what) if isinstance(item, Mapping) else _by_position(item, signature, what)
    names = [name for name in signature.names if name in given]
    names += [name for name in given if name not in signature.names]  # names from **kwargs
    held, constants = [], {}
    tensors = []
    for name in names:
        value = given[name]
        if isinstance(item, Mapping) and isinstance(value, PLAIN) and name not in signature.required:
            if value is not None:
                constants[name] = value
            continue
        held.append(name)
        tensors.append(_checked(value, name, what))
    return Call(signature, tuple(held), constants), tuple(tensors)


def _by_name(item: Mapping[Any, Any], signature: CallSignature, what: str) -> dict[str, Any]:
    required = signature.required
    ignored = {key for key in LABELS if key not in required and (key not in signature.names or key in _LOSS_LABELS)}
    others = {key: value for key, value in item.items() if key not in ignored}
    is_known = signature.takes_others or any(key in signature.names for key in others)
    if len(required) == len(others) == 1 and not is_known:
        return {required[0]: next(iter(others.values()))}  # whatever its name
    given = {str(key): value for key, value in others.items()}
    missing = [name for name in required if name not in given and name not in signature.defaults]
    strange = [] if signature.takes_others else [name for name in given if name not in signature.names]
    if missing or strange or not given:
        raise InvalidValueError(
            f"{what} has the keys {', '.join(map(str, item))}, and the model has the inputs "
            f"{', '.join(signature.names)}: use the same names and leave out what the model does not take"
            f"{' (' + ', '.join(strange) + ')' if strange else ''}, or pass tuples in the order of the inputs"
        )
    return given


def _by_position(item: Any, signature: CallSignature, what: str) -> dict[str, Any]:
    values = [item]
    if isinstance(item, (list, tuple)):
        values = list(item[0]) if item and isinstance(item[0], (list, tuple)) else list(item)
    required = signature.required
    if len(values) < len(required):
        raise InvalidValueError(
            f"{what} holds {len(values)} tensors, and the model has the inputs {', '.join(required)}: pass tuples in "
            "this order, or dictionaries with these names"
        )
    names = [*required]
    # Optional inputs follow by position, as in model(*batch); a last tensor with fewer than two axes is labels.
    behind = [name for name in signature.by_position if name not in required]
    others = values[len(required) :]
    for number, (name, value) in enumerate(zip(behind, others, strict=False), 1):
        if not isinstance(value, (torch.Tensor, np.ndarray)) or signature.defaults.get(name) is not None:
            break
        if value.ndim < 2 and number == len(others):
            _LOG.warning(
                "%s: its last tensor, of shape %s, counts as labels and is not handed to the input '%s'; if it is that "
                "input, pass dictionaries by name",
                *(what, list(value.shape), name),
            )
            break
        names.append(name)
    return dict(zip(names, values, strict=False))


def _checked(value: Any, name: str, what: str) -> torch.Tensor:
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
    is_finite = torch.isfinite(tensor) | torch.isneginf(tensor) if "mask" in name else torch.isfinite(tensor)
    if tensor.is_floating_point() and not bool(is_finite.all()):
        raise InvalidValueError(f"{what}: input '{name}' holds NaN or Inf; check how the data is prepared")
    return tensor.detach().cpu()

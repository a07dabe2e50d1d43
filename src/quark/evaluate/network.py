"""A model that runs: opened once, given batches of any size, with quark's operators at hand.

A model whose batch size is fixed gets its input in pieces of that size; the last one is filled up by repeating its last
sample, and what comes out for the filling is dropped.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quark.errors import InvalidValueError, ModelError
from quark.onnx.data import InputInfo
from quark.onnx.input_files import held_still
from quark.onnx.load.outline import watch_external_data
from quark.onnx.session import open_session, running

if TYPE_CHECKING:
    import onnxruntime

Array = NDArray[Any]
CPU = ("CPUExecutionProvider",)


class Network:
    """An ONNX model in ONNX Runtime."""

    def __init__(self, model: Path, threads: int | None = None, providers: tuple[str, ...] = CPU) -> None:
        self.path = model
        self.name = model.name
        self._files = watch_external_data(checked_file(model))  # which the runtime maps
        with held_still(self._files):
            self._session: onnxruntime.InferenceSession = open_session(model, threads=threads, providers=providers)
        self.inputs = tuple(_input(each) for each in self._session.get_inputs())
        self.outputs = tuple(each.name for each in self._session.get_outputs())

    @property
    def session(self) -> onnxruntime.InferenceSession:
        """The session itself, for functions that measure a network."""
        return self._session

    @property
    def image_input(self) -> InputInfo:
        """The one input; a model with several takes no images."""
        if len(self.inputs) != 1:
            found = ", ".join(map(str, self.inputs))
            raise ModelError(f"model '{self.path}' takes no images: expected one input, it has {found}")
        return self.inputs[0]

    @property
    def batch_size(self) -> int | None:
        """The only batch size that the model takes; None where it takes any."""
        sizes = {each.batch for each in self.inputs}
        return next(iter(sizes)) if len(sizes) == 1 else None

    def run(self, inputs: dict[str, Array]) -> list[Array]:
        """All outputs for a batch, each with the batch first."""
        count = _count(inputs)
        fixed = self.batch_size
        if fixed is None or fixed == count:
            return self._run(inputs)
        pieces = [self._run(_piece(inputs, start, fixed)) for start in range(0, count, fixed)]
        return [np.concatenate(parts)[:count] for parts in zip(*pieces, strict=True)]

    def scores(self, inputs: dict[str, Array]) -> Array:
        """The first output as [n, classes]."""
        return as_scores(self.run(inputs)[0], self.path)

    def _run(self, inputs: dict[str, Array]) -> list[Array]:
        feeds = {each.name: inputs[each.name].astype(each.dtype, copy=False) for each in self.inputs}
        with held_still(self._files), running(f"model '{self.path}'"):
            return [np.asarray(each) for each in self._session.run(None, feeds)]


def as_scores(output: Array, model: Path) -> Array:
    """An output as [n, classes]; [n, classes, 1, 1] is one, too."""
    scores = output.reshape(len(output), -1) if output.ndim > 1 else output[:, None]
    if scores.shape[1] < 2:
        raise ModelError(f"model '{model}': its first output of shape {list(output.shape)} has no scores of classes")
    return scores


def checked_file(model: Path) -> Path:
    """The path, if a file is there."""
    if model.is_file():
        return model
    if model.is_dir():
        raise InvalidValueError(f"model '{model}': it is a folder; expected the ONNX file inside it")
    if model.exists():
        raise InvalidValueError(f"model '{model}': it is a device or pipe; expected an ONNX file")
    raise InvalidValueError(f"model '{model}': there is no such file; expected an ONNX model")


def _count(inputs: dict[str, Array]) -> int:
    return len(next(iter(inputs.values())))


def _piece(inputs: dict[str, Array], start: int, size: int) -> dict[str, Array]:
    """`size` samples from `start` on, the last one repeated where there are fewer."""
    return {name: array[np.minimum(np.arange(start, start + size), len(array) - 1)] for name, array in inputs.items()}


_TYPES = {"float": "float32", "double": "float64"}


def _input(port: onnxruntime.NodeArg) -> InputInfo:
    shape = tuple(size if isinstance(size, int) and size > 0 else None for size in port.shape)
    name = str(port.type).removeprefix("tensor(").removesuffix(")")
    try:
        dtype = np.dtype(_TYPES.get(name, name))
    except TypeError as error:
        raise ModelError(f"input '{port.name}' has type {port.type}, which is no array of numbers") from error
    return InputInfo(port.name, dtype, shape)

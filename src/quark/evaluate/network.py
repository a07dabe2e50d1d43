"""A model in ONNX Runtime, with quark's operators, for batches of any size.

A model with a fixed batch size gets its input in pieces of that size. The last piece is padded by repeating its last
sample, and the outputs for the padding are dropped.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quark.devices import device_of
from quark.errors import InvalidValueError, ModelError
from quark.onnx.data import InputInfo
from quark.onnx.file_graph import computed_graph
from quark.onnx.input_files import held_still
from quark.onnx.load.reading import watch_external_data
from quark.onnx.load.source import ExternalData, read_source
from quark.onnx.load.wire import carve
from quark.onnx.session import open_session, running

if TYPE_CHECKING:
    import onnxruntime

Array = NDArray[Any]
CPU = ("cpu",)


class Network:
    """An ONNX model in ONNX Runtime, on devices of quark.devices.

    A float model that ONNX Runtime refuses because its layers are of float64 or bfloat16 runs as `quark quantize` reads
    it, in float32; `remark` says so.
    """

    def __init__(self, model: Path, threads: int | None = None, providers: tuple[str, ...] = CPU) -> None:
        self.path = model
        self.device = str(device_of(providers))
        self.name = model.name
        self._files = watch_external_data(checked_file(model))  # the runtime maps them
        with held_still(self._files):
            self._session, self.remark = _opened(model, threads, providers)
        ports = self._session.get_inputs()
        shapeless = _shapeless(model) if any(not port.shape for port in ports) else ()
        self.inputs = tuple(_input(port, port.name not in shapeless) for port in ports)
        self.outputs = tuple(output.name for output in self._session.get_outputs())

    @property
    def session(self) -> onnxruntime.InferenceSession:
        """The session itself, for functions that measure a network."""
        return self._session

    @property
    def image_input(self) -> InputInfo:
        """The only input; a model with several inputs cannot take images."""
        if len(self.inputs) != 1:
            inputs = ", ".join(map(str, self.inputs))
            raise ModelError(
                f"model '{self.path}' takes no images: expected one input, but it has {inputs}; "
                "give a .npz file with an array [n, ...] for each of them"
            )
        return self.inputs[0]

    @property
    def batch_size(self) -> int | None:
        """The fixed batch size of the model, or None if it accepts any."""
        sizes = {input_.batch for input_ in self.inputs}
        return next(iter(sizes)) if len(sizes) == 1 else None

    def run(self, inputs: dict[str, Array]) -> list[Array]:
        """Return all outputs for a batch, each with the batch first."""
        count = len(next(iter(inputs.values())))
        fixed = self.batch_size
        if fixed is None or fixed == count:
            return self._run(inputs)
        pieces = []
        for start in range(0, count, fixed):
            numbers = np.arange(start, start + fixed)
            pieces.append(
                self._run({name: array[np.minimum(numbers, len(array) - 1)] for name, array in inputs.items()})
            )
        return [np.concatenate(parts)[:count] for parts in zip(*pieces, strict=True)]

    def scores(self, inputs: dict[str, Array]) -> Array:
        """Return the first output as [n, classes]."""
        return as_scores(self.run(inputs)[0], self.path)

    def _run(self, inputs: dict[str, Array]) -> list[Array]:
        feeds = {input_.name: inputs[input_.name].astype(input_.dtype, copy=False) for input_ in self.inputs}
        with held_still(self._files), running(f"model '{self.path}'"):
            return [np.asarray(output) for output in self._session.run(None, feeds)]


def _opened(
    model: Path, threads: int | None, providers: tuple[str, ...]
) -> tuple[onnxruntime.InferenceSession, str | None]:
    """A session, and a remark if it does not run the file as it is."""
    try:
        return open_session(model, threads=threads, providers=providers), None
    except ModelError:
        read = read_source(model)
        graph, remarks = computed_graph(read, ExternalData(read))
        if not remarks:
            raise
        said = f"'{model.name}' is run in float32, because ONNX Runtime refuses its layers: {'; '.join(remarks)}"
        return open_session(graph, threads=threads, providers=providers), said


def as_scores(output: Array, model: Path) -> Array:
    """Return an output such as [n, classes, 1, 1] as [n, classes]."""
    scores = output.reshape(len(output), -1) if output.ndim > 1 else output[:, None]
    if scores.shape[1] < 2:
        raise ModelError(f"model '{model}': its first output of shape {list(output.shape)} has no scores of classes")
    return scores


def checked_file(model: Path) -> Path:
    """Return the path if it is a file."""
    if model.is_file():
        return model
    if model.is_dir():
        raise InvalidValueError(f"model '{model}': it is a folder; expected the ONNX file inside it")
    if model.exists():
        raise InvalidValueError(f"model '{model}': it is a device or pipe; expected an ONNX file")
    raise InvalidValueError(f"model '{model}': there is no such file; expected an ONNX model")


_TYPES = {"float": "float32", "double": "float64", "string": "object"}  # numpy holds strings as objects


def _shapeless(model: Path) -> frozenset[str]:
    """The inputs without a shape. ONNX Runtime gives them that of a scalar."""
    inputs = carve(read_source(model)).proto.graph.input
    return frozenset(input_.name for input_ in inputs if not input_.type.tensor_type.HasField("shape"))


def _input(port: onnxruntime.NodeArg, has_shape: bool) -> InputInfo:
    shape = tuple(size if isinstance(size, int) and size > 0 else None for size in port.shape) if has_shape else None
    name = str(port.type).removeprefix("tensor(").removesuffix(")")
    try:
        dtype = np.dtype(_TYPES.get(name, name))
    except TypeError as error:
        raise ModelError(f"input '{port.name}' has type {port.type}, which is not an array of numbers") from error
    return InputInfo(port.name, dtype, shape)

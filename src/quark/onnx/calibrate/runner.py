"""Runs the float model and returns intermediate tensors; and runs any network on two samples at a time.

One session serves calibration and the verdict: its outputs are the model's own and the wanted tensors. Each run asks
for those it needs. The values stay where the runtime wrote them; statistics read them there, without a copy.

Two samples at a time with half of the processors each are faster than one with all of them, because statistics of one
overlap with operators of the other, and small operators do not use many threads well. Hence `workers`.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from quark.errors import InvalidValueError
from quark.onnx.graph import attribute
from quark.onnx.input_files import MappedFile, held_still
from quark.onnx.large_tensors import byte_pieces, mapped_files
from quark.onnx.session import check_computed, open_session, release_memory, run_shared, running

_FLOAT = "tensor(float)"
_RECURRENT = frozenset({"LSTM", "GRU", "RNN", "Scan"})  # Scan: its inputs decide which axes it iterates over

Item = TypeVar("Item")
Result = TypeVar("Result")


def processor_count() -> int:
    """The processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


WORKERS = 2 if processor_count() > 1 else 1  # samples at a time
THREADS = max(1, processor_count() // WORKERS)  # for each of them


def each_in_order(
    function: Callable[[int, Item], Result], items: Iterable[Item], see: Callable[[Result], None]
) -> None:
    """Compute for all items with several workers, and pass the results to `see` in order. No more items are taken from
    the iterable than are being worked on."""
    with ThreadPoolExecutor(WORKERS) as pool:
        pending: list[Future[Result]] = []
        try:
            for index, item in enumerate(items):
                if len(pending) >= WORKERS:
                    see(pending.pop(0).result())
                pending.append(pool.submit(function, index, item))
            while pending:
                see(pending.pop(0).result())
        finally:
            for future in pending:  # after an interrupt, do not wait for work that has not begun
                future.cancel()


class FloatRunner:
    """A context manager that frees the session. `tensors` names what calibration may ask for: any tensors that nodes
    compute, inputs, and constants. The session is created when first needed, so a large model that is never run takes
    no memory. Later changes of the model do not affect it. Without `stays_open`, `rest` frees the session."""

    def __init__(
        self,
        model: ir.Model,
        tensors: Iterable[str] = (),
        *,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        threads: int | None = None,
        stays_open: bool = True,
    ) -> None:
        processors = threads or processor_count()
        self.workers = 2 if processors > 1 else 1
        self._model = model
        self._original: ir.Model | None = None  # the model as it was when it was opened first, to open it again
        self._given = {value.name for value in model.graph.inputs} | set(model.graph.initializers)
        self._own = [value.name or "" for value in model.graph.outputs]
        self._extra = [name for name in tensors if name not in self._given]
        check_computed(model, self._extra)
        self._providers, self._threads = providers, max(1, processors // self.workers)
        self._opening = threading.Lock()
        self._opened: Any = None
        self._files: list[MappedFile] = []  # files that the session may have mapped as well
        self._is_closed = False
        self._stays_open = stays_open

    @property
    def _session(self) -> Any:
        if self._is_closed:
            raise InvalidValueError("this runner is closed")
        with self._opening:
            if self._opened is None:
                model = self._model if self._original is None else self._original
                if not self._stays_open:
                    self._original = model.clone() if self._original is None else self._original
                self._files = mapped_files(model)
                self._opened = open_session(
                    model, extra_outputs=self._extra, providers=self._providers, threads=self._threads
                )
            return self._opened

    @property
    def model(self) -> ir.Model:
        """The model as it is now, which may differ from what runs."""
        return self._model

    def watch(self, tensors: Iterable[str]) -> None:
        """Add tensors that calibration may ask for; a session that lacks them is opened again."""
        new = [name for name in dict.fromkeys(tensors) if name not in self._given and name not in self._extra]
        check_computed(self._model, new)
        if new:
            self.release()
            self._original = None
            self._extra += new

    @property
    def input_shapes(self) -> dict[str, tuple[int | str | None, ...]]:
        return {input_.name: tuple(input_.shape) for input_ in self._session.get_inputs()}

    @property
    def may_have_time_first(self) -> bool:
        """True if a node may read the first axis of a tensor as time."""
        nodes = (node for node in self._model.graph.all_nodes() if node.op_type in _RECURRENT)
        return any(not attribute(node, "layout") for node in nodes)

    def outputs(self, sample: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """The model's own outputs."""
        values = self._run(sample, self._own)
        # copies: a value that lives on keeps all of the session's memory with it
        return {name: np.array(Tensor(value).array) for name, value in zip(self._own, values, strict=True)}

    def outputs_of(self, samples: Iterable[Mapping[str, npt.NDArray[Any]]]) -> list[dict[str, npt.NDArray[Any]]]:
        """The model's own outputs for each sample."""
        outputs: list[dict[str, npt.NDArray[Any]]] = []
        each_in_order(lambda _, sample: self.outputs(sample), samples, outputs.append)
        return outputs

    def tensors(self, sample: Mapping[str, npt.NDArray[Any]], names: Sequence[str]) -> dict[str, Tensor]:
        """The named tensors, in the runtime's memory; they are freed with the result."""
        computed = [name for name in names if name not in self._given]
        values = self._run(sample, computed) if computed else []
        tensors = {name: Tensor(value) for name, value in zip(computed, values, strict=True)}
        return {name: tensors[name] if name in tensors else Tensor(self._fed(sample, name)) for name in names}

    def _fed(self, sample: Mapping[str, npt.NDArray[Any]], name: str) -> npt.NDArray[Any]:
        """The value for a graph input: the sample's, or the input's own default; or the value of a constant."""
        default = self._model.graph.initializers.get(name)
        if name in sample or default is None or default.const_value is None:
            return sample[name]
        return np.asarray(default.const_value.numpy())

    def _run(self, sample: Mapping[str, npt.NDArray[Any]], names: Sequence[str]) -> list[Any]:
        session = self._session
        with held_still(self._files), running("the float model"):
            return run_shared(session, names, sample)

    def nonfinite_weight(self) -> str | None:
        """The name of a weight with NaN or Inf, the likely cause of such activations; None if there is none."""
        for name, value in self._model.graph.initializers.items():
            tensor = value.const_value
            if tensor is not None and tensor.dtype.is_floating_point() and not np.isfinite(tensor.numpy()).all():
                return name
        return None

    def model_digest(self) -> str:
        """A hash of the model with its weights."""
        state = hashlib.sha256()
        for name, value in self._model.graph.initializers.items():
            if value.const_value is not None:
                state.update(f"{name}:{value.const_value.dtype}:{value.const_value.shape};".encode())
                for piece in byte_pieces(value.const_value):
                    state.update(piece)
        for node in self._model.graph:
            state.update(str(node).encode())
        return state.hexdigest()

    def release(self) -> None:
        """Free the session's memory, which is as large as all tensors together; the next run creates a new session."""
        with self._opening:
            self._opened = None
        release_memory()

    def rest(self) -> None:
        """Say that the next run is some time away: memory is freed unless the runner stays open."""
        if not self._stays_open:
            self.release()

    def close(self) -> None:
        """Free the session and its memory."""
        self._opened, self._original, self._is_closed = None, None, True
        release_memory()

    def __enter__(self) -> FloatRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Tensor:
    """A value of the runtime, or an array of the sample, as a numpy array that shares its memory."""

    def __init__(self, value: Any) -> None:
        self._value = value

    @property
    def array(self) -> npt.NDArray[Any]:
        """The values; the array keeps the memory alive, even without this object."""
        value = self._value
        if isinstance(value, np.ndarray):
            return value
        is_shared = value.data_type() == _FLOAT and value.device_name().lower() == "cpu"
        size = math.prod(value.shape()) if is_shared else 0
        if not size:
            return np.asarray(value.numpy())
        memory = (ctypes.c_float * size).from_address(value.data_ptr())
        memory.owner = value  # type: ignore[attr-defined] # an array of it refers to this object, and so to the value
        flat: npt.NDArray[Any] = np.ctypeslib.as_array(memory)
        shaped: npt.NDArray[Any] = flat.reshape(value.shape())
        return shaped

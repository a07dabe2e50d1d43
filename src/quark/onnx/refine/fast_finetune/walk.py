"""A network that is computed for all samples piece by piece, so that each piece is computed about once.

    walk.visit(tensors, see)      compute these tensors for every sample, from what is remembered
    walk.advance(done, to_come)   remember what the rest of the network needs of the part that is done, and no more

What is remembered are tensors between two layers: beyond a limit they go to a temporary file. A piece is a model of its
own that ONNX Runtime computes, with what is remembered as its inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from quark.onnx.piece import piece, read_by
from quark.onnx.session import open_session, release_memory

Array = NDArray[Any]
See = Callable[[int, Mapping[str, Array]], None]


class Walk:
    """`samples` are the model's inputs. `make_store` gives an empty store of samples (append, [], len, close)."""

    def __init__(
        self,
        model: ir.Model,
        samples: Any,
        make_store: Callable[[], Any],
        *,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        workers: int = 2,
        threads: int = 1,
    ) -> None:
        self.model = model
        self._samples: Any = samples
        given = model.graph.initializers  # an input that has one need not be fed
        self._names = [str(value.name) for value in model.graph.inputs if value.name not in given]
        computed = [value for node in model.graph for value in node.outputs]
        self._values = {str(value.name): value for value in (*model.graph.inputs, *computed)}
        self._make_store = make_store
        self._is_own = False
        self._providers, self._workers, self._threads = providers, workers, threads

    def visit(self, tensors: Sequence[str], see: See) -> None:
        """Compute the tensors for every sample; `see` gets the number of the sample and the values, from several
        threads. Tensors that are remembered are handed on as they are."""
        known = [name for name in tensors if name in self._names]
        computed = [name for name in tensors if name not in self._names]
        session = None if not computed else self._open(computed)

        def one(index: int) -> None:
            sample = self._samples[index]
            values = {name: sample[name] for name in known}
            if session is not None:
                wanted = {each.name for each in session.get_inputs()}
                feeds = {name: array for name, array in sample.items() if name in wanted}
                values |= dict(zip(computed, session.run(computed, feeds), strict=True))
            see(index, values)

        pool = ThreadPoolExecutor(self._workers)
        try:
            for _ in pool.map(one, range(len(self._samples))):
                pass
        finally:
            pool.shutdown(cancel_futures=True)  # who interrupts does not wait for what has not begun

    def advance(self, done: Iterable[str], to_come: Iterable[str]) -> None:
        """Nodes by name: those whose results are final, and those that are yet to be looked at."""
        live = self.live(done, to_come)
        if set(live) == set(self._names):
            return
        store = self._make_store()
        pending: dict[int, dict[str, Array]] = {}
        lock = threading.Lock()

        def see(index: int, values: Mapping[str, Array]) -> None:
            with lock:  # in the order of the samples, whoever is computed first
                pending[index] = dict(values)
                while len(store) in pending:
                    store.append(pending.pop(len(store)))

        try:
            self.visit(live, see)
        except BaseException:
            store.close()
            raise
        self.close()
        self._samples, self._names, self._is_own = store, live, True
        release_memory()

    def live(self, done: Iterable[str], to_come: Iterable[str]) -> list[str]:
        """The tensors that the part to come reads of the part that is done, or of what is remembered."""
        finished = self._before(done)
        rest = self._before(to_come) - finished
        available = {id(value) for node in finished for value in node.outputs}
        found: dict[str, None] = {}
        for node in self.model.graph:
            if node not in rest:
                continue
            for value in read_by(node):
                if id(value) in available or value.name in self._names:
                    found[str(value.name)] = None
        return list(found)

    def value(self, name: str) -> ir.Value | None:
        """The tensor of that name."""
        return self._values.get(name)

    def close(self) -> None:
        if self._is_own:
            self._samples.close()

    def _before(self, names: Iterable[str]) -> set[ir.Node]:
        """These nodes, and all that they are computed from, back to what is remembered."""
        wanted = set(names)
        pending = [node for node in self.model.graph if node.name in wanted]
        found: set[ir.Node] = set()
        while pending:
            node = pending.pop()
            if node in found:
                continue
            found.add(node)
            for value in read_by(node):
                producer = value.producer()
                if producer is not None and value.name not in self._names:
                    pending.append(producer)
        return found

    def _open(self, outputs: Sequence[str]) -> Any:
        part = piece(self.model, self._names, outputs)
        for value in part.graph.inputs:
            if value.type is None and len(self._samples):  # inference does not find every type
                value.dtype = ir.DataType.from_numpy(self._samples[0][str(value.name)].dtype)
        return open_session(
            part,
            providers=self._providers,
            threads=self._threads,
            has_integer_kernels=False,
        )

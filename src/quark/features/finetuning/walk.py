"""Networks computed for all samples piece by piece, so that each piece is computed about once, and rows of a layer.

    walk.visit(tensors, see)      compute these tensors for all samples, from what is remembered
    walk.advance(done, to_come)   remember what the rest of the network needs of the part that is done, and no more

What is remembered are tensors between two layers: beyond a limit they go to a temporary file. A piece is a model of its
own that ONNX Runtime computes, with what is remembered as its inputs. `stages` says where to stop to remember. On a GPU
that also trains, torch computes the pieces, and all of it stays there (device_walk.py).

A layer is fitted to rows of what the quantized network hands it, and what the float network computes there, which
`Gatherer` finds. Every eighth sample is held out from training; of a lone sample, every eighth row. Rows of training
samples are shuffled while they are gathered, so that any neighbours make a batch.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.devices import Device
from quark.features.finetuning.layers import TrainedLayer, placed
from quark.features.finetuning.options import FinetuneOptions
from quark.features.finetuning.problem import Rows
from quark.onnx.graph import constant, dimensions, input_value, piece, read_by, set_constant
from quark.onnx.insert import InsertOptions, insert
from quark.onnx.session import open_session, release_memory
from quark.plan import DynamicChoice, QuantizationPlan, Role
from quark.rounded import rounded

Array = NDArray[Any]
See = Callable[[range, Mapping[str, Any]], None]  # values of these samples, joined along the first axis

LONGEST = 6  # layers of a stage
_PLAIN = frozenset(map(ir.DataType.from_numpy, map(np.dtype, ("?", *"bhiqBHIQefd"))))  # types of numpy
LITTLE_MEMORY = 256 << 20  # if a walk takes less, it stops between any two layers, so that it computes nothing twice
HELD_OUT_EVERY = 8


class Walk:
    """`samples` are the model's inputs. `make_store` gives an empty SampleStore."""

    def __init__(
        self,
        model: ir.Model,
        samples: Any,
        make_store: Callable[[], Any],
        *,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        workers: int = 2,
        threads: int = 1,
        little: int = LITTLE_MEMORY,
    ) -> None:
        self.model = model
        self._samples: Any = samples
        given = model.graph.initializers  # an input that has one need not be fed
        self._names = [str(value.name) for value in model.graph.inputs if value.name not in given]
        self._nodes = list(model.graph)
        self._read = {node: list(read_by(node)) for node in self._nodes}
        computed = [value for node in self._nodes for value in node.outputs]
        self._values = {str(value.name): value for value in (*model.graph.inputs, *computed)}
        self._make_store = make_store
        self._is_own = False
        self._pool: ThreadPoolExecutor | None = None
        self._runs: list[Future[None]] = []
        self._providers, self._workers, self._threads = providers, workers, threads
        self._little = little

    def visit(self, tensors: Sequence[str], see: See) -> None:
        """Compute the tensors for all samples; `see` gets numbers of samples and their values, from several threads.
        Tensors that are remembered are handed on as they are."""
        known = [name for name in tensors if name in self._names]
        computed = [name for name in tensors if name not in self._names]
        session: Any = None
        wanted: set[str] = set()
        if computed:
            session = self._session(computed)
            wanted = {input_.name for input_ in session.get_inputs()}

        def run_sample(index: int) -> None:
            sample = self._samples[index]
            values = {name: sample[name] for name in known}
            if session is not None:
                feeds = {name: array for name, array in sample.items() if name in wanted}
                values |= dict(zip(computed, session.run(computed, feeds), strict=True))
            see(range(index, index + 1), values)

        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers)
        self._runs = [self._pool.submit(run_sample, index) for index in range(len(self._samples))]
        try:
            for run in self._runs:
                run.result()
        finally:  # after an interruption, do not wait for work that has not begun
            self.cancel()
            wait(self._runs)

    def cancel(self) -> None:
        """End the visit that another thread is at."""
        for run in self._runs:
            run.cancel()

    def _session(self, computed: Sequence[str]) -> Any:
        """A session that computes these tensors from what is remembered."""
        part = piece(self.model, self._names, computed)
        for value in part.graph.inputs:
            if value.type is None and len(self._samples):  # inference does not find every type
                value.dtype = ir.DataType.from_numpy(self._samples[0][str(value.name)].dtype)
        return open_session(part, providers=self._providers, threads=self._threads, has_integer_kernels=False)

    def store(self, tensors: Sequence[str], store: Any, others: Sequence[str] = (), see: See | None = None) -> None:
        """Compute the tensors for every sample, and append them to the store in the order of the samples. `see` gets
        them as well, and others with them."""
        pending: dict[int, dict[str, Array]] = {}
        lock = threading.Lock()

        def keep(samples: range, values: Mapping[str, Any]) -> None:
            with lock:
                pending.update(split(samples, {name: values[name] for name in tensors}))
                while len(store) in pending:
                    store.append(pending.pop(len(store)), is_own=True)
            if see is not None:
                see(samples, values)

        self.visit(list(dict.fromkeys([*tensors, *others])), keep)

    def advance(
        self, done: Iterable[str], to_come: Iterable[str], tensors: Sequence[str] = (), see: See | None = None
    ) -> None:
        """Go on from nodes, by name, whose results are final, to those that are yet to be looked at; on the way, `see`
        gets other tensors."""
        live = self.live(done, to_come)
        if set(live) == set(self._names):
            if see is not None:
                self.visit(tensors, see)
            return
        store = self._remembered(live, tensors, see)
        was_little = self._needs(self._names) <= self._little
        self._forget()
        self._samples, self._names, self._is_own = store, live, True
        if not was_little:
            release_memory()

    def is_little(self, done: Iterable[str], to_come: Iterable[str]) -> bool:
        """True if what `advance` would remember takes little memory, so that advancing pays behind every layer. False
        for codes of small floats, for example: ONNX Runtime does not hand them out as arrays."""
        live = self.live(done, to_come)
        values = [self.value(name) for name in live]
        return (
            all(value is not None and value.dtype in _PLAIN for value in values) and self._needs(live) <= self._little
        )

    def _needs(self, tensors: Iterable[str]) -> int:
        """The bytes of tensors of all samples."""
        return 4 * len(self._samples) * sum(numbers_of(self.value(name)) for name in tensors)

    def _remembered(self, tensors: Sequence[str], others: Sequence[str] = (), see: See | None = None) -> Any:
        """A store of the tensors for every sample; `see` gets others."""
        store = self._make_store()
        try:
            self.store(tensors, store, others, see)
        except BaseException:
            store.close()
            raise
        return store

    def live(self, done: Iterable[str], to_come: Iterable[str]) -> list[str]:
        """The tensors that the part to come reads of the part that is done, or of what is remembered."""
        finished = self._before(done)
        rest = self._before(to_come) - finished
        available = {id(value) for node in finished for value in node.outputs}
        alive: dict[str, None] = {}
        for node in (node for node in self._nodes if node in rest):
            for value in self._read[node]:
                if id(value) in available or value.name in self._names:
                    alive[str(value.name)] = None
        return list(alive)

    def value(self, name: str) -> ir.Value | None:
        """The tensor of that name."""
        return self._values.get(name)

    def empty(self, count: int) -> Any:
        """Room for numbers of what is visited, where they are."""
        return np.empty(count, np.float32)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._forget()

    def _forget(self) -> None:
        """Close what is remembered."""
        if self._is_own:
            self._samples.close()

    def _before(self, names: Iterable[str]) -> set[ir.Node]:
        """These nodes, and all that they are computed from, back to what is remembered."""
        wanted = set(names)
        pending = [node for node in self._nodes if node.name in wanted]
        nodes: set[ir.Node] = set()
        while pending:
            node = pending.pop()
            if node in nodes:
                continue
            nodes.add(node)
            for value in self._read[node]:
                producer = value.producer()
                if producer is not None and value.name not in self._names:
                    pending.append(producer)
        return nodes


def split(samples: range, values: Mapping[str, Any]) -> dict[int, dict[str, Array]]:
    """The values of each sample as arrays, from those of several that are joined along the first axis."""
    arrays = {name: value if isinstance(value, np.ndarray) else value.cpu().numpy() for name, value in values.items()}
    if len(samples) == 1:
        return {samples[0]: arrays}
    parts = {name: np.split(array, len(samples)) for name, array in arrays.items()}
    return {number: {name: part[index] for name, part in parts.items()} for index, number in enumerate(samples)}


def numbers_of(value: ir.Value | None) -> int:
    """The number of elements of a tensor for one sample; unknown dimensions count as 1."""
    return math.prod(size or 1 for size in dimensions(value) or ())


def stages(walk: Walk, layers: Sequence[TrainedLayer]) -> Iterator[list[TrainedLayer]]:
    """Cut the layers, in order, behind the one, among the next few, where the least has to be remembered; the last of
    equal ones, since remembering costs as well."""

    def remembered(end: int) -> int:
        """The numbers of a sample that the layers from `end` on need of what is before."""
        if end == len(layers):
            return 0
        live = walk.live([layer.name for layer in layers[:end]], [layer.name for layer in layers[end:]])
        return sum(numbers_of(walk.value(name)) for name in live)

    start = 0
    while start < len(layers):
        ends = range(start + 1, min(start + LONGEST, len(layers)) + 1)
        sizes = {end: remembered(end) for end in ends}
        end = min(ends, key=lambda end: (sizes[end], -end))
        yield list(layers[start:end])
        start = end


@dataclass(frozen=True, eq=False)
class Targets:
    """For each sample the positions that were chosen, among how many; for samples together, [rows, outputs], what the
    float network computes there."""

    picks: list[Array]
    positions: list[int]
    values: dict[range, Any]

    def joined(self, samples: range) -> Array:
        """The positions that were chosen of several samples, counted from the first on."""
        starts = np.cumsum([0, *(self.positions[number] for number in samples)])
        return np.concatenate([start + self.picks[number] for start, number in zip(starts, samples, strict=False)])


class Gatherer:
    """`place` numbers a layer among all, and with the seed decides which rows are chosen and how they are shuffled."""

    def __init__(self, float_walk: Walk, quantized_walk: Walk, count: int, options: FinetuneOptions) -> None:
        self._float, self._quantized = float_walk, quantized_walk
        self._count, self._options = count, options
        self._rooms: dict[str, Any] = {}

    def targets(
        self,
        stage: Mapping[int, TrainedLayer],
        outputs: Mapping[str, str],
        onwards: tuple[Sequence[str], Sequence[str]] | None = None,
    ) -> dict[str, Targets]:
        """The targets of all layers of a stage; `outputs` are their tensors in the float network, by layer. With
        `onwards`, the layers that are then done and those to come, its walk goes on behind the stage."""
        seed, nothing = self._options.fit.seed, [np.zeros(0)] * self._count
        targets = {layer.name: Targets(nothing.copy(), [0] * self._count, {}) for layer in stage.values()}

        def see(samples: range, values: Mapping[str, Any]) -> None:
            for place, layer in stage.items():
                y, chosen = values[outputs[layer.name]], targets[layer.name]
                count = layer.source.count(tuple(y.shape)) // len(samples)
                wanted = self._options.rows_per_sample(layer.row_numbers, self._count)
                for number in samples:
                    chosen.positions[number] = count
                    chosen.picks[number] = np.arange(count)
                    if count > wanted:
                        generator = np.random.default_rng([seed, place, number])
                        chosen.picks[number] = np.sort(generator.choice(count, wanted, replace=False))
                chosen.values[samples] = layer.source.outputs(y, chosen.joined(samples))

        tensors = list(dict.fromkeys(outputs[layer.name] for layer in stage.values()))
        if onwards is None:
            self._float.visit(tensors, see)
        else:
            self._float.advance(*onwards, tensors, see)
        return targets

    def rows(self, layer: TrainedLayer, place: int, targets: Targets, seen: str, exact: str) -> tuple[Rows, Rows]:
        """The rows to train on, and those held out. The layer reads `seen` in the quantized network, and `exact` in the
        float one."""
        split = _Split(targets, np.random.default_rng([self._options.fit.seed, place]))
        quantized = self._gathered(self._quantized, seen, layer, targets, split)
        floats = None
        if self._options.fit.drop_ratio < 1:
            floats = self._gathered(self._float, exact, layer, targets, split)
        wanted = self._room(self._float, "targets", (split.count, layer.output_numbers))
        for samples, values in targets.values.items():
            wanted[placed(split.places(samples), wanted)] = placed(values, wanted)
        return tuple(  # type: ignore[return-value]
            Rows(quantized[part], wanted[part], None if floats is None else floats[part]) for part in split.parts
        )

    def _gathered(self, walk: Walk, tensor: str, layer: TrainedLayer, targets: Targets, split: _Split) -> Any:
        """The rows of all samples in their places, [rows, groups, length]."""
        name = "inputs" if walk is self._quantized else "float inputs"
        rows = layer.source.rows(self._room(walk, name, (split.count, layer.row_numbers)), layer.layout)

        def see(samples: range, values: Mapping[str, Any]) -> None:
            layer.source.write_inputs(values[tensor], targets.joined(samples), split.places(samples), rows)

        walk.visit([tensor], see)
        return rows

    def _room(self, walk: Walk, name: str, shape: tuple[int, int]) -> Any:
        """Memory for the rows of one layer, which those of the next one take: fresh pages cost more than the rows."""
        size = math.prod(shape)
        if name not in self._rooms or math.prod(self._rooms[name].shape) < size:
            self._rooms[name] = walk.empty(size)
        return self._rooms[name][:size].reshape(shape)


class _Split:
    """The positions of each sample's rows: first those for training, then the held-out ones."""

    def __init__(self, targets: Targets, generator: np.random.Generator) -> None:
        sizes = [len(pick) for pick in targets.picks]
        held = held_out(len(sizes))
        is_held = [np.full(size, index in held) for index, size in enumerate(sizes)]
        if len(sizes) == 1:
            every = min(sizes[0], HELD_OUT_EVERY)
            is_held = [np.arange(sizes[0]) % every == every - 1]
        flat = np.concatenate(is_held)
        self.count = len(flat)
        self._starts = np.cumsum([0, *sizes])
        trained = int((~flat).sum())
        self.parts = slice(0, trained), slice(trained, len(flat))
        self._places = np.empty(len(flat), np.int64)
        self._places[~flat] = generator.permutation(trained)
        self._places[flat] = np.arange(trained, len(flat))

    def places(self, samples: range) -> Array:
        """The places of the rows of samples."""
        return self._places[self._starts[samples[0]] : self._starts[samples[-1] + 1]]


def shares_memory(options: FinetuneOptions) -> bool:
    """True if ONNX Runtime computes on the GPU that torch trains on."""
    device = Device.parse(options.infer_device)
    return device.kind == "cuda" and str(device) == options.fit.device


def held_out(count: int) -> frozenset[int]:
    """The samples that are not trained on."""
    chosen = [index for index in range(count) if index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    return frozenset(chosen or [count - 1])


def are_enough(picks: Sequence[Array]) -> bool:
    """True if there is a row to train on and one to hold out."""
    return sum(len(pick) for pick in picks) > 1


def quantized_copy(model: ir.Model, plan: QuantizationPlan) -> ir.Model:
    """A network that computes what the quantized one does, with constants that can still change: activations have their
    quantizers, weights and biases are plain numbers, rounded. What is quantized at run time stays float."""
    copy = model.clone()
    activations = (entry for entry in plan if entry.role is Role.ACTIVATION)
    known = tuple(activation for activation in activations if not isinstance(activation.choice, DynamicChoice))
    insert(copy, QuantizationPlan(known), InsertOptions())
    return with_rounded_constants(copy, plan)


def with_rounded_constants(model: ir.Model, plan: QuantizationPlan) -> ir.Model:
    """The model with every constant that the plan quantizes rounded in place."""
    nodes = {str(node.name): node for node in model.graph}
    for entry in plan:
        if isinstance(entry.choice, DynamicChoice):
            continue
        for reader in entry.readers:
            node = nodes.get(reader.node)
            values = None if node is None else constant(input_value(node, reader.index))
            if node is not None and values is not None:
                set_constant(model, node, reader.index, rounded(values, entry.choice).astype(values.dtype))
    return model

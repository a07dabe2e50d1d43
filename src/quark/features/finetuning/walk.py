"""Networks computed for all samples piece by piece, so that each piece is computed about once, and rows of a layer.

    walk.visit(tensors, see)      compute these tensors for all samples, from what is remembered
    walk.advance(done, to_come)   remember what the rest of the network needs of the part that is done, and no more

What is remembered are tensors between two layers: beyond a limit they go to a temporary file. A piece is a model of its
own that ONNX Runtime computes, with what is remembered as its inputs. `stages` says where to stop to remember. On a GPU
that also trains, all of it stays there (device_walk.py).

A layer is fitted to rows of what the quantized network hands it, and what the float network computes there, which
`Gatherer` finds. Every eighth sample is held out from training; of a lone sample, every eighth row. Rows of training
samples are shuffled while they are gathered, so that any neighbours make a batch.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
HELD_OUT_EVERY = 8


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
        """Compute the tensors for all samples; `see` gets numbers of samples and their values, from several threads.
        Tensors that are remembered are handed on as they are."""
        known = [name for name in tensors if name in self._names]
        computed = [name for name in tensors if name not in self._names]
        session: Any = None
        if computed:
            session = self._session(computed)

        def one(index: int) -> None:
            sample = self._samples[index]
            values = {name: sample[name] for name in known}
            if session is not None:
                wanted = {each.name for each in session.get_inputs()}
                feeds = {name: array for name, array in sample.items() if name in wanted}
                values |= dict(zip(computed, session.run(computed, feeds), strict=True))
            see(range(index, index + 1), values)

        pool = ThreadPoolExecutor(self._workers)
        try:
            for _ in pool.map(one, range(len(self._samples))):
                pass
        finally:
            pool.shutdown(cancel_futures=True)  # who interrupts does not wait for what has not begun

    def _session(self, computed: Sequence[str]) -> Any:
        """A session that computes these tensors from what is remembered."""
        part = piece(self.model, self._names, computed)
        for value in part.graph.inputs:
            if value.type is None and len(self._samples):  # inference does not find every type
                value.dtype = ir.DataType.from_numpy(self._samples[0][str(value.name)].dtype)
        return open_session(part, providers=self._providers, threads=self._threads, has_integer_kernels=False)

    def store(self, tensors: Sequence[str], store: Any) -> None:
        """Compute the tensors for every sample, and append them to the store in the order of the samples."""
        pending: dict[int, dict[str, Array]] = {}
        lock = threading.Lock()

        def see(samples: range, values: Mapping[str, Any]) -> None:
            with lock:
                pending.update(split(samples, values))
                while len(store) in pending:
                    store.append(pending.pop(len(store)))

        self.visit(tensors, see)

    def advance(self, done: Iterable[str], to_come: Iterable[str]) -> None:
        """Go on from nodes, by name, whose results are final, to those that are yet to be looked at."""
        live = self.live(done, to_come)
        if set(live) == set(self._names):
            return
        store = self._remembered(live)
        self.close()
        self._samples, self._names, self._is_own = store, live, True
        release_memory()

    def _remembered(self, tensors: Sequence[str]) -> Any:
        """A store of the tensors for every sample."""
        store = self._make_store()
        try:
            self.store(tensors, store)
        except BaseException:
            store.close()
            raise
        return store

    def live(self, done: Iterable[str], to_come: Iterable[str]) -> list[str]:
        """The tensors that the part to come reads of the part that is done, or of what is remembered."""
        finished = self._before(done)
        rest = self._before(to_come) - finished
        available = {id(value) for node in finished for value in node.outputs}
        found: dict[str, None] = {}
        for node in (each for each in self.model.graph if each in rest):
            for value in read_by(node):
                if id(value) in available or value.name in self._names:
                    found[str(value.name)] = None
        return list(found)

    def value(self, name: str) -> ir.Value | None:
        """The tensor of that name."""
        return self._values.get(name)

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """Room for numbers of what is visited, where they are."""
        return np.zeros(shape, np.float32)

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


def split(samples: range, values: Mapping[str, Any]) -> dict[int, dict[str, Array]]:
    """The values of each sample as arrays, from those of several that are joined along the first axis."""
    arrays = {name: value if isinstance(value, np.ndarray) else value.cpu().numpy() for name, value in values.items()}
    if len(samples) == 1:
        return {samples[0]: arrays}
    parts = {name: np.split(array, len(samples)) for name, array in arrays.items()}
    return {number: {name: each[index] for name, each in parts.items()} for index, number in enumerate(samples)}


def numbers_of(value: ir.Value | None) -> int:
    """How many numbers a tensor has for one sample; dimensions that are not known count as 1."""
    return math.prod(size or 1 for size in dimensions(value) or ())


def stages(walk: Walk, layers: Sequence[TrainedLayer]) -> Iterator[list[TrainedLayer]]:
    """Cut the layers, in order, behind the one, among the next few, where the least has to be remembered; the last of
    equal ones, since remembering costs as well."""

    def remembered(end: int) -> int:
        """The numbers of a sample that the layers from `end` on need of what is before."""
        if end == len(layers):
            return 0
        live = walk.live([each.name for each in layers[:end]], [each.name for each in layers[end:]])
        return sum(numbers_of(walk.value(name)) for name in live)

    start = 0
    while start < len(layers):
        ends = range(start + 1, min(start + LONGEST, len(layers)) + 1)
        sizes = {end: remembered(end) for end in ends}
        end = min(ends, key=lambda each: (sizes[each], -each))
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

    def targets(self, stage: Mapping[int, TrainedLayer], outputs: Mapping[str, str]) -> dict[str, Targets]:
        """The targets of all layers of a stage; `outputs` are their tensors in the float network, by layer."""
        seed, nothing = self._options.fit.seed, [np.zeros(0)] * self._count
        found = {each.name: Targets(nothing.copy(), [0] * self._count, {}) for each in stage.values()}

        def see(samples: range, values: Mapping[str, Any]) -> None:
            for place, layer in stage.items():
                y, chosen = values[outputs[layer.name]], found[layer.name]
                count = layer.source.count(tuple(y.shape)) // len(samples)
                wanted = self._options.rows_per_sample(layer.row_numbers, self._count)
                for number in samples:
                    chosen.positions[number] = count
                    chosen.picks[number] = np.arange(count)
                    if count > wanted:
                        generator = np.random.default_rng([seed, place, number])
                        chosen.picks[number] = np.sort(generator.choice(count, wanted, replace=False))
                chosen.values[samples] = layer.source.outputs(y, chosen.joined(samples))

        self._float.visit(list(dict.fromkeys(outputs[each.name] for each in stage.values())), see)
        return found

    def rows(self, layer: TrainedLayer, place: int, targets: Targets, seen: str, exact: str) -> tuple[Rows, Rows]:
        """The rows to train on, and those held out. The layer reads `seen` in the quantized network, and `exact` in the
        float one."""
        split = _Split(layer, targets, np.random.default_rng([self._options.fit.seed, place]))
        quantized = self._gathered(self._quantized, seen, layer, targets, split)
        floats = None
        if self._options.fit.drop_ratio < 1:
            floats = self._gathered(self._float, exact, layer, targets, split)
        wanted = split.empty(self._float, layer.output_numbers)
        for samples, values in targets.values.items():
            split.put(wanted, samples, values[:, None])
        return tuple(  # type: ignore[return-value]
            Rows(
                quantized[part].swapaxes(0, 1),
                wanted[part][0],
                None if floats is None else floats[part].swapaxes(0, 1),
            )
            for part in (0, 1)
        )

    def _gathered(
        self, walk: Walk, tensor: str, layer: TrainedLayer, targets: Targets, split: _Split
    ) -> tuple[Any, Any]:
        groups, _, length = layer.layout.matrices
        buffers = split.empty(walk, length, groups)

        def see(samples: range, values: Mapping[str, Any]) -> None:
            split.put(buffers, samples, layer.source.inputs(values[tensor], targets.joined(samples)))

        walk.visit([tensor], see)
        return buffers


class _Split:
    """Where the rows of each sample go: part 0 is trained on, part 1 held out."""

    def __init__(self, layer: TrainedLayer, targets: Targets, generator: np.random.Generator) -> None:
        sizes = [len(each) for each in targets.picks]
        held = held_out(len(sizes))
        is_held = [np.full(size, index in held) for index, size in enumerate(sizes)]
        if len(sizes) == 1:
            every = min(sizes[0], HELD_OUT_EVERY)
            is_held = [np.arange(sizes[0]) % every == every - 1]
        flat = np.concatenate(is_held)
        self._starts = np.cumsum([0, *sizes])
        self._is_held = flat
        self._counts = (int((~flat).sum()), int(flat.sum()))
        self._places = np.empty(len(flat), np.int64)
        self._places[~flat] = generator.permutation(self._counts[0])
        self._places[flat] = np.arange(self._counts[1])

    def empty(self, walk: Walk, length: int, groups: int = 1) -> tuple[Any, Any]:
        """Room for the rows of both parts, [groups, rows, length]."""
        first, second = (walk.zeros((groups, count, length)) for count in self._counts)
        return first, second

    def put(self, buffers: tuple[Any, Any], samples: range, rows: Any) -> None:
        """Write the rows of samples, [rows, groups, length], to their places."""
        span = slice(self._starts[samples[0]], self._starts[samples[-1] + 1])
        is_held, places = self._is_held[span], self._places[span]
        for buffer, chosen in zip(buffers, (~is_held, is_held), strict=True):
            given = placed(rows, buffer)
            if not chosen.all():  # whole samples are held out: most often there is nothing to copy first
                given = given[placed(np.flatnonzero(chosen), given)]
            if chosen.any():
                buffer.swapaxes(0, 1)[placed(places[chosen], buffer)] = given


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
    return sum(len(each) for each in picks) > 1


def quantized_copy(model: ir.Model, plan: QuantizationPlan) -> ir.Model:
    """A network that computes what the quantized one does, with constants that can still change: activations have their
    quantizers, weights and biases are plain numbers, rounded. What is quantized at run time stays float."""
    copy = model.clone()
    known = tuple(each for each in plan if not isinstance(each.choice, DynamicChoice))
    insert(copy, QuantizationPlan(tuple(each for each in known if each.role is Role.ACTIVATION)), InsertOptions())
    nodes = {str(node.name): node for node in copy.graph}
    for each in known:
        for reader in each.readers:
            node = nodes.get(reader.node)
            values = None if node is None else constant(input_value(node, reader.index))
            if node is not None and values is not None:
                set_constant(copy, node, reader.index, rounded(values, each.choice).astype(values.dtype))
    return copy

"""A walk whose tensors stay on the device that trains, with many samples in a run.

Copying activations to the processor and back, and starting a network of one sample a thousand times, would take most of
the time of finetuning on a GPU. Here ONNX Runtime reads and writes memory of torch, and samples are joined along their
first axis. Not every network takes that: some samples are computed alone as well, and if the results differ, or the
network refuses the joined samples, the walk goes on one by one. Tensors that would take too much of the device's memory
are remembered elsewhere, as without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from quark.errors import ModelError
from quark.features.finetuning.walk import See, Walk, numbers_of
from quark.onnx.graph import piece
from quark.onnx.session import open_session, running
from quark.text import get_logger

Array = NDArray[Any]
_LOG = get_logger(__name__)
TOGETHER = 64  # samples of a run at most
FEWEST_TOGETHER = 32  # rather than this few, the last run has fewer samples than the others
MOST_MEMORY = 0.3  # of what is free on the device, for what one walk remembers
MOST_ERROR = 1e-3  # of the squares: rounding to another code now and then, not another function


class DeviceWalk(Walk):
    """A walk on the device that trains."""

    def __init__(
        self,
        model: ir.Model,
        samples: Any,
        make_store: Callable[[], Any],
        *,
        device: str | torch.device,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        workers: int = 2,
        threads: int = 1,
        little: int = 0,
    ) -> None:
        super().__init__(
            model, samples, make_store, providers=providers, workers=workers, threads=threads, little=little
        )
        self._device = torch.device(device)
        count = len(samples)
        size = together(count)
        self._groups = [range(start, min(start + size, count)) for start in range(0, count, size)]
        self._is_joined = can_be_joined(samples)

    def visit(self, tensors: Sequence[str], see: See) -> None:
        if not self._is_visited(tensors, see):
            super().visit(tensors, see)

    def is_little(self, done: Iterable[str], to_come: Iterable[str]) -> bool:
        return False  # sessions on a device take long to open, and it computes fast

    def _is_visited(self, tensors: Sequence[str], see: See) -> bool:
        """True if the tensors were computed for groups of samples. If not, nothing was seen, and none ever will be."""
        reason = self._visit_joined(tensors, see) if self._is_joined else ""
        if reason:
            _LOG.info("finetuning: samples are computed one by one, since %s", reason)
            self._is_joined = False
        return reason is None

    def _visit_joined(self, tensors: Sequence[str], see: See) -> str | None:
        """Compute the tensors for groups of samples; why not, if they cannot be joined. Then nothing was seen."""
        known = [name for name in tensors if name in self._names]
        computed = [name for name in tensors if name not in self._names]
        if not computed:
            for number, group in enumerate(self._groups):
                held = self._held(number, known)
                see(group, {name: held[name] for name in known})
            return None
        try:
            part = self._joined_part(computed)
            session, alone = (self._opened(part, each) for each in (self._providers, ("cpu",)))
            run = _JoinedRun(session, alone, self._samples[0], computed, self._device)
            held = self._held(0, [*known, *run.inputs])
            values = run(held, len(self._groups[0]))
            are_same = all(run.agrees(values, self._samples[index], index) for index in (0, self._groups[0][-1]))
        except (ModelError, ValueError) as error:
            return str(error)
        if not are_same:
            return "together they give other results"
        see(self._groups[0], {**{name: held[name] for name in known}, **values})
        for number, group in enumerate(self._groups[1:], 1):
            held = self._held(number, [*known, *run.inputs])
            see(group, {**{name: held[name] for name in known}, **run(held, len(group))})
        return None

    def _joined_part(self, computed: Sequence[str]) -> ir.Model:
        """A network that computes these tensors for any number of samples."""
        part = piece(self.model, self._names, computed)
        for value in part.graph.inputs:
            if str(value.name) in self._names:
                value.dtype = ir.DataType.from_numpy(self._samples[0][str(value.name)].dtype)
            value.shape = None
        for value in (value for node in part.graph for value in node.outputs):
            value.shape = None
        return part

    def _opened(self, part: ir.Model, providers: Sequence[str]) -> Any:
        return open_session(part, providers=providers, threads=self._threads, has_integer_kernels=False)

    def _held(self, number: int, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """What is remembered of a group of samples, on the device."""
        if isinstance(self._samples, _Remembered):
            return self._samples.groups[number]
        samples = [self._samples[index] for index in self._groups[number]]
        joined = {name: np.concatenate([np.atleast_1d(each[name]) for each in samples]) for name in names}
        return {name: torch.from_numpy(array).to(self._device) for name, array in joined.items()}

    def _remembered(self, tensors: Sequence[str], others: Sequence[str] = (), see: See | None = None) -> Any:
        if see is not None:
            self.visit(others, see)
        values = [self.value(name) for name in tensors]
        needed = 4 * len(self._samples) * sum(map(numbers_of, values))
        store = _Remembered(self._groups)
        if needed < MOST_MEMORY * free_memory(self._device) and self._is_visited(tensors, store.keep):
            return store
        return super()._remembered(tensors)

    def empty(self, count: int) -> Any:
        return torch.empty(count, device=self._device)


class _Remembered:
    """Tensors of all samples on the device, by group; as a store, the samples one by one as arrays."""

    def __init__(self, groups: Sequence[range]) -> None:
        self._ranges = list(groups)
        self.groups: list[dict[str, torch.Tensor]] = [{} for _ in groups]

    def keep(self, samples: range, values: Mapping[str, Any]) -> None:
        """Keep the values of a group."""
        self.groups[self._ranges.index(samples)] = dict(values)

    def __len__(self) -> int:
        return sum(map(len, self._ranges))

    def __getitem__(self, index: int) -> dict[str, Array]:
        number = next(number for number, each in enumerate(self._ranges) if index in each)
        place, count = index - self._ranges[number][0], len(self._ranges[number])
        group = self.groups[number].items()
        return {name: value.tensor_split(count)[place].cpu().numpy() for name, value in group}

    def close(self) -> None:
        self.groups.clear()


class _JoinedRun:
    """Runs a session on many samples at once, from tensors of torch to tensors of torch. `alone` is the same network on
    the processor, for one sample at a time: it tells the shapes of the outputs, and joined samples are compared with
    it. On the GPU, ONNX Runtime would prepare its kernels again for a batch of one, which takes longer than the run."""

    def __init__(
        self, session: Any, alone: Any, first: Mapping[str, Array], outputs: Sequence[str], device: torch.device
    ) -> None:
        self._session, self._alone_session = session, alone
        self._outputs, self._device = outputs, device
        self._types = {each.name: first[each.name].dtype for each in session.get_inputs()}
        self._first = self._alone(first)
        for name, array in (*self._first.items(), *((name, first[name]) for name in self._types)):
            if array.dtype.kind not in "fiub" or not array.ndim:
                raise ValueError(f"'{name}' of type {array.dtype} and shape {array.shape} cannot be joined")

    @property
    def inputs(self) -> list[str]:
        return list(self._types)

    def _alone(self, sample: Mapping[str, Array]) -> dict[str, Array]:
        with running("a part of the network"):
            values = self._alone_session.run(list(self._outputs), {name: sample[name] for name in self._types})
        return dict(zip(self._outputs, values, strict=True))

    def __call__(self, held: Mapping[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
        binding = self._session.io_binding()
        where = (self._device.type, self._device.index or 0)
        kept = {name: held[name].contiguous() for name in self._types}  # until the run has ended
        for name, tensor in kept.items():
            binding.bind_input(name, *where, self._types[name].type, tuple(tensor.shape), tensor.data_ptr())
        values = {}
        for name in self._outputs:
            first = self._first[name]
            shape, dtype = (count * first.shape[0], *first.shape[1:]), torch.from_numpy(first[:0]).dtype
            values[name] = torch.empty(shape, dtype=dtype, device=self._device)
            binding.bind_output(name, *where, first.dtype.type, shape, values[name].data_ptr())
        if self._device.type != "cpu":  # the runtime works on a stream of its own
            torch.cuda.current_stream(self._device).synchronize()
        with running("a part of the network"):
            self._session.run_with_iobinding(binding)
        return values

    def agrees(self, values: Mapping[str, torch.Tensor], sample: Mapping[str, Array], index: int) -> bool:
        """True if sample number `index` of those that were joined has the values that it has alone."""
        for name, alone in self._alone(sample).items():
            found = values[name][index * len(alone) : (index + 1) * len(alone)].cpu().numpy()
            if found.shape != alone.shape:
                return False
            if alone.dtype.kind != "f":
                if not np.array_equal(found, alone):
                    return False
                continue
            wide = alone.astype(np.float64)
            if not np.square(found - wide).sum() <= MOST_ERROR * np.square(wide).sum():  # NaN is no agreement
                return False
        return True


def can_be_joined(samples: Sequence[Mapping[str, Array]]) -> bool:
    """True if there are several samples, all of the same shapes."""
    shapes = {tuple((name, array.shape) for name, array in samples[index].items()) for index in range(len(samples))}
    return len(samples) > 1 and len(shapes) == 1 and all(shape for _, shape in shapes.pop())


def together(count: int) -> int:
    """The number of samples in a run, so that every run has as many if possible. On a GPU, every session prepares its
    kernels again for each batch size.

    >>> together(1000), together(128), together(61), together(67)
    (50, 64, 61, 64)
    """
    sizes = range(min(TOGETHER, count), min(FEWEST_TOGETHER, count) - 1, -1)
    return next((size for size in sizes if size and count % size == 0), TOGETHER)


def free_memory(device: torch.device) -> float:
    """Bytes that are free on the device; the processor's memory is not limited here."""
    return float("inf") if device.type == "cpu" else float(torch.cuda.mem_get_info(device)[0])

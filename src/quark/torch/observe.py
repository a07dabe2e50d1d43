"""Run the float network over the calibration data, and find the ranges of its tensors.

Ranges are found by the methods of `quark.ranges`, as on the ONNX side. Quantizers that learn have starting points of
their own:

    LSQ     the step with the least squared error, expressed as the range that codes of that step reach
    TQT     a threshold: the maximum for weights and KL-J for activations, unless the spec says otherwise

Several processes that each see a part of the data, as torchrun starts them, merge what they have seen in the order of
their ranks, so that all of them find the same ranges.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed, fx

from quark.decide.scales import choice_of_range
from quark.decide.specs import AffineSpec, MeasuredSpec
from quark.errors import InvalidValueError, ModelError
from quark.plan import AffineChoice, Role
from quark.ranges import MinMax, Observer, TensorRange
from quark.torch.graph import layer_name
from quark.torch.train.quantizers import AffineQuantizer

if TYPE_CHECKING:
    from quark.onnx.calibrate.survey import Statistic

RangeKey = tuple[str, MeasuredSpec]
Extremes = tuple[NDArray[Any], NDArray[Any]]
Value = TypeVar("Value")
Found = TypeVar("Found", bound="Statistic")
UNKNOWN = TensorRange(0.0, 1.0, method="unknown until the first batch, taken as")


def observe(
    network: fx.GraphModule, wanted: Iterable[RangeKey], batches: Iterable[tuple[torch.Tensor, ...]]
) -> dict[RangeKey, TensorRange]:
    """Return the range of every wanted tensor over all batches, by the method of its spec."""
    methods = {key: key[1].observed_method() for key in wanted}
    observers = {key: method.observer(key[1].integer, key[1].is_symmetric) for key, method in methods.items()}
    if not observers:
        return {}
    _show_all(network, observers, batches, is_second=False)
    _merge_ranks(observers)
    again = {key: observer for key, observer in observers.items() if observer.needs_second_pass}
    if again:
        _show_all(network, again, batches, is_second=True)
        _merge_ranks(again)
        observers |= again
    return {key: observer.result() for key, observer in observers.items()}


def channel_extremes(
    network: fx.GraphModule, axes: Mapping[str, int], batches: Iterable[tuple[torch.Tensor, ...]]
) -> dict[str, Extremes]:
    """Return (lowest, highest) of the channels of the given axis for each node of `axes`, over all data and ranks."""
    by_tensor: dict[str, Extremes] = {}

    def see(name: str, value: torch.Tensor) -> None:
        others = [axis for axis in range(value.dim()) if axis != axes[name] % value.dim()]
        low, high = (reduce(value, dim=others).double().cpu().numpy() for reduce in (torch.amin, torch.amax))
        before = by_tensor.get(name)
        by_tensor[name] = (low, high) if before is None else (np.minimum(before[0], low), np.maximum(before[1], high))

    if axes:
        _Watching(network, axes, see).run_all(batches)
    for name, extremes in by_tensor.items():
        lows, highs = zip(*gathered(extremes), strict=True)
        by_tensor[name] = np.min(lows, axis=0), np.max(highs, axis=0)
    return by_tensor


def survey(
    network: fx.GraphModule,
    statistics: Mapping[str, Found],
    batches: Iterable[tuple[torch.Tensor, ...]],
    sample_limit: int,
) -> dict[str, Found]:
    """Return the statistics by node, filled in from batches until `sample_limit` samples were seen, and merged over all
    ranks."""
    size = 0  # samples of the current batch

    def first_batches() -> Iterator[tuple[torch.Tensor, ...]]:
        nonlocal size
        left = sample_limit
        for batch in batches:
            size = int(batch[0].shape[0]) if batch and batch[0].dim() else 1
            yield batch
            left -= size
            if left <= 0:
                return

    def see(name: str, value: torch.Tensor) -> None:
        is_batch = value.dim() > 1 and value.shape[0] == size
        for sample in torch.split(value, 1) if is_batch else [value]:
            try:
                statistics[name].observe(sample.float().cpu().contiguous().numpy())
            except InvalidValueError as error:
                raise InvalidValueError(f"tensor '{name}' of the float network: {error}") from error
            statistics[name].end_of_sample()

    if statistics:
        _Watching(network, statistics, see).run_all(first_batches())
    first, *others = gathered(dict(statistics))
    for other in others:
        for name, statistic in first.items():
            statistic.merge(other[name])
    return first


def gathered(value: Value) -> list[Value]:
    """Return the values of all processes in the order of their ranks; the given value alone if there are no others.

    >>> gathered(3)
    [3]
    """
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return [value]
    values: list[Value | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return [other for other in values if other is not None]


class _Watching(fx.Interpreter):
    """Runs a network node by node, and passes the value of each node of these names to `see`."""

    def __init__(
        self, network: fx.GraphModule, names: Collection[str], see: Callable[[str, torch.Tensor], None]
    ) -> None:
        super().__init__(network)
        self._names = frozenset(names)
        self._see = see
        self.extra_traceback = False
        self._device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))

    def run_node(self, n: fx.Node) -> Any:
        try:
            value = super().run_node(n)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ModelError(
                f"node '{n.name}' of {layer_name(n)} does not run on the calibration data: {error}. Check the shapes "
                "of the batches; a model that was exported for one batch size only takes others when it is exported "
                "with quark.torch.export_for_training"
            ) from error
        if n.name in self._names:
            self._see(n.name, value.detach())
        return value

    def run_all(self, batches: Iterable[tuple[torch.Tensor, ...]]) -> None:
        with torch.no_grad():
            for batch in batches:
                self.run(*(tensor.to(self._device) for tensor in batch), enable_io_processing=False)


def _show_all(
    network: fx.GraphModule,
    observers: Mapping[RangeKey, Observer],
    batches: Iterable[tuple[torch.Tensor, ...]],
    is_second: bool,
) -> None:
    """Show every observer its tensor, in the first or the second pass over the data."""
    by_name: dict[str, list[tuple[MeasuredSpec, Observer]]] = {}
    for (name, spec), observer in observers.items():
        by_name.setdefault(name, []).append((spec, observer))

    def see(name: str, value: torch.Tensor) -> None:
        try:
            for spec, observer in by_name[name]:
                show(observer, spec, value, is_second)
        except InvalidValueError as error:
            raise InvalidValueError(f"tensor '{name}' of the float network: {error}") from error

    _Watching(network, by_name, see).run_all(batches)


def show(observer: Observer, spec: MeasuredSpec, value: torch.Tensor, is_second: bool) -> None:
    """Pass the values of a batch to an observer, in the first or the second pass."""
    if spec.observed_method() == MinMax():  # found on the tensor's own device
        samples: Iterable[torch.Tensor] = [torch.stack(torch.aminmax(value)) if value.numel() else value]
    else:  # each sample by itself, since some methods compare samples
        samples = value if value.dim() > 1 else [value]
    for sample in samples:
        array = sample.float().cpu().contiguous().numpy()
        (observer.observe_again if is_second else observer.observe)(array)
        if not is_second:
            observer.end_of_sample()


def recalibrate(
    network: fx.GraphModule, specs: Mapping[str, AffineSpec], batches: Iterable[tuple[torch.Tensor, ...]]
) -> int:
    """Give the activations of a quantized network with fixed scales those of what they hold now, in place; return how
    many. `specs` has what is wanted of each quantizer, by its name."""
    quantizers = {
        module: specs[module.name]
        for module in network.modules()
        if isinstance(module, AffineQuantizer) and module.role is Role.ACTIVATION and module.name in specs
    }
    observers = {
        module: spec.observed_method().observer(spec.integer, spec.is_symmetric) for module, spec in quantizers.items()
    }
    keys: dict[RangeKey, Any] = {(module.name, spec): module for module, spec in quantizers.items()}

    def run(is_second: bool) -> None:
        def see(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            try:
                show(observers[module], quantizers[module], arguments[0].detach(), is_second)
            except InvalidValueError as error:
                raise InvalidValueError(f"tensor '{module.tensor}': {error}") from error

        hooks = [module.register_forward_pre_hook(see) for module in observers]
        try:
            _Watching(network, (), lambda name, value: None).run_all(batches)
        finally:
            for hook in hooks:
                hook.remove()
        merged = {key: observers[module] for key, module in keys.items() if module in observers}
        _merge_ranks(merged)
        observers.update({keys[key]: observer for key, observer in merged.items()})

    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        run(is_second=False)
        known = dict(observers)
        for module in [module for module, observer in known.items() if not observer.needs_second_pass]:
            del observers[module]
        if observers:
            run(is_second=True)
    finally:
        for observed_module, mode in modes.items():
            observed_module.training = mode
    for module, observer in {**known, **observers}.items():
        module.assign(choice_of_range(quantizers[module], observer.result()))
    return len(known)


@dataclass(frozen=True)
class FirstBatch:
    """Finds where a learned quantizer starts, from the first batch that it sees in each process."""

    tensor: str
    spec: AffineSpec

    def __call__(self, x: torch.Tensor) -> AffineChoice:
        """Return the choice for these values, merged with those of the other processes."""
        key: RangeKey = (self.tensor, self.spec)
        method = self.spec.observed_method()
        observers: dict[RangeKey, Observer] = {key: method.observer(self.spec.integer, self.spec.is_symmetric)}
        try:
            show(observers[key], self.spec, x, is_second=False)
            _merge_ranks(observers)
            if observers[key].needs_second_pass:
                show(observers[key], self.spec, x, is_second=True)
                _merge_ranks(observers)
        except InvalidValueError as error:
            raise InvalidValueError(f"tensor '{self.tensor}' in the first batch: {error}") from error
        range_ = observers[key].result()
        choice = choice_of_range(self.spec, range_)
        if not self.spec.integer.signed and range_.lowest < -choice.scale[0] / 2:
            raise InvalidValueError(
                f"tensor '{self.tensor}' goes down to {range_.lowest:.3g} in the first batch, and {self.spec.format} "
                f"codes that learn begin at 0: give its layer int{self.spec.integer.bits}"
            )
        return choice


def _merge_ranks(observers: dict[RangeKey, Observer]) -> None:
    """Replace every observer by the merged one of all ranks."""
    of_ranks = gathered(list(observers.values()))
    if len(of_ranks) == 1:
        return
    for place, key in enumerate(observers):
        first, *rest = [copy.deepcopy(rank[place]) for rank in of_ranks]
        for other in rest:
            first.merge(other)
        observers[key] = first

"""The ranges of activations, found by the methods of `quark.ranges` as on the ONNX side.

Several processes that each see a part of the data (torchrun) merge what they have seen, in the order of their ranks, so
that all of them come to the same ranges. A method that cares for the order of samples is refused there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from quark.errors import InvalidValueError
from quark.ranges import MinMax, Observer, TensorRange
from quark.torch.methods import observed_method
from quark.torch.observe.watching import Watching
from quark.torch.processes import gathered
from quark.torch.specs import AffineSpec

RangeKey = tuple[str, AffineSpec]


def observe(
    network: fx.GraphModule, wanted: Iterable[RangeKey], batches: Iterable[tuple[torch.Tensor, ...]]
) -> dict[RangeKey, TensorRange]:
    """The range of every wanted tensor over all batches, by the method of its spec."""
    methods = {key: observed_method(key[1]) for key in wanted}
    observers = {key: method.observer(key[1].format, key[1].is_symmetric) for key, method in methods.items()}
    if not observers:
        return {}
    _pass(network, observers, batches, is_second=False)
    _merge_ranks(observers)
    again = {key: each for key, each in observers.items() if each.needs_second_pass}
    if again:
        _pass(network, again, batches, is_second=True)
        _merge_ranks(again)
        observers |= again
    return {key: observer.result() for key, observer in observers.items()}


def _pass(
    network: fx.GraphModule,
    observers: Mapping[RangeKey, Observer],
    batches: Iterable[tuple[torch.Tensor, ...]],
    is_second: bool,
) -> None:
    by_name: dict[str, list[tuple[RangeKey, Observer]]] = {}
    for key, observer in observers.items():
        by_name.setdefault(key[0], []).append((key, observer))

    def see(name: str, value: torch.Tensor) -> None:
        for key, observer in by_name[name]:
            _show(observer, key, value, is_second)

    watching = Watching(network, by_name, see)
    for batch in batches:
        watching.over(batch)


def _show(observer: Observer, key: RangeKey, value: torch.Tensor, is_second: bool) -> None:
    """Each sample of the batch by itself, since some methods compare samples."""
    if observed_method(key[1]) == MinMax():
        value = torch.stack(torch.aminmax(value)) if value.numel() else value  # found where the tensor is
        samples: Iterable[Any] = [value]
    else:
        samples = value if value.dim() > 1 else [value]
    for sample in samples:
        array = sample.float().cpu().contiguous().numpy()
        try:
            (observer.observe_again if is_second else observer.observe)(array)
        except InvalidValueError as error:
            raise InvalidValueError(f"tensor '{key[0]}' of the float network: {error}") from error
        if not is_second:
            observer.end_of_sample()


def _merge_ranks(observers: dict[RangeKey, Observer]) -> None:
    """Replace every observer by the merged one of all ranks."""
    of_ranks = gathered(list(observers.values()))
    if len(of_ranks) == 1:
        return
    unmergeable = sorted({str(key[1].method) for key, each in observers.items() if not each.is_mergeable})
    if unmergeable:
        raise InvalidValueError(
            f"calibration by {', '.join(unmergeable)} over several processes: it depends on the order of samples; "
            "calibrate in one process and load the state_dict in all, or take MinMax or a histogram method"
        )
    for place, key in enumerate(observers):
        first, *rest = [copy.deepcopy(each[place]) for each in of_ranks]
        for other in rest:
            first.merge(other)
        observers[key] = first

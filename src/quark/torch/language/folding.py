"""Divide the input of linear layers channel by channel, in the parameters of what computes it.

The input of linear layers comes from a normalization, or from another linear layer with operations between that keep
channels apart and pass factors on: attention passes on those of its values, a gated MLP those of its up projection.
Which layers these are is found out by a run in which every channel of a linear layer gets a factor of its own. If the
same factors arrive, they also tell which channel went where: heads that share their values read the same channel.
Another run checks that nothing but the given layers reads these channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from quark.errors import InvalidValueError, UnsupportedOptionError
from quark.plan import SkippedNode
from quark.torch.language.architecture import is_norm, linears_of
from quark.torch.language.linear import QuantizedLinear
from quark.torch.language.named_groups import NamedGroup
from quark.torch.language.pipeline import Head, LayerWork
from quark.torch.language.streams import Streams, run_to

Array = NDArray[Any]
MOST_CHANGE = 2e-3  # change of a layer's outputs in the check, relative to their largest magnitude
CLOSE = 0.2  # share of the difference between the factors of two channels


@dataclass(frozen=True)
class ScaledGroup:
    """Linear layers whose input can be divided. `channels` has the output of `source` that each channel follows; None
    if `source` is a normalization, whose channels are the same."""

    linears: tuple[str, ...]
    source: str
    channels: tuple[int, ...] | None = None
    input: str = ""
    inspected: str = ""

    def tied(self, scales: Array) -> Array:
        """The scales with one number for channels that come from the same output: the geometric mean."""
        if self.channels is None:
            return scales
        places = np.array(self.channels)
        counts = np.bincount(places)
        means = np.bincount(places, np.log2(scales)) / np.maximum(counts, 1)
        return np.asarray(np.exp2(means)[places])


Found = tuple[tuple[ScaledGroup, ...], tuple[SkippedNode, ...]]
_KNOWN: WeakKeyDictionary[Streams, dict[Any, Found]] = WeakKeyDictionary()


def scaled_groups(work: LayerWork, named: Sequence[NamedGroup] = ()) -> Found:
    """The groups of linear layers whose input can be divided, and those that cannot, with the reason. With `named`,
    only these are looked at."""
    assert work.streams is not None
    if isinstance(work.layer, Head) and (named or work.architecture.is_tied):
        return (), ()  # names are those of decoder layers, and the embedding must not change
    shapes = tuple((path, tuple(linear.weight.shape)) for path, linear in linears_of(work.layer))
    key = (type(work.layer), shapes, tuple(work.targets), tuple(named))
    known = _KNOWN.setdefault(work.streams, {})
    if key not in known:  # the layers of a model are alike
        known[key] = _find(work, named)
    groups, left = known[key]
    return groups, tuple(SkippedNode(work.full_name(skipped.node), skipped.op_type, skipped.reason) for skipped in left)


def divide(work: LayerWork, group: ScaledGroup, scales: Array) -> None:
    """Divide the input of a group by the scales, and multiply the weights that read it by them."""
    source = work.layer.get_submodule(group.source)
    if group.channels is None:
        _scale_norm(source, 1 / scales)
    else:
        factors = np.ones(_sizes(source)[0])
        factors[list(group.channels)] = 1 / scales
        _multiply(source, "weight", factors[:, None])
        if getattr(source, "bias", None) is not None:
            _multiply(source, "bias", factors)
    for path in group.linears:
        _multiply(work.layer.get_submodule(path), "weight", scales[None])


@contextmanager
def tried(
    work: LayerWork, group: ScaledGroup, scales: Array, weights: Mapping[str, torch.Tensor], quantizer: Any = None
) -> Iterator[None]:
    """Within the block, the layers of a group compute with these weights and an input that is divided by the scales and
    then quantized. `weights` are those after multiplication and rounding."""
    hooks, standing = [], {path: work.linear(path).weight.data for path in weights}

    def change(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        divided = args[0] / torch.as_tensor(scales, dtype=args[0].dtype, device=args[0].device)
        return (divided if quantizer is None else quantizer(divided), *args[1:])

    try:
        for path, weight in weights.items():
            linear = work.linear(path)
            linear.weight.data = weight.to(linear.weight)
            hooks.append(linear.register_forward_pre_hook(change))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for path, data in standing.items():
            work.linear(path).weight.data = data


def outputs_of(work: LayerWork, group: ScaledGroup, batches: int) -> list[torch.Tensor]:
    """The results of the inspected module, or of the linear layers, for the first batches."""
    assert work.streams is not None
    paths = [group.inspected] if group.inspected else list(group.linears)
    outputs = []
    for call, hidden in zip(work.calls[:batches], work.streams.seen[:batches], strict=True):
        outputs += [value for _, value in run_to(work.layer, call, hidden, paths, is_output=True)]
    return outputs


def _find(work: LayerWork, named: Sequence[NamedGroup]) -> Found:
    probe = _Probe(work)
    groups: list[ScaledGroup] = []
    left: list[SkippedNode] = []
    wanted = [_checked(work, group) for group in named]
    wanted = wanted or [NamedGroup(group.source, group.linears, "") for group in work.groups]
    for named_group in wanted:
        result = probe.group(named_group)
        if isinstance(result, ScaledGroup):
            groups.append(result)
        elif named:
            words = f"scaling_layers with prev_op '{named_group.source}' and {list(named_group.linears)}"
            raise UnsupportedOptionError(f"{words}: {result}")
        else:
            left += [SkippedNode(path, "Linear", result) for path in named_group.linears]
    return tuple(groups), tuple(left)


def _checked(work: LayerWork, group: NamedGroup) -> NamedGroup:
    """The group, if the layer has what it names."""
    known = dict(work.layer.named_modules())
    for path in (group.source, group.input, *group.linears, *([group.inspected] if group.inspected else [])):
        if path not in known:
            raise InvalidValueError(f"scaling_layers names '{path}', which a {type(work.layer).__name__} does not have")
    for path in (group.input, *group.linears):
        if not isinstance(known[path], (nn.Linear, QuantizedLinear)):
            raise InvalidValueError(f"scaling_layers: '{path}' is a {type(known[path]).__name__}, expected a Linear")
    return group


class _Probe:
    """Runs of a layer on the first batch."""

    def __init__(self, work: LayerWork) -> None:
        assert work.streams is not None
        self.work, self.call, self.hidden = work, work.calls[0], work.streams.seen[0]
        self.expected = self.call.run(work.layer, self.hidden)

    def group(self, wanted: NamedGroup) -> ScaledGroup | str:
        layer = self.work.layer
        linears = wanted.linears
        modules = [layer.get_submodule(path) for path in linears]
        if any(getattr(module, "rotation", None) is not None for module in modules):
            return "its input is rotated at run time"
        source = wanted.source
        if source and is_norm(layer.get_submodule(source)):
            group = ScaledGroup(linears, source, None, wanted.input or linears[0], wanted.inspected)
            return group if self._is_exact(group) else f"something else reads what '{source}' returns"
        if source and not isinstance(layer.get_submodule(source), (nn.Linear, QuantizedLinear)):
            return f"'{source}' is a {type(layer.get_submodule(source)).__name__}, which has no weights to divide"
        size = _sizes(modules[0])[1]
        before = [path for path, module in layer.named_modules() if isinstance(module, (nn.Linear, QuantizedLinear))]
        for path in [source] if source else reversed(before):
            outputs = _sizes(layer.get_submodule(path))[0]
            if path in linears or (size % outputs and outputs % size):
                continue
            channels = self._channels(path, linears[0], min(outputs, size))
            if channels is None:
                continue
            group = ScaledGroup(linears, path, channels, wanted.input or linears[0], wanted.inspected)
            if self._is_exact(group):
                return group
        return "no layer before it can take the division in"

    def _channels(self, source: str, target: str, last: int) -> tuple[int, ...] | None:
        """The output of `source` that each channel of the input of `target` follows, among the last outputs."""
        outputs = _sizes(self.work.layer.get_submodule(source))[0]
        factors = np.ones(outputs)
        factors[-last:] = 1 + np.arange(1, last + 1) / last
        ((_, plain),) = run_to(self.work.layer, self.call, self.hidden, [target])
        with self._hooked({source: factors}, {}):
            ((_, scaled),) = run_to(self.work.layer, self.call, self.hidden, [target])
        plain, scaled = (array.reshape(-1, array.shape[-1]).double() for array in (plain, scaled))
        rows = plain.abs().argmax(dim=0, keepdim=True)
        ratio = (scaled.gather(0, rows) / plain.gather(0, rows))[0]
        places = ((ratio - 1) * last).round()
        if not bool(((places >= 1) & (places <= last)).all()):
            return None
        wanted = plain * (1 + places / last)
        scale = plain.abs().amax(dim=0).clamp_min(1e-30)
        if not bool(((scaled - wanted).abs().amax(dim=0) / scale < CLOSE / last).all()):
            return None
        return tuple((places.long() - 1 + outputs - last).tolist())

    def _is_exact(self, group: ScaledGroup) -> bool:
        """True if dividing, and multiplying again in front of the linear layers, changes nothing."""
        size = self.work.linear(group.linears[0]).weight.shape[1]
        scales = group.tied(np.where(np.arange(size) % 3 == 0, 2.0, np.where(np.arange(size) % 3 == 1, 1.0, 0.5)))
        if group.channels is None:
            factors = 1 / scales
        else:
            factors = np.ones(_sizes(self.work.layer.get_submodule(group.source))[0])
            factors[list(group.channels)] = 1 / scales
        with self._hooked({group.source: factors}, dict.fromkeys(group.linears, scales)):
            result = self.call.run(self.work.layer, self.hidden)
        largest = float(self.expected.abs().max()) or 1.0
        return bool((result - self.expected).abs().max() <= MOST_CHANGE * largest)

    @contextmanager
    def _hooked(self, outputs: Mapping[str, Array], inputs: Mapping[str, Array]) -> Iterator[None]:
        """Within the block, outputs and inputs of modules are multiplied."""
        hooks = []
        try:
            for path, factors in outputs.items():
                hooks.append(self.work.layer.get_submodule(path).register_forward_hook(_times_output(factors)))
            for path, factors in inputs.items():
                hooks.append(self.work.layer.get_submodule(path).register_forward_pre_hook(_times_input(factors)))
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _sizes(linear: nn.Module) -> tuple[int, int]:
    """The number of outputs and of inputs of a linear layer."""
    assert isinstance(linear, (nn.Linear, QuantizedLinear))
    return linear.weight.shape[0], linear.weight.shape[1]


def _times_output(factors: Array) -> Callable[..., torch.Tensor]:
    return lambda _module, _args, out: out * torch.as_tensor(factors, dtype=out.dtype, device=out.device)


def _times_input(factors: Array) -> Callable[..., tuple[torch.Tensor, ...]]:
    def change(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0] * torch.as_tensor(factors, dtype=args[0].dtype, device=args[0].device), *args[1:])

    return change


def _multiply(module: nn.Module, name: str, factors: Array, added: float = 0.0) -> None:
    parameter = getattr(module, name)
    with torch.no_grad():
        numbers = torch.as_tensor(factors, dtype=torch.float64, device=parameter.device)
        parameter.copy_((parameter.double() + added) * numbers - added)


def _scale_norm(norm: nn.Module, factors: Array) -> None:
    """Multiply what a normalization returns. Some compute with their weight plus 1."""
    weight, bias = norm.weight, getattr(norm, "bias", None)
    assert isinstance(weight, torch.Tensor)
    standing = weight.data
    x = torch.linspace(-1, 1, len(weight), dtype=weight.dtype, device=weight.device)[None]
    with torch.no_grad():
        try:
            weight.data = torch.zeros_like(standing)
            at_zero = norm(x) - (0 if bias is None else bias)
            weight.data = torch.ones_like(standing)
            at_one = norm(x) - (0 if bias is None else bias)
        finally:
            weight.data = standing
    added = float((at_zero.abs().max() / (at_one - at_zero).abs().max().clamp_min(1e-30)).round())
    _multiply(norm, "weight", factors, added)
    if isinstance(bias, torch.Tensor):
        _multiply(norm, "bias", factors)

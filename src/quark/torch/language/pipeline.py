"""Quantize a language model layer by layer, in place."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from quark.account import AlgorithmFacts
from quark.decide.specs import LayerSpec, is_measured
from quark.errors import InvalidValueError, ModelError, UnsupportedOptionError, unknown_name
from quark.features.order import call, features_missing, options_in_use
from quark.onnx.progress import track
from quark.ranges import TensorRange
from quark.text import get_logger
from quark.torch.language.activations import quantizer_of
from quark.torch.language.architecture import (
    Architecture,
    all_linears,
    find_architecture,
    is_norm,
    linears_of,
    with_linears,
)
from quark.torch.language.kv_cache import adjust_outputs, check_patterns, quantize_cache, spec_of_projection
from quark.torch.language.linear import QuantizedLinear, RoundedWeight, has_open_scales, round_to_nearest
from quark.torch.language.streams import Call, Streams, rows, run_to, start_streams
from quark.torch.observe import show
from quark.torch.specs import Settings

Rows = torch.Tensor
_MUCH = 0.05  # share of weights in float from which on it is reported: routers and convolutions have less
_LOG = get_logger(__name__)


@dataclass(frozen=True)
class InputGroup:
    """Linear layers that read the same tensor, by their paths in the layer, in the order in which they run. `source`
    is the normalization that computes it, "" if something else does."""

    linears: tuple[str, ...]
    source: str = ""


@dataclass(eq=False)
class ModelWork:
    """A language model that is being quantized."""

    model: nn.Module
    architecture: Architecture
    settings: Settings


@dataclass(eq=False)
class LayerWork(ModelWork):
    """One layer of it: a decoder layer, or the head with the normalization before it.

    `targets` says what is wanted of each linear layer that is quantized, by its path in the layer. `exact_layer` is a
    float copy, made before anything is rounded; None without data. `groups` is empty without data.
    """

    path: str
    layer: nn.Module
    calls: Sequence[Call] = ()
    streams: Streams | None = None
    names: Mapping[str, str] = field(default_factory=dict)  # full names, where they are not path.name
    targets: dict[str, LayerSpec] = field(init=False, default_factory=dict)
    exact_layer: nn.Module | None = field(init=False, default=None)
    groups: tuple[InputGroup, ...] = field(init=False, default=())
    input_quantizers: dict[str, nn.Module] = field(init=False, default_factory=dict)
    output_quantizers: dict[str, nn.Module] = field(init=False, default_factory=dict)
    is_rounded: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        with_linears(self.layer)
        for path, _ in linears_of(self.layer):
            spec = spec_of(self.settings, self.full_name(path))
            if spec is not None and (spec.weight or spec.activation or spec.output):
                self.targets[path] = spec

    def full_name(self, path: str) -> str:
        """The path of a linear layer in the model."""
        return self.names.get(path, f"{self.path}.{path}")

    def linear(self, path: str) -> nn.Linear | QuantizedLinear:
        """A linear layer of this layer, rounded or not."""
        linear = self.layer.get_submodule(path)
        assert isinstance(linear, (nn.Linear, QuantizedLinear))
        return linear

    def inputs(self, paths: Sequence[str]) -> Iterator[dict[str, tuple[Rows | None, Rows]]]:
        """For each batch, the rows that linear layers get: in the float network, if it is followed, and in the
        quantized one, before their own quantizers. What was rounded before is taken into account."""
        assert self.streams is not None
        exact = self.streams.exact
        for number, (layer_call, hidden) in enumerate(zip(self.calls, self.streams.seen, strict=True)):
            kept = self.streams.kept[number]
            seen = {path: self.turned(path, rows(x, kept)) for path, x in run_to(self.layer, layer_call, hidden, paths)}
            if exact is None:
                yield {path: (None, seen[path]) for path in paths}
                continue
            # before anything is rounded, the layer is its own float copy
            tensors = run_to(self.exact_layer or self.layer, layer_call, exact[number], paths)
            yield {path: (self.turned(path, rows(x, kept)), seen[path]) for path, x in tensors}

    def quantized_input(self, path: str, values: Rows) -> Rows:
        """The input that a linear layer computes with for these rows."""
        quantizer = self.input_quantizers.get(path)
        if quantizer is None:
            return values
        with torch.no_grad():
            result = quantizer(values)
        assert isinstance(result, torch.Tensor)
        return result

    def set_rotated(self, path: str, weight: torch.Tensor, rotation: nn.Module) -> None:
        """Turn the inputs of a linear layer by a module, and give it the weight that undoes it."""
        turned = QuantizedLinear(_plain(self.linear(path)), None, RoundedWeight(weight))
        turned.rotation = rotation
        self.layer.set_submodule(path, turned)

    def set_rounded(self, path: str, weight: RoundedWeight, low_rank: Sequence[torch.Tensor] = ()) -> None:
        """Put a rounded weight in the place of a linear layer, with the quantizers of its input and output."""
        before = self.linear(path)
        made = QuantizedLinear(_plain(before), self.targets[path].weight, weight)
        made.rotation = before.rotation if isinstance(before, QuantizedLinear) else None
        made.input_quantizer, made.output_quantizer = self.input_quantizers.get(path), self.output_quantizers.get(path)
        if low_rank:
            like = before.weight
            made.low_rank = nn.ParameterList(
                nn.Parameter(factor.to(like.device, like.dtype), False) for factor in low_rank
            )
        self.layer.set_submodule(path, made)
        self.is_rounded.add(path)

    def turned(self, path: str, values: Rows) -> Rows:
        """The rows behind the rotation that a linear layer begins with, if it has one."""
        rotation = getattr(self.layer.get_submodule(path), "rotation", None)
        if rotation is None:
            return values
        turned = rotation(values)
        assert isinstance(turned, torch.Tensor)
        return turned


def quantize_language_model(model: nn.Module, data: Iterable[Any] | None, settings: Settings) -> nn.Module:
    """Quantize the linear layers of a model by the settings, in place, and return it in eval mode.

    `data` has batches of token ids [batch, length], or dictionaries of what the model takes. Without it, only weights
    and types that need no ranges can be quantized.
    """
    done = next((path for path, module in model.named_modules() if isinstance(module, QuantizedLinear)), None)
    if done is not None:
        raise InvalidValueError(f"'{done}' is quantized already: expected a float model; load it again")
    architecture = find_architecture(model, layers_path(settings))
    check_settings(model, architecture, settings, has_data=data is not None)
    model.eval().requires_grad_(False)
    work = ModelWork(model, architecture, settings)
    facts = list(call("language", "before_layers", work))
    streams = None if data is None else start_streams(model, architecture, data, has_exact=follows_float(settings))
    count = architecture.count + (architecture.head is not None)
    with track(count, "quantizing layers") as advance:
        for index in range(architecture.count):
            path = architecture.layer(index)
            calls = () if streams is None else streams.calls[index]
            layer_work = LayerWork(model, architecture, settings, path, model.get_submodule(path), calls, streams)
            facts += quantize_layer(layer_work)
            if streams is not None:
                streams.advance(calls, layer_work.layer, layer_work.exact_layer)
                streams.calls[index].clear()  # the masks of layers that are done need no memory
            advance()
        if architecture.head is not None:
            facts += quantize_layer(head_work(work, streams))
            advance()
    model.quark = QuantizedState(architecture, settings, tuple(facts))  # type: ignore[assignment]
    return model


NEED_DATA = ("smooth_quant", "activation_aware", "compensation", "sign_rounding")  # features


def check_settings(model: nn.Module, architecture: Architecture, settings: Settings, *, has_data: bool) -> None:
    """Raise for what is not for language models, or not for this one, or not without data."""
    missing = () if settings.config.get("algo_config") is None else features_missing("language", settings)
    if missing:
        raise UnsupportedOptionError(
            f"algo_config asks for {missing[0].replace('_', ' ')}, which is not for language models; leave it out"
        )
    blind = [folder for folder in NEED_DATA if settings.options_of(folder) is not None and not has_data]
    if blind:
        raise InvalidValueError(
            f"algo_config asks for {blind[0].replace('_', ' ')}, which looks at what layers read, and there is no "
            "data: pass token ids to quantize_model, or leave it out"
        )
    layers = [settings.specs, *settings.by_type.values(), *settings.by_name.values()]
    if any(layer is not None and layer.bias is not None for layer in layers):
        raise UnsupportedOptionError("bias: the biases of language models stay in float; leave its spec out")
    if settings.kv_cache is not None:
        check_patterns(settings.kv_cache, all_linears(model))
    check_layers(model, architecture, settings, has_data=has_data)


def check_layers(model: nn.Module, architecture: Architecture, settings: Settings, *, has_data: bool) -> None:
    """Raise, or warn, where settings do not fit the linear layers that this model has."""
    known = all_linears(model)
    for pattern in settings.by_name:
        if not any(fnmatch(name, pattern) for name in known):
            raise unknown_name("linear layer (layer_quant_config)", pattern, list(known))
    for kind, spec in settings.by_type.items():
        if kind != "Linear" and spec is not None:
            raise UnsupportedOptionError(
                f"layer_type_quant_config '{kind}': the layers of language models that are quantized are linear ones; "
                "use 'Linear', or leave it out"
            )
    for pattern in settings.exclude:
        if not any(fnmatch(name, pattern) for name in known):
            _LOG.warning("exclude '%s' matches no linear layer: none is left out by it", pattern)
    wanted = {name: spec for name in known if architecture.has(name) and (spec := spec_of(settings, name))}
    if not any(spec.weight or spec.activation or spec.output for spec in wanted.values()) and not settings.kv_cache:
        raise InvalidValueError(
            f"no linear layer of {type(model).__name__} is to be quantized: look at the types and at exclude"
        )
    for name, spec in wanted.items():
        if not has_data and any(
            tensor_spec is not None and is_measured(tensor_spec) for tensor_spec in (spec.activation, spec.output)
        ):
            raise InvalidValueError(
                f"'{name}' has a static scale for what it reads or returns, and there is no data: pass token ids, use "
                "is_dynamic=True, or quantize weights alone"
            )
    _check_head(model, architecture, wanted, known, has_data=has_data)
    _warn_of_others(model, architecture)


def _check_head(
    model: nn.Module,
    architecture: Architecture,
    wanted: Mapping[str, LayerSpec],
    known: Mapping[str, tuple[int, int]],
    *,
    has_data: bool,
) -> None:
    """Raise if what the head reads is not known: something lies between the last normalization and it."""
    width = getattr(model.config, "hidden_size", None)
    head = architecture.head or ""
    if has_data and head in wanted and width is not None and known[head][1] != width:
        raise UnsupportedOptionError(
            f"'{head}' reads {known[head][1]} channels and the layers return {width}, so another layer lies between "
            "them, and the head cannot be calibrated; exclude it"
        )


def _warn_of_others(model: nn.Module, architecture: Architecture) -> None:
    """Tell which weights of the layers are not those of linear layers, as those of experts, and stay in float."""
    layers = model.get_submodule(architecture.layers)
    linears = set(all_linears(layers))
    sizes = {
        path: sum(
            parameter.numel()
            for parameter in module._parameters.values()
            if parameter is not None and parameter.dim() > 1
        )
        for path, module in layers.named_modules()
        if path not in linears
    }
    total = sum(parameter.numel() for parameter in layers.parameters())
    if sum(sizes.values()) > _MUCH * total:
        largest = max(sizes, key=sizes.__getitem__)
        _LOG.warning(
            "%.0f%% of the weights in layers are not those of linear layers and stay in float, such as '%s.%s' (%s)",
            *(100 * sum(sizes.values()) / total, architecture.layers, largest),
            type(layers.get_submodule(largest)).__name__,
        )


def follows_float(settings: Settings) -> bool:
    """True if a feature needs to know what the float network has before a layer."""
    return any(getattr(options, "needs_exact_inputs", False) for options in options_in_use(settings))


def layers_path(settings: Settings) -> str:
    """The path of the list of layers that algorithms name; empty if it is to be found."""
    paths = {getattr(options, "decoder_layers", "") for options in options_in_use(settings)} - {""}
    if len(paths) > 1:
        raise InvalidValueError(f"model_decoder_layers: algorithms name different ones, {', '.join(sorted(paths))}")
    return next(iter(paths), "")


@dataclass(frozen=True, eq=False)
class QuantizedState:
    """The state of a quantized language model, in its attribute `quark`."""

    architecture: Architecture
    settings: Settings
    facts: tuple[AlgorithmFacts, ...]


class Head(nn.Module):
    """The end of a model as a layer: the last normalization and the projection onto the vocabulary."""

    def __init__(self, norm: nn.Module | None, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(hidden if self.norm is None else self.norm(hidden))
        return result


def head_work(work: ModelWork, streams: Streams | None) -> LayerWork:
    """The head as a layer. What is set there has to be put into the model afterwards: `quantize_layer` does."""
    parts = work.architecture
    assert parts.head is not None
    head = Head(
        None if parts.norm is None else work.model.get_submodule(parts.norm), work.model.get_submodule(parts.head)
    )
    calls = () if streams is None else [Call()] * len(streams)
    return LayerWork(work.model, parts, work.settings, "", head, calls, streams, {"head": parts.head})


def quantize_layer(work: LayerWork) -> list[AlgorithmFacts]:
    """Round the linear layers of one layer in place, by the features that are on, else to nearest."""
    has_exact = work.streams is not None and work.streams.exact is not None
    if not work.targets:
        work.exact_layer = copy.deepcopy(work.layer) if has_exact and work.settings.kv_cache else work.layer
        quantize_cache(work)
        return []
    for path in work.targets:
        if not bool(torch.isfinite(work.linear(path).weight).all()):
            raise ModelError(f"the weight of '{work.full_name(path)}' has NaN or Inf, which no scale fits")
    if work.streams is not None:
        work.groups = _groups(work)
    facts = list(call("language", "before_rounding", work))
    _prepare_quantizers(work)
    if has_exact:
        work.exact_layer = copy.deepcopy(work.layer)
    facts += call("language", "round_weights", work)
    importance = _importance(work)
    for path, spec in work.targets.items():
        if path not in work.is_rounded:
            weight = work.linear(path).weight
            rounded = (
                RoundedWeight(weight)
                if spec.weight is None
                else round_to_nearest(weight, spec.weight, importance.get(path))
            )
            work.set_rounded(path, rounded)
    quantize_cache(work)
    if isinstance(work.layer, Head):
        work.model.set_submodule(work.names["head"], work.layer.head)
    return facts


def _importance(work: LayerWork) -> dict[str, Any]:
    """The mean square of every input of linear layers, where data is there and the scales of weights are open."""
    wanted = [
        path
        for path, spec in work.targets.items()
        if path not in work.is_rounded and spec.weight is not None and has_open_scales(spec.weight)
    ]
    if work.streams is None or not wanted:
        return {}
    sums: dict[str, torch.Tensor] = {}
    for batch in work.inputs(wanted):
        for path, (_, seen) in batch.items():
            squares = work.quantized_input(path, seen).double().square().sum(dim=0)
            sums[path] = sums[path] + squares if path in sums else squares
    return {path: each.cpu().numpy() for path, each in sums.items() if bool(torch.isfinite(each).all())}


def spec_of(settings: Settings, name: str) -> LayerSpec | None:
    """The spec of a linear layer with that name; None leaves it as it is."""
    is_excluded = any(fnmatch(name, pattern) for pattern in settings.exclude)
    projection = spec_of_projection(settings, name, is_excluded)
    if is_excluded or projection is not None:
        return projection
    for pattern, spec in settings.by_name.items():
        if fnmatch(name, pattern):
            return spec
    return settings.by_type.get("Linear", settings.specs)


def _plain(linear: nn.Linear | QuantizedLinear) -> nn.Linear:
    """A linear layer with the shape, type and bias of another; its weight is that of the other."""
    if isinstance(linear, nn.Linear):
        return linear
    made = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    made.weight, made.bias = nn.Parameter(linear.weight, False), linear.bias  # type: ignore[assignment]
    return made


def _groups(work: LayerWork) -> tuple[InputGroup, ...]:
    """The linear layers that are quantized, by the tensor that they read, found in a run of the first batch."""
    assert work.streams is not None
    alive: list[torch.Tensor] = []  # kept alive, so that no two tensors have the same identity
    readers: dict[int, list[str]] = {}
    sources: dict[int, str] = {}

    def read(path: str, value: torch.Tensor) -> None:
        alive.append(value)
        readers.setdefault(id(value), []).append(path)

    def wrote(path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            alive.append(value)
            sources[id(value)] = path

    hooks = [
        work.layer.get_submodule(path).register_forward_pre_hook(lambda _m, args, path=path: read(path, args[0]))
        for path in work.targets
    ]
    hooks += [
        module.register_forward_hook(lambda _m, _args, out, path=path: wrote(path, out))
        for path, module in work.layer.named_modules()
        if is_norm(module)
    ]
    try:
        work.calls[0].run(work.layer, work.streams.seen[0])
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(InputGroup(tuple(paths), sources.get(key, "")) for key, paths in readers.items())


def _prepare_quantizers(work: LayerWork) -> None:
    """Make the quantizers of inputs and outputs; ranges are those of the layer before its weights are rounded."""
    for is_output, made in ((False, work.input_quantizers), (True, work.output_quantizers)):
        specs = {path: target.output if is_output else target.activation for path, target in work.targets.items()}
        wanted = {path: spec for path, spec in specs.items() if spec is not None}
        measured = {path: spec for path, spec in wanted.items() if is_measured(spec)}
        ranges = _measure(work, measured, is_output=is_output) if measured else {}
        for path, spec in wanted.items():
            device = work.linear(path).weight.device
            made[path] = quantizer_of(spec, ranges.get(path), work.full_name(path)).to(device)
    adjust_outputs(work)


def _measure(work: LayerWork, specs: Mapping[str, Any], *, is_output: bool) -> dict[str, TensorRange]:
    if work.streams is None:
        raise InvalidValueError(
            f"'{work.full_name(next(iter(specs)))}' has a static scale for what it reads or returns, and there is no "
            "data: pass token ids to quantize_model, use is_dynamic=True, or quantize weights alone"
        )
    observers = {p: s.observed_method().observer(s.integer, s.is_symmetric) for p, s in specs.items()}
    for is_second in (False, True):
        paths = [path for path, observer in observers.items() if not is_second or observer.needs_second_pass]
        if not paths:
            break
        for number, (layer_call, hidden) in enumerate(zip(work.calls, work.streams.seen, strict=True)):
            for path, x in run_to(work.layer, layer_call, hidden, paths, is_output=is_output):
                values = rows(x, work.streams.kept[number])
                values = values if is_output else work.turned(path, values)
                show(observers[path], specs[path], values[None], is_second)
    return {path: observer.result() for path, observer in observers.items()}

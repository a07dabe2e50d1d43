"""Keys and values in 8 bits: what the attention of a language model keeps of earlier tokens.

Before rotary positions, keys and values are the outputs of projections, and their quantizers those of any output. After
them (`is_post_rope`), they are quantized where they enter the cache. A module in front of the attention layer replaces
its cache by one that rounds what it is given and passes it on. Without a cache it does the same, so a model returns the
same logits either way.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quark.decide.specs import LayerSpec, TensorSpec, is_measured
from quark.errors import InvalidValueError, UnsupportedOptionError
from quark.torch.language.activations import quantizer_of
from quark.torch.language.float8 import Float8Quantizer
from quark.torch.language.streams import rows
from quark.torch.observe import show
from quark.torch.specs import KvCacheOptions, Settings
from quark.torch.train.quantizers import AffineQuantizer

if TYPE_CHECKING:
    from quark.torch.language.pipeline import LayerWork

ATTRIBUTE = "quark_kv_cache"  # attribute of the attention module
KEY, VALUE = "k_proj", "v_proj"


def check_patterns(options: KvCacheOptions, names: Iterable[str]) -> None:
    """Raise if a pattern matches no linear layer, or one that neither returns keys nor values."""
    known = list(names)
    for pattern in (*options.by_name, *options.shared):
        if not any(fnmatch(name, pattern) for name in known):
            raise InvalidValueError(
                f"kv_cache_quant_config or kv_cache_group '{pattern}' matches no linear layer: expected a pattern such "
                "as '*k_proj' for the projection that returns keys or values"
            )
    for name in known:
        is_meant = any(fnmatch(name, pattern) for pattern in options.by_name)
        if options.is_post_rope and is_meant and not name.endswith((KEY, VALUE)):
            raise UnsupportedOptionError(
                f"kv_cache_post_rope with '{name}': only projections called {KEY} and {VALUE} are known to return keys "
                "and values; use kv_cache_post_rope=False"
            )


def spec_of_projection(settings: Settings, name: str, is_excluded: bool) -> LayerSpec | None:
    """The spec of a projection in the options of the cache; None if they do not mention it."""
    options = settings.kv_cache
    spec = None if options is None else _match(options.by_name, name)
    if options is None or spec is None:
        return None
    output = None if options.is_post_rope else spec.output
    return LayerSpec(None, None, None, output) if is_excluded else LayerSpec(spec.activation, spec.weight, None, output)


def adjust_outputs(work: LayerWork) -> None:
    """Give the quantizers of keys and values shared scales, and none that is too small."""
    options = work.settings.kv_cache
    if options is None or options.is_post_rope:
        return
    mine = {
        path: quantizer
        for path, quantizer in work.output_quantizers.items()
        if _match(options.by_name, work.full_name(path))
    }
    _share(options, {work.full_name(path): quantizer for path, quantizer in mine.items()})


def quantize_cache(work: LayerWork) -> None:
    """Put quantizers in front of the cache of the layer's attention, with ranges of its keys and values there."""
    options = work.settings.kv_cache
    if options is None or not options.is_post_rope:
        return
    for path, attention in list(work.layer.named_modules()):
        specs: dict[str, TensorSpec] = {}
        for projection in (KEY, VALUE):
            name = work.full_name(f"{path}.{projection}".lstrip("."))
            wanted = _match(options.by_name, name) if hasattr(attention, projection) else None
            if wanted is not None and wanted.output is not None:
                specs[projection] = wanted.output
        if not specs:
            continue
        full = work.full_name(path)
        ranges = _ranges(work, attention, specs, full)
        made = {name: quantizer_of(spec, ranges.get(name), f"{full}.{name}") for name, spec in specs.items()}
        _share(options, {f"{full}.{name}": quantizer for name, quantizer in made.items()})
        attach(attention, made, next(attention.parameters()).device)


def attach(attention: nn.Module, quantizers: Mapping[str, nn.Module], device: torch.device) -> None:
    """Quantize the keys and values that enter an attention module's cache, by quantizers for k_proj and v_proj."""
    module = CacheQuantizers(quantizers).to(device)
    setattr(attention, ATTRIBUTE, module)
    attention.register_forward_pre_hook(_Replace(argument_of(attention)), with_kwargs=True)


def argument_of(attention: nn.Module) -> str:
    """The name of the argument that is the cache."""
    names = inspect.signature(type(attention).forward).parameters
    argument = next((name for name in ("past_key_values", "past_key_value") if name in names), None)
    if argument is None:
        raise UnsupportedOptionError(
            f"kv_cache_post_rope: {type(attention).__name__} takes no cache as past_key_values; use "
            "kv_cache_post_rope=False"
        )
    return argument


class CacheQuantizers(nn.Module):
    """The quantizers of keys and values of one attention module."""

    def __init__(self, quantizers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.quantizers = nn.ModuleDict(dict(quantizers))

    def forward(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = {KEY: keys, VALUE: values}
        keys, values = (self.quantizers[k](x) if k in self.quantizers else x for k, x in given.items())
        return keys, values


class _Replace:
    """A hook that replaces the cache; a class, so that a model can be copied and pickled."""

    def __init__(self, argument: str) -> None:
        self.argument = argument

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        cache = _QuantizedCache(getattr(module, ATTRIBUTE), kwargs.get(self.argument))
        return args, {**kwargs, self.argument: cache}


class _QuantizedCache:
    """A cache that rounds keys and values before it passes them on; None in its place: returns them."""

    def __init__(self, quantizers: CacheQuantizers, cache: Any) -> None:
        self._quantizers, self._cache = quantizers, cache

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rounded = self._quantizers(key_states, value_states)
        return rounded if self._cache is None else self._cache.update(*rounded, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class _Recorder(nn.Module):
    """Stands for the quantizers while ranges are measured."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, torch.Tensor] = {}

    def forward(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.found = {KEY: keys.detach(), VALUE: values.detach()}
        return keys, values


def _ranges(work: LayerWork, attention: nn.Module, specs: Mapping[str, TensorSpec], name: str) -> dict[str, Any]:
    measured = {key: spec for key, spec in specs.items() if is_measured(spec)}
    if not measured:
        return {}
    if work.streams is None:
        raise InvalidValueError(
            f"the cache of '{name}' has static scales, and there is no data: pass token ids to quantize_model"
        )
    observers = {
        key: spec.observed_method().observer(spec.integer, spec.is_symmetric) for key, spec in measured.items()
    }
    for is_second in (False, True):
        wanted = [key for key, observer in observers.items() if not is_second or observer.needs_second_pass]
        for recorded in _recorded(work, attention) if wanted else ():
            for key in wanted:
                show(observers[key], measured[key], recorded[key][None], is_second)
    return {key: observer.result() for key, observer in observers.items()}


def _recorded(work: LayerWork, attention: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Keys and values as rows, for each batch."""
    assert work.streams is not None
    recorder = _Recorder()
    setattr(attention, ATTRIBUTE, recorder)
    hook = attention.register_forward_pre_hook(_Replace(argument_of(attention)), with_kwargs=True)
    try:
        for number, (call, hidden) in enumerate(zip(work.calls, work.streams.seen, strict=True)):
            call.run(work.layer, hidden)
            kept = work.streams.kept[number]
            yield {key: rows(x.transpose(1, 2).flatten(2), kept) for key, x in recorder.found.items()}
    finally:
        hook.remove()
        delattr(attention, ATTRIBUTE)


def _share(options: KvCacheOptions, quantizers: Mapping[str, nn.Module]) -> None:
    """`quantizers` are those of one layer, by the names of the projections."""
    fixed = {name: quantizer for name, quantizer in quantizers.items() if _has_scale(quantizer)}
    shared = [
        quantizer for name, quantizer in fixed.items() if any(fnmatch(name, pattern) for pattern in options.shared)
    ]
    common = max((float(quantizer.scale) for quantizer in shared), default=0.0)  # type: ignore[arg-type]
    for quantizer in fixed.values():
        scale = quantizer.scale
        assert isinstance(scale, torch.Tensor)
        wanted = max(common if quantizer in shared else float(scale), options.least_scale)
        if wanted != float(scale) and isinstance(quantizer, AffineQuantizer) and not quantizer.is_symmetric:
            raise UnsupportedOptionError(
                f"kv_cache_group and min_kv_scale with the zero point of '{quantizer.tensor}': scales can only be "
                "shared by symmetric types; use symmetric=True"
            )
        scale.fill_(wanted)


def _has_scale(quantizer: nn.Module) -> bool:
    if isinstance(quantizer, Float8Quantizer):
        return quantizer.scale is not None
    return isinstance(quantizer, AffineQuantizer)


def _match(entries: Mapping[str, LayerSpec], name: str) -> LayerSpec | None:
    return next((entry for pattern, entry in entries.items() if fnmatch(name, pattern)), None)

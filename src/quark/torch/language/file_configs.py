"""The field `quantization_config` of a saved model: which types its linear layers have, in two published layouts.

Layers are described by `LayerTypes`, the specs of what they read, of their weights and of what they return. Writing,
types that are the same everywhere are said once, and others for layers by name. Reading, a name from a file is only
compared with names of the model, and patterns are not expressions.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from torch import nn

import quark
from quark.decide.specs import AffineSpec, BlockSpec, DynamicSpec, FloatSpec, TensorSpec
from quark.errors import ModelError, QuarkError, UnsupportedOptionError
from quark.files.foreign import Fields
from quark.formats.affine import integer_format
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.formats.spec import BlockFormat, Rounding, ScaleRule
from quark.torch.language.float8 import Float8Quantizer
from quark.torch.language.linear import QuantizedLinear
from quark.torch.language.weight_layouts import (
    AwqLayout,
    CompressedLayout,
    Fp8Layout,
    QuarkLayout,
    WeightLayout,
    is_stored_whole,
)
from quark.torch.quantization.config.tensor_spec import MX_FORMATS, QuantizationSpec
from quark.torch.quantization.config.type import Dtype
from quark.torch.train.quantizers import AffineQuantizer, BlockFakeQuantizer, DynamicQuantizer

QUARK, COMPRESSED, AWQ, FP8 = "quark", "compressed-tensors", "awq", "fp8"
_MX_ELEMENTS = {name: dtype for dtype, name in MX_FORMATS.items()}
_ANYTHING = {
    "max_input_numel",
    "enable_buffer_reuse",
    "block_size",
}  # fields of AMD Quark that numbers do not depend on
_PLACES = {"input_tensors": "activation", "weight": "weight", "output_tensors": "output"}
_GROUP_PLACES = {"input_activations": "activation", "weights": "weight", "output_activations": "output"}


@dataclass(frozen=True)
class LayerTypes:
    """The specs of one linear layer; None where it stays in float."""

    activation: TensorSpec | None
    weight: TensorSpec | None
    output: TensorSpec | None


@dataclass(frozen=True)
class KvTypes:
    """The type of the keys and values in the cache."""

    spec: TensorSpec
    is_post_rope: bool

    def as_layer(self) -> LayerTypes:
        """The types of a projection of which only this is quantized."""
        return LayerTypes(None, None, self.spec)


@dataclass(frozen=True)
class FileTypes:
    """What a file says: the layout of weights, the types of linear layers by name, and those of the cache. `settings`
    is the configuration that the model was quantized by, as a dictionary; None if the file does not have it.
    `has_branches`: layers turn their inputs, or have a low-rank branch."""

    layout: WeightLayout
    layers: Mapping[str, LayerTypes]
    kv_cache: Mapping[str, KvTypes]  # by the name of the projection whose outputs are the keys or values
    settings: Mapping[str, Any] | None = None
    has_branches: bool = False


def types_of(linear: QuantizedLinear) -> LayerTypes:
    """The types of a layer as it is."""
    quantizers = (linear.input_quantizer, linear.output_quantizer)
    read, returned = (None if quantizer is None else spec_of_quantizer(quantizer) for quantizer in quantizers)
    return LayerTypes(read, linear.spec, returned)


def spec_of_quantizer(quantizer: nn.Module) -> TensorSpec:
    """The type that a quantizer of an activation rounds to."""
    if isinstance(quantizer, Float8Quantizer):
        return quantizer.spec
    if isinstance(quantizer, DynamicQuantizer):
        return DynamicSpec(quantizer.format.name, quantizer.is_symmetric, quantizer.is_per_row)
    if isinstance(quantizer, BlockFakeQuantizer):
        choice = quantizer.choice()
        return BlockSpec(choice.quantizer, -1, False, choice.to_bfloat16_first)  # type: ignore[union-attr]
    if isinstance(quantizer, AffineQuantizer):
        return AffineSpec(quantizer.format.name, is_symmetric=quantizer.is_symmetric)
    raise UnsupportedOptionError(
        f"activations of '{getattr(quantizer, 'tensor', '')}' as {type(quantizer).__name__}: files have no such type; "
        "use integers, FP8 or an MX type"
    )


# ---------------------------------------------------------------- Quark
def quark_config(types: FileTypes, excluded: Iterable[str]) -> dict[str, Any]:
    """The field as AMD Quark writes it. What is not the same everywhere is listed by the names of layers."""
    assert isinstance(types.layout, QuarkLayout)
    described = {name: layer_record(layer) for name, layer in types.layers.items()}
    empty = layer_record(LayerTypes(None, None, None))
    counted = Counter(json.dumps(config, sort_keys=True) for config in described.values())
    most_common = max(counted, key=lambda text: (counted[text], text), default=None)
    common = empty if most_common is None else dict(json.loads(most_common))
    kv_cache = {
        name: {**described.get(name, empty), "output_tensors": _quark_spec(cache.spec, is_weight=False)}
        for name, cache in types.kv_cache.items()
    }
    return {
        "quant_method": QUARK,
        "global_quant_config": common,
        "layer_type_quant_config": {},
        "layer_quant_config": {name: config for name, config in described.items() if config != common},
        "kv_cache_quant_config": kv_cache,
        "kv_cache_post_rope": any(cache.is_post_rope for cache in types.kv_cache.values()),
        "exclude": sorted(excluded),
        # Algorithms are done with, but for what they left to be computed: a reader has to know of that.
        "algo_config": (types.settings or {}).get("algo_config") if types.has_branches else None,
        "softmax_quant_spec": None,
        "quant_mode": "eager_mode",
        "version": quark.__version__,
        "export": _export(types),
        "settings": types.settings,
    }


def _export(types: FileTypes) -> dict[str, Any]:
    """The form of the file, as AMD Quark's loader expects it."""
    assert isinstance(types.layout, QuarkLayout)
    has_group = types.layout.has_cache_scales and bool(types.kv_cache)
    return {
        "kv_cache_group": ["*k_proj", "*v_proj"] if has_group else [],
        "min_kv_scale": 0.0,
        "pack_method": "reorder" if types.layout.is_reordered else "order",
        "weight_format": "real_quantized" if types.layout.has_codes else "fake_quantized",
        "weight_merge_groups": None,
    }


def layer_record(types: LayerTypes) -> dict[str, Any]:
    """The types of a layer in AMD Quark's fields."""
    specs = {place: getattr(types, name) for place, name in _PLACES.items()}
    named = {
        place: None if spec is None else _quark_spec(spec, is_weight=place == "weight") for place, spec in specs.items()
    }
    return {**named, "bias": None, "target_device": None}


def _quark_spec(spec: TensorSpec, *, is_weight: bool) -> dict[str, Any]:
    """A spec in AMD Quark's fields."""
    fields: dict[str, Any] = {
        "observer_cls": "PerTensorMinMaxObserver",
        "is_dynamic": False,
        "qscheme": "per_tensor",
        "ch_axis": None,
        "group_size": None,
        "symmetric": True,
        "round_method": "half_even",
        "scale_type": "float",
        "scale_format": None,
        "scale_calculation_mode": None,
        "mx_element_dtype": None,
        "zero_point_type": "int32",
        "is_scale_quant": False,
        "qat_spec": None,
    }
    if isinstance(spec, BlockSpec):
        return {**fields, **_quark_block(spec), "is_dynamic": not is_weight}
    per_channel = {"observer_cls": "PerChannelMinMaxObserver", "qscheme": "per_channel"}
    fields["dtype"] = spec.format
    if isinstance(spec, AffineSpec):
        fields["symmetric"] = spec.is_symmetric
        if spec.group_size is not None:
            sizes = {"ch_axis": -1, "group_size": spec.group_size}
            fields |= {"observer_cls": "PerGroupMinMaxObserver", "qscheme": "per_group", **sizes}
        elif spec.is_per_channel:
            fields |= {**per_channel, "ch_axis": 0}
    elif isinstance(spec, DynamicSpec):
        fields |= {"symmetric": spec.is_symmetric, "is_dynamic": True}
        fields |= {**per_channel, "ch_axis": 1} if spec.is_per_row else {}
    elif spec.is_eight_bits:
        fields["is_dynamic"] = spec.is_dynamic
        fields |= {**per_channel, "ch_axis": 1 if spec.is_dynamic else 0} if spec.is_per_channel else {}
    else:
        raise UnsupportedOptionError(f"{spec.format}: files of AMD Quark have no such type; use integers, FP8 or MX")
    return fields


def _quark_block(spec: BlockSpec) -> dict[str, Any]:
    fmt, rule = spec.quantizer.format, spec.quantizer.scale_rule
    dtype = _MX_ELEMENTS.get(fmt.name)
    if dtype is None or dtype is Dtype.int8:
        raise UnsupportedOptionError(f"{fmt}: files of AMD Quark have MX types of floats only; use one of these")
    return {
        "dtype": dtype.value,
        "observer_cls": "PerBlockMXObserver",
        "qscheme": "per_group",
        "ch_axis": -1,
        "group_size": fmt.block_size,
        "symmetric": None,
        "scale_format": "e8m0",
        "scale_calculation_mode": rule.value,
    }


def read_quark_config(config: Fields, names: Iterable[str]) -> FileTypes:
    """The types of the model's linear layers of these names."""
    export = config.mapping("export") if config.has("export") else None
    method = "reorder" if export is None else export.text("pack_method", ("reorder", "order"))
    format_ = "real_quantized"
    if export is not None:
        format_ = export.text("weight_format", ("real_quantized", "fake_quantized"))
    layout = QuarkLayout(method == "reorder", format_ == "real_quantized")
    common = read_layer_record(config.mapping("global_quant_config"))
    by_name = {key: read_layer_record(mapping) for key, mapping in _mappings(config, "layer_quant_config").items()}
    by_type = {key: read_layer_record(mapping) for key, mapping in _mappings(config, "layer_type_quant_config").items()}
    kv_cache = {key: read_layer_record(mapping) for key, mapping in _mappings(config, "kv_cache_quant_config").items()}
    is_post_rope = config.has("kv_cache_post_rope") and config.boolean("kv_cache_post_rope")
    excluded = config.texts("exclude") if config.has("exclude") else ()
    layers, cached = {}, {}
    for name in names:
        types = by_name.get(name) or _first_match(by_name, name) or by_type.get("Linear", common)
        is_excluded = any(fnmatch(name, pattern) for pattern in excluded)
        cache = kv_cache.get(name) or _first_match(kv_cache, name)
        if cache is not None and cache.output is not None:
            types = LayerTypes(cache.activation, cache.weight, None if is_post_rope else cache.output)
            types = LayerTypes(None, None, types.output) if is_excluded else types
            cached[name] = KvTypes(cache.output, is_post_rope)
        elif is_excluded:
            continue
        if types != LayerTypes(None, None, None):
            layers[name] = types
    return FileTypes(layout, layers, cached, _settings_in(config))


def _mappings(config: Fields, key: str) -> dict[str, Fields]:
    if not config.has(key):
        return {}
    entries = config.mapping(key)
    return {name: entries.mapping(name) for name in entries}


def _first_match(entries: Mapping[str, LayerTypes], name: str) -> LayerTypes | None:
    return next((entry for pattern, entry in entries.items() if fnmatch(name, pattern)), None)


def read_layer_record(fields: Fields) -> LayerTypes:
    """The inverse of `layer_record`."""
    specs: dict[str, TensorSpec | None] = dict.fromkeys(_PLACES.values())
    for place, name in _PLACES.items():
        if not fields.has(place):
            continue
        content = {key: value for key, value in fields.mapping(place).content.items() if key not in _ANYTHING}
        try:
            specs[name] = QuantizationSpec.from_dict(content).tensor_spec()
        except (QuarkError, TypeError, AttributeError) as error:
            raise ModelError(f"quantization_config: field '{place}' cannot be read: {error}") from error
    if fields.has("bias"):
        fields.refuse("bias", "null, since biases are floats here")
    return LayerTypes(**specs)


# ---------------------------------------------------------------- AutoAWQ and FP8
def awq_config(types: FileTypes, excluded: Iterable[str]) -> dict[str, Any]:
    """The field as AutoAWQ and AMD Quark's mode of that name write it."""
    assert isinstance(types.layout, AwqLayout)
    weight = _only_types(types, AWQ).weight
    assert isinstance(weight, AffineSpec)
    if types.kv_cache:
        raise UnsupportedOptionError("kv_cache_quant_config: files of AutoAWQ have no such scales; use 'quark'")
    return {
        "quant_method": AWQ,
        "bits": weight.integer.bits,
        "group_size": weight.group_size,
        "zero_point": True,
        "version": "gemm",
        "pack_method": "reorder" if types.layout.is_reordered else "order",
        "modules_to_not_convert": sorted(excluded),
        "export": _export(types),
        "settings": types.settings,
    }


def fp8_config(types: FileTypes, excluded: Iterable[str]) -> dict[str, Any]:
    """The field as vLLM's reader of FP8 and AMD Quark's mode of that name have it."""
    activation = _only_types(types, FP8).activation
    is_fp8 = isinstance(activation, FloatSpec) and activation.format == "fp8_e4m3" and not activation.is_per_channel
    caches = set(types.kv_cache.values())
    is_same = all(cache.is_post_rope and cache.spec == FloatSpec("fp8_e4m3", True, True) for cache in caches)
    if not (activation is None or is_fp8) or not is_same:
        raise UnsupportedOptionError(
            "custom_mode 'fp8': activations and the cache have FP8E4M3PerTensorSpec there, the cache with "
            "kv_cache_post_rope=True; use 'quark' for other types"
        )
    scheme = None
    if isinstance(activation, FloatSpec):
        scheme = "dynamic" if activation.is_dynamic else "static"
    return {
        "quant_method": FP8,
        "activation_scheme": scheme,
        "ignored_layers": sorted(excluded),
        "kv_cache_scheme": "static" if caches else None,
        "export": _export(types),
        "settings": types.settings,
    }


def _only_types(types: FileTypes, mode: str) -> LayerTypes:
    """The types of all quantized layers, which have to be the same."""
    kinds = {json.dumps(layer_record(layer), sort_keys=True): layer for layer in types.layers.values()}
    if len(kinds) != 1 or next(iter(kinds.values())).output is not None:
        raise UnsupportedOptionError(
            f"custom_mode '{mode}': all layers have the same types there, and none for outputs; use 'quark'"
        )
    return next(iter(kinds.values()))


def read_awq_config(config: Fields, names: Iterable[str]) -> FileTypes:
    """The types of the model's linear layers of these names."""
    if config.integer("bits") != 4 or not config.boolean("zero_point"):
        config.refuse("bits", "4, with zero points")
    method = config.text("pack_method", ("reorder", "order")) if config.has("pack_method") else "reorder"
    spec = AffineSpec("uint4", is_symmetric=False, group_size=config.integer("group_size", 1, 1 << 20))
    excluded = config.texts("modules_to_not_convert") if config.has("modules_to_not_convert") else ()
    types = LayerTypes(None, spec, None)
    layers = {name: types for name in names if not any(fnmatch(name, pattern) for pattern in excluded)}
    return FileTypes(AwqLayout(method == "reorder"), layers, {}, _settings_in(config))


def read_fp8_config(config: Fields, names: Iterable[str]) -> FileTypes:
    """The types of the model's linear layers of these names."""
    fixed = FloatSpec("fp8_e4m3", True, True)
    scheme = config.text("activation_scheme", ("static", "dynamic")) if config.has("activation_scheme") else None
    read = {None: None, "static": fixed, "dynamic": FloatSpec("fp8_e4m3", True, True, is_dynamic=True)}[scheme]
    has_cache = config.has("kv_cache_scheme") and config.text("kv_cache_scheme", ("static",)) == "static"
    excluded = config.texts("ignored_layers") if config.has("ignored_layers") else ()
    known = list(names)
    types = LayerTypes(read, fixed, None)
    layers = {name: types for name in known if not any(fnmatch(name, pattern) for pattern in excluded)}
    projections = [name for name in known if has_cache and name.endswith(("k_proj", "v_proj"))]
    cached = dict.fromkeys(projections, KvTypes(fixed, is_post_rope=True))
    return FileTypes(Fp8Layout(), layers, cached, _settings_in(config))


def _settings_in(config: Fields) -> Mapping[str, Any] | None:
    return config.mapping("settings").content if config.has("settings") else None


# ---------------------------------------------------------------- compressed-tensors
def compressed_config(types: FileTypes, excluded: Iterable[str]) -> dict[str, Any]:
    """The field as compressed-tensors writes it. With one kind of layers, all linear ones are targets, but for those in
    `ignore`; with several, layers are listed by name."""
    described = {name: json.dumps(_compressed_layer(layer), sort_keys=True) for name, layer in types.layers.items()}
    groups: dict[str, Any] = {}
    kinds = list(dict.fromkeys(described.values()))
    for number, kind in enumerate(kinds):
        names = ["Linear"] if len(kinds) == 1 else [name for name, config in described.items() if config == kind]
        groups[f"group_{number}"] = {**json.loads(kind), "targets": names}
    formats = {group["format"] for group in groups.values()}
    caches = list(dict.fromkeys(types.kv_cache.values()))
    if len(caches) > 1 or any(not cache.is_post_rope for cache in caches):
        raise UnsupportedOptionError(
            "kv_cache_quant_config: files of compressed-tensors have one type for all keys and values, quantized when "
            "they enter the cache; use one type and kv_cache_post_rope=True, or custom_mode='quark'"
        )
    return {
        "quant_method": COMPRESSED,
        "config_groups": groups,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "ignore": sorted(excluded),
        "kv_cache_scheme": _compressed_args(caches[0].spec, is_weight=False) if caches else None,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "settings": types.settings,
    }


def _compressed_layer(types: LayerTypes) -> dict[str, Any]:
    if types.weight is None:
        raise UnsupportedOptionError(
            "a layer with quantized activations and float weights: files of compressed-tensors have no such layers; "
            "give it a weight spec, exclude it, or use custom_mode='quark'"
        )
    specs = {place: getattr(types, name) for place, name in _GROUP_PLACES.items()}
    args = {
        place: None if spec is None else _compressed_args(spec, is_weight=place == "weights")
        for place, spec in specs.items()
    }
    return {**args, "format": _compressed_format(types)}


def _compressed_format(types: LayerTypes) -> str:
    weight = types.weight
    if isinstance(weight, BlockSpec):
        return "mxfp8-quantized" if weight.quantizer.format.name == "mxfp8_e4m3" else "mxfp4-pack-quantized"
    if isinstance(weight, FloatSpec):
        return "float-quantized"
    assert isinstance(weight, AffineSpec)
    return "int-quantized" if is_stored_whole(weight, types.activation is not None) else "pack-quantized"


def _compressed_args(spec: TensorSpec, *, is_weight: bool) -> dict[str, Any]:
    args: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    if isinstance(spec, BlockSpec):
        fmt = spec.quantizer.format
        if fmt.name not in ("mxfp4_e2m1", "mxfp8_e4m3"):
            raise UnsupportedOptionError(f"{fmt}: files of compressed-tensors have MXFP4 and MXFP8 (E4M3) only")
        args |= {"num_bits": fmt.element.bits, "strategy": "group", "group_size": fmt.block_size}
        return {**args, "dynamic": not is_weight, "scale_dtype": "torch.uint8"}
    if isinstance(spec, FloatSpec):
        if spec.format != "fp8_e4m3":
            raise UnsupportedOptionError(f"{spec.format}: files of compressed-tensors have FP8 E4M3 only")
        strategy = ("token" if spec.is_dynamic else "channel") if spec.is_per_channel else "tensor"
        return {**args, "strategy": strategy, "dynamic": spec.is_dynamic}
    bits = integer_format(spec.format).bits
    if not is_weight and bits > 8:
        raise UnsupportedOptionError(f"{spec.format}: activations in files of compressed-tensors have at most 8 bits")
    args |= {"num_bits": bits, "type": "int", "symmetric": spec.is_symmetric}
    if isinstance(spec, DynamicSpec):
        return {**args, "dynamic": True, "strategy": "token" if spec.is_per_row else "tensor"}
    if spec.group_size is not None:
        return {**args, "strategy": "group", "group_size": spec.group_size}
    return {**args, "strategy": "channel"} if spec.is_per_channel else args


def read_compressed_config(config: Fields, names: Iterable[str]) -> FileTypes:
    """The types of the model's linear layers of these names."""
    groups = []
    for fields in _mappings(config, "config_groups").values():
        specs: dict[str, TensorSpec | None] = dict.fromkeys(_GROUP_PLACES.values())
        for place, name in _GROUP_PLACES.items():
            if fields.has(place):
                specs[name] = _read_args(fields.mapping(place), is_weight=place == "weights")
        targets = fields.texts("targets")
        if any(target.startswith("re:") for target in targets):
            fields.refuse("targets", "'Linear' or names of layers; transformers reads regular expressions")
        groups.append((frozenset(targets), LayerTypes(**specs)))
    ignored = config.texts("ignore") if config.has("ignore") else ()
    if any(pattern.startswith("re:") for pattern in ignored):
        config.refuse("ignore", "names of layers; transformers reads regular expressions")
    layers, cached = {}, {}
    scheme = None
    if config.has("kv_cache_scheme"):
        scheme = KvTypes(_read_args(config.mapping("kv_cache_scheme"), is_weight=False), is_post_rope=True)
    for name in names:
        if scheme is not None and name.endswith(("k_proj", "v_proj")):
            cached[name] = scheme
        if name in ignored:
            continue
        exact = [types for targets, types in groups if name in targets]
        wide = [types for targets, types in groups if "Linear" in targets]
        if exact or wide:
            layers[name] = (exact or wide)[0]
    return FileTypes(CompressedLayout(), layers, cached, _settings_in(config))


def _read_args(fields: Fields, *, is_weight: bool) -> TensorSpec:
    bits, kind = fields.integer("num_bits", 1, 8), fields.text("type", ("int", "float"))
    strategy = fields.text("strategy", ("tensor", "channel", "group", "token"))
    is_dynamic = fields.has("dynamic") and fields.boolean("dynamic")
    is_symmetric = not fields.has("symmetric") or fields.boolean("symmetric")
    size = fields.integer("group_size", 1, 1 << 20) if fields.has("group_size") else None
    if kind == "float":
        if size is not None:
            fmt = get_format({4: "mxfp4_e2m1", 8: "mxfp8_e4m3"}.get(bits) or fields.refuse("num_bits", "4 or 8"))
            assert isinstance(fmt, BlockFormat)
            quantizer = BlockQuantizer(
                fmt.with_block_size(size), ScaleRule.EVEN, Rounding.HALF_EVEN, fmt.default_nonfinite
            )
            return BlockSpec(quantizer) if is_weight else BlockSpec(quantizer, -1, follows_reduction=False)
        if bits != 8:
            fields.refuse("num_bits", "8 for floats without groups")
        return FloatSpec("fp8_e4m3", True, True, strategy in ("channel", "token"), is_dynamic)
    if is_dynamic:
        return DynamicSpec(f"int{bits}", is_symmetric, strategy == "token")
    if size is not None and strategy != "group":
        fields.refuse("strategy", "'group' with a group_size")
    return AffineSpec(f"int{bits}", is_symmetric=is_symmetric, is_per_channel=strategy == "channel", group_size=size)


WRITERS: Mapping[type[WeightLayout], Callable[[FileTypes, Iterable[str]], dict[str, Any]]] = {
    QuarkLayout: quark_config,
    CompressedLayout: compressed_config,
    AwqLayout: awq_config,
    Fp8Layout: fp8_config,
}
READERS: Mapping[str, Callable[[Fields, Iterable[str]], FileTypes]] = {
    QUARK: read_quark_config,
    COMPRESSED: read_compressed_config,
    AWQ: read_awq_config,
    FP8: read_fp8_config,
}

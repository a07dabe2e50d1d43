"""Configurations for language models, by the name of a scheme and the type of the model.

>>> config = LLMTemplate.get("llama").get_config("int4_wo_64")
>>> config.global_quant_config.weight.group_size, config.exclude
(64, ['lm_head'])

Layers are found in the model, so a template only says which projections give keys and values, and what stays in float.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase as fnmatch
from typing import Any, ClassVar

from quark.errors import InvalidValueError, UnsupportedOptionError, unknown_name
from quark.text import get_logger
from quark.torch.quantization.config import config as all_configs
from quark.torch.quantization.config.algorithm import AlgoConfig
from quark.torch.quantization.config.config import (
    BFP16Spec,
    Config,
    FP8E4M3PerChannelSpec,
    FP8E4M3PerTensorSpec,
    Int4PerChannelSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    MX6Spec,
    MX9Spec,
    OCP_MXFP4Spec,
    OCP_MXFP6E2M3Spec,
    OCP_MXFP6E3M2Spec,
    QuantizationConfig,
    Uint4PerChannelSpec,
    Uint4PerGroupSpec,
)
from quark.torch.quantization.config.named_specs import DataTypeSpec

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class Scheme:
    """Types of weights and of what linear layers read; `text` says them in words."""

    text: str
    make: Callable[[], QuantizationConfig]


def _scheme(text: str, weight: DataTypeSpec, activation: DataTypeSpec | None = None) -> Scheme:
    def make() -> QuantizationConfig:
        read = None if activation is None else activation.to_quantization_spec()
        return QuantizationConfig(weight=weight.to_quantization_spec(), input_tensors=read)

    return Scheme(text, make)


def _groups(kind: Any, size: int) -> Scheme:
    name = "uint4" if kind is Uint4PerGroupSpec else "int4"
    return _scheme(f"{name} weights in groups of {size}", kind(ch_axis=-1, group_size=size))


_FP4 = OCP_MXFP4Spec(ch_axis=-1, scale_calculation_mode=None)  # even, or chosen by data
_FP8 = FP8E4M3PerTensorSpec()
_INT8 = Int8PerTensorSpec()
_INT8_CHANNELS = Int8PerChannelSpec(ch_axis=0, symmetric=True)

SCHEMES: Mapping[str, Scheme] = {
    **{f"int4_wo_{size}": _groups(Int4PerGroupSpec, size) for size in (32, 64, 128)},
    "int4_wo_per_channel": _scheme("int4 weights, a scale for each output", Int4PerChannelSpec(ch_axis=0)),
    **{f"uint4_wo_{size}": _groups(Uint4PerGroupSpec, size) for size in (32, 64, 128)},
    "uint4_wo_per_channel": _scheme("uint4 weights, a scale for each output", Uint4PerChannelSpec(ch_axis=0)),
    "int8_wo": _scheme("int8 weights, a scale for each output", _INT8_CHANNELS),
    "int8": _scheme("int8 weights and activations, one fixed scale for each tensor", _INT8, _INT8),
    "w8a8": _scheme(
        "int8 weights with a scale for each output, int8 activations with a scale for each token",
        _INT8_CHANNELS,
        Int8PerChannelSpec(ch_axis=1, symmetric=True, is_dynamic=True),
    ),
    "w8a8_static": _scheme(
        "int8 weights with a scale for each output, int8 activations with a fixed scale", _INT8_CHANNELS, _INT8
    ),
    "fp8": _scheme("FP8 (E4M3) weights and activations, one fixed scale for each tensor", _FP8, _FP8),
    "ptpc_fp8": _scheme(
        "FP8 (E4M3) weights with a scale for each output, FP8 activations with a scale for each token",
        FP8E4M3PerChannelSpec(ch_axis=0),
        FP8E4M3PerChannelSpec(ch_axis=1, is_dynamic=True),
    ),
    "mxfp4": _scheme("MXFP4 weights and activations", _FP4, _FP4),
    "mxfp4_weight_only": _scheme("MXFP4 weights", _FP4),
    "mxfp6_e3m2": _scheme(
        "MXFP6 (E3M2) weights and activations", OCP_MXFP6E3M2Spec(ch_axis=-1), OCP_MXFP6E3M2Spec(ch_axis=-1)
    ),
    "mxfp6_e2m3": _scheme(
        "MXFP6 (E2M3) weights and activations", OCP_MXFP6E2M3Spec(ch_axis=-1), OCP_MXFP6E2M3Spec(ch_axis=-1)
    ),
    "mxfp4_mxfp6_e2m3": _scheme("MXFP4 weights, MXFP6 (E2M3) activations", _FP4, OCP_MXFP6E2M3Spec(ch_axis=-1)),
    "mxfp4_fp8": _scheme("MXFP4 weights, FP8 (E4M3) activations with a fixed scale", _FP4, _FP8),
    "mx6": _scheme("MX6 weights and activations", MX6Spec(ch_axis=-1), MX6Spec(ch_axis=-1)),
    "mx9": _scheme("MX9 weights and activations", MX9Spec(ch_axis=-1), MX9Spec(ch_axis=-1)),
    "bfp16": _scheme("BFP16 weights and activations", BFP16Spec(ch_axis=-1), BFP16Spec(ch_axis=-1)),
}
KV_CACHE_SCHEMES: Mapping[str, DataTypeSpec] = {"fp8": _FP8, "int8": _INT8}
ALGORITHMS: Mapping[str, str] = {
    "awq": "AWQConfig",
    "gptq": "GPTQConfig",
    "gptaq": "GPTAQConfig",
    "qronos": "QronosConfig",
    "autoround": "AutoRoundConfig",
    "svdquant": "SVDQuantConfig",
    "smoothquant": "SmoothQuantConfig",
    "autosmoothquant": "AutoSmoothQuantConfig",
    "rotation": "RotationConfig",
}

# arguments of LLMTemplate before there was `algorithm_configs`
_FORMER = {**{name: name for name in ALGORITHMS}, "smooth_quant": "smoothquant", "auto_smooth_quant": "autosmoothquant"}

_KEYS_AND_VALUES = ("*k_proj", "*v_proj")


class LLMTemplate:
    """How models of one type are quantized.

    `kv_layers_name` has patterns of the projections that give keys and values, `exclude_layers_name` those of layers
    that stay in float. `algorithm_configs` has the settings of algorithms by their names; others have their defaults.
    Their former arguments still work: `awq_config`, `gptq_config` and so on. `gate_up_layers_name` is kept for scripts
    that read it; projections that read the same tensor are found in the model. `f2f_weight_converters` is None.
    """

    _templates: ClassVar[dict[str, LLMTemplate]] = {}
    _schemes: ClassVar[dict[str, Scheme]] = dict(SCHEMES)

    def __init__(
        self,
        model_type: str,
        kv_layers_name: Sequence[str] | None = None,
        q_layer_name: str | Sequence[str] | None = None,
        gate_up_layers_name: Sequence[str] | None = None,
        exclude_layers_name: Sequence[str] = (),
        algorithm_configs: Mapping[str, AlgoConfig | None] | None = None,
        f2f_weight_converters: None = None,
        **former: AlgoConfig | None,
    ) -> None:
        if f2f_weight_converters is not None:
            raise UnsupportedOptionError("f2f_weight_converters: weights are read as transformers names them")
        self.model_type = model_type
        self.kv_layers_name = None if kv_layers_name is None else list(kv_layers_name)
        self.q_layer_name = q_layer_name
        self.gate_up_layers_name = list(gate_up_layers_name or ("gate_proj", "up_proj"))
        self.exclude_layers_name = list(exclude_layers_name)
        self.f2f_weight_converters = f2f_weight_converters
        for name in former:
            if name.removesuffix("_config") not in _FORMER:
                raise unknown_name("argument of LLMTemplate", name, [f"{argument}_config" for argument in _FORMER])
        named = {_FORMER[name.removesuffix("_config")]: config for name, config in former.items()}
        given = _by_lower_name({**named, **(algorithm_configs or {})})
        self.algo_config: dict[str, AlgoConfig | None] = {**dict.fromkeys(ALGORITHMS), **given}

    @classmethod
    def list_available(cls) -> list[str]:
        """The types of models that there are templates for."""
        return list(cls._templates)

    @classmethod
    def register_template(cls, template: LLMTemplate) -> None:
        """Add a template, or replace the one of the same type."""
        if template.model_type in cls._templates:
            _LOG.warning("the template for '%s' is replaced", template.model_type)
        cls._templates[template.model_type] = template

    @classmethod
    def get(cls, model_type: str) -> LLMTemplate:
        """The template for a type of model, which is `model.config.model_type`."""
        if model_type not in cls._templates:
            raise InvalidValueError(
                f"there is no template for '{model_type}'; known are {', '.join(cls._templates)}. For others, "
                "make one: LLMTemplate(model_type, kv_layers_name=[...], exclude_layers_name=['lm_head'])"
            )
        return cls._templates[model_type]

    @classmethod
    def register_scheme(cls, scheme_name: str, config: QuantizationConfig) -> None:
        """Add a scheme under a name that is still free."""
        if scheme_name in cls._schemes:
            raise InvalidValueError(f"scheme '{scheme_name}' is there already; unregister it, or take another name")
        cls._schemes[scheme_name] = Scheme("registered", lambda: replace(config))

    @classmethod
    def unregister_scheme(cls, scheme_name: str) -> None:
        """Remove a scheme that was registered."""
        if scheme_name not in cls._schemes:
            raise unknown_name("scheme", scheme_name, cls._schemes)
        if scheme_name in SCHEMES:
            raise InvalidValueError(f"scheme '{scheme_name}' is built in and cannot be removed")
        del cls._schemes[scheme_name]

    @classmethod
    def get_supported_schemes(cls) -> list[str]:
        """The names of the schemes."""
        return list(cls._schemes)

    def get_config(  # noqa: PLR0913 - AMD Quark's arguments, in its order
        self,
        scheme: str,
        algorithm: str | Sequence[str] | None = None,
        kv_cache_scheme: str | None = None,
        min_kv_scale: float = 0.0,
        attention_scheme: str | None = None,
        layer_config: Mapping[str, str] | None = None,
        layer_type_config: Mapping[Any, str] | None = None,
        exclude_layers: Sequence[str] | None = None,
        algo_configs: Mapping[str, AlgoConfig] | None = None,
        shared_scale_groups: Sequence[Any] | None = None,
    ) -> Config:
        """A configuration for models of this type.

        `scheme` says the types, `layer_config` and `layer_type_config` those of other layers, by patterns of names and
        by classes. `algorithm` is gptq, awq and so on, or a list of them, with settings in `algo_configs`.
        `exclude_layers` replaces what the template leaves in float. `kv_cache_scheme`: fp8 or int8.
        """
        if attention_scheme is not None:
            raise UnsupportedOptionError(
                f"attention_scheme {attention_scheme!r}: attention itself is computed in float; leave it out, and use "
                "kv_cache_scheme for what the cache holds"
            )
        known = _by_lower_name({**self.algo_config, **(algo_configs or {})})
        names = [algorithm] if isinstance(algorithm, str) else list(algorithm or ())
        patterns = (self.kv_layers_name or ()) if kv_cache_scheme is not None else ()
        excluded = self.exclude_layers_name if exclude_layers is None else list(exclude_layers)
        by_name = {name: self._layers(scheme) for name, scheme in (layer_config or {}).items()}
        cache = self._cache(kv_cache_scheme, by_name, scheme)
        projections = {name: layer for name, layer in cache.items() if name not in excluded}
        return Config(
            self._layers(scheme),
            exclude=excluded,
            algo_config=[_algorithm(name.lower(), known) for name in names],
            layer_type_quant_config={key: self._layers(scheme) for key, scheme in (layer_type_config or {}).items()},
            layer_quant_config={**by_name, **projections},
            kv_cache_quant_config=cache,
            kv_cache_group=list(patterns),
            min_kv_scale=min_kv_scale,
            shared_scale_groups=list(shared_scale_groups or ()),
        )

    def _layers(self, scheme: str) -> QuantizationConfig:
        if scheme not in self._schemes:
            raise unknown_name("scheme", scheme, self._schemes)
        return self._schemes[scheme].make()

    def _cache(
        self, cache: str | None, layers: Mapping[str, QuantizationConfig], scheme: str
    ) -> dict[str, QuantizationConfig]:
        """The configurations of the projections that give keys and values: what `layers` says of the attention that
        they are in, or the scheme, and the type of the cache."""
        if cache is None:
            return {}
        if cache not in KV_CACHE_SCHEMES:
            raise unknown_name("kv_cache_scheme", cache, KV_CACHE_SCHEMES)
        if not self.kv_layers_name:
            raise InvalidValueError(
                f"kv_cache_scheme {cache}: the template for '{self.model_type}' does not name the projections for keys "
                "and values (kv_layers_name)"
            )
        spec = KV_CACHE_SCHEMES[cache].to_quantization_spec()

        def base(name: str) -> QuantizationConfig:
            paths = (name, f"model.layers.0.self_attn.{name.lstrip('*.')}")
            matching = (own for pattern, own in layers.items() if any(fnmatch(path, pattern) for path in paths))
            return next(matching, None) or self._layers(scheme)

        return {name: replace(base(name), output_tensors=spec) for name in self.kv_layers_name}


def _by_lower_name(configs: Mapping[str, AlgoConfig | None] | None) -> dict[str, AlgoConfig]:
    by_name = {name.lower(): config for name, config in (configs or {}).items() if config is not None}
    for name in by_name:
        if name not in ALGORITHMS:
            raise unknown_name("algorithm", name, ALGORITHMS)
    return by_name


def _algorithm(name: str, known: Mapping[str, AlgoConfig]) -> AlgoConfig:
    if name not in ALGORITHMS:
        raise unknown_name("algorithm", name, ALGORITHMS)
    if name in known:
        return deepcopy(known[name])  # which people edit
    made: AlgoConfig = getattr(all_configs, ALGORITHMS[name])()
    return made


for _model_type in (
    *("cohere", "gemma2", "gemma3_text", "gptj", "hunyuan_v1_dense", "instella", "llama", "mistral", "olmo", "opt"),
    *("phi", "qwen2", "qwen3"),
):
    LLMTemplate.register_template(
        LLMTemplate(_model_type, _KEYS_AND_VALUES, "*q_proj", exclude_layers_name=["lm_head"])
    )
LLMTemplate.register_template(LLMTemplate("phi3", ["*qkv_proj"], "*qkv_proj", exclude_layers_name=["lm_head"]))
LLMTemplate.register_template(LLMTemplate("gpt2", ["*c_attn"], "*c_attn", exclude_layers_name=["lm_head"]))

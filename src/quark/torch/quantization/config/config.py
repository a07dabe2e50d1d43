"""The configuration of a run, as users write it.

    QuantizationSpec      one tensor                           QTensorConfig is the same
    QuantizationConfig    the tensors of a layer               QLayerConfig
    Config                a model                              QConfig

>>> from quark.torch.quantization.config.type import Dtype
>>> int8 = QuantizationSpec(Dtype.int8)
>>> config = Config(QuantizationConfig(input_tensors=int8, output_tensors=int8, weight=int8), exclude=["classifier*"])
>>> config.settings().exclude
('classifier*',)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from torch import nn

from quark.common.utils.log import ScreenLogger
from quark.decide.end_layers import EndLayers
from quark.decide.specs import AffineSpec, BlockSpec, DynamicSpec, FloatSpec, LayerSpec
from quark.errors import (
    InvalidValueError,
    UnsupportedOptionError,
    UnsupportedTypeError,
    refuse_unknown_fields,
    unknown_name,
)
from quark.features.bias_correction.options import TorchBiasCorrectionOptions
from quark.features.compensation.options import CompensationOptions
from quark.files.foreign import SETTINGS, read_json
from quark.formats.affine import integer_format
from quark.ranges import PowerOfTwoMinMSE
from quark.text import get_logger
from quark.torch.quantization.config.algorithm import (
    AlgoConfig,
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    BiasCorrectionConfig,
    CLEConfig,
    GPTAQConfig,
    GPTQConfig,
    OnlineRotationConfig,
    QronosConfig,
    RotationConfig,
    SearchedScalesConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
    algorithm_dict,
    chosen_options,
)
from quark.torch.quantization.config.named_specs import *  # noqa: F403 - these are also imported from here
from quark.torch.quantization.config.named_specs import __all__ as _named_specs
from quark.torch.quantization.config.tensor_spec import QATSpec, QuantizationSpec, TQTSpec
from quark.torch.quantization.config.type import QuantFlow, QuantizationMode, parse
from quark.torch.specs import KvCacheOptions, Settings

if TYPE_CHECKING:
    from quark.torch.quantization.config.template import LLMTemplate

_LOG = get_logger(__name__)


@refuse_unknown_fields
@dataclass
class QuantizationConfig:
    """Specs for a layer's inputs, outputs, weight and bias. None leaves a tensor in float, even if the configuration of
    the whole model has a spec for it. Fields can be edited; they are checked when it is built and when it is used."""

    input_tensors: QuantizationSpec | None = None
    output_tensors: QuantizationSpec | None = None
    weight: QuantizationSpec | None = None
    bias: QuantizationSpec | None = None

    def __post_init__(self) -> None:
        self.layer_specs()

    def layer_specs(self) -> LayerSpec:
        """Return typed specs for the pipeline, after checking the fields."""
        given = {name: getattr(self, name) for name in _PLACES}
        for name, spec in given.items():
            if isinstance(spec, (list, tuple)):
                raise UnsupportedTypeError(
                    f"{name}: {len(spec)} specs came, and a tensor is quantized once; give one QuantizationSpec"
                )
            if hasattr(spec, "to_quantization_spec"):
                raise UnsupportedTypeError(f"{name} {type(spec).__name__}: call its to_quantization_spec()")
            if spec is not None and not isinstance(spec, QuantizationSpec):
                raise UnsupportedTypeError(f"{name} {spec!r}: expected a QuantizationSpec, or None for float")
        specs = {name: None if spec is None else spec.tensor_spec() for name, spec in given.items()}
        integers = {name: spec for name, spec in specs.items() if isinstance(spec, (AffineSpec, DynamicSpec))}
        for name, spec in integers.items():
            has_several = isinstance(spec, AffineSpec) and not spec.has_one_scale
            if name in ("input_tensors", "output_tensors") and has_several:
                raise InvalidValueError(
                    f"{name} with qscheme {'per_channel' if given[name].group_size is None else 'per_group'}: a layer "
                    "sums over what it reads, and integers of several scales do not add up; use per_tensor, or a type "
                    "in blocks such as Dtype.mx"
                )
        for name, spec in integers.items():
            if name != "bias" and integer_format(spec.format).bits > _MOST_BITS:
                raise InvalidValueError(
                    f"{name} with {spec.format}: float32, which it is computed in, does not hold such codes, and sums "
                    f"of their products overflow; expected at most {_MOST_BITS} bits, 32 are for bias"
                )
        for name, spec in integers.items():
            if name in ("weight", "bias") and isinstance(spec, DynamicSpec):
                raise InvalidValueError(f"{name} with is_dynamic: it is known beforehand; use is_dynamic=False")
        _check_floats(specs)
        return LayerSpec(specs["input_tensors"], specs["weight"], specs["bias"], specs["output_tensors"])

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for each spec, or None."""
        specs = {name: getattr(self, name) for name in _PLACES}
        return {name: None if spec is None else spec.to_dict() for name, spec in specs.items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> QuantizationConfig:
        """Read what `to_dict` wrote."""
        for key, value in content.items():
            if key not in _PLACES and value is not None:
                raise unknown_name("field of QuantizationConfig", key, _PLACES)
        given = {name: content[name] for name in _PLACES if content.get(name) is not None}
        return cls(**{name: QuantizationSpec.from_dict(spec) for name, spec in given.items()})


def _check_floats(specs: Mapping[str, Any]) -> None:
    """Raise for an 8-bit float that a tensor of its place cannot have."""
    for name, spec in specs.items():
        if isinstance(spec, FloatSpec) and spec.is_eight_bits:
            _check_float(name, spec)


def _check_float(name: str, spec: FloatSpec) -> None:
    is_activation = name in ("input_tensors", "output_tensors")
    if is_activation and spec.is_per_channel and not spec.is_dynamic:
        raise InvalidValueError(
            f"{name} with fp8 and qscheme per_channel: tokens are not known beforehand; use per_tensor or "
            "is_dynamic=True"
        )
    if not is_activation and spec.is_dynamic:
        raise InvalidValueError(f"{name} with is_dynamic: it is known beforehand; use is_dynamic=False")
    if name == "bias":
        raise InvalidValueError("bias with fp8: biases stay in float; leave it out")


# Rows of few samples suffice: a layer's inputs have many positions.
_COMPENSATION_SAMPLES = 16


def _is_fixed(weight: AffineSpec) -> bool:
    """True for a power-of-two scale of least squared error, which is too coarse for the weights' extremes and does not
    follow them in training."""
    is_coarse = weight.is_power_of_two and weight.has_one_scale and weight.learning is None
    return is_coarse and isinstance(weight.method, PowerOfTwoMinMSE)


_LOG_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
_SHARED = "every tensor has a scale of its own; leave it out"
# what other versions offer: the default, and what to do in its place
_ONLY_DEFAULTS: Mapping[str, tuple[Any, str]] = {
    "shared_scale_groups": ([], _SHARED),
    "softmax_quant_spec": (None, "attention itself is computed in float; leave it out"),
    "quant_flow": (QuantFlow.standard, "use ModelQuantizer.direct_quantize_checkpoint, from folder to folder"),
    "sync_moe_expert_input_amax": (False, _SHARED),
    "keep_prequantized_layers": (True, "layers that are quantized already stay as they are; leave it out"),
}
_MOST_BITS = 16  # bits of an operand; a float32 has 24 bits of precision
_PLACES = tuple(field.name for field in fields(QuantizationConfig))


@refuse_unknown_fields
@dataclass
class Config:
    """How a model is quantized.

    `global_quant_config` applies to all layers, `layer_type_quant_config` to layers of a kind, such as `nn.Linear` or
    "Linear", `layer_quant_config` to those whose name matches a pattern, such as "features.0.*". An entry replaces the
    global one as a whole; None leaves the layer in float, as does `exclude`, a list of patterns. `algo_config` lists
    algorithms; None: bias correction if activations are integers with static scales, and then cross-layer equalization
    if weights have one scale each, and compensation (GPTQ) if that is a power of two of least squared error; []: none.

    `kv_cache_quant_config` is for the keys and values that the attention of a language model keeps: patterns such as
    "*k_proj" and "*v_proj", with `output_tensors` for the keys and values. An entry replaces the configuration of the
    projection as a whole. `kv_cache_group`: patterns of projections that share a scale, in each layer.
    `min_kv_scale`: no scale is smaller. `kv_cache_post_rope`: quantize what enters the cache, and not what the
    projections return.

    `keep_first_last` names a type for the first and the last layers, where theirs is narrower: int8, fp8_e4m3,
    fp8_e5m2, mxint8, mxfp8_e4m3, mxfp8_e5m2, float, or first_conv_float, which leaves only first convolutions in
    float. A layer that `layer_quant_config` names keeps what it says.

    `npu_rules` makes the result fit AMD's NPU; None: if everything is int8,
    symmetric, with one power-of-two scale for a tensor.

    `log_severity_level` is that of ScreenLogger: 0 debug, 1 info, 2 warning, 3 error, 4 critical; None leaves it.
    `version` is that of the package that wrote the configuration, and `gpu_resident_blocks` a matter of memory: neither
    changes a number. `shared_scale_groups`, `softmax_quant_spec`, `quant_flow`, `sync_moe_expert_input_amax` and
    `keep_prequantized_layers` are accepted with their defaults only.
    """

    global_quant_config: QuantizationConfig
    exclude: Sequence[str] = field(default_factory=list)
    algo_config: Sequence[AlgoConfig] | None = None
    log_severity_level: int | None = 1
    version: str | None = None
    layer_type_quant_config: Mapping[Any, QuantizationConfig | None] = field(default_factory=dict)
    layer_quant_config: Mapping[str, QuantizationConfig | None] = field(default_factory=dict)
    kv_cache_quant_config: Mapping[str, QuantizationConfig] = field(default_factory=dict)
    kv_cache_group: Sequence[str] = field(default_factory=list)
    min_kv_scale: float = 0.0
    kv_cache_post_rope: bool = False
    shared_scale_groups: Sequence[Any] = field(default_factory=list)
    softmax_quant_spec: QuantizationSpec | None = None
    quant_mode: QuantizationMode = QuantizationMode.fx_graph_mode
    quant_flow: QuantFlow = QuantFlow.standard
    gpu_resident_blocks: int = 0
    sync_moe_expert_input_amax: bool = False
    keep_prequantized_layers: bool = True
    npu_rules: bool | None = None
    seed: int = 0
    keep_first_last: str | None = None

    def __post_init__(self) -> None:
        self.settings()
        if self.log_severity_level not in (None, _LOG_LEVELS.index(logging.INFO)):
            ScreenLogger.set_shared_level(_LOG_LEVELS[self.log_severity_level])
        if self.quant_mode is QuantizationMode.eager_mode:
            _LOG.warning("eager_mode: there is one way to quantize a model here, on its graph, and that is taken")

    @staticmethod
    def with_llm_template(template: LLMTemplate, *args: Any, **options: Any) -> Config:
        """Return `template.get_config(...)` of the other arguments, which are scheme, algorithm and so on."""
        return template.get_config(*args, **options)

    def settings(self) -> Settings:
        """Return typed settings for the pipeline. The fields are checked again, since they can be edited."""
        self._check_types()
        specs = self.global_quant_config.layer_specs()
        by_type, by_name = (
            {name: None if entry is None else entry.layer_specs() for name, entry in entries.items()}
            for entries in (self._by_type_name(), self.layer_quant_config)
        )
        layers = [specs, *(layer for layer in (*by_type.values(), *by_name.values()) if layer is not None)]
        if self.algo_config is not None:
            equalize, correct_biases, features = chosen_options(self.algo_config)
        else:
            static = [
                layer
                for layer in layers
                if any(isinstance(spec, AffineSpec) for spec in (layer.activation, layer.output))
            ]
            weights = [layer.weight for layer in static]  # equalization helps where all channels have one scale
            has_uneven_channels = any(isinstance(weight, AffineSpec) and weight.has_one_scale for weight in weights)
            equalize = CLEConfig().options() if has_uneven_channels else None
            correct_biases = TorchBiasCorrectionOptions() if static else None
            is_compensated = any(isinstance(weight, AffineSpec) and _is_fixed(weight) for weight in weights)
            features = (
                {"compensation": CompensationOptions(sample_limit=_COMPENSATION_SAMPLES)} if is_compensated else {}
            )
        given = [spec for layer in layers for spec in (layer.activation, layer.output, layer.weight, layer.bias)]
        others = [
            spec
            for spec in given
            if spec is not None
            and not (
                isinstance(spec, AffineSpec)
                and spec.format == "int8"
                and spec.is_symmetric
                and spec.is_power_of_two
                and spec.has_one_scale
            )
        ]
        has_both = all(layer.weight and (layer.activation or layer.output) for layer in layers)
        if self.npu_rules and (others or not has_both):
            came = f"{others[0]}" if others else "a layer without weight or activations"
            raise InvalidValueError(
                f"npu_rules with {came}: an NPU takes int8, symmetric, one power-of-two scale for a tensor, of "
                "weights and activations; use such specs (PerTensorPowOf2MinMSEObserver), or npu_rules=None"
            )
        return Settings(
            specs,
            by_type,
            by_name,
            exclude=tuple(self.exclude),
            equalize=equalize,
            correct_biases=correct_biases,
            features=features,
            applies_npu_rules=has_both and not others if self.npu_rules is None else self.npu_rules,
            seed=self.seed,
            kv_cache=self._kv_cache(),
            config=self.to_dict(),
            ends=None if self.keep_first_last is None else EndLayers.named(self.keep_first_last),
        )

    def _kv_cache(self) -> KvCacheOptions | None:
        """The options of the cache, checked; None if it stays in float."""
        if not self.kv_cache_quant_config:
            given = {"kv_cache_group": self.kv_cache_group, "min_kv_scale": self.min_kv_scale}
            given["kv_cache_post_rope"] = self.kv_cache_post_rope
            for name, value in given.items():
                if value:
                    raise InvalidValueError(f"{name} {value!r} without kv_cache_quant_config: give the types")
            return None
        by_name = {name: config.layer_specs() for name, config in self.kv_cache_quant_config.items()}
        for name, layer in by_name.items():
            if layer.output is None:
                raise InvalidValueError(
                    f"kv_cache_quant_config['{name}'] has no output_tensors, which are the keys or values"
                )
            if self.kv_cache_post_rope and isinstance(layer.output, BlockSpec):
                raise InvalidValueError(
                    f"kv_cache_quant_config['{name}'] in blocks with kv_cache_post_rope: the cache takes int8 or fp8 "
                    "with a scale for the tensor"
                )
        groups = self.kv_cache_group
        if not isinstance(groups, (list, tuple)) or not all(isinstance(group, str) for group in groups):
            raise UnsupportedTypeError(f"kv_cache_group {groups!r}: expected patterns, such as ['*k_proj', '*v_proj']")
        least = self.min_kv_scale
        if isinstance(least, bool) or not isinstance(least, (int, float)) or not 0 <= least < float("inf"):
            raise InvalidValueError(f"min_kv_scale {least!r}: expected a number of at least 0")
        return KvCacheOptions(by_name, tuple(groups), float(least), bool(self.kv_cache_post_rope))

    def _by_type_name(self) -> dict[str, QuantizationConfig | None]:
        return {type_name(key): config for key, config in self.layer_type_quant_config.items()}

    def _check_types(self) -> None:
        if not isinstance(self.global_quant_config, QuantizationConfig):
            raise UnsupportedTypeError(f"global_quant_config {self.global_quant_config!r}: expected QuantizationConfig")
        all_entries: dict[str, Mapping[Any, Any]] = {
            "layer_type": self.layer_type_quant_config,
            "layer": self.layer_quant_config,
            "kv_cache": self.kv_cache_quant_config,
        }
        for name, entries in all_entries.items():
            for key, value in entries.items():
                if name == "kv_cache" and value is None:
                    raise UnsupportedTypeError(f"kv_cache_quant_config[{key!r}] None: leave the entry out")
                if value is not None and not isinstance(value, QuantizationConfig):
                    raise UnsupportedTypeError(f"{name}_quant_config[{key!r}]: expected QuantizationConfig or None")
        if not isinstance(self.exclude, (list, tuple)) or not all(isinstance(pattern, str) for pattern in self.exclude):
            raise UnsupportedTypeError(
                f"exclude {self.exclude!r}: expected a list of patterns, such as ['classifier*']"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise UnsupportedTypeError(f"seed {self.seed!r}: expected an integer")
        for name, (usual, remedy) in _ONLY_DEFAULTS.items():
            if getattr(self, name) not in (usual, None):
                raise UnsupportedOptionError(f"{name} {getattr(self, name)!r}: {remedy}")
        levels = (None, *range(len(_LOG_LEVELS)))
        if self.log_severity_level not in levels:
            came = type(self.log_severity_level).__name__
            raise InvalidValueError(f"log_severity_level: expected 0 to 4, or None, got {came}; give fields by name")
        if not isinstance(self.quant_mode, QuantizationMode):
            raise UnsupportedTypeError(f"quant_mode {self.quant_mode!r}: expected QuantizationMode.fx_graph_mode")

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON can hold it."""
        by_type, by_name = (
            {name: None if entry is None else entry.to_dict() for name, entry in entries.items()}
            for entries in (self._by_type_name(), self.layer_quant_config)
        )
        kv_cache = {
            "kv_cache_quant_config": {name: config.to_dict() for name, config in self.kv_cache_quant_config.items()},
            "kv_cache_group": list(self.kv_cache_group),
            "min_kv_scale": self.min_kv_scale,
            "kv_cache_post_rope": self.kv_cache_post_rope,
        }
        kv_cache = kv_cache if self.kv_cache_quant_config else {}  # most models have none
        return {
            "global_quant_config": self.global_quant_config.to_dict(),
            "exclude": list(self.exclude),
            "algo_config": None
            if self.algo_config is None
            else [algorithm_dict(algorithm) for algorithm in self.algo_config],
            "layer_type_quant_config": by_type,
            "layer_quant_config": by_name,
            "quant_mode": self.quant_mode.name,
            **kv_cache,
            "npu_rules": self.npu_rules,
            "seed": self.seed,
            **({} if self.keep_first_last is None else {"keep_first_last": self.keep_first_last}),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Config:
        """Read what `to_dict` wrote; missing fields get their defaults."""
        names = [field.name for field in fields(cls)]
        for key, value in content.items():
            if key not in names and value is not None:
                raise unknown_name("field of Config", key, names)
        known = {key: value for key, value in content.items() if key in names}
        if known.get("softmax_quant_spec") is not None:
            known["softmax_quant_spec"] = QuantizationSpec.from_dict(known["softmax_quant_spec"])
        if isinstance(known.get("quant_flow"), str):
            known["quant_flow"] = parse(QuantFlow, known["quant_flow"], "quant_flow")
        for name in ("layer_type_quant_config", "layer_quant_config", "kv_cache_quant_config"):
            known[name] = {
                key: None if config is None else QuantizationConfig.from_dict(config)
                for key, config in (known.get(name) or {}).items()
            }
        by_type = known["layer_type_quant_config"]
        known["layer_type_quant_config"] = {getattr(nn, key, key): config for key, config in by_type.items()}
        if known.get("algo_config") is not None:
            known["algo_config"] = [AlgoConfig.from_dict(algorithm) for algorithm in known["algo_config"]]
        if "quant_mode" in known:
            known["quant_mode"] = parse(QuantizationMode, known["quant_mode"], "quant_mode")
        return cls(**{**known, "global_quant_config": QuantizationConfig.from_dict(content["global_quant_config"])})


def type_name(key: object) -> str:
    """Return the name of a layer type, given as a class or a name. A name that differs from a class of torch.nn only by
    case is refused as a typo."""
    if isinstance(key, type) and issubclass(key, nn.Module):
        return key.__name__
    if not isinstance(key, str):
        raise UnsupportedTypeError(f"layer_type_quant_config: {key!r} came, expected nn.Linear, or 'Linear'")
    known = {name.lower(): name for name in dir(nn)}
    if known.get(key.lower(), key) != key:
        raise unknown_name("kind of layer", key, [name for name in dir(nn) if name[0].isupper()])
    return key


def load_quant_algo_config_from_file(file_path: str | os.PathLike[str]) -> AlgoConfig:
    """Read the settings of an algorithm from a JSON file: its `name`, and the fields of its class."""
    content = read_json(file_path, f"algorithm '{os.fspath(file_path)}'", SETTINGS)
    if not isinstance(content, dict):
        raise InvalidValueError(f"'{os.fspath(file_path)}': expected the name and the fields of an algorithm")
    return AlgoConfig.from_dict(content)


load_pre_optimization_config_from_file = load_quant_algo_config_from_file  # smoothing and rotation are algorithms too

QTensorConfig = QuantizationSpec
QLayerConfig = QuantizationConfig
QConfig = Config

__all__ = [
    *_named_specs,
    "AWQConfig",
    "AlgoConfig",
    "AutoRoundConfig",
    "AutoSmoothQuantConfig",
    "BiasCorrectionConfig",
    "CLEConfig",
    "Config",
    "GPTAQConfig",
    "GPTQConfig",
    "OnlineRotationConfig",
    "QATSpec",
    "QConfig",
    "QLayerConfig",
    "QTensorConfig",
    "QronosConfig",
    "QuantizationConfig",
    "QuantizationSpec",
    "RotationConfig",
    "SVDQuantConfig",
    "SearchedScalesConfig",
    "SmoothQuantConfig",
    "TQTSpec",
    "load_pre_optimization_config_from_file",
    "load_quant_algo_config_from_file",
]

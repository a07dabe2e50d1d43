"""The configuration of a run, as people write it.

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from quark.errors import InvalidValueError, UnsupportedTypeError, refuse_unknown_fields, unknown_name
from quark.text import get_logger
from quark.torch.equalize.options import CrossLayerOptions
from quark.torch.quantization.config.algorithm import (
    AlgoConfig,
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    BiasCorrectionConfig,
    ChosenOptions,
    CLEConfig,
    GPTAQConfig,
    GPTQConfig,
    QronosConfig,
    RotationConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
    chosen_options,
)
from quark.torch.quantization.config.block_specs import *  # noqa: F403 - what these list belongs here too
from quark.torch.quantization.config.block_specs import __all__ as _block_specs
from quark.torch.quantization.config.integer_specs import *  # noqa: F403
from quark.torch.quantization.config.integer_specs import __all__ as _integer_specs
from quark.torch.quantization.config.layer_config import QuantizationConfig
from quark.torch.quantization.config.tensor_spec import QATSpec, QuantizationSpec, TQTSpec
from quark.torch.quantization.config.type import QuantizationMode, parse
from quark.torch.refine.options import BiasCorrectionOptions
from quark.torch.specs import AffineSpec, Granularity, LayerSpecs, Settings, TensorSpec

_LOG = get_logger(__name__)

LayerTypes = Mapping[Any, QuantizationConfig | None]
LayerNames = Mapping[str, QuantizationConfig | None]


@refuse_unknown_fields
@dataclass
class Config:
    """How a model is quantized.

    `global_quant_config` goes for all layers; `layer_type_quant_config` for layers of a kind, such as `nn.Linear` or
    "Linear", `layer_quant_config` for those whose name fits a pattern, such as "features.0.*": the whole entry takes
    the place of the global one, and None leaves the layer in float, as does `exclude`, a list of patterns.
    `algo_config` lists algorithms; None: bias correction where activations are integers with scales that are known
    beforehand, and there cross-layer equalization where weights have one scale; [] none. `npu_rules` makes the result
    one that AMD's NPU takes; None: where everything is int8, symmetric, with one power-of-two scale.
    """

    global_quant_config: QuantizationConfig
    exclude: Sequence[str] = field(default_factory=list)
    algo_config: Sequence[AlgoConfig] | None = None
    layer_type_quant_config: LayerTypes = field(default_factory=dict)
    layer_quant_config: LayerNames = field(default_factory=dict)
    quant_mode: QuantizationMode = QuantizationMode.fx_graph_mode
    npu_rules: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.settings()
        if self.quant_mode is QuantizationMode.eager_mode:
            _LOG.warning("eager_mode: there is one way to quantize a model here, on its graph, and that is taken")

    def settings(self) -> Settings:
        """The same as the steps read it; checked anew, since the fields can be edited."""
        self._check_types()
        specs = self.global_quant_config.layer_specs()
        by_type = {type_name(key): _layer_specs(each) for key, each in self.layer_type_quant_config.items()}
        by_name = {name: _layer_specs(each) for name, each in self.layer_quant_config.items()}
        layers = [specs, *(each for each in (*by_type.values(), *by_name.values()) if each is not None)]
        equalize, correct_biases = self._algorithms(layers)
        return Settings(
            specs,
            by_type,
            by_name,
            exclude=tuple(self.exclude),
            equalize=equalize,
            correct_biases=correct_biases,
            applies_npu_rules=self._applies_npu_rules(layers),
            seed=self.seed,
            config=self.to_dict(),
        )

    def _check_types(self) -> None:
        if not isinstance(self.global_quant_config, QuantizationConfig):
            raise UnsupportedTypeError(f"global_quant_config {self.global_quant_config!r}: expected QuantizationConfig")
        for name, entries in (("layer_type", self.layer_type_quant_config), ("layer", self.layer_quant_config)):
            for key, value in entries.items():
                if value is not None and not isinstance(value, QuantizationConfig):
                    raise UnsupportedTypeError(f"{name}_quant_config[{key!r}]: expected QuantizationConfig or None")
        if not isinstance(self.exclude, (list, tuple)) or not all(isinstance(each, str) for each in self.exclude):
            raise UnsupportedTypeError(
                f"exclude {self.exclude!r}: expected a list of patterns, such as ['classifier*']"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise UnsupportedTypeError(f"seed {self.seed!r}: expected an integer")
        if not isinstance(self.quant_mode, QuantizationMode):
            raise UnsupportedTypeError(f"quant_mode {self.quant_mode!r}: expected QuantizationMode.fx_graph_mode")

    def _algorithms(self, layers: Sequence[LayerSpecs]) -> ChosenOptions:
        if self.algo_config is not None:
            return chosen_options(self.algo_config)
        static = [layer for layer in layers if _has_static_integers(layer)]
        has_uneven_channels = any(_shares_one_scale(layer.weight) for layer in static)
        return (
            CrossLayerOptions() if has_uneven_channels else None,
            BiasCorrectionOptions() if static else None,
        )

    def _applies_npu_rules(self, layers: Sequence[LayerSpecs]) -> bool:
        others = [each for layer in layers for each in _given(layer) if not _is_for_npu(each)]
        has_both = all(layer.weight and (layer.input or layer.output) for layer in layers)
        if self.npu_rules and (others or not has_both):
            came = f"{others[0]}" if others else "a layer without weight or activations"
            raise InvalidValueError(
                f"npu_rules with {came}: an NPU takes int8, symmetric, one power-of-two scale for a tensor, of "
                "weights and activations; use such specs (PerTensorPowOf2MinMSEObserver), or npu_rules=None"
            )
        return has_both and not others if self.npu_rules is None else self.npu_rules

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        by_type = {type_name(key): each for key, each in self.layer_type_quant_config.items()}
        return {
            "global_quant_config": self.global_quant_config.to_dict(),
            "exclude": list(self.exclude),
            "algo_config": None if self.algo_config is None else [each.to_dict() for each in self.algo_config],
            "layer_type_quant_config": {name: _to_dict(each) for name, each in by_type.items()},
            "layer_quant_config": {name: _to_dict(each) for name, each in self.layer_quant_config.items()},
            "quant_mode": self.quant_mode.name,
            "npu_rules": self.npu_rules,
            "seed": self.seed,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Config:
        """What `to_dict` wrote; fields that are missing have their defaults."""
        names = [each.name for each in fields(cls)]
        for key in content:
            if key not in names:
                raise unknown_name("field of Config", key, names)
        known = dict(content)
        for name in ("layer_type_quant_config", "layer_quant_config"):
            known[name] = {key: _from_dict(each) for key, each in known.get(name, {}).items()}
        if known.get("algo_config") is not None:
            known["algo_config"] = [AlgoConfig.from_dict(each) for each in known["algo_config"]]
        if "quant_mode" in known:
            known["quant_mode"] = parse(QuantizationMode, known["quant_mode"], "quant_mode")
        return cls(**{**known, "global_quant_config": QuantizationConfig.from_dict(content["global_quant_config"])})


def type_name(key: object) -> str:
    """The name of a kind of layer, of its class or as it is. One that differs from a class of torch.nn only by capitals
    is taken for a slip."""
    if isinstance(key, type) and issubclass(key, nn.Module):
        return key.__name__
    if not isinstance(key, str):
        raise UnsupportedTypeError(f"layer_type_quant_config: {key!r} came, expected nn.Linear, or 'Linear'")
    known = {name.lower(): name for name in dir(nn)}
    if known.get(key.lower(), key) != key:
        raise unknown_name("kind of layer", key, [name for name in dir(nn) if name[0].isupper()])
    return key


def _given(layer: LayerSpecs) -> Iterator[TensorSpec]:
    return (each for each in (layer.input, layer.output, layer.weight, layer.bias) if each is not None)


def _has_static_integers(layer: LayerSpecs) -> bool:
    return any(isinstance(each, AffineSpec) and not each.is_dynamic for each in (layer.input, layer.output))


def _shares_one_scale(spec: TensorSpec | None) -> bool:
    """That all channels of a weight have one scale, which is what equalization helps."""
    return isinstance(spec, AffineSpec) and spec.granularity is Granularity.TENSOR


def _is_for_npu(spec: TensorSpec) -> bool:
    return (
        isinstance(spec, AffineSpec)
        and spec.format.name == "int8"
        and spec.is_symmetric
        and spec.is_power_of_two
        and spec.granularity is Granularity.TENSOR
        and not spec.is_dynamic
    )


def _layer_specs(config: QuantizationConfig | None) -> LayerSpecs | None:
    return None if config is None else config.layer_specs()


def _to_dict(config: QuantizationConfig | None) -> dict[str, Any] | None:
    return None if config is None else config.to_dict()


def _from_dict(content: Mapping[str, Any] | None) -> QuantizationConfig | None:
    return None if content is None else QuantizationConfig.from_dict(content)


QTensorConfig = QuantizationSpec
QLayerConfig = QuantizationConfig
QConfig = Config

__all__ = [
    *_block_specs,
    *_integer_specs,
    "AWQConfig",
    "AlgoConfig",
    "AutoRoundConfig",
    "AutoSmoothQuantConfig",
    "BiasCorrectionConfig",
    "CLEConfig",
    "Config",
    "GPTAQConfig",
    "GPTQConfig",
    "QATSpec",
    "QConfig",
    "QLayerConfig",
    "QTensorConfig",
    "QronosConfig",
    "QuantizationConfig",
    "QuantizationSpec",
    "RotationConfig",
    "SVDQuantConfig",
    "SmoothQuantConfig",
    "TQTSpec",
]

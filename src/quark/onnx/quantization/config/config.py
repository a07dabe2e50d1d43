"""The configs that people write.

    QuantizationConfig    one flat object of fields and `extra_options`; what presets are
    Config                a QuantizationConfig as ModelQuantizer takes it
    QConfig               by tensor: a spec for each kind of tensor, and others for certain layers

All are ordinary objects to edit in place. They are checked when a ModelQuantizer is built of them, and turned into
frozen typed options there. `save` and `load` keep them as YAML or JSON, without loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from quark.errors import (
    InvalidValueError,
    UnknownNameError,
    UnsupportedTypeError,
    refuse_unknown_fields,
    unknown_name,
)
from quark.files.foreign import short
from quark.onnx.quantization.config.algorithm import AlgoConfig
from quark.onnx.quantization.config.option_kinds import is_subgraph
from quark.onnx.quantization.config.quant_types import CalibrationMethod, QuantFormat, QuantType
from quark.onnx.quantization.config.spec import Int8Spec, QLayerConfig

LayerMap = dict[Any, Any]  # {QLayerConfig or None: [names]}, or the other way round


@refuse_unknown_fields
@dataclass
class QuantizationConfig:
    """How a model is quantized.

    Ranges come from `calibrate_method`, numbers are of `activation_type` and `weight_type`. What is quantized: all
    operators that it is useful for, or `op_types_to_quantize` and `nodes_to_quantize`, and `extra_op_types_to_quantize`
    beside them, less `nodes_to_exclude` (names or regular expressions) and `subgraphs_to_exclude` (pairs of lists: the
    first and the last nodes). `extra_options` holds all that is rarer, by the names in the options table.

    >>> QuantizationConfig(weight_type=QuantType.QUInt8).per_channel
    False
    """

    calibrate_method: Any = CalibrationMethod.MinMax
    quant_format: Any = QuantFormat.QDQ
    activation_type: Any = QuantType.QInt8
    weight_type: Any = QuantType.QInt8
    input_nodes: list[str] = field(default_factory=list)
    output_nodes: list[str] = field(default_factory=list)
    op_types_to_quantize: list[str] = field(default_factory=list)
    nodes_to_quantize: list[str] = field(default_factory=list)
    extra_op_types_to_quantize: list[str] = field(default_factory=list)
    nodes_to_exclude: list[str] = field(default_factory=list)
    subgraphs_to_exclude: list[tuple[list[str], list[str]]] = field(default_factory=list)
    specific_tensor_precision: bool = False
    execution_providers: list[str] = field(default_factory=lambda: ["CPUExecutionProvider"])
    per_channel: bool = False
    reduce_range: bool = False
    optimize_model: bool = True
    use_dynamic_quant: bool = False
    use_external_data_format: bool = False
    convert_fp16_to_fp32: bool = False
    convert_nchw_to_nhwc: bool = False
    include_sq: bool = False
    include_rotation: bool = False
    include_cle: bool = False
    include_auto_mp: bool = False
    include_fast_ft: bool = False
    enable_npu_cnn: bool = False
    enable_npu_transformer: bool = False
    debug_mode: bool = False
    crypto_mode: bool = False
    print_summary: bool = True
    ignore_warnings: bool = True
    log_severity_level: int = 1
    extra_options: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Every field, as JSON can hold it; enums as 'QuantType.QInt8'. A function among the options is an error."""
        from quark.onnx.quantization.config.files import quantization_config_to_dict

        return quantization_config_to_dict(self)

    @staticmethod
    def from_dict(content: dict[str, Any]) -> QuantizationConfig:
        """What `to_dict` wrote; fields that are missing have their defaults, or those of the preset under 'preset'."""
        from quark.onnx.quantization.config.files import quantization_config_from_dict

        return quantization_config_from_dict(content)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write to a .yaml, .yml or .json file."""
        from quark.onnx.quantization.config.files import write

        return write(self.to_dict(), path)

    @staticmethod
    def load(path: str | PathLike[str]) -> QuantizationConfig:
        """Read such a file."""
        from quark.onnx.quantization.config.files import read_as

        return read_as(QuantizationConfig.from_dict, path)


@dataclass
class Config:
    """What ModelQuantizer takes, and what QConfig.get_default_config returns: the config for the whole model.

    `exclude` lists nodes and subgraphs to leave in float, as in a QConfig, beside those that `global_quant_config`
    excludes. `extra_options` and `use_external_data_format` are those of `global_quant_config`.

    >>> config = QConfig.get_default_config("XINT8")
    >>> config.exclude = ["classifier", r"block4\\..*"]
    >>> config.whole().nodes_to_exclude
    ['classifier', 'block4\\\\..*']
    """

    global_quant_config: QuantizationConfig
    exclude: list[Any] = field(default_factory=list)

    def __setattr__(self, name: str, value: Any) -> None:
        known = ("global_quant_config", "exclude", "extra_options", "use_external_data_format")
        if name in known:
            super().__setattr__(name, value)
        elif name in QuantizationConfig.__dataclass_fields__:
            raise UnknownNameError(f"no field of Config {name!r}: set config.global_quant_config.{name}")
        elif name in QConfig.__dataclass_fields__:
            raise UnknownNameError(
                f"no field of Config {name!r}: a preset has one setting for the whole model. Edit "
                f"config.global_quant_config, or build a QConfig with {name}"
            )
        else:
            raise unknown_name("field of Config", name, known)

    @property
    def extra_options(self) -> dict[str, Any]:
        """The extra options of `global_quant_config`."""
        return self.global_quant_config.extra_options

    @extra_options.setter
    def extra_options(self, value: dict[str, Any]) -> None:
        self.global_quant_config.extra_options = value

    @property
    def use_external_data_format(self) -> bool:
        """The field of that name of `global_quant_config`."""
        return self.global_quant_config.use_external_data_format

    @use_external_data_format.setter
    def use_external_data_format(self, value: bool) -> None:
        self.global_quant_config.use_external_data_format = value

    def whole(self) -> QuantizationConfig:
        """`global_quant_config`, with `exclude` added to what it excludes."""
        flat = self.global_quant_config
        if not self.exclude:
            return flat
        if not isinstance(flat, QuantizationConfig):
            raise UnsupportedTypeError(f"global_quant_config {short(flat)}: expected a QuantizationConfig")
        nodes, subgraphs = exclusions(self.exclude)
        return replace(
            flat,
            nodes_to_exclude=[*(flat.nodes_to_exclude or ()), *nodes],
            subgraphs_to_exclude=[*(flat.subgraphs_to_exclude or ()), *subgraphs],
        )

    def save(self, path: str | PathLike[str]) -> Path:
        """Write to a .yaml, .yml or .json file; the content is that of `whole()`."""
        return self.whole().save(path)

    @staticmethod
    def load(path: str | PathLike[str]) -> Config:
        """Read such a file."""
        return Config(QuantizationConfig.load(path))


def exclusions(exclude: Any) -> tuple[list[str], list[Any]]:
    """The names of nodes, and the subgraphs, in an `exclude` list."""
    nodes: list[str] = []
    subgraphs: list[Any] = []
    if not isinstance(exclude, (str, list, tuple, set, frozenset)):
        raise UnsupportedTypeError(f"exclude: {short(exclude)}, expected a list of names")
    for each in [exclude] if isinstance(exclude, str) else exclude:
        if isinstance(each, str):
            nodes.append(each)
        elif is_subgraph(each):
            subgraphs.append(each)
        elif isinstance(each, list) and all(map(is_subgraph, each)):
            subgraphs.extend(each)
        else:
            raise InvalidValueError(
                f"exclude: {each!r}, expected a name, a regular expression, or for a subgraph a pair "
                "(['first'], ['last'])"
            )
    return nodes, subgraphs


@refuse_unknown_fields
@dataclass(init=False, eq=False)
class QConfig:
    """Quantization by tensor and by layer.

    `specific_layer_config` maps a QLayerConfig to the names (or regular expressions) of nodes, `layer_type_config` to
    operator types; the key None leaves them in float; {name: QLayerConfig} is understood too. `exclude` lists names,
    regular expressions, and pairs of lists for subgraphs. Further keywords are extra options, by the same names as in
    a QuantizationConfig; `extra_options={...}` is understood too. Two are equal when they say the same.

    >>> QConfig(QLayerConfig(activation=Int8Spec(), weight=Int8Spec()), Percentile=99.99).extra_options
    {'Percentile': 99.99}
    """

    global_config: QLayerConfig
    specific_layer_config: LayerMap
    layer_type_config: LayerMap
    exclude: list[Any]
    algo_config: list[AlgoConfig]
    use_external_data_format: bool
    extra_options: dict[str, Any]

    def __init__(
        self,
        global_config: QLayerConfig | None = None,
        specific_layer_config: LayerMap | None = None,
        layer_type_config: LayerMap | None = None,
        exclude: list[Any] | None = None,
        algo_config: list[AlgoConfig] | None = None,
        use_external_data_format: bool = False,
        **extra_options: Any,
    ) -> None:
        nested = extra_options.pop("extra_options", None) or {}
        if not isinstance(nested, dict):
            raise UnsupportedTypeError(f"extra_options {nested!r}: expected a dictionary")
        self.global_config = global_config or QLayerConfig(activation=Int8Spec(), weight=Int8Spec())
        self.specific_layer_config = specific_layer_config or {}
        self.layer_type_config = layer_type_config or {}
        self.exclude = exclude or []
        self.algo_config = algo_config or []
        self.use_external_data_format = use_external_data_format
        self.extra_options = {**extra_options, **nested}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # it can be edited

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it. A function among the options is an error."""
        from quark.onnx.quantization.config.files import qconfig_to_dict

        return qconfig_to_dict(self)

    @staticmethod
    def from_dict(content: dict[str, Any]) -> QConfig:
        """What `to_dict` wrote."""
        from quark.onnx.quantization.config.files import qconfig_from_dict

        return qconfig_from_dict(content)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write to a .yaml, .yml or .json file."""
        from quark.onnx.quantization.config.files import write

        return write(self.to_dict(), path)

    @staticmethod
    def load(path: str | PathLike[str]) -> QConfig:
        """Read such a file."""
        from quark.onnx.quantization.config.files import read_as

        return read_as(QConfig.from_dict, path)

    @staticmethod
    def get_default_config(config_name: str) -> Config:
        """A preset by name, ready for ModelQuantizer; a fresh object every time."""
        from quark.onnx.quantization.presets import get_default_config

        return Config(get_default_config(config_name))

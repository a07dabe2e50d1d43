"""The configs that people write.

    QuantizationConfig    one flat object of fields and `extra_options`; what presets are
    Config                a QuantizationConfig as ModelQuantizer takes it
    QConfig               by tensor: a spec for each kind of tensor, and others for certain layers

All are ordinary objects to edit in place. They are checked when a ModelQuantizer is built of them, and turned into
frozen typed options there. `save` and `load` keep them as YAML or JSON, without loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from quark.errors import UnsupportedTypeError, unknown_name
from quark.onnx.quantization.config.algorithm import AlgoConfig
from quark.onnx.quantization.config.quant_types import CalibrationMethod, QuantFormat, QuantType
from quark.onnx.quantization.config.spec import Int8Spec, QLayerConfig

LayerMap = dict[Any, Any]  # {QLayerConfig or None: [names]}, or the other way round


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

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            raise unknown_name("field of QuantizationConfig", name, self.__dataclass_fields__)
        super().__setattr__(name, value)

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
    """What ModelQuantizer takes: the config for the whole model."""

    global_quant_config: QuantizationConfig

    def save(self, path: str | PathLike[str]) -> Path:
        """Write to a .yaml, .yml or .json file; the content is the QuantizationConfig's."""
        return self.global_quant_config.save(path)

    @staticmethod
    def load(path: str | PathLike[str]) -> Config:
        """Read such a file."""
        return Config(QuantizationConfig.load(path))


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

"""The configs that people write.

    QuantizationConfig    one flat object of fields and `extra_options`; what presets are
    Config                a QuantizationConfig as ModelQuantizer takes it
    QConfig               by tensor: a spec for each kind of tensor, and others for certain layers

All are ordinary objects to edit in place. ModelQuantizer checks them and turns them into frozen typed options. `save`
and `load` keep them as YAML or JSON, without loss. A file of a QuantizationConfig may start from a preset and hold only
what differs; extra options are merged key by key, and unknown keys are errors:

    preset: XINT8
    extra_options:
      CalibDataSize: 100
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

from quark.errors import InvalidValueError, UnknownNameError, UnsupportedTypeError, refuse_unknown_fields, unknown_name
from quark.files.foreign import short
from quark.onnx.quantization.config.algorithm import AlgoConfig
from quark.onnx.quantization.config.content import (
    merged,
    naming,
    plain,
    read_as,
    refuse_function,
    restored,
    restored_options,
    tuples,
    write,
)
from quark.onnx.quantization.config.quant_types import CalibrationMethod, QuantFormat, QuantType
from quark.onnx.quantization.config.spec import Int8Spec, QLayerConfig, refuse_unknown_keys
from quark.onnx.quantization.presets import PRESETS, unknown_preset

LayerMap = dict[Any, Any]  # {QLayerConfig or None: [names]}, or the other way round


@refuse_unknown_fields
@dataclass
class QuantizationConfig:
    """How a model is quantized.

    `calibrate_method` finds the ranges; `activation_type` and `weight_type` are the number types. By default all
    operators are quantized that benefit from it. `op_types_to_quantize` and `nodes_to_quantize` restrict that,
    `extra_op_types_to_quantize` adds to it, and `nodes_to_exclude` (names or regular expressions) and
    `subgraphs_to_exclude` (pairs of lists: the first and the last nodes) take nodes out. `extra_options` has the rarer
    options by name, which docs/options.md lists.

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
        return {field.name: plain(getattr(self, field.name), field.name) for field in fields(self)}

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> QuantizationConfig:
        """Read what `to_dict` wrote; missing fields have their defaults, or the values of the preset under 'preset'."""
        if not isinstance(content, Mapping):
            raise UnsupportedTypeError(f"config: expected a mapping of fields, got {short(content)}")
        values = dict(content)
        preset = values.pop("preset", None)
        if preset is not None and not isinstance(preset, str):
            raise UnsupportedTypeError(f"preset is {short(preset)}: expected the name of a preset")
        config = QuantizationConfig() if preset is None else get_default_config(preset)
        known = [field.name for field in fields(config)]
        for name, value in values.items():
            if name not in known:
                raise unknown_name("field of QuantizationConfig", name, [*known, "preset"])
            if name == "extra_options":
                value = merged(config.extra_options, restored_options({} if value is None else value))
            else:
                value = tuples(value) if name == "subgraphs_to_exclude" else restored(value)
            setattr(config, name, value)
        return config

    def save(self, path: str | PathLike[str]) -> Path:
        """Write to a .yaml, .yml or .json file."""
        return write(self.to_dict(), path)

    @staticmethod
    def load(path: str | PathLike[str]) -> QuantizationConfig:
        """Read such a file."""
        return read_as(QuantizationConfig.from_dict, path)


def get_default_config(config_name: str) -> QuantizationConfig:
    """A fresh config of that preset; nothing in it is shared.

    >>> get_default_config("MXINT8").extra_options["MXAttributes"]["scale_rule"]
    'floor'
    """
    if not isinstance(config_name, str) or config_name not in PRESETS:
        raise unknown_preset(config_name)
    row = PRESETS[config_name]
    return QuantizationConfig(**copy.deepcopy(dict(row.fields)), extra_options=copy.deepcopy(dict(row.options)))


@dataclass
class Config:
    """What QConfig.get_default_config returns, for ModelQuantizer: the config for the whole model.

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


def is_names(value: Any) -> bool:
    """True if value is a collection of strings."""
    return isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in value)


def is_subgraph(value: Any) -> bool:
    """True if value is a pair of lists of names: the first nodes and the last."""
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_names, value))


def exclusions(exclude: Any) -> tuple[list[str], list[Any]]:
    """The names of nodes, and the subgraphs, in an `exclude` list."""
    nodes: list[str] = []
    subgraphs: list[Any] = []
    if not isinstance(exclude, (str, list, tuple, set, frozenset)):
        raise UnsupportedTypeError(f"exclude: {short(exclude)}, expected a list of names")
    for entry in [exclude] if isinstance(exclude, str) else exclude:
        if isinstance(entry, str):
            nodes.append(entry)
        elif is_subgraph(entry):
            subgraphs.append(entry)
        elif isinstance(entry, list) and all(map(is_subgraph, entry)):
            subgraphs.extend(entry)
        else:
            raise InvalidValueError(
                f"exclude: {entry!r}, expected a name, a regular expression, or for a subgraph a pair "
                "(['first'], ['last'])"
            )
    return nodes, subgraphs


@refuse_unknown_fields
@dataclass(init=False, eq=False)
class QConfig:
    """Quantization by tensor and by layer.

    `specific_layer_config` maps a QLayerConfig to the names (or regular expressions) of nodes, `layer_type_config` to
    operator types; the key None leaves them in float; {name: QLayerConfig} is accepted too. `exclude` lists names,
    regular expressions, and pairs of lists for subgraphs. Further keywords are extra options, with the same names as in
    a QuantizationConfig; `extra_options={...}` is accepted too. Two are equal if `to_dict` is.

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

    def to_dict(self, on_function: Callable[[str], Any] = refuse_function) -> dict[str, Any]:
        """The config as a dictionary for JSON. A function among the options is an error, or becomes what `on_function`
        returns for its name."""
        return {
            "global_config": self.global_config.to_dict(),
            "specific_layer_config": [
                [layer and layer.to_dict(), names] for layer, names in layer_entries(self.specific_layer_config)
            ],
            "layer_type_config": [
                [layer and layer.to_dict(), names] for layer, names in layer_entries(self.layer_type_config)
            ],
            "exclude": plain(self.exclude),
            "algo_config": [algorithm.to_dict(on_function) for algorithm in self.algo_config],
            "use_external_data_format": self.use_external_data_format,
            "extra_options": plain(self.extra_options, "", on_function),
        }

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> QConfig:
        """Read what `to_dict` wrote."""
        if not isinstance(content, Mapping) or "global_config" not in content:
            raise InvalidValueError("not a QConfig: expected a mapping with 'global_config'")
        refuse_unknown_keys("field of QConfig", content, QConfig)
        exclude = content.get("exclude")
        algorithms = _list(content, "algo_config", "a list of mappings with the name of an algorithm")
        return QConfig(
            naming("global_config", QLayerConfig.from_dict, content["global_config"]),
            _layer_map(content, "specific_layer_config"),
            _layer_map(content, "layer_type_config"),
            tuples([exclude] if isinstance(exclude, str) else _list(content, "exclude", "a list of names")),
            [naming(f"algo_config[{i}]", AlgoConfig.from_dict, algorithm) for i, algorithm in enumerate(algorithms)],
            content.get("use_external_data_format", False),
            extra_options=restored_options(content.get("extra_options", {})),
        )

    def save(self, path: str | PathLike[str]) -> Path:
        """Write to a .yaml, .yml or .json file."""
        return write(self.to_dict(), path)

    @staticmethod
    def load(path: str | PathLike[str]) -> QConfig:
        """Read such a file."""
        return read_as(QConfig.from_dict, path)

    @staticmethod
    def get_default_config(config_name: str) -> Config:
        """A preset by name, ready for ModelQuantizer; a fresh object every time."""
        return Config(get_default_config(config_name))


def layer_entries(layers: Mapping[Any, Any]) -> list[tuple[QLayerConfig | None, list[str]]]:
    """Both ways of writing per-layer configs as pairs of a config and the names that it is for."""
    entries: list[tuple[QLayerConfig | None, list[str]]] = []
    for key, value in layers.items():
        if key is None or isinstance(key, QLayerConfig):
            entries.append((key, [value] if isinstance(value, str) else list(value)))
        elif isinstance(key, str) and (value is None or isinstance(value, QLayerConfig)):
            entries.append((value, [key]))
        else:
            raise UnsupportedTypeError(
                f"layer config {key!r}: {value!r}: expected {{QLayerConfig or None: [names]}} or {{name: QLayerConfig}}"
            )
    return entries


def _layer_map(content: Mapping[str, Any], field: str) -> dict[QLayerConfig | None, list[str]]:
    """Per-layer configs from the pairs that `QConfig.to_dict` writes."""
    expected = "a list of pairs [CONFIG, [NAMES]], CONFIG being a mapping, or null for what stays in float"
    layers: dict[QLayerConfig | None, list[str]] = {}
    for number, entry in enumerate(_list(content, field, expected)):
        if not isinstance(entry, (list, tuple)) or len(entry) != 2:
            raise InvalidValueError(f"{field}[{number}] is {short(entry)}: expected {expected}")
        config, names = entry
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise InvalidValueError(f"{field}[{number}][1] is {short(names)}: expected a list of names")
        key = None if config is None else naming(f"{field}[{number}][0]", QLayerConfig.from_dict, config)
        layers[key] = [*layers.get(key, []), *names]
    return layers


def _list(content: Mapping[str, Any], field: str, expected: str) -> list[Any]:
    """A field of a QConfig that is a list, or null for an empty one."""
    value = content.get(field)
    if value is not None and not isinstance(value, (list, tuple)):
        raise UnsupportedTypeError(f"{field} is {short(value)}: expected {expected}")
    return list(value or [])

"""From a config, which people write, to Settings, which the pipeline reads.

Every field and every extra option is carried out, refused with a reason, or listed in the remarks with the reason why
it cannot matter. Nothing is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from quark.errors import InvalidValueError, UnsupportedTypeError, unknown_name
from quark.onnx.calibrate.options import CalibrationOptions
from quark.onnx.choose.options import BlockPlacement, ChoiceOptions, Selection, Target, TensorOverride
from quark.onnx.choose.specs import AffineSpec, DynamicSpec, LayerSpec
from quark.onnx.insert.options import InsertOptions, NodeStyle
from quark.onnx.load.options import LoadOptions
from quark.onnx.optimize.options import OptimizeOptions
from quark.onnx.protect.options import ProtectMode, ProtectOptions
from quark.onnx.quantization.config.algorithm_options import (
    equalize_options,
    fields_and_options,
    refine_options,
    switched_on,
)
from quark.onnx.quantization.config.config import Config, QConfig, QuantizationConfig
from quark.onnx.quantization.config.field_checks import check_fields, preset_of, refuse_fields
from quark.onnx.quantization.config.files import (
    layer_entries,
    load_config,
    naming,
    plain,
    qconfig_to_dict,
    refuse_infinite,
    without_places,
)
from quark.onnx.quantization.config.layers import fields_of, layer_of
from quark.onnx.quantization.config.mixed_precision_options import draft_low_spec, mix_options
from quark.onnx.quantization.config.nbits_spec import nbits_spec
from quark.onnx.quantization.config.npu_options import npu_options
from quark.onnx.quantization.config.option_table import OPTIONS
from quark.onnx.quantization.config.option_treatments import Draft, SameAs, default_rewrites
from quark.onnx.quantization.config.options_of_graphs import POOLS
from quark.onnx.quantization.config.quant_types import format_of_type
from quark.onnx.quantization.config.spec_options import irrelevant, spec_options
from quark.onnx.quantization.config.tensor_specs import SpecOptions, layer_spec
from quark.onnx.quantization.presets import PRESETS, unknown_preset
from quark.onnx.quantization.settings import Settings
from quark.onnx.save.options import SaveOptions

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
AnyConfig = Config | QuantizationConfig | QConfig | str | PathLike[str]


def settings_of(config: AnyConfig) -> Settings:
    """The settings of a config, of a preset by its name, or of a YAML or JSON file by its path.

    >>> settings_of("MXINT8").choose.default.weight.quantizer.scale_rule.value
    'floor'
    """
    if isinstance(config, (str, PathLike)) and config not in PRESETS:
        path = Path(config)
        if path.suffix.lower() not in CONFIG_SUFFIXES:
            raise unknown_preset(str(config))
        return naming(f"config file {str(path)!r}", lambda each: _settings(path.stem, each), load_config(path))
    return _settings(*_resolved(config))


def _settings(name: str | None, wanted: Any) -> Settings:
    if isinstance(wanted, QConfig):
        return _by_tensor(name, wanted)
    if not isinstance(wanted, QuantizationConfig):
        raise UnsupportedTypeError(
            f"config {wanted!r}: expected a Config, a QuantizationConfig, a QConfig, the name of a preset, or the path "
            "of a YAML or JSON file"
        )
    return _by_fields(name, wanted)


def _resolved(config: Any) -> tuple[str | None, Any]:
    """A name to call it by, where it has one, and the config itself."""
    if isinstance(config, str) and config in PRESETS:
        return config, PRESETS[config].config()
    return None, config.global_quant_config if isinstance(config, Config) else config


def _by_fields(name: str | None, config: QuantizationConfig) -> Settings:
    check_fields(config)
    preset = preset_of(config)
    resolved, draft = _drafted(config)
    values = draft.spec_values
    options = _spec_options(resolved, draft)
    if values.get("UseMatMulNBits"):
        default = nbits_spec(resolved, draft)
    else:
        layer = layer_spec(layer_of(resolved, values), options)
        default = _dynamic_spec(layer, resolved, draft) if resolved.use_dynamic_quant else layer
    draft_low_spec(draft, layer_of(resolved, values), options, default)
    _tensor_precision(resolved, draft)
    return _assembled(preset or name or "custom", resolved, draft, default, plain(vars(config), "", str))


def _by_tensor(name: str | None, config: QConfig) -> Settings:
    algorithms, extra_options = fields_and_options(config.algo_config, config.extra_options)
    flat = replace(fields_of(config), extra_options=extra_options, **algorithms)
    check_fields(flat)
    resolved, draft = _drafted(flat)
    for option in ("ActivationSymmetric", "WeightSymmetric", "WeightCalibrateMethod", "MixedPrecisionTensor"):
        if draft.spec_values.pop(option, None) is not None:
            draft.remarks.append(f"{option}: in a QConfig the specs say it")
    options = _spec_options(resolved, draft)
    default = (
        nbits_spec(resolved, draft)
        if draft.spec_values.get("UseMatMulNBits")
        else layer_spec(config.global_config, options)
    )
    draft_low_spec(draft, config.global_config, options, default)
    draft.put("choose", "by_node", _layer_specs(config.specific_layer_config, options, default))
    draft.put("choose", "by_op_type", _layer_specs(config.layer_type_config, options, default))
    return _assembled(name or "custom", resolved, draft, default, qconfig_to_dict(config, str))


def _layer_specs(layers: Mapping[Any, Any], options: SpecOptions, default: LayerSpec) -> tuple[Any, ...]:
    entries = layer_entries(layers)
    return tuple((name, layer and layer_spec(layer, options, default)) for layer, names in entries for name in names)


def _drafted(config: QuantizationConfig) -> tuple[QuantizationConfig, Draft]:
    """The config with the fields that options are other names of, and all other options where they go."""
    given = config.extra_options
    for name, value in given.items():
        if name not in OPTIONS:
            raise unknown_name("extra option", name, OPTIONS)
        OPTIONS[name].kind.check(name, value)
    draft = Draft()
    same = {name: value for name, value in given.items() if isinstance(OPTIONS[name].treatment, SameAs)}
    for name, value in same.items():
        OPTIONS[name].treatment.apply(draft, name, value)
    resolved = replace(config, **draft.fields)
    refuse_fields(resolved)
    draft.members = _usual_members(resolved)
    draft.switched_on = switched_on(resolved)
    for name, value in given.items():
        if name not in same:
            OPTIONS[name].treatment.apply(draft, name, value)
    return resolved, draft


def _usual_members(config: QuantizationConfig) -> dict[str, set[str]]:
    usual = ChoiceOptions(LayerSpec(None, None))
    members = {"aligned": set(usual.aligned), "fused_activations": set(usual.fused_activations)}
    if config.enable_npu_cnn:
        members["aligned"].update(POOLS)
        members["fused_activations"].update(("LeakyRelu", "PRelu"))
    return members


def _spec_options(config: QuantizationConfig, draft: Draft) -> SpecOptions:
    placement = draft.of("choose").get("block_placement", BlockPlacement.COMPUTE)
    return spec_options(draft.spec_values, placement, config.enable_npu_cnn, config.reduce_range)


def _dynamic_spec(layer: LayerSpec, config: QuantizationConfig, draft: Draft) -> LayerSpec:
    if not isinstance(layer.weight, AffineSpec) or layer.weight.format not in ("int8", "uint8"):
        raise InvalidValueError(
            f"use_dynamic_quant with weight_type {config.weight_type}: expected QuantType.QInt8 or QuantType.QUInt8"
        )
    return LayerSpec(DynamicSpec("uint8"), layer.weight)


def _tensor_precision(config: QuantizationConfig, draft: Draft) -> None:
    """The older way to give tensors types by name."""
    by_type = draft.spec_values.get("MixedPrecisionTensor")
    if by_type is None:
        return
    if not config.specific_tensor_precision:
        draft.remarks.append("MixedPrecisionTensor: specific_tensor_precision is False, so that it is not used")
        return
    overrides = tuple(
        TensorOverride(tensor, format_of_type(quant_type))
        for quant_type, tensors in by_type.items()
        for tensor in tensors
    )
    draft.put("choose", "overrides", overrides)


def _assembled(
    name: str, config: QuantizationConfig, draft: Draft, default: LayerSpec, record: Mapping[str, Any]
) -> Settings:
    refuse_infinite(record)
    is_nbits = draft.spec_values.get("UseMatMulNBits", False)
    if not is_nbits and draft.of("insert").pop("matmul_nbits", None) is not None:
        draft.remarks.append("MatMulNBitsParams: UseMatMulNBits is not set")
    npu = npu_options(draft.npu_values, config.enable_npu_cnn, default)
    choose = replace(_choice_options(config, draft, default), positions=npu.positions)
    equalize, refine = equalize_options(draft), refine_options(draft)
    style = _node_style(config, default)
    mix = mix_options(draft, choose, npu.simulate, style)
    specs = [choose.default, mix.low if mix else None, *(spec for _, spec in (*choose.by_op_type, *choose.by_node))]
    protect = ProtectOptions(**draft.of("protect"))
    if "mac_budget" in draft.of("protect") and protect.mode is not ProtectMode.AUTO:
        draft.remarks.append("ProtectBudget: Protect is not 'auto', so that there is nothing for it to limit")
    remarks = [*draft.remarks, *npu.remarks, *_field_remarks(config, default), *irrelevant(draft.spec_values, specs)]
    return Settings(
        choose,
        name,
        load=LoadOptions(has_fp16_converted=config.convert_fp16_to_fp32, **draft.of("load")),
        optimize=_optimize_options(config, draft),
        equalize=equalize,
        calibrate=CalibrationOptions(providers=tuple(config.execution_providers or ()), **draft.of("calibrate")),
        simulate=npu.simulate,
        refine=refine,
        protect=protect,
        mix=mix,
        insert=InsertOptions(style=style, **draft.of("insert")),
        save=SaveOptions(has_external_data=config.use_external_data_format, **draft.of("save")),
        has_summary=config.print_summary,
        config=without_places(record),
        remarks=tuple(dict.fromkeys(remarks)),
    )


def _choice_options(config: QuantizationConfig, draft: Draft, default: LayerSpec) -> ChoiceOptions:
    target = Target.ONNX_RUNTIME
    if config.enable_npu_cnn:
        target = Target.NPU_CNN
    elif config.enable_npu_transformer:
        target = Target.NPU_TRANSFORMER
    return ChoiceOptions(
        default,
        selection=_selection(config, draft),
        target=target,
        has_quantized_bias=draft.spec_values.get("QuantizeBias", True),
        **{name: frozenset(members) for name, members in draft.members.items()},  # type: ignore[arg-type]
        **draft.of("choose"),
    )


def _selection(config: QuantizationConfig, draft: Draft) -> Selection:
    subgraphs = config.subgraphs_to_exclude or []
    wanted = {
        "op_types": frozenset(config.op_types_to_quantize) if config.op_types_to_quantize else None,
        "extra_op_types": frozenset(config.extra_op_types_to_quantize or ()),
        "nodes": tuple(config.nodes_to_quantize or ()),
        "excluded_nodes": tuple(config.nodes_to_exclude or ()),
        "excluded_subgraphs": tuple((tuple(first), tuple(last)) for first, last in subgraphs),
        "input_nodes": tuple(config.input_nodes or ()),
        "output_nodes": tuple(config.output_nodes or ()),
    }
    return Selection(**{**wanted, **draft.of("selection")})


def _optimize_options(config: QuantizationConfig, draft: Draft) -> OptimizeOptions:
    on = frozenset(name for name, is_on in draft.rewrites.items() if is_on)
    off = frozenset(draft.rewrites) - on
    fields = dict(draft.of("optimize"))
    has_defaults = fields.pop("is_on", True) and config.optimize_model
    return OptimizeOptions(off if has_defaults else off | (default_rewrites() - on), on, **fields)


def _node_style(config: QuantizationConfig, default: LayerSpec) -> NodeStyle:
    if config.quant_format.name != "QOperator":
        return NodeStyle.QDQ
    if not isinstance(default.activation, AffineSpec) or not isinstance(default.weight, AffineSpec):
        raise InvalidValueError(
            "quant_format QOperator: there are such operators for integers only; use QuantFormat.QDQ"
        )
    return NodeStyle.QOPERATOR


_LOGGING = "messages go to the logger 'quark'; set its level: logging.getLogger('quark').setLevel(...)"


def _field_remarks(config: QuantizationConfig, default: LayerSpec) -> list[str]:
    usual = QuantizationConfig()
    names = ("debug_mode", "ignore_warnings", "log_severity_level")
    remarks = [f"{each}: {_LOGGING}" for each in names if getattr(config, each) not in (getattr(usual, each), None)]
    if not isinstance(default.weight, AffineSpec):
        given = [each for each in ("per_channel", "reduce_range") if getattr(config, each)]
        given += [each for each in ("AddQDQPairToWeight",) if config.extra_options.get(each)]
        remarks += [f"{each}: weights are not of integers with a scale" for each in given]
    if config.extra_options.get("SimplifyModel") and not config.optimize_model:
        remarks.append("SimplifyModel: optimize_model is False, so that only the rewrites that are asked for run")
    if config.specific_tensor_precision and "MixedPrecisionTensor" not in config.extra_options:
        remarks.append("specific_tensor_precision: MixedPrecisionTensor gives no tensors")
    return remarks

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
from quark.onnx.quantization.config.algorithm_options import equalize_options, refine_options
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
from quark.onnx.quantization.config.layers import RunFields, layer_of
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
    return None, config.whole() if isinstance(config, Config) else config


def _by_fields(name: str | None, config: QuantizationConfig) -> Settings:
    check_fields(config)
    preset = preset_of(config)
    run, draft = _drafted(RunFields.of(config))
    values = draft.spec_values
    options = _spec_options(run, draft)
    default = nbits_spec(run, draft) if values.get("UseMatMulNBits") else None
    layer = layer_of(config, values)
    if default is None:
        default = layer_spec(layer, options)
        default = _dynamic_spec(default, config) if config.use_dynamic_quant else default
    draft_low_spec(draft, layer, options, default)
    _tensor_precision(run, draft)
    return _assembled(preset or name or "custom", run, draft, default, plain(vars(config), "", str))


def _by_tensor(name: str | None, config: QConfig) -> Settings:
    given = RunFields.by_tensor(config)
    check_fields(given)
    run, draft = _drafted(given)
    for option in ("ActivationSymmetric", "WeightSymmetric", "WeightCalibrateMethod", "MixedPrecisionTensor"):
        if draft.spec_values.pop(option, None) is not None:
            draft.remarks.append(f"{option}: in a QConfig the specs say it")
    options = _spec_options(run, draft)
    default = (
        nbits_spec(run, draft) if draft.spec_values.get("UseMatMulNBits") else layer_spec(config.global_config, options)
    )
    draft_low_spec(draft, config.global_config, options, default)
    draft.put("choose", "by_node", _layer_specs(config.specific_layer_config, options, default))
    draft.put("choose", "by_op_type", _layer_specs(config.layer_type_config, options, default))
    return _assembled(name or "custom", run, draft, default, qconfig_to_dict(config, str))


def _layer_specs(layers: Mapping[Any, Any], options: SpecOptions, default: LayerSpec) -> tuple[Any, ...]:
    entries = layer_entries(layers)
    return tuple((name, layer and layer_spec(layer, options, default)) for layer, names in entries for name in names)


def _drafted(run: RunFields) -> tuple[RunFields, Draft]:
    """The fields with those that options are other names of, and all other options where they go."""
    given = run.extra_options
    for name, value in given.items():
        if name not in OPTIONS:
            raise unknown_name("extra option", name, OPTIONS)
        OPTIONS[name].kind.check(name, value)
    draft = Draft()
    same = {name: value for name, value in given.items() if isinstance(OPTIONS[name].treatment, SameAs)}
    for name, value in same.items():
        OPTIONS[name].treatment.apply(draft, name, value)
    resolved = replace(run, **draft.fields)
    refuse_fields(resolved)
    draft.members = _usual_members(resolved)
    draft.switched_on = resolved.switched_on
    for name, value in given.items():
        if name not in same:
            OPTIONS[name].treatment.apply(draft, name, value)
    return resolved, draft


def _usual_members(run: RunFields) -> dict[str, set[str]]:
    usual = ChoiceOptions(LayerSpec(None, None))
    members = {"aligned": set(usual.aligned), "fused_activations": set(usual.fused_activations)}
    if run.enable_npu_cnn:
        members["aligned"].update(POOLS)
        members["fused_activations"].update(("LeakyRelu", "PRelu"))
    return members


def _spec_options(run: RunFields, draft: Draft) -> SpecOptions:
    placement = draft.of("choose").get("block_placement", BlockPlacement.COMPUTE)
    return spec_options(draft.spec_values, placement, run.enable_npu_cnn, run.reduce_range)


def _dynamic_spec(layer: LayerSpec, config: QuantizationConfig) -> LayerSpec:
    if not isinstance(layer.weight, AffineSpec) or layer.weight.format not in ("int8", "uint8"):
        raise InvalidValueError(
            f"use_dynamic_quant with weight_type {config.weight_type}: expected QuantType.QInt8 or QuantType.QUInt8"
        )
    return LayerSpec(DynamicSpec("uint8"), layer.weight)


def _tensor_precision(run: RunFields, draft: Draft) -> None:
    """The older way to give tensors types by name."""
    by_type = draft.spec_values.get("MixedPrecisionTensor")
    if by_type is None:
        return
    if not run.specific_tensor_precision:
        draft.remarks.append("MixedPrecisionTensor: specific_tensor_precision is False, so that it is not used")
        return
    overrides = tuple(
        TensorOverride(tensor, format_of_type(quant_type))
        for quant_type, tensors in by_type.items()
        for tensor in tensors
    )
    draft.put("choose", "overrides", overrides)


def _assembled(name: str, run: RunFields, draft: Draft, default: LayerSpec, record: Mapping[str, Any]) -> Settings:
    refuse_infinite(record)
    is_nbits = draft.spec_values.get("UseMatMulNBits", False)
    if not is_nbits and draft.of("insert").pop("matmul_nbits", None) is not None:
        draft.remarks.append("MatMulNBitsParams: UseMatMulNBits is not set")
    npu = npu_options(draft.npu_values, run.enable_npu_cnn, default)
    choose = replace(_choice_options(run, draft, default), positions=npu.positions)
    equalize, refine = equalize_options(draft), refine_options(draft)
    style = _node_style(run, default)
    mix = mix_options(draft, choose, npu.simulate, style)
    specs = [choose.default, mix.low if mix else None, *(spec for _, spec in (*choose.by_op_type, *choose.by_node))]
    protect = ProtectOptions(**draft.of("protect"))
    if "mac_budget" in draft.of("protect") and protect.mode is not ProtectMode.AUTO:
        draft.remarks.append("ProtectBudget: Protect is not 'auto', so that there is nothing for it to limit")
    remarks = [*draft.remarks, *npu.remarks, *_field_remarks(run, default), *irrelevant(draft.spec_values, specs)]
    return Settings(
        choose,
        name,
        load=LoadOptions(has_fp16_converted=run.convert_fp16_to_fp32, **draft.of("load")),
        optimize=_optimize_options(run, draft),
        equalize=equalize,
        calibrate=CalibrationOptions(providers=tuple(run.execution_providers or ()), **draft.of("calibrate")),
        simulate=npu.simulate,
        refine=refine,
        protect=protect,
        mix=mix,
        insert=InsertOptions(style=style, **draft.of("insert")),
        save=SaveOptions(has_external_data=run.use_external_data_format, **draft.of("save")),
        has_summary=run.print_summary,
        config=without_places(record),
        remarks=tuple(dict.fromkeys(remarks)),
    )


def _choice_options(run: RunFields, draft: Draft, default: LayerSpec) -> ChoiceOptions:
    target = Target.ONNX_RUNTIME
    if run.enable_npu_cnn:
        target = Target.NPU_CNN
    elif run.enable_npu_transformer:
        target = Target.NPU_TRANSFORMER
    return ChoiceOptions(
        default,
        selection=_selection(run, draft),
        target=target,
        has_quantized_bias=draft.spec_values.get("QuantizeBias", True),
        **{name: frozenset(members) for name, members in draft.members.items()},  # type: ignore[arg-type]
        **draft.of("choose"),
    )


def _selection(run: RunFields, draft: Draft) -> Selection:
    subgraphs = run.subgraphs_to_exclude or []
    wanted = {
        "op_types": frozenset(run.op_types_to_quantize) if run.op_types_to_quantize else None,
        "extra_op_types": frozenset(run.extra_op_types_to_quantize or ()),
        "nodes": tuple(run.nodes_to_quantize or ()),
        "excluded_nodes": tuple(run.nodes_to_exclude or ()),
        "excluded_subgraphs": tuple((tuple(first), tuple(last)) for first, last in subgraphs),
        "input_nodes": tuple(run.input_nodes or ()),
        "output_nodes": tuple(run.output_nodes or ()),
    }
    return Selection(**{**wanted, **draft.of("selection")})


def _optimize_options(run: RunFields, draft: Draft) -> OptimizeOptions:
    on = frozenset(name for name, is_on in draft.rewrites.items() if is_on)
    off = frozenset(draft.rewrites) - on
    fields = dict(draft.of("optimize"))
    has_defaults = fields.pop("is_on", True) and run.optimize_model
    return OptimizeOptions(off if has_defaults else off | (default_rewrites() - on), on, **fields)


def _node_style(run: RunFields, default: LayerSpec) -> NodeStyle:
    if run.quant_format.name != "QOperator":
        return NodeStyle.QDQ
    if not isinstance(default.activation, AffineSpec) or not isinstance(default.weight, AffineSpec):
        raise InvalidValueError(
            "quant_format QOperator: there are such operators for integers only; use QuantFormat.QDQ"
        )
    return NodeStyle.QOPERATOR


_LOGGING = "messages go to the logger 'quark'; set its level: logging.getLogger('quark').setLevel(...)"


def _field_remarks(run: RunFields, default: LayerSpec) -> list[str]:
    usual = RunFields()
    names = ("debug_mode", "ignore_warnings", "log_severity_level")
    remarks = [f"{each}: {_LOGGING}" for each in names if getattr(run, each) not in (getattr(usual, each), None)]
    if not isinstance(default.weight, AffineSpec):
        given = [each for each in ("per_channel", "reduce_range") if getattr(run, each)]
        given += [each for each in ("AddQDQPairToWeight",) if run.extra_options.get(each)]
        remarks += [f"{each}: weights are not of integers with a scale" for each in given]
    if run.extra_options.get("SimplifyModel") and not run.optimize_model:
        remarks.append("SimplifyModel: optimize_model is False, so that only the rewrites that are asked for run")
    if run.specific_tensor_precision and "MixedPrecisionTensor" not in run.extra_options:
        remarks.append("specific_tensor_precision: MixedPrecisionTensor gives no tensors")
    return remarks

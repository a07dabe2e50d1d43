"""Convert a config, which people write, to Settings, which the pipeline reads.

Every field and every extra option is carried out, refused with a reason, or listed in the remarks with the reason why
it cannot matter. Nothing is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from quark.decide.options import ChoiceOptions, PositionOptions, Selection, Target
from quark.decide.specs import AffineSpec, DynamicSpec, FloatSpec, LayerSpec
from quark.errors import InvalidValueError, UnsupportedTypeError, unknown_name
from quark.features.bias_correction.options import BiasCorrectionOptions
from quark.features.equalization.options import CrossLayerOptions
from quark.features.order import FEATURES
from quark.features.protection.options import ProtectMode, ProtectOptions
from quark.features.rotation.options import RotationOptions, read_pairs
from quark.features.smooth_quant.options import SmoothOptions
from quark.formats.affine import integer_format
from quark.npu import RULE_NAMES
from quark.onnx.calibrate.passes import CalibrationOptions
from quark.onnx.insert.pairs import OPSET_OF_BLOCKS, OPSET_OF_FLOAT8, InsertOptions, NBitsOptions, NodeStyle, WeightForm
from quark.onnx.load import LoadOptions
from quark.onnx.optimize import FOR_NPUS, FUSIONS, OptimizeOptions
from quark.onnx.quantization.config.algorithm import (
    AdaQuantConfig,
    AdaRoundConfig,
    AlgoConfig,
    AutoMixprecisionConfig,
    BiasCorrectionConfig,
    CLEConfig,
    DistillationConfig,
    GPTQConfig,
    QuarotConfig,
    SmoothQuantConfig,
)
from quark.onnx.quantization.config.config import (
    Config,
    QConfig,
    QuantizationConfig,
    exclusions,
    get_default_config,
    layer_entries,
)
from quark.onnx.quantization.config.content import naming, plain, refuse_infinite, without_places
from quark.onnx.quantization.config.files import load_config
from quark.onnx.quantization.config.finetune_options import finetune_options, finetune_settings
from quark.onnx.quantization.config.mixed_precision_options import draft_low_spec, mix_options, mixed_precision_settings
from quark.onnx.quantization.config.option_table import OPTIONS, POOLS
from quark.onnx.quantization.config.option_treatments import DEFAULT_REWRITES, Draft, SameAs
from quark.onnx.quantization.config.passes import with_passes
from quark.onnx.quantization.config.preference import with_preference
from quark.onnx.quantization.config.run_fields import (
    BIAS_CORRECTION,
    CROSS_LAYER,
    DISTILLATION,
    FINETUNE,
    GPTQ,
    MIXED_PRECISION,
    ROTATION,
    SMOOTH,
    check_fields,
    refuse_fields,
    switched_on,
    without_fix_neurons,
)
from quark.onnx.quantization.config.spec import QLayerConfig, QTensorConfig, ScaleType
from quark.onnx.quantization.config.tensor_specs import (
    draft_overrides,
    irrelevant,
    layer_of,
    layer_spec,
    spec_options,
)
from quark.onnx.quantization.presets import PRESETS, unknown_preset
from quark.onnx.save import SaveOptions
from quark.onnx.settings import EqualizeOptions, RefineOptions, Settings
from quark.onnx.simulate import DEFAULT_SUBSTITUTIONS, SUBSTITUTION_OF_OPTION, SimulateOptions

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
AnyConfig = Config | QuantizationConfig | QConfig | str | PathLike[str]


def settings_of(config: AnyConfig) -> Settings:
    """The settings of a config, of a preset by its name, or of a YAML or JSON file by its path.

    >>> settings_of("MXINT8").choose.default.weight.quantizer.scale_rule.value
    'floor'
    """
    if not isinstance(config, (str, PathLike)):
        return _settings(config.whole() if isinstance(config, Config) else config)
    if isinstance(config, str) and config in PRESETS:
        return _settings(get_default_config(config), config)
    path = Path(config)
    if path.suffix.lower() not in CONFIG_SUFFIXES:
        raise unknown_preset(str(config))
    return naming(f"config file {str(path)!r}", lambda content: _settings(content, path.stem), load_config(path))


def with_algorithms(config: Any, algorithms: Sequence[AlgoConfig]) -> Settings:
    """The settings of a QuantizationConfig with accuracy algorithms beside those that it names."""
    run = config.whole() if isinstance(config, Config) else config
    if not isinstance(run, QuantizationConfig):
        raise InvalidValueError(f"algorithms with a {type(run).__name__}: list them in its algo_config")
    fields, options = fields_and_options(algorithms, run.extra_options)
    return _settings(replace(run, extra_options=options, **fields))


def _settings(config: Any, name: str = "custom") -> Settings:
    if isinstance(config, QConfig):
        return _by_tensor(config, name)
    if not isinstance(config, QuantizationConfig):
        raise UnsupportedTypeError(
            f"config {config!r}: expected a Config, a QuantizationConfig, a QConfig, the name of a preset, or the path "
            "of a YAML or JSON file"
        )
    check_fields(config)
    given_format = config.quant_format
    config = without_fix_neurons(config)
    extra_options, has_cross_layer = with_passes(config.extra_options)
    if extra_options != config.extra_options:
        config = replace(config, extra_options=extra_options, include_cle=config.include_cle or has_cross_layer)
    draft = _drafted(config)
    if config.quant_format is not given_format:
        types = f"activations {config.activation_type.name} and weights {config.weight_type.name}"
        draft.remarks.append(f"quant_format {given_format.name}: FixNeuron nodes are written as QDQ, with {types}")
    options = spec_options(draft)
    is_nbits = draft.spec_values.get("UseMatMulNBits")
    default = _nbits_spec(draft) if is_nbits else None
    layer = layer_of(config, draft.spec_values)
    if default is None:
        default = layer_spec(layer, options)
        if config.use_dynamic_quant:
            weight = default.weight
            if not isinstance(weight, AffineSpec) or weight.format not in ("int8", "uint8"):
                raise InvalidValueError(
                    f"use_dynamic_quant with weight_type {config.weight_type}: expected QuantType.QInt8 or "
                    "QuantType.QUInt8"
                )
            default = LayerSpec(DynamicSpec("uint8"), weight)
    draft_low_spec(draft, layer, options, default)
    draft_overrides(draft, options, default)
    # options first: comparing them makes no config
    alike = [row for row in PRESETS.values() if row.options == config.extra_options]
    preset = next((row.name for row in alike if get_default_config(row.name) == config), name)
    return _assembled(preset, draft, default, plain(vars(config), "", str))


def _by_tensor(config: QConfig, name: str) -> Settings:
    expanded, has_cross_layer = with_passes(config.extra_options)
    if expanded != config.extra_options:
        config = copy(config)
        config.extra_options = expanded
    if has_cross_layer:  # the file replaces an entry
        others = [algorithm for algorithm in config.algo_config if not isinstance(algorithm, CLEConfig)]
        config.algo_config = [*others, CLEConfig()]
    algorithms, extra_options = fields_and_options(config.algo_config, config.extra_options)
    layer = config.global_config
    if not isinstance(layer, QLayerConfig):
        raise UnsupportedTypeError(f"global_config: expected a QLayerConfig, got {layer!r}")
    # power-of-two scales for all tensors imply the NPU, which their spec is made for
    tensors = (layer.inputs, layer.weight)
    has_power_of_two = all(tensor is not None and tensor.scale_type is ScaleType.PowerOf2 for tensor in tensors)
    nodes, subgraphs = exclusions(config.exclude)
    run = QuantizationConfig(
        nodes_to_exclude=nodes,
        subgraphs_to_exclude=subgraphs,
        use_external_data_format=config.use_external_data_format,
        enable_npu_cnn=has_power_of_two and config.extra_options.get("EnableNPUCnn", True),
        extra_options=extra_options,
        **algorithms,
    )
    check_fields(run)
    draft = _drafted(run, layer.inputs)
    for option in ("ActivationSymmetric", "WeightSymmetric", "WeightCalibrateMethod"):
        if draft.spec_values.pop(option, None) is not None:
            draft.remarks.append(f"{option}: a QConfig has this in its specs")
    options = spec_options(draft)
    is_nbits = draft.spec_values.get("UseMatMulNBits")
    default = _nbits_spec(draft) if is_nbits else layer_spec(layer, options)
    draft_low_spec(draft, layer, options, default)
    layers = {"by_node": config.specific_layer_config, "by_op_type": config.layer_type_config}
    for field, entries in layers.items():
        specs = tuple(
            (layer, other and layer_spec(other, options, default))
            for other, names in layer_entries(entries)
            for layer in names
        )
        draft.put("choose", field, specs)
    draft_overrides(draft, options, default)
    return _assembled(name, draft, default, config.to_dict(str))


def _drafted(run: QuantizationConfig, inputs: QTensorConfig | None = None) -> Draft:
    """Check the extra options and apply each of them, those first that are other names of fields. `inputs` is the spec
    of activations of a QConfig."""
    for name, value in run.extra_options.items():
        if name not in OPTIONS:
            raise unknown_name("extra option", name, OPTIONS)
        OPTIONS[name].kind.check(name, value)
    run, remarks = with_preference(run, inputs)
    given, draft = run.extra_options, Draft(run)
    draft.remarks += remarks
    for name, value in given.items():
        if isinstance(OPTIONS[name].treatment, SameAs):
            OPTIONS[name].treatment(draft, name, value)
    refuse_fields(draft.run)
    usual = ChoiceOptions(LayerSpec(None, None))
    draft.members = {"aligned": set(usual.aligned), "fused_activations": set(usual.fused_activations)}
    if draft.run.enable_npu_cnn:
        draft.members["aligned"].update(POOLS)
        draft.members["fused_activations"].update(("LeakyRelu", "PRelu"))
    for name, value in given.items():
        if not isinstance(OPTIONS[name].treatment, SameAs):
            OPTIONS[name].treatment(draft, name, value)
    return draft


# The options that UseMatMulNBits decides, with the values that ask for the same.
_DECIDED_BY_NBITS: Mapping[str, Any] = {
    "ActivationSymmetric": None,
    "WeightSymmetric": None,
    "WeightCalibrateMethod": None,
    "Int32Bias": None,
    "Int16Bias": False,
    "WeightsOnly": True,
    "MatMulConstBOnly": True,
}


def _nbits_spec(draft: Draft) -> LayerSpec:
    """UseMatMulNBits: weights of MatMul and Gemm in groups of a few bits, with DequantizeLinear those of convolutions,
    tables of embeddings too if asked for, all else float."""
    values = {**draft.run.extra_options, **draft.spec_values}
    given = [name for name, same in _DECIDED_BY_NBITS.items() if values.get(name, same) != same]
    for name in [*given, *(["op_types_to_quantize"] if draft.run.op_types_to_quantize else [])]:
        draft.spec_values.pop(name, None)
        draft.remarks.append(f"{name}: UseMatMulNBits implies it: weights of MatMul in groups, all else float")
    nbits = draft.steps.setdefault("insert", {}).setdefault("matmul_nbits", NBitsOptions())
    draft.put("choose", "is_weights_only", True)
    op_types = {"MatMul", "Gemm"}
    if nbits.form is WeightForm.DEQUANTIZE_LINEAR:  # opset from which it has blocks
        draft.put("load", "least_opset", OPSET_OF_BLOCKS)
        op_types |= {"Conv", "ConvTranspose"}
    draft.put("selection", "needs_constant_matmul_operand", True)
    draft.put("selection", "needs_weight_matrix", nbits.form is WeightForm.MATMUL_NBITS)
    sign = "" if nbits.is_symmetric else "u"
    weight = AffineSpec(
        f"{sign}int{nbits.bits}",
        is_symmetric=nbits.is_symmetric,
        is_per_channel=nbits.group_size is None,
        group_size=nbits.group_size,
        group_rule=nbits.group_rule,
    )
    if nbits.embedding_bits is not None:
        op_types.add("Gather")
        table = replace(
            weight,
            format=f"{sign}int{nbits.embedding_bits}",
            is_per_channel=False,
            group_size=nbits.embedding_group_size or nbits.group_size or NBitsOptions().group_size,
        )
        draft.put("choose", "by_op_type", (("Gather", LayerSpec(None, table)),))
    draft.put("selection", "op_types", frozenset(op_types))
    return LayerSpec(None, weight)


def _assembled(name: str, draft: Draft, default: LayerSpec, record: Mapping[str, Any]) -> Settings:
    refuse_infinite(record)
    run, algorithms = draft.run, switched_on(draft.run)
    if not draft.spec_values.get("UseMatMulNBits", False) and draft.of("insert").pop("matmul_nbits", None) is not None:
        draft.remarks.append("MatMulNBitsParams: UseMatMulNBits is not set")
    bits, weight = draft.of("gptq").get("bits"), default.weight
    if bits is not None and isinstance(weight, AffineSpec) and integer_format(weight.format).bits != bits:
        raise InvalidValueError(
            f"GPTQParams.Bits (bits) = {bits}: weights are {weight.format} by their own spec, and GPTQ rounds to that; "
            "set the weight's type instead"
        )
    positions, simulate, npu_remarks = _npu_options(draft.npu_values, run.enable_npu_cnn, default)
    choose = replace(_choice_options(draft, default), positions=positions)
    equalize, refine = equalize_options(draft), refine_options(draft)
    style = NodeStyle.QDQ
    if run.quant_format.name == "QOperator":
        style = NodeStyle.QOPERATOR
        if not isinstance(default.activation, AffineSpec) or not isinstance(default.weight, AffineSpec):
            raise InvalidValueError(
                "quant_format QOperator: there are such operators for integers only; use QuantFormat.QDQ"
            )
    mix = mix_options(draft, style)
    specs = [choose.default, mix.low if mix else None, *(spec for _, spec in (*choose.by_op_type, *choose.by_node))]
    specs += [LayerSpec(override.spec, override.spec) for override in choose.overrides]
    specs += [] if choose.ends is None else [choose.ends.layer]
    is_packed = "matmul_nbits" in draft.of("insert")  # that form needs no newer opset, or has reported it already
    needed = 0 if is_packed else max((_least_opset(spec) for spec in specs if spec is not None), default=0)
    if needed > draft.of("load").get("least_opset", LoadOptions().least_opset):
        draft.put("load", "least_opset", needed)
    protect = ProtectOptions(**draft.of("protect"))
    if "mac_budget" in draft.of("protect") and protect.mode is not ProtectMode.AUTO:
        draft.remarks.append("ProtectBudget: Protect is not 'auto', so that there is nothing for it to limit")
    remarks = [*draft.remarks, *npu_remarks, *_field_remarks(run, default), *irrelevant(draft.spec_values, specs)]
    return Settings(
        choose,
        name,
        load=LoadOptions(
            has_fp16_converted=run.convert_fp16_to_fp32,
            needs_float32=isinstance(default.activation, AffineSpec),
            **draft.of("load"),
        ),
        optimize=_optimize_options(draft),
        equalize=equalize,
        calibrate=CalibrationOptions(**{"providers": tuple(run.execution_providers or ()), **draft.of("calibrate")}),
        simulate=simulate,
        refine=refine,
        protect=protect,
        mix=mix,
        features={
            feature.folder: feature.options(**draft.of(feature.folder))
            for feature in FEATURES
            if feature.switch in algorithms
        },
        insert=InsertOptions(style=style, **draft.of("insert")),
        save=_save_options(draft),
        has_summary=run.print_summary,
        has_warnings=not run.ignore_warnings,
        config=without_places(record),
        remarks=tuple(dict.fromkeys(remarks)),
    )


def _least_opset(layer: LayerSpec) -> int:
    """The opset from which the standard has these types."""
    tensors = (layer.activation, layer.weight, layer.output)
    has_groups = any(isinstance(spec, AffineSpec) and spec.group_size is not None for spec in tensors)
    has_float8 = any(isinstance(spec, FloatSpec) and spec.is_eight_bits for spec in tensors)
    return OPSET_OF_BLOCKS if has_groups else OPSET_OF_FLOAT8 if has_float8 else 0


def _optimize_options(draft: Draft) -> OptimizeOptions:
    """The rewrites that are on and off. optimize_model and SimplifyModel both ask for the usual ones, so that either is
    enough; the fusions run unless their own option says no, and an NPU has some more."""
    run, optimize = draft.run, dict(draft.of("optimize"))
    on = frozenset(name for name, is_on in draft.rewrites.items() if is_on)
    off = frozenset(draft.rewrites) - on
    if run.enable_npu_cnn or run.enable_npu_transformer:
        on |= FOR_NPUS - off
    is_simplified = optimize.pop("is_simplified", False)
    if optimize.pop("is_skipped", False):
        on, off = frozenset(), off | on | DEFAULT_REWRITES
    elif not (run.optimize_model or is_simplified):
        off |= DEFAULT_REWRITES - on - FUSIONS
    return OptimizeOptions(off, on, has_channels_last=run.convert_nchw_to_nhwc, **optimize)


def _save_options(draft: Draft) -> SaveOptions:
    """The typed options. crypto_mode contradicts whatever writes a file."""
    run, calibrate = draft.run, draft.of("calibrate")
    options = SaveOptions(
        has_external_data=run.use_external_data_format, is_in_memory=run.crypto_mode, **draft.of("save")
    )
    if not run.crypto_mode:
        return options
    files = {
        "use_external_data_format": run.use_external_data_format,
        "CalibCacheDir": calibrate.get("cache"),
        "SaveAndRestore or TensorsRangeFile": calibrate.get("ranges_file"),
        "SaveTensorHistFig": calibrate.get("histogram_folder"),
        "PreprocessedModelPath (preprocessed_model_path)": options.preprocessed,
    }
    for name, value in files.items():
        if value:
            raise InvalidValueError(f"crypto_mode and {name}: in that mode nothing is written to disk; leave one out")
    return replace(options, preprocessed=None)


# Options about positions only; the rules for alignment have an effect without them as well.
_POSITION_OPTIONS = {"NPULimitationCheck", "MaxLoopNum", *(name for name in RULE_NAMES if not name.startswith("Align"))}


def _npu_options(
    values: Mapping[str, Any], is_for_npu: bool, layer: LayerSpec
) -> tuple[PositionOptions | None, SimulateOptions, list[str]]:
    """What an NPU's integer units imply: limits on positions, operators as the unit computes them, and remarks.

    Both are on by default with `enable_npu_cnn` and power-of-two scales. Otherwise NPULimitationCheck asks for limits,
    SimulateDPU for the usual operators, and an operator's own option for that one. `layer` is the default spec.
    """
    has_positions = all(
        isinstance(spec, AffineSpec) and spec.is_power_of_two for spec in (layer.activation, layer.weight)
    )
    is_usual = is_for_npu and has_positions
    chosen = set(DEFAULT_SUBSTITUTIONS if values.get("SimulateDPU", is_usual) else ())
    for option, substitution in SUBSTITUTION_OF_OPTION.items():
        if option in values:
            chosen.add(substitution) if values[option] else chosen.discard(substitution)
    simulate = SimulateOptions(frozenset(chosen))
    if has_positions and values.get("NPULimitationCheck", is_usual):
        limit = {"max_rounds": values["MaxLoopNum"]} if "MaxLoopNum" in values else {}
        return PositionOptions(frozenset(rule for rule in RULE_NAMES if values.get(rule, True)), **limit), simulate, []
    reason = "it is about the positions of power-of-two scales, which these types do not have"
    if has_positions:
        reason = "NPULimitationCheck is False, so that there is nothing for it to steer"
    unused = [name for name, value in values.items() if name in _POSITION_OPTIONS and value is not False]
    return None, simulate, [f"{name}: {reason}" for name in unused]


def _choice_options(draft: Draft, default: LayerSpec) -> ChoiceOptions:
    run = draft.run
    target = Target.NPU_TRANSFORMER if run.enable_npu_transformer else Target.ONNX_RUNTIME
    selection = {
        "op_types": frozenset(run.op_types_to_quantize) if run.op_types_to_quantize else None,
        "extra_op_types": frozenset(run.extra_op_types_to_quantize or ()),
        "nodes": tuple(run.nodes_to_quantize or ()),
        "excluded_nodes": tuple(run.nodes_to_exclude or ()),
        "excluded_subgraphs": tuple((tuple(first), tuple(last)) for first, last in run.subgraphs_to_exclude or ()),
        "input_nodes": tuple(run.input_nodes or ()),
        "output_nodes": tuple(run.output_nodes or ()),
        "needs_constant_matmul_operand": run.enable_npu_transformer,
    }
    return ChoiceOptions(
        default,
        selection=Selection(**{**selection, **draft.of("selection")}),
        target=Target.NPU_CNN if run.enable_npu_cnn else target,
        has_quantized_bias=draft.spec_values.get("QuantizeBias", True),
        **{name: frozenset(members) for name, members in draft.members.items()},  # type: ignore[arg-type]
        **draft.of("choose"),
    )


_LOGGING = "messages go to the logger 'quark'; set its level: logging.getLogger('quark').setLevel(...)"


def _field_remarks(run: QuantizationConfig, default: LayerSpec) -> list[str]:
    usual = QuantizationConfig()
    names = ("debug_mode", "log_severity_level")
    remarks = [f"{name}: {_LOGGING}" for name in names if getattr(run, name) not in (getattr(usual, name), None)]
    has_scales = isinstance(default.weight, FloatSpec) and default.weight.is_eight_bits
    if not isinstance(default.weight, AffineSpec) and not has_scales:
        given = [name for name in ("per_channel", "reduce_range") if getattr(run, name)]
        given += [name for name in ("AddQDQPairToWeight",) if run.extra_options.get(name)]
        remarks += [f"{name}: weights are not of integers with a scale" for name in given]
    if run.extra_options.get("SimplifyModel") is False and run.optimize_model:
        remarks.append("SimplifyModel: optimize_model is True and asks for the same rewrites; set both to False")
    if run.specific_tensor_precision and "MixedPrecisionTensor" not in run.extra_options:
        remarks.append("specific_tensor_precision: MixedPrecisionTensor gives no tensors")
    return remarks


# Accuracy algorithms as a config asks for them: fields and extra options, or the entries of `QConfig.algo_config`.
#
#     include_cle       CLEConfig              cross-layer equalization      CLE...
#     include_sq        SmoothQuantConfig      SmoothQuant                   SmoothAlpha
#     include_auto_mp   AutoMixprecisionConfig mixed precision               AutoMixprecision
#     include_fast_ft   AdaRoundConfig         finetuning                    FastFinetune
#                       AdaQuantConfig
#     BiasCorrection    BiasCorrectionConfig   bias correction               BiasCorrection...
#     Distillation      DistillationConfig     distillation                  Distillation...
#
# An entry of `algo_config` is another way to write the field and the options. An extra option overrides a setting
# that the entry leaves at its default; two that contradict each other are an error.

# The field or option that each entry turns on.
_SWITCHES: Mapping[type[AlgoConfig], str] = {
    CLEConfig: CROSS_LAYER,
    SmoothQuantConfig: SMOOTH,
    BiasCorrectionConfig: BIAS_CORRECTION,
    AutoMixprecisionConfig: MIXED_PRECISION,
    AdaRoundConfig: FINETUNE,
    AdaQuantConfig: FINETUNE,
    GPTQConfig: GPTQ,
    QuarotConfig: ROTATION,
    DistillationConfig: DISTILLATION,
}


def fields_and_options(
    algorithms: Sequence[AlgoConfig], given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields that entries of `algo_config` turn on, and all extra options: those given, and the entries' own."""
    if not isinstance(algorithms, (list, tuple)) or not all(
        isinstance(algorithm, AlgoConfig) for algorithm in algorithms
    ):
        raise UnsupportedTypeError(f"algo_config {algorithms!r}: expected a list such as [CLEConfig()]")
    names = [type(algorithm).__name__ for algorithm in algorithms]
    unknown = [type(algorithm).__name__ for algorithm in algorithms if type(algorithm) not in _SWITCHES]
    if unknown:
        available = ", ".join(cls.__name__ for cls in _SWITCHES)
        raise UnsupportedTypeError(f"algo_config has {', '.join(unknown)}: expected {available}")
    for name in names:
        if names.count(name) > 1:
            raise InvalidValueError(f"algo_config has {name} more than once: leave one of them")
    if AdaRoundConfig.__name__ in names and AdaQuantConfig.__name__ in names:
        raise InvalidValueError("algo_config has AdaRoundConfig and AdaQuantConfig: weights are trained by one of them")
    switches = [_SWITCHES[type(algorithm)] for algorithm in algorithms]
    options = dict(given)
    for entry in algorithms:
        for option, value in _options_of(entry).items():
            if options.setdefault(option, value) != value:
                raise InvalidValueError(
                    f"option '{option}' = {options[option]!r} and {type(entry).__name__} ({value!r}) say different "
                    "things: leave one out"
                )
    return {name: True for name in switches if name not in (BIAS_CORRECTION, GPTQ, DISTILLATION)}, options


def _options_of(entry: AlgoConfig) -> dict[str, Any]:
    """The extra options that say the same as an entry of `algo_config`."""
    if isinstance(entry, AutoMixprecisionConfig):
        return {"AutoMixprecision": mixed_precision_settings(entry)}
    if isinstance(entry, AdaRoundConfig):
        return {"FastFinetune": finetune_settings(entry)}
    if isinstance(entry, BiasCorrectionConfig):
        return {BIAS_CORRECTION: True}
    usual, keys = vars(type(entry)()), type(entry).option_keys()
    settings = {keys[name]: value for name, value in vars(entry).items() if value != usual[name]}
    if isinstance(entry, GPTQConfig):
        return {GPTQ: True, **({"GPTQParams": settings} if settings else {})}
    if isinstance(entry, DistillationConfig):
        return {DISTILLATION: True, **settings}
    return settings


def equalize_options(draft: Draft) -> EqualizeOptions:
    """The typed options of equalization and SmoothQuant."""
    algorithms, cross_layer = switched_on(draft.run), dict(draft.of("cross_layer"))
    if CROSS_LAYER in algorithms and not cross_layer.pop("has_threshold", True):
        if "weight_threshold" in cross_layer:
            draft.remarks.append("CLEWeightThreshold: CLEScaleUseThreshold is False, so that it is not used")
        cross_layer["weight_threshold"] = 0.0
    return EqualizeOptions(
        CrossLayerOptions(**cross_layer) if CROSS_LAYER in algorithms else None,
        SmoothOptions(**draft.of("smooth")) if SMOOTH in algorithms else None,
        _rotation_options(draft.of("rotation")) if ROTATION in algorithms else None,
    )


def _rotation_options(values: Mapping[str, Any]) -> RotationOptions:
    path = values.get("source")
    others = {name: value for name, value in values.items() if name != "source"}
    return RotationOptions(read_pairs(path) if path else (), **others, source=str(path or ""))


def refine_options(draft: Draft) -> RefineOptions:
    """The typed options of bias correction and finetuning."""
    algorithms = switched_on(draft.run)
    return RefineOptions(
        BiasCorrectionOptions(**draft.of("bias_correction")) if BIAS_CORRECTION in algorithms else None,
        finetune_options(draft) if FINETUNE in algorithms else None,
    )

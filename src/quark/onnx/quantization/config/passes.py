"""ShapeShifterYaml and PreprocessYAML: graph passes that a YAML file names, as the options that do the same.

    preprocess_passes:                       # or passes:
      onnx_fold_batch_norm: {fold_batch_norm: true}
    postprocess_passes:
      onnx_remove_qdq_between_op_types: {remove_qdq_between_op_types: [[Conv, Relu]]}
    preprocessed_model_path: float.onnx      # optional

The passes before quantizing take the place of the usual rewrites: those that the file does not name are off. Their
order is that of the steps here, whatever the order in the file. Passes on the quantized graph are decisions of the
plan, so they become options that decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quark.errors import InvalidValueError, UnsupportedOptionError, unknown_name
from quark.files.foreign import SETTINGS, read_json, read_yaml, short
from quark.onnx.optimize import REWRITE_OF_OPTION
from quark.onnx.quantization.config.option_kinds import BOOL, NAMES, PAIRS, PATH, SHAPES, Kind, integer, optional

PASS_OPTIONS = ("ShapeShifterYaml", "PreprocessYAML")
CROSS_LAYER_PASS = "onnx_cross_layer_equalization"
PREPROCESSED = "PreprocessedModelPath"
_FILE_KEYS = ("passes", "preprocess_passes", "postprocess_passes", "preprocessed_model_path")
# in a file that also says which model the passes are for; here that is the model to quantize
_WHOLE_FILE_KEYS = ("input_model_path", "input_model_config", "output_model_path", "engine")

Options = dict[str, Any]


@dataclass(frozen=True)
class _Pass:
    """Its main parameter, which turns it on or says what it does, and the kind of its values; further ones with the
    only values that are possible here; and the options that do the same as it, from the value of the main parameter."""

    parameter: str
    options_of: Callable[[Any], Options]
    usual: Any = True
    kind: Kind = BOOL
    fixed: Mapping[str, tuple[Any, ...]] | None = None


def _flag(parameter: str, *options: str) -> _Pass:
    return _Pass(parameter, lambda value: dict.fromkeys(options, value))


def _shapes_text(value: Any) -> Options:
    return {"FixShapes": ";".join(f"{name}:{list(shape)}" for name, shape in value.items())}


def _aligned(value: Any) -> Options:
    names = {
        "Concat": "AlignConcat",
        "MaxPool": "AlignPool",
        "AveragePool": "AlignPool",
        "GlobalAveragePool": "AlignPool",
        "Pad": "AlignPad",
        "Slice": "AlignSlice",
        "Transpose": "AlignTranspose",
        "Reshape": "AlignReshape",
    }
    if isinstance(value, bool):
        return dict.fromkeys(names.values(), value)
    given = ([value] if value else []) if isinstance(value, str) else value
    for name in given:
        if name not in names:
            raise unknown_name("operator type to align", name, names)
    return {names[name]: True for name in given}


_ALIGNED = Kind(
    "True, False, an operator type or a list of them",
    lambda value: isinstance(value, (bool, str)) or NAMES.has_type(value),
)
_BEFORE: Mapping[str, _Pass] = {
    "onnx_convert_opset_version": _Pass(
        "target_opset_version",
        lambda value: {} if value is None else {"ConvertOpsetVersion": value},
        None,
        optional(integer(1)),
    ),
    "onnx_simplify": _Pass("simplify", lambda value: {"SimplifyModel": value}, fixed={"simplify_Options": ({}, None)}),
    "onnx_optimize_with_ort": _flag("optimize_with_ort", "OptimizeModel"),
    "onnx_remove_input_init": _flag("remove_input_init", "RemoveInputInit"),
    "onnx_copy_bias_init": _Pass("shared_bias_op_types", lambda value: {"CopyBiasInit": value}, None, optional(NAMES)),
    "onnx_copy_shared_init": _Pass(
        "shared_init_op_types", lambda value: {"CopySharedInit": value}, None, optional(NAMES)
    ),
    "onnx_fold_batch_norm": _flag("fold_batch_norm", "FoldBatchNorm"),
    "onnx_fold_batch_norm_after_concat": _flag("fold_batch_norm_after_concat", "FoldBatchNorm"),
    "onnx_fuse_instance_norm": _flag("fuse_instance_norm", "FuseInstanceNorm"),
    "onnx_fuse_l2_norm": _flag("fuse_l2_norm", "FuseL2Norm"),
    "onnx_fuse_gelu": _flag("fuse_gelu", "FuseGelu"),
    "onnx_fuse_layer_norm": _flag("fuse_layer_norm", "FuseLayerNorm"),
    "onnx_convert_bn_to_conv": _flag("convert_bn_to_conv", "ConvertBNToConv"),
    "onnx_convert_clip_to_relu": _flag("convert_clip_to_relu", "ConvertClipToRelu"),
    "onnx_convert_reduce_mean_to_global_avg_pool": _flag(
        "convert_reduce_mean_to_global_avg_pool", "ConvertReduceMeanToGlobalAvgPool"
    ),
    "onnx_convert_split_to_slice": _flag("convert_split_to_slice", "ConvertSplitToSlice"),
    "onnx_split_large_kernel_pool": _flag("split_large_kernel_pool", "SplitLargeKernelPool"),
    "onnx_convert_fp16_to_fp32": _Pass(
        "convert_fp16_to_fp32",
        lambda value: {"ConvertFP16ToFP32": value},
        fixed={"subgraphs_to_include": (None, [])},
    ),
    "onnx_convert_nchw_to_nhwc": _flag("convert_nchw_to_nhwc", "ConvertNCHWToNHWC"),
    "onnx_fix_shapes": _Pass("input_output_name_shapes", _shapes_text, None, SHAPES),
}
_AFTER: Mapping[str, _Pass] = {
    "onnx_adjust_bias_scale": _flag("adjust_bias_scale", "AdjustBiasScale"),
    "onnx_align_scale": _Pass("align_scale", _aligned, "", _ALIGNED),
    "onnx_xint8_adjust": _flag("xint8_adjust", "NPULimitationCheck"),
    "onnx_xint8_simulate": _flag("xint8_simulate", "SimulateDPU"),
    "onnx_insert_clip_before_bfloat16_qdq": _flag("insert_clip_before_bfloat16_qdq", "BF16WithClip"),
    "onnx_replace_bfloat16_qdq_with_cast": _flag("replace_bfloat16_qdq_with_cast", "BF16QDQToCast"),
    "onnx_remove_bfloat16_cast": _flag("remove_bfloat16_cast", "EnableVaimlBF16"),
    "onnx_remove_qdq_between_op_types": _Pass(
        "remove_qdq_between_op_types",
        lambda value: {"RemoveQDQBetweenOps": [tuple(pair) for pair in value]},
        [],
        PAIRS,
    ),
}
_ABSENT = (
    "onnx_fold_div_into_matmul",
    "onnx_set_node_attributes",
    "onnx_constrain_per_channel_weight_scale",
)
_OF_TORCH = ("pytorch_remove_dropout", "pytorch_trace_model")

_CROSS_LAYER = {
    "replace_clip6_relu": "ReplaceClip6Relu",
    "cle_steps": "CLESteps",
    "cle_balance_method": "CLEBalanceMethod",
    "cle_weight_threshold": "CLEWeightThreshold",
    "cle_scale_append_bias": "CLEScaleAppendBias",
    "cle_scale_use_threshold": "CLEScaleUseThreshold",
    "cle_total_layer_diff_threshold": "CLETotalLayerDiffThreshold",
}
_CROSS_LAYER_FIXED: Mapping[str, tuple[Any, ...]] = {
    "op_types_to_quantize": (["Conv", "Gemm"], []),
    "nodes_to_quantize": ([],),
    "nodes_to_exclude": ([],),
}

_GENERAL: Options = {
    "onnx_convert_opset_version": {"target_opset_version": 21},
    "onnx_copy_bias_init": {"shared_bias_op_types": ["Conv", "ConvTranspose", "Gemm"]},
    "onnx_simplify": None,
    "onnx_remove_input_init": None,
    "onnx_optimize_with_ort": None,
    "onnx_fold_batch_norm": None,
    "onnx_fuse_instance_norm": None,
    "onnx_fuse_l2_norm": None,
    "onnx_fuse_gelu": None,
    "onnx_fuse_layer_norm": None,
}
_FOR_NPU = (
    "onnx_convert_split_to_slice",
    "onnx_convert_bn_to_conv",
    "onnx_convert_reduce_mean_to_global_avg_pool",
    "onnx_split_large_kernel_pool",
)
TEMPLATES: Mapping[str, Options] = {
    **dict.fromkeys(("a8w8", "a16w8", "bf16", "bfp16"), _GENERAL),
    "xint8": {**_GENERAL, **dict.fromkeys(_FOR_NPU)},
}


def with_passes(options: Mapping[str, Any]) -> tuple[Options, bool]:
    """Return extra options with those of the passes in the place of the file that names them, and True if the passes
    include cross-layer equalization. The file's options win over others of the same name."""
    name = next((option for option in PASS_OPTIONS if options.get(option) is not None), None)
    rest = {key: value for key, value in options.items() if key not in PASS_OPTIONS}
    if name is None:
        return rest, False
    optional(PATH).check(name, options[name])
    label = f"option '{name}' ({options[name]})"
    before, after, path = _groups(options[name], label)
    # everything not named is off; constants are copied only if a pass says so
    given: Options = {option: False for option in REWRITE_OF_OPTION if not option.startswith("Copy")}
    given |= {"SimplifyModel": False, "OptimizeModel": False, "CopySharedInit": None, "CopyBiasInit": None}
    given[PREPROCESSED] = path if before else None
    has_cross_layer = CROSS_LAYER_PASS in before
    if has_cross_layer:
        options_of_pass, has_cross_layer = _cross_layer(before.pop(CROSS_LAYER_PASS), label)
        given |= options_of_pass
    for pass_name, parameters in before.items():
        for key, value in _options_of(pass_name, parameters, _BEFORE, label).items():
            given[key] = value or given[key] if key == "FoldBatchNorm" else value  # two passes are that
    for pass_name, parameters in after.items():
        given |= _options_of(pass_name, parameters, _AFTER, label)
    return {**rest, **given}, has_cross_layer


def _groups(spec: Any, label: str) -> tuple[Options, Options, str]:
    """The passes before and after quantizing, and the path of the float model after the first."""
    path = Path(spec)
    if path.suffix.lower() not in (".yaml", ".yml", ".json"):
        if str(spec).lower() not in TEMPLATES:
            raise unknown_name(f"template of {label}, which is not a .yaml file", str(spec), TEMPLATES)
        return dict(TEMPLATES[str(spec).lower()]), {}, ""
    content = (read_json if path.suffix.lower() == ".json" else read_yaml)(path, label, SETTINGS)
    if not isinstance(content, Mapping):
        raise InvalidValueError(f"{label}: {short(content)}, expected a mapping with {', '.join(_FILE_KEYS)}")
    for key in content:
        if key not in _FILE_KEYS and key not in _WHOLE_FILE_KEYS:
            raise unknown_name(f"key of {label}", key, _FILE_KEYS)
    groups = [content.get(key) for key in ("preprocess_passes", "postprocess_passes")]
    if groups == [None, None]:
        groups[0] = content.get("passes")
    for group in groups:
        if group is not None and not isinstance(group, Mapping):
            raise InvalidValueError(f"{label}: {short(group)}, expected a mapping from names of passes to parameters")
    target = content.get("preprocessed_model_path") or ""
    if not isinstance(target, str):
        raise InvalidValueError(f"{label}: preprocessed_model_path is {short(target)}, expected a path")
    return dict(groups[0] or {}), dict(groups[1] or {}), target


def _options_of(name: str, parameters: Any, known: Mapping[str, _Pass], label: str) -> Options:
    others = _AFTER if known is _BEFORE else _BEFORE
    if name in _ABSENT:
        raise UnsupportedOptionError(f"{label}: this version does not have the pass '{name}'; remove it from the file")
    if name in _OF_TORCH:
        raise UnsupportedOptionError(f"{label}: the pass '{name}' is about torch modules, and this model is ONNX")
    if name in others or (name == CROSS_LAYER_PASS and known is _AFTER):
        group = "postprocess_passes" if known is _BEFORE else "preprocess_passes"
        raise InvalidValueError(f"{label}: the pass '{name}' belongs under {group}")
    if name not in known:
        raise unknown_name(f"pass of {label}", name, [*known, *_ABSENT])
    row = known[name]
    _check_parameters(name, parameters, {row.parameter: None, **(row.fixed or {})}, label)
    value = (parameters or {}).get(row.parameter, row.usual)
    row.kind.check(f"{name}.{row.parameter}", value)
    return row.options_of(value)


def _cross_layer(parameters: Any, label: str) -> tuple[Options, bool]:
    """The options of cross-layer equalization, and True if it is on."""
    known = {"cross_layer_equalization": None, **dict.fromkeys(_CROSS_LAYER), **_CROSS_LAYER_FIXED}
    _check_parameters(CROSS_LAYER_PASS, parameters, known, label)
    given = dict(parameters or {})
    is_on = given.get("cross_layer_equalization", True)
    BOOL.check(f"{CROSS_LAYER_PASS}.cross_layer_equalization", is_on)
    options = {option: given[key] for key, option in _CROSS_LAYER.items() if key in given}
    return (options, True) if is_on else ({}, False)


def _check_parameters(name: str, parameters: Any, known: Mapping[str, Any], label: str) -> None:
    """Refuse parameters that the pass does not have, and values that are not possible here."""
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidValueError(f"{label}, pass '{name}': {short(parameters)}, expected a mapping of parameters")
    for key, value in (parameters or {}).items():
        if key not in known:
            raise unknown_name(f"parameter of pass '{name}' ({label})", key, known)
        if known[key] is not None and value not in known[key]:
            raise UnsupportedOptionError(
                f"{label}, pass '{name}': {key} = {short(value)} is not available; leave it out"
            )

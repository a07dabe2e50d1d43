"""docs/options.md: all fields and extra options, from the tables that the code reads.

An extra option stands in one of four places, by what becomes of it: among those that are carried out, as another name
of a field, as something that this version refuses, or as something that cannot matter here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from quark.decide.options import BlockPlacement, PositionOptions
from quark.errors import InvalidValueError, QuarkError
from quark.features.bias_correction.options import BiasCorrectionOptions
from quark.features.equalization.options import CrossLayerOptions
from quark.features.smooth_quant.options import SmoothOptions
from quark.onnx.insert.pairs import NBitsOptions
from quark.onnx.optimize import REWRITE_OF_OPTION
from quark.onnx.quantization.config.config import QuantizationConfig, get_default_config
from quark.onnx.quantization.config.option_kinds import BOOL, NBITS_FIELDS, OVERRIDE_KEYS
from quark.onnx.quantization.config.option_table import OPTIONS, SECTIONS
from quark.onnx.quantization.config.option_treatments import (
    DEFAULT_REWRITES,
    ForSpecs,
    Option,
    Refused,
    Remark,
    Rewrite,
    SameAs,
    Steers,
)
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.quant_types import (
    CALIBRATION_METHODS,
    QUANT_FORMATS,
    QUANT_TYPES,
    CalibrationMethod,
    Int16Method,
    format_of_type,
)
from quark.onnx.quantization.config.run_fields import FIELD_KINDS
from quark.onnx.quantization.config.tensor_specs import MOVING_AVERAGE_CONSTANT, SpecOptions
from quark.onnx.settings import Settings
from tools.reference.markdown import code, generated, table

INTRODUCTION = """
A `QuantizationConfig` has fields, and `extra_options` for what is rarer. Both can be set in Python, in a YAML or JSON
file, and on the command line with `--set NAME=VALUE`:

```python
>>> from quark.onnx import get_default_config
>>> config = get_default_config("INT8_CNN_DEFAULT")
>>> config.reduce_range = True
>>> config.extra_options["CalibDataSize"] = 100

```

```yaml
preset: INT8_CNN_DEFAULT
reduce_range: true
extra_options:
  CalibDataSize: 100
```

In a file, on the command line and in `extra_options`, a name that is not listed here is an error that offers the
nearest one. A value of the wrong type is an error, too. [Quantizing ONNX models](quantizing_onnx.md) shows their use.
"""

EXTRA_OPTIONS = """## Extra options that are carried out

Where no default is shown, leaving the option out is not the same as any value of it.
"""

FIELD_DOCS: Mapping[str, str] = {
    "calibrate_method": "how the ranges of activations are found; see [calibration](calibration.md)",
    "quant_format": "how quantized computation is written: QDQ pairs, or QOperator nodes",
    "activation_type": "the numbers of activations",
    "weight_type": "the numbers of weights",
    "input_nodes": "quantize from these nodes on",
    "output_nodes": "quantize up to these nodes",
    "op_types_to_quantize": "only these operator types; empty: those that it is useful for",
    "nodes_to_quantize": "only these nodes, by name or regular expression",
    "extra_op_types_to_quantize": "these operator types too",
    "nodes_to_exclude": "these nodes stay in float, by name or regular expression",
    "subgraphs_to_exclude": "all nodes on a path from the first nodes to the last stay in float",
    "specific_tensor_precision": "use the option `MixedPrecisionTensor`",
    "execution_providers": "what calibration and the verdict run on, as ONNX Runtime names it",
    "per_channel": "a scale for each output channel of a weight",
    "reduce_range": "weights use one bit less, for integer units that would saturate",
    "optimize_model": "graph rewrites that leave the output as it is, before quantization",
    "use_dynamic_quant": "scales of activations are found at run time; needs no calibration",
    "use_external_data_format": "weights in a file beside the model; above 2 GB they always are",
    "convert_fp16_to_fp32": "a float16 model becomes float32 first",
    "convert_nchw_to_nhwc": "channels last",
    "include_sq": "SmoothQuant: the outliers of activations go into the weights",
    "include_rotation": "rotation",
    "include_cle": "cross-layer equalization: channels of neighbouring layers get like ranges",
    "include_auto_mp": "mixed precision, found automatically",
    "include_fast_ft": "[finetuning](finetuning.md): AdaRound or AdaQuant",
    "enable_npu_cnn": "for convolutional networks on an NPU: where quantizers go; with power-of-two scales its limits",
    "enable_npu_transformer": "place quantizers for transformers on an NPU",
    "debug_mode": "no effect: messages go to the logger `quark`",
    "crypto_mode": "nothing is written to disk or logged; the model comes from memory and is returned",
    "print_summary": "`ModelQuantizer` prints a summary at the end",
    "ignore_warnings": "no effect: messages go to the logger `quark`",
    "log_severity_level": "no effect: messages go to the logger `quark`",
    "extra_options": "the options below, by name",
}


def options_document(command: str) -> str:
    """The text of docs/options.md."""
    options = list(OPTIONS.values())
    parts = [generated(command, "Fields and options") + INTRODUCTION, "## Fields\n", _fields_table(), EXTRA_OPTIONS]
    for title, section in SECTIONS.items():
        rows = [
            _carried_out_row(option)
            for option in section
            if not _is_refused(option) and not isinstance(option.treatment, (SameAs, Remark))
        ]
        if rows:
            parts += [f"### {title}\n", table(("option", "value", "default", "what it does"), rows)]
    aliases = [
        (code(option.name), code(option.treatment.field)) for option in options if isinstance(option.treatment, SameAs)
    ]
    idle = [(code(option.name), option.treatment.reason) for option in options if isinstance(option.treatment, Remark)]
    refused = []
    for option in filter(_is_refused, options):
        reason = option.treatment.reason if isinstance(option.treatment, Refused) else "there is no such rewrite"
        refused.append((code(option.name), option.doc, reason))
    parts += [
        "## Other names of fields\n",
        table(("option", "field"), aliases),
        "## Not in this version\n\nAsking for one of these is an error with the reason.\n",
        table(("option", "what it asks for", "reason"), refused),
        "## Without effect here\n\nThey are accepted, and the report lists them once with the reason.\n",
        table(("option", "reason"), idle),
        "## Names of types, methods and node formats\n",
        _names(),
    ]
    return "\n".join(parts)


def _is_refused(option: Option) -> bool:
    is_unknown_rewrite = isinstance(option.treatment, Rewrite) and option.name not in REWRITE_OF_OPTION
    return isinstance(option.treatment, Refused) or is_unknown_rewrite


def _fields_table() -> str:
    usual = QuantizationConfig()
    rows = []
    for field in fields(QuantizationConfig):
        if field.name not in FIELD_DOCS:
            raise InvalidValueError(f"field '{field.name}' has no line in FIELD_DOCS of {__name__}: write one")
        doc = FIELD_DOCS[field.name]
        default = code(_python(getattr(usual, field.name)))
        rows.append((code(field.name), FIELD_KINDS[field.name].expected, default, doc))
    return table(("field", "value", "default", "what it does"), rows)


def _carried_out_row(option: Option) -> tuple[str, ...]:
    """The row of an option that is carried out: name, value, default and what it does."""
    expected = option.kind.expected
    keys = OVERRIDE_KEYS if option.name == "TensorQuantOverrides" else option.kind.keys
    if keys:
        usual = vars(NBitsOptions()) if option.name == "MatMulNBitsParams" else {}
        kinds = {
            name: key.expected + (f"; default {usual[NBITS_FIELDS[name]]}" if usual and name in NBITS_FIELDS else "")
            for name, key in keys.items()
        }
        expected += "; keys: " + "; ".join(f"{code(name)} ({text})" for name, text in kinds.items())
    is_alias = isinstance(option.treatment, ForSpecs) and option.treatment.alias_of
    found = None if is_alias else default_of(option)
    default = "" if found is None or found.value is None else code(_python(found.value))
    if found is not None and found.on_npu is not None:
        default = "; ".join(filter(None, (default, f"with `enable_npu_cnn` {code(_python(found.on_npu))}")))
    needs = f"; with {code(option.treatment.flag)}" if isinstance(option.treatment, Steers) else ""
    return code(option.name), expected, default, option.doc + needs


def _names() -> str:
    """The table of enum members that are not refused whatever else the config says."""
    classes = {
        "`calibrate_method`": CALIBRATION_METHODS,
        "`activation_type`, `weight_type`": QUANT_TYPES,
        "`quant_format`": QUANT_FORMATS,
    }
    rows = []
    for field, kinds in classes.items():
        for cls in kinds:
            members = ", ".join(code(name) for name, member in cls.__members__.items() if _is_usable(member))
            rows += [(field, code(cls.__name__), members)] if members else []
    return table(("field", "class", "members"), rows)


def _is_usable(member: Enum) -> bool:
    if isinstance(member, QUANT_TYPES):
        try:
            format_of_type(member)
        except InvalidValueError:
            return False
    return not isinstance(member, Int16Method) and "FixNeuron" not in member.name


def _python(value: Any) -> str:
    return f"{type(value).__name__}.{value.name}" if isinstance(value, Enum) else repr(value)


# ---------------------------------------------------------------- defaults
NPU_PRESET = "XINT8"
PRESETS_TO_TRY = ("INT8_CNN_DEFAULT", "BF16", "MXINT8", "VINT8", NPU_PRESET)

BOTH = [True, False]

OTHER_DEFAULTS: Mapping[str, Any] = {
    "BlockPlacement": BlockPlacement.COMPUTE.value,
    "Percentile": SpecOptions().percentile,
    "PercentileCandidates": list(SpecOptions().layerwise.candidates),
    "LWPMetric": "mse",
    "LWPUseHistogram": True,
    "MinMSEModeFloatScale": "HistCenter",
    "CalibMovingAverageConstant": MOVING_AVERAGE_CONSTANT,
    "MinMSEModePof2Scale": "All",
    "WeightCalibrateMethod": CalibrationMethod.MinMax,
    "CLESteps": CrossLayerOptions().steps,
    "CLETotalLayerDiffThreshold": CrossLayerOptions().settled_at,
    "CLEWeightThreshold": CrossLayerOptions().weight_threshold,
    "CLEClip": CrossLayerOptions().clip.value,
    "SmoothAlpha": SmoothOptions().alpha,
    "BiasCorrectionInputs": BiasCorrectionOptions().inputs.value,
    "BiasCorrectionSamples": BiasCorrectionOptions().sample_limit,
    "MaxLoopNum": PositionOptions(frozenset()).max_rounds,
}


@dataclass(frozen=True)
class Default:
    """The value that leaving an option out amounts to, None if there is none; `on_npu` if it differs for convolutions
    on an NPU."""

    value: Any
    on_npu: Any = None


def default_of(option: Option) -> Default | None:
    """Return the default of an option, or None if leaving it out is not the same as any value of it.

    For options of True or False it is found by trying: the value with the same settings as none, in the first of a few
    presets where the two values differ. An option that steers an algorithm is tried with the algorithm on.
    """
    if option.name in OTHER_DEFAULTS:
        return Default(OTHER_DEFAULTS[option.name])
    if option.kind is not BOOL:
        return None
    # the values that change nothing: both if the option does not matter, none if leaving it out is a third way
    same = {preset: [value for value in BOTH if is_default(preset, option, value)] for preset in PRESETS_TO_TRY}
    usual = next((same[preset] for preset in PRESETS_TO_TRY if len(same[preset]) < len(BOTH)), BOTH)
    on_npu = same[NPU_PRESET] if len(same[NPU_PRESET]) == 1 and same[NPU_PRESET] != usual else [None]
    if len(usual) == 1:
        return Default(usual[0], on_npu[0])
    return Default(None, on_npu[0]) if on_npu[0] is not None else None


def is_default(preset: str, option: Option, value: Any) -> bool:
    """True if the option with this value changes nothing about the preset, with the algorithm that it steers on."""
    config = get_default_config(preset)
    config.extra_options.pop(option.name, None)
    if isinstance(option.treatment, Steers):
        flag = option.treatment.flag
        if flag in vars(config):
            setattr(config, flag, True)
        else:
            config.extra_options[flag] = True
    try:
        return _content(config) == _content(replace(config, extra_options={**config.extra_options, option.name: value}))
    except QuarkError:
        return False  # a value that is refused is not what happens anyway


def _content(config: QuantizationConfig) -> Settings:
    """The settings, with the rewrites that run in one set, and without the names and remarks that go with them."""
    settings = settings_of(config)
    wanted = settings.optimize
    runs = (DEFAULT_REWRITES | wanted.enabled) - wanted.disabled
    optimize = replace(wanted, enabled=runs, disabled=frozenset())
    return replace(settings, optimize=optimize, name="", config={}, remarks=())

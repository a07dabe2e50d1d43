"""The presets: one row each, the variants with an accuracy algorithm derived from their row.

`get_default_config` of `config.config` makes an editable config of a row.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from quark.errors import UnknownNameError
from quark.features.mixed_precision.plan import DEFAULT_SQNR_DB
from quark.onnx.quantization.config.data_type import (
    BFP16,
    MX4,
    MX6,
    MX9,
    MXFP4E2M1,
    MXFP6E2M3,
    MXFP6E3M2,
    MXFP8E4M3,
    MXFP8E5M2,
    NVFP4,
    DataType,
    MXInt8,
)
from quark.onnx.quantization.config.quant_types import (
    CalibrationMethod,
    ExtendedQuantFormat,
    ExtendedQuantType,
    PowerOfTwoMethod,
    QuantType,
)

S4, S8, U8 = QuantType.QInt4, QuantType.QInt8, QuantType.QUInt8
S16, U16 = ExtendedQuantType.QInt16, ExtendedQuantType.QUInt16
BF16 = ExtendedQuantType.QBFloat16
MIN_MAX, PERCENTILE, MIN_MSE = CalibrationMethod.MinMax, CalibrationMethod.Percentile, PowerOfTwoMethod.MinMSE

# For presets that finetune: the best rate differs a hundredfold between formats, and 'auto' finds it for each layer.
FINETUNING_RATE = "auto"
FINETUNING_BATCH = 4

_EXTENDED = {"quant_format": ExtendedQuantFormat.QDQ}

# Weights that compensate for each other's rounding. A few samples have enough rows, and more only take longer.
# Finetuning rounds every layer again, and has the same result without compensation.
COMPENSATED = {"Compensation": True, "CompensationSamples": 32}
COMPENSATED_INT8 = {"Compensation": True, "CompensationSamples": 16}
# For small floats and blocks, whose rounding error grows with the number: the mean of steady channels is subtracted.
CENTERED = {"BiasCorrection": True, "Centering": True}


@dataclass(frozen=True)
class Preset:
    """A row: `fields` of QuantizationConfig, and `options` for its `extra_options`."""

    name: str
    description: str
    fields: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def is_trained(self) -> bool:
        """True if weights are trained, which takes minutes."""
        return bool(self.fields.get("include_fast_ft") or self.options.get("Distillation"))

    def with_fields(self, **fields: Any) -> Preset:
        """This preset with further fields."""
        return replace(self, fields={**self.fields, **fields})


# ---------------------------------------------------------------- how rows are made
def integers(name: str, description: str, method: Any, types: tuple[Any, Any], /, **options: Any) -> Preset:
    """Integers of (activation, weight) types, calibrated by `method`.

    Signed weights have a scale for each channel, which costs integer kernels nothing and is essential for depthwise
    layers; power-of-two scales are per tensor.
    """
    fields = {"calibrate_method": method, "activation_type": types[0], "weight_type": types[1]}
    if method is not MIN_MSE and types[1] is not U8:
        fields["per_channel"] = True
    is_plain = all(isinstance(type_, QuantType) for type_ in types)
    return Preset(name, description, fields if is_plain else {**_EXTENDED, **fields}, options)


def floats(name: str, description: str, quant_type: Any, /, **options: Any) -> Preset:
    """One float type for activations and weights."""
    return Preset(name, description, {**_EXTENDED, "activation_type": quant_type, "weight_type": quant_type}, options)


def scaled_floats(name: str, description: str, quant_type: Any, /, **options: Any) -> Preset:
    """8-bit floats with a scale for each activation and for each output channel of a weight."""
    row = floats(name, description, quant_type, **options)
    return row.with_fields(calibrate_method=MIN_MAX, per_channel=True)


def blocks(name: str, description: str, /, *types: DataType | Any, **options: Any) -> Preset:
    """Block types: one for activations and weights, or one each. A quant type without attributes is used as it is."""
    activation, weight = types if len(types) == 2 else types * 2
    quant_types = [type_.map_onnx_format if isinstance(type_, DataType) else type_ for type_ in (activation, weight)]
    fields = {**_EXTENDED, "activation_type": quant_types[0], "weight_type": quant_types[1]}
    return Preset(name, description, fields, {**_attributes(activation, weight), **options})


def _attributes(*types: DataType | Any) -> dict[str, Any]:
    """The extra options that describe these block types; of two, the first is that of activations."""
    activation, weight = types[0], types[-1]
    if activation != weight and all(
        getattr(type_, "map_onnx_format", None) is ExtendedQuantType.QMX for type_ in types
    ):
        return {"MXAttributes": dict(activation.attributes), "WeightMXAttributes": dict(weight.attributes)}
    options = {
        ExtendedQuantType.QBFP: "BFPAttributes",
        ExtendedQuantType.QMX: "MXAttributes",
        ExtendedQuantType.QNVFP4: "NVFP4Attributes",
    }
    return {options[type_.map_onnx_format]: dict(type_.attributes) for type_ in types if isinstance(type_, DataType)}


def weight_only(name: str, description: str, /, **parameters: Any) -> Preset:
    """Weights of a few bits with all else in float; `parameters` of MatMulNBitsParams."""
    usual = {"GroupSize": 128, "Symmetric": True, "Bits": 4, "AccuracyLevel": 1, "EmbeddingBits": 4}
    return Preset(name, description, {}, {"UseMatMulNBits": True, "MatMulNBitsParams": {**usual, **parameters}})


def mixed(name: str, description: str, base: Preset, target: Any) -> Preset:
    """Auto mixed precision from the base's types to the target's."""
    target_type = target.map_onnx_format if isinstance(target, DataType) else target
    precision = {"ActTargetQuantType": target_type, "WeightTargetQuantType": target_type, "SQNRTarget": DEFAULT_SQNR_DB}
    options = {**base.options, **_attributes(target), "AutoMixprecision": precision}
    return Preset(name, description, {**base.fields, "include_auto_mp": True}, options)


def finetuned(base: Preset, algorithm: str, name: str = "") -> Preset:
    """The base, finetuned by 'AdaRound' or 'AdaQuant'."""
    parameters = _finetuning(FINETUNING_RATE, algorithm.lower(), FINETUNING_BATCH)
    options = {name: value for name, value in base.options.items() if name not in COMPENSATED}
    return Preset(
        name or f"{base.name}_{algorithm.upper()}",
        f"{base.description}, refined by {algorithm}",
        {**base.fields, "include_fast_ft": True},
        {**options, "FastFinetune": parameters},
    )


def distilled(base: Preset, settings: Mapping[str, Any]) -> Preset:
    """The base, with all weights trained together to give the float network's outputs."""
    description = f"{base.description}, refined by distillation"
    options = {"Distillation": True, **{f"Distillation{name}": value for name, value in settings.items()}}
    return Preset(f"{base.name}_DISTILL", description, base.fields, {**base.options, **options})


def _finetuning(learning_rate: float | str, algorithm: str, batch_size: int) -> dict[str, Any]:
    return {
        "DataSize": 1000,
        "FixedSeed": 1705472343,
        "BatchSize": batch_size,
        "NumIterations": 1000,
        "LearningRate": learning_rate,
        "OptimAlgorithm": algorithm,
        "OptimDevice": "cpu",
        "InferDevice": "cpu",
        "EarlyStop": True,
    }


DEFAULT_ADAROUND_PARAMS = _finetuning(0.1, "adaround", 2)  # the parameters that scripts import
DEFAULT_ADAQUANT_PARAMS = _finetuning(1e-5, "adaquant", 2)


def accurate(base: Preset, name: str) -> Preset:
    """The base with percentile calibration and AdaRound."""
    options = {key: value for key, value in base.options.items() if key != "CalibMovingAverage"}
    description = base.description.replace("MinMax", "percentile 99.9999").replace(", moving average", "")
    fields = {**base.fields, "calibrate_method": PERCENTILE}
    return finetuned(Preset(name, description, fields, {"Percentile": 99.9999, **options}), "AdaRound", name)


# ---------------------------------------------------------------- the rows
# They are a table, formatted by hand.
# fmt: off
XINT8 = integers("XINT8", "8 bits, power-of-two scales of least squared error; for NPUs",
    MIN_MSE, (U8, S8), ActivationSymmetric=True, CLESteps=1, CLEClip="calibrated", ReplaceClip6Relu=False,
    BiasCorrection=True, **COMPENSATED_INT8, Protect="auto").with_fields(enable_npu_cnn=True, include_cle=True)
VINT8 = integers("VINT8", "signed 8 bits, power-of-two scales of least squared error; for the VAIML compiler",
    MIN_MSE, (S8, S8), ActivationSymmetric=True, ConvertBNToConv=True, ConvertClipToRelu=True,
    ConvertSplitToSlice=True, RemoveQDQConvClip=False, RemoveQDQConvRelu=False, RemoveQDQConvLeakyRelu=False,
    RemoveQDQConvPRelu=False, Int32Bias=False, DedicatedQDQPair=True, QuantizeAllOpTypes=True, NPULimitationCheck=True,
    SimulateDPU=True, ConvertSigmoidToHardSigmoid=False, BiasCorrection=True,
    Protect="auto").with_fields(optimize_model=False)
A8W8 = integers("A8W8", "signed 8 bits, symmetric, weights per channel, MinMax averaged over samples",
    MIN_MAX, (S8, S8), ActivationSymmetric=True, CalibMovingAverage=True, BiasCorrection=True, AlignConcat=True,
    AlignSlice=False, FoldRelu=True, Protect="auto")
A16W8 = integers("A16W8", "16-bit activations and 8-bit weights, symmetric, MinMax",
    MIN_MAX, (S16, S8), ActivationSymmetric=True, AlignConcat=True, AlignSlice=False, FoldRelu=True,
    AlignEltwiseQuantType=True, BiasCorrection=True)
S8S8 = integers("S8S8_AAWS", "signed 8 bits, asymmetric activations, percentile 99.9999",
    PERCENTILE, (S8, S8), Percentile=99.9999, BiasCorrection=True, Protect="auto")
U8S8 = integers("U8S8_AAWS", "unsigned 8-bit activations, signed 8-bit weights, percentile",
    PERCENTILE, (U8, S8), BiasCorrection=True, Protect="auto")
U8U8 = integers("U8U8_AAWA", "unsigned 8 bits, asymmetric, percentile",
    PERCENTILE, (U8, U8), ActivationSymmetric=False, WeightSymmetric=False, BiasCorrection=True, Protect="auto")
U16S8 = integers("U16S8_AAWS", "unsigned 16-bit activations, signed 8-bit weights, percentile",
    PERCENTILE, (U16, S8), BiasCorrection=True)
S16S8 = integers("S16S8_ASWS", "signed 16-bit activations, 8-bit weights, symmetric, percentile",
    PERCENTILE, (S16, S8), ActivationSymmetric=True, BiasCorrection=True)
S16S16 = integers("S16S16_AAWS", "", PERCENTILE, (S16, S16), Percentile=99.9999, Int32Bias=False, BiasCorrection=True)

INT8_CNN = integers("INT8_CNN_DEFAULT",
    "uint8 activations, int8 weights per channel, MinMax averaged over samples; for CPUs",
    MIN_MAX, (U8, S8), CalibMovingAverage=True, BiasCorrection=True, Protect="auto")
INT16_CNN = integers("INT16_CNN_DEFAULT", "uint16 activations, int16 weights, MinMax", MIN_MAX, (U16, S16))
INT8_TRANSFORMER = integers("INT8_TRANSFORMER_DEFAULT",
    "uint8 activations, int8 weights, MinMax, SmoothQuant; MatMul and Gemm of transformers",
    MIN_MAX, (U8, S8), SmoothAlpha="auto", QuantizeEmbeddings=True, BiasCorrection=True,
    Protect="auto").with_fields(enable_npu_transformer=True, include_sq=True)
INT16_TRANSFORMER = integers("INT16_TRANSFORMER_DEFAULT",
    "uint16 activations, int16 weights, MinMax, moving average; MatMul and Gemm of transformers",
    MIN_MAX, (U16, S16), CalibMovingAverage=True).with_fields(enable_npu_transformer=True)

FP16 = floats("FP16", "float16", ExtendedQuantType.QFloat16)
BFLOAT16 = floats("BF16", "bfloat16", BF16, QuantizeAllOpTypes=True)

_FP8 = {**CENTERED, "WeightScaleRule": "mse", "KeepFirstLast": "first_conv_float"}
FP8_PRESETS = (
    scaled_floats("FP8E4M3", "8-bit floats with 4 exponent bits, weights per channel, MinMax; standard QDQ nodes; the "
        "first convolution in float", ExtendedQuantType.QFloat8E4M3FN, **_FP8),
    scaled_floats("FP8E5M2", "8-bit floats with 5 exponent bits, weights per channel, MinMax; standard QDQ nodes; the "
        "first convolution in float", ExtendedQuantType.QFloat8E5M2, **_FP8),
)
# Unsigned activations: at opset 21, which groups need, ONNX Runtime 1.31 fails to make some int8 activations unsigned.
A8W4 = integers("A8W4", "uint8 activations, 4-bit weights in groups of 32, MinMax averaged over samples",
    MIN_MAX, (U8, S4), WeightGroupSize=32, CalibMovingAverage=True, BiasCorrection=True)
A16W4 = integers("A16W4", "16-bit activations, 4-bit weights in groups of 32, symmetric, MinMax",
    MIN_MAX, (S16, S4), WeightGroupSize=32, ActivationSymmetric=True, BiasCorrection=True)
BLOCK_PRESETS = (
    blocks("BFP16", "block float: 8-bit integers, eight share an exponent", BFP16),
    blocks("MX4", "shared microexponents, 4 bits an element", MX4),
    blocks("MX6", "shared microexponents, 6 bits an element", MX6, **CENTERED, **COMPENSATED),
    blocks("MX9", "shared microexponents, 9 bits an element", MX9),
    blocks("MXFP8E5M2", "OCP microscaling, 8-bit floats with 5 exponent bits", MXFP8E5M2, **CENTERED),
    # Small floats lose the same in every binade; equalization changes which channels share a block.
    blocks("MXFP8E4M3", "OCP microscaling, 8-bit floats with 4 exponent bits", MXFP8E4M3, **CENTERED,
           **COMPENSATED, CLESteps=1, CLEClip="per_channel").with_fields(include_cle=True),
    blocks("MXFP6E3M2", "OCP microscaling, 6-bit floats with 3 exponent bits", MXFP6E3M2, **CENTERED),
    blocks("MXFP6E2M3", "OCP microscaling, 6-bit floats with 2 exponent bits", MXFP6E2M3, **CENTERED,
           **COMPENSATED),
    blocks("MXFP4E2M1", "OCP microscaling, 4-bit floats", MXFP4E2M1, **CENTERED, **COMPENSATED,
           WeightScaleRule="mse"),
    blocks("MXINT8", "OCP microscaling, 8-bit integers", MXInt8, Protect="auto"),
    blocks("NVFP4", "4-bit floats, 16 share an 8-bit float scale, one scale a tensor; the first convolution in float",
           NVFP4, **CENTERED, WeightScaleRule="mse", KeepFirstLast="first_conv_float"),
)
TWO_BLOCK_PRESETS = (
    blocks("MXFP8E4M3_MXFP4E2M1", "MXFP8E4M3 activations, MXFP4 weights; first and last layers in MXFP8E4M3",
           MXFP8E4M3, MXFP4E2M1, **CENTERED, WeightScaleRule="mse", KeepFirstLast="mxfp8_e4m3"),
    blocks("MXFP6E2M3_MXFP4E2M1", "MXFP6E2M3 activations, MXFP4 weights; first and last layers in MXFP8E4M3",
           MXFP6E2M3, MXFP4E2M1, **CENTERED, WeightScaleRule="mse", KeepFirstLast="mxfp8_e4m3"),
    blocks("MXINT8_MXFP4E2M1", "MXINT8 activations, MXFP4 weights; first and last layers in MXFP8E4M3",
           MXInt8, MXFP4E2M1, **CENTERED, WeightScaleRule="mse", KeepFirstLast="mxfp8_e4m3"),
    blocks("MXFP8E4M3_MXFP6E2M3", "MXFP8E4M3 activations, MXFP6E2M3 weights", MXFP8E4M3, MXFP6E2M3,
           **CENTERED),
)
MIXED_BLOCK_PRESETS = (
    mixed("BF16_MIXED_BFP16", "bfloat16, block float where it does no harm", BFLOAT16, BFP16),
    mixed("BF16_MIXED_MXINT8", "bfloat16, MXINT8 where it does no harm", BFLOAT16, MXInt8),
)
WITH_ADAROUND = (XINT8, S8S8, U8S8, S16S8, A8W8, A16W8, U16S8)
WITH_ADAQUANT = (*WITH_ADAROUND, FP16, BFLOAT16, *BLOCK_PRESETS, *MIXED_BLOCK_PRESETS, *FP8_PRESETS, A8W4, A16W4,
    *TWO_BLOCK_PRESETS)
# The presets that lose most to rounding, and those for NPUs. Coarse formats need more steps at a higher rate.
DISTILLATION = {
    "XINT8": {"Steps": 500, "Rate": 0.004},
    "A8W4": {"Steps": 500, "Rate": 0.003},
    "MX4": {"Steps": 1500, "Rate": 0.006},
    "MX6": {"Steps": 1000, "Rate": 0.01},
    "MXFP6E3M2": {"Steps": 1000, "Rate": 0.01},
    "MXFP4E2M1": {"Steps": 1500, "Rate": 0.005, "Features": 0.5, "Unrounded": 0.25},
    "NVFP4": {"Steps": 500, "Rate": 0.003},
}
WITH_DISTILLATION = tuple(row for row in (XINT8, A8W4, *BLOCK_PRESETS) if row.name in DISTILLATION)

# fmt: on

_ROWS = (
    XINT8,
    VINT8,
    A8W8,
    A16W8,
    A8W4,
    A16W4,
    S8S8,
    U8S8,
    U8U8,
    U16S8,
    S16S8,
    INT8_CNN,
    INT16_CNN,
    finetuned(INT8_CNN, "AdaRound", "INT8_CNN_ACCURATE"),  # with the ranges of its base, which are the better ones
    accurate(INT16_CNN, "INT16_CNN_ACCURATE"),
    INT8_TRANSFORMER,
    INT16_TRANSFORMER,
    accurate(INT8_TRANSFORMER, "INT8_TRANSFORMER_ACCURATE"),
    accurate(INT16_TRANSFORMER, "INT16_TRANSFORMER_ACCURATE"),
    Preset(
        "UINT8_DYNAMIC_QUANT",
        "uint8 weights per channel, activations quantized at run time; needs no data",
        {"weight_type": U8, "per_channel": True, "use_dynamic_quant": True},
        {},
    ),
    FP16,
    BFLOAT16,
    *FP8_PRESETS,
    *BLOCK_PRESETS,
    *TWO_BLOCK_PRESETS,
    blocks("BF16_BFP16", "bfloat16 activations, block float weights", BF16, BFP16),
    blocks("BF16_MXINT8", "bfloat16 activations, MXINT8 weights", BF16, MXInt8),
    blocks("MX9_INT8", "MX9 activations, int8 weights", MX9, S8),
    mixed("S16S16_MIXED_S8S8", "signed 16 bits, 8 where it does no harm", S16S16, S8),
    *MIXED_BLOCK_PRESETS,
    weight_only(
        "MATMUL_NBITS", "4-bit weights of MatMul, Gemm and embeddings in groups of 128, all else float; needs no data"
    ),
    weight_only(
        "INT4_WEIGHT_ONLY",
        "4-bit weights of MatMul, Gemm and embeddings in groups of 32, all else float; needs no data",
        GroupSize=32,
    ),
    weight_only(
        "INT4_WEIGHT_ONLY_GPTQ",
        "4-bit weights of MatMul, Gemm and embeddings in groups of 32 with zero points, all else float; by GPTQ",
        GroupSize=32,
        Symmetric=False,
        Algorithm="GPTQ",
    ),
    weight_only(
        "INT4_WEIGHT_ONLY_AWQ",
        "4-bit weights of MatMul, Gemm and embeddings in groups of 32, all else float; scaled by AWQ",
        GroupSize=32,
        Algorithm="AWQ",
    ),
    *(finetuned(row, "AdaRound") for row in WITH_ADAROUND),
    *(finetuned(row, "AdaQuant") for row in WITH_ADAQUANT),
    *(distilled(row, DISTILLATION[row.name]) for row in WITH_DISTILLATION),
)

PRESETS: Mapping[str, Preset] = MappingProxyType({row.name: row for row in _ROWS})


def unknown_preset(name: object) -> UnknownNameError:
    """Return the error for a name that is not a preset.

    >>> str(unknown_preset("MXINT9"))
    "no preset 'MXINT9'. Did you mean MXINT8? 'quark presets' lists all 93."
    >>> str(unknown_preset("int8"))
    "no preset 'int8'. Did you mean INT8_CNN_DEFAULT or INT8_TRANSFORMER_DEFAULT? 'quark presets' lists all 93."
    """
    wanted = str(name).upper()
    longer = [
        preset for preset in PRESETS if wanted and preset.startswith(f"{wanted}_") and preset.endswith("_DEFAULT")
    ]
    nearest = longer[:2] or difflib.get_close_matches(wanted, PRESETS, n=1)
    hint = f" Did you mean {' or '.join(nearest)}?" if nearest else ""
    return UnknownNameError(f"no preset {name!r}.{hint} 'quark presets' lists all {len(PRESETS)}.")

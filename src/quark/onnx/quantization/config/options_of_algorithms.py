"""Extra options: accuracy algorithms, and what steers them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite, isnan

from quark.onnx.equalize.options import ClipTreatment
from quark.onnx.mix.options import Method
from quark.onnx.quantization.config.option_kinds import (
    BOOL,
    FUNCTION,
    NAMES,
    PATH,
    QUANT_TYPE,
    TEXT,
    TWO_NUMBERS,
    Kind,
    integer,
    is_number,
    mapping,
    number,
    number_from,
    number_or,
    one_of,
    optional,
)
from quark.onnx.quantization.config.option_treatments import Option, Refused, Steers, Switch
from quark.onnx.quantization.config.options_of_numbers import attributes_kind
from quark.onnx.quantization.config.spec import QLayerConfig
from quark.onnx.refine.options import CorrectionInputs, Reconstruction
from quark.reconstruction.options import Algorithm

# What turns the algorithms on: fields, and an option.
CROSS_LAYER, SMOOTH, BIAS_CORRECTION = "include_cle", "include_sq", "BiasCorrection"
MIXED_PRECISION, FINETUNE = "include_auto_mp", "include_fast_ft"

_ALGORITHMS = tuple(each.value for each in Algorithm)
_ALGORITHM = Kind(
    "one of " + ", ".join(_ALGORITHMS),
    lambda value: isinstance(value, str),
    lambda value: value.lower() in _ALGORITHMS,
)
_DEVICE = Kind(
    "cpu, cuda, cuda:N, hip or hip:N, with the number N of a device",
    lambda value: isinstance(value, str),
    lambda value: re.fullmatch(r"cpu|(cuda|hip)(:\d+)?", value, re.ASCII) is not None,
)
_RATE = Kind("a number above 0", is_number, lambda value: value > 0 and isfinite(value))
_LR_ADJUST = Kind(
    "two numbers: an error, and the learning rate above it, which is above 0",
    TWO_NUMBERS.has_type,
    lambda value: value[0] >= 0 and _RATE.is_legal(value[1]),
)
_BETAS = Kind(
    "two numbers of at least 1, the first and the last",
    TWO_NUMBERS.has_type,
    lambda value: all(each >= 1 and isfinite(each) for each in value),
)

_METRIC = Kind(
    "a measure: a name such as 'cosine', 'FILE.py:FUNCTION', or a function",
    lambda value: isinstance(value, str) or callable(value),
)

FINETUNE_KEYS = {
    "DataSize": integer(1),
    "FixedSeed": integer(0),
    "BatchSize": integer(1),
    "NumBatches": integer(),
    "NumIterations": integer(0),
    "LearningRate": number_or("auto", _RATE),
    "OptimAlgorithm": _ALGORITHM,
    "OptimDevice": _DEVICE,
    "InferDevice": _DEVICE,
    "EarlyStop": BOOL,
    "SelectiveUpdate": BOOL,
    "LRAdjust": optional(_LR_ADJUST),
    "TargetOpType": NAMES,
    "UpdateBias": BOOL,
    "OutputQDQ": BOOL,
    "DropRatio": number_from(0, 1),
    "MemOptLevel": integer(0, 2),
    "CacheDir": optional(PATH),
    "LogPeriod": integer(1),
    "MemoryLimit": number_from(0),
    "Reconstruction": one_of(*(each.value for each in Reconstruction)),
    "RegParam": number_from(0),
    "BetaRange": _BETAS,
    "WarmStart": number_from(0, 1),
}
MIXED_PRECISION_KEYS = {
    "ActTargetQuantType": QUANT_TYPE,
    "WeightTargetQuantType": QUANT_TYPE,
    "BiasTargetQuantType": QUANT_TYPE,
    "TargetQuantType": QUANT_TYPE,
    "TargetMXAttributes": attributes_kind("MXQuantizeDequantize"),
    "TargetBFPAttributes": attributes_kind("BFPQuantizeDequantize"),
    "TargetLayerConfig": Kind("a QLayerConfig", lambda value: isinstance(value, (QLayerConfig, Mapping))),
    "OutputIndex": integer(0),
    "Top1AccTarget": optional(number_from(0)),
    "EvaluateFunction": optional(FUNCTION),
    "Metric": optional(_METRIC),
    "MetricTarget": optional(number_from(0)),
    "L2Target": optional(number_from(0)),
    "SQNRTarget": optional(Kind("a number", is_number, lambda value: not isnan(value))),
    "BitsTarget": optional(number(0)),
    "BitOperationsTarget": optional(number(0, 1)),
    "NumTarget": integer(0),
    "TargetOpType": NAMES,
    "IncludeLayers": NAMES,
    "ExcludeLayers": NAMES,
    "Method": one_of(*(each.value for each in Method)),
    "PlanFile": optional(PATH),
    "UsePlan": BOOL,
    "SampleLimit": integer(1),
}

ALGORITHM_OPTIONS: tuple[Option, ...] = (
    Option(
        "FastFinetune",
        mapping("a dictionary", FINETUNE_KEYS),
        Steers(FINETUNE, "finetune", "settings"),
        "settings of AdaRound and AdaQuant: [finetuning](finetuning.md)",
    ),
    Option(
        "AutoMixprecision",
        mapping("a dictionary", MIXED_PRECISION_KEYS),
        Steers(MIXED_PRECISION, "mix", "settings"),
        "settings of mixed precision: the lower types, and how far to go with them",
    ),
    Option(
        "CLESteps",
        integer(-1),
        Steers(CROSS_LAYER, "cross_layer", "steps"),
        "passes of cross-layer equalization; -1: until it settles",
    ),
    Option(
        "CLEScaleAppendBias",
        BOOL,
        Steers(CROSS_LAYER, "cross_layer", "has_appended_bias"),
        "the bias counts in the range of its channel",
    ),
    Option(
        "CLETotalLayerDiffThreshold",
        number(0),
        Steers(CROSS_LAYER, "cross_layer", "settled_at"),
        "the mean change of the scales at which it has settled",
    ),
    Option(
        "CLEWeightThreshold",
        number_from(0),
        Steers(CROSS_LAYER, "cross_layer", "weight_threshold"),
        "channels whose ranges before and behind add up to less stay as they are",
    ),
    Option(
        "CLEScaleUseThreshold",
        BOOL,
        Steers(CROSS_LAYER, "cross_layer", "has_threshold"),
        "use `CLEWeightThreshold`; False: every channel is rescaled",
    ),
    Option(
        "CLEBalanceMethod",
        TEXT,
        Refused("the range of a channel is its largest magnitude, which is 'max'; other ways are not known", ("max",)),
        "how the range of a channel is found",
    ),
    Option(
        "CLEClip",
        one_of(*(each.value for each in ClipTreatment)),
        Steers(CROSS_LAYER, "cross_layer", "clip", ClipTreatment),
        "Clip(0, 6) between layers: 'per_channel' gives it a bound for each channel, 'calibrated' leaves channels that "
        "reach the bound as they are, 'skip' rescales nothing through it",
    ),
    Option(
        "CLEBiasAbsorption",
        BOOL,
        Steers(CROSS_LAYER, "cross_layer", "has_bias_absorption"),
        "what a channel always has on top moves into the biases behind it",
    ),
    Option(
        "SmoothAlpha",
        number_or("auto", number_from(0, 1)),
        Steers(SMOOTH, "smooth", "alpha", lambda value: None if value == "auto" else float(value)),
        "the share that SmoothQuant moves to the weights; 'auto': the best for each layer",
    ),
    Option(
        BIAS_CORRECTION, BOOL, Switch(), "biases are corrected by the mean error that rounding makes in their layer"
    ),
    Option(
        "BiasCorrectionInputs",
        one_of(*(each.value for each in CorrectionInputs)),
        Steers(BIAS_CORRECTION, "bias_correction", "inputs", CorrectionInputs),
        "whose activations that error is measured with: those of the 'float' network, or of the 'quantized' one",
    ),
    Option(
        "BiasCorrectionSamples",
        integer(1),
        Steers(BIAS_CORRECTION, "bias_correction", "sample_limit"),
        "how many of the calibration samples that looks at, at most",
    ),
)

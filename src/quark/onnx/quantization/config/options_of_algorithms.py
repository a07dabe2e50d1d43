"""Extra options: accuracy algorithms, and what steers them."""

from __future__ import annotations

from quark.onnx.equalize.options import ClipTreatment
from quark.onnx.quantization.config.option_kinds import (
    BOOL,
    FUNCTION,
    NAMES,
    PATH,
    QUANT_TYPE,
    TEXT,
    TWO_NUMBERS,
    integer,
    mapping,
    number,
    number_from,
    number_or,
    one_of,
    optional,
)
from quark.onnx.quantization.config.option_treatments import Algorithm, Option, Refused, Steers, Switch
from quark.onnx.refine.options import CorrectionInputs

# What turns the algorithms on: fields, and an option.
CROSS_LAYER, SMOOTH, BIAS_CORRECTION = "include_cle", "include_sq", "BiasCorrection"

FINETUNE_KEYS = {
    "DataSize": integer(1),
    "FixedSeed": integer(0),
    "BatchSize": integer(1),
    "NumBatches": integer(),
    "NumIterations": integer(0),
    "LearningRate": number(0),
    "OptimAlgorithm": one_of("adaround", "adaquant"),
    "OptimDevice": TEXT,
    "InferDevice": TEXT,
    "EarlyStop": BOOL,
    "SelectiveUpdate": BOOL,
    "LRAdjust": optional(TWO_NUMBERS),
    "TargetOpType": NAMES,
    "UpdateBias": BOOL,
    "OutputQDQ": BOOL,
    "DropRatio": number(-1, 1),
    "MemOptLevel": integer(0, 2),
    "CacheDir": optional(PATH),
    "LogPeriod": integer(1),
}
MIXED_PRECISION_KEYS = {
    "ActTargetQuantType": QUANT_TYPE,
    "WeightTargetQuantType": QUANT_TYPE,
    "BiasTargetQuantType": QUANT_TYPE,
    "TargetQuantType": QUANT_TYPE,
    "OutputIndex": integer(0),
    "Top1AccTarget": number(),
    "L2Target": number(),
    "EvaluateFunction": optional(FUNCTION),
    "NumTarget": integer(0),
    "TargetOpType": NAMES,
}

ALGORITHM_OPTIONS: tuple[Option, ...] = (
    Option(
        "FastFinetune",
        mapping("a dictionary", FINETUNE_KEYS),
        Algorithm("include_fast_ft"),
        "settings of AdaRound and AdaQuant",
    ),
    Option(
        "AutoMixprecision",
        mapping("a dictionary", MIXED_PRECISION_KEYS),
        Algorithm("include_auto_mp"),
        "settings of mixed precision",
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

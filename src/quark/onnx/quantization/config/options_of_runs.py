"""Extra options: NPUs, accuracy algorithms, and the run itself."""

from __future__ import annotations

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
    mapping,
    number,
    one_of,
    optional,
)
from quark.onnx.quantization.config.option_treatments import Algorithm, Option, Refused, Remark, SameAs

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

NPU_REASON = "the NPU's rules for operators and positions are not part of this version; leave it out"
CONVERTED_MODEL = "the model is changed for an NPU, which this version does not do; leave it out"

RUN_OPTIONS: tuple[Option, ...] = (
    # NPUs
    *(
        Option(name, BOOL, Refused(CONVERTED_MODEL), doc)
        for name, doc in {
            "SimulateDPU": "operators as an NPU computes them",
            "ConvertLeakyReluToDPUVersion": "LeakyRelu as an NPU computes it",
            "ConvertSigmoidToHardSigmoid": "Sigmoid as HardSigmoid",
            "ConvertHardSigmoidToDPUVersion": "HardSigmoid as an NPU computes it",
            "ConvertAvgPoolToDPUVersion": "AveragePool as an NPU computes it",
            "ConvertReduceMeanToDPUVersion": "ReduceMean as an NPU computes it",
            "ConvertSoftmaxToDPUVersion": "Softmax as an NPU computes it",
            "ConvertClipToDPUVersion": "Clip as an NPU computes it",
        }.items()
    ),
    *(
        Option(name, BOOL, Refused(NPU_REASON), doc)
        for name, doc in {
            "NPULimitationCheck": "positions brought within an NPU's limits",
            "AdjustShiftCut": "shifts from sum to output within limits",
            "AdjustShiftBias": "shifts of biases within limits",
            "AdjustShiftRead": "shifts of the inputs of elementwise operators within limits",
            "AdjustShiftWrite": "shifts of the outputs of elementwise operators within limits",
            "AdjustHardSigmoid": "positions around HardSigmoid within limits",
            "AdjustShiftSwish": "positions around Swish within limits",
        }.items()
    ),
    Option(
        "MaxLoopNum", integer(0), Remark("scales are aligned in one go, without repeated passes"), "passes of alignment"
    ),
    # Accuracy algorithms
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
        "CLESteps", integer(-1), Algorithm("include_cle"), "passes of cross-layer equalization; -1: until it settles"
    ),
    Option("CLEScaleAppendBias", BOOL, Algorithm("include_cle"), "biases count in equalization"),
    Option("CLETotalLayerDiffThreshold", number(0), Algorithm("include_cle"), "when equalization has settled"),
    Option("SmoothAlpha", number(-1, 1), Algorithm("include_sq"), "the share that SmoothQuant moves to the weights"),
    Option(
        "BiasCorrection",
        BOOL,
        Refused("bias correction is not part of this version yet; leave it out"),
        "biases corrected by the mean error",
    ),
    # The run itself
    Option(
        "EvalMetrics",
        Kind("anything", lambda value: True),
        Remark("every run reports cosine and SQNR of each output"),
        "measure the result",
    ),
    Option("PrintSummary", BOOL, SameAs("print_summary"), "a summary at the end"),
    Option("OptimizeModel", BOOL, SameAs("optimize_model"), "graph rewrites that leave the output as it is"),
    Option("ExecutionProviders", NAMES, SameAs("execution_providers"), "what calibration runs on"),
    Option("EnableNPUCnn", BOOL, SameAs("enable_npu_cnn"), "place quantizers for the NPU's convolutions"),
    Option(
        "EnableNPUTransformer", BOOL, SameAs("enable_npu_transformer"), "place quantizers for transformers on the NPU"
    ),
    Option("ConvertFP16ToFP32", BOOL, SameAs("convert_fp16_to_fp32"), "a float16 model becomes float32 first"),
    Option("ConvertNCHWToNHWC", BOOL, SameAs("convert_nchw_to_nhwc"), "channels last"),
    Option("CryptoMode", BOOL, SameAs("crypto_mode"), "no files but encrypted ones"),
    Option("DebugMode", BOOL, SameAs("debug_mode"), "more messages"),
    Option("IgnoreWarnings", BOOL, SameAs("ignore_warnings"), "fewer messages"),
)

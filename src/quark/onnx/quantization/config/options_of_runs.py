"""Extra options: the run itself."""

from __future__ import annotations

from quark.onnx.protect.options import ProtectMode
from quark.onnx.quantization.config.option_kinds import BOOL, NAMES, Kind, integer, number_from, one_of
from quark.onnx.quantization.config.option_treatments import Into, Option, Remark, SameAs

RUN_OPTIONS: tuple[Option, ...] = (
    Option(
        "EvalMetrics",
        Kind("anything", lambda value: True),
        Remark("every run reports cosine and SQNR of each output"),
        "measure the result",
    ),
    Option(
        "VerdictMemoryLimit",
        integer(0),
        Into("calibrate", "verdict_limit_bytes", lambda megabytes: megabytes * 1_000_000),
        "MB of weights up to which float and quantized model run for the verdict; else 1 GB, and half of what is free",
    ),
    Option(
        "Protect",
        one_of(*(mode.value for mode in ProtectMode)),
        Into("protect", "mode", ProtectMode),
        "keep in float what breaks in 8 bits: 'auto', known 'structures' only, or 'none'; 8-bit presets have 'auto'",
    ),
    Option(
        "ProtectBudget",
        number_from(0.0, 1.0),
        Into("protect", "mac_budget", float),
        "the share of multiply-accumulates that layers found by measuring may take out of 8 bits; with `Protect`",
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

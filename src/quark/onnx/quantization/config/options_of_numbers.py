"""Extra options: number formats, scales, and how ranges are found."""

from __future__ import annotations

from pathlib import Path

from quark.formats.spec import ScaleRule
from quark.onnx.choose.options import BlockPlacement
from quark.onnx.quantization.config.option_kinds import (
    BOOL,
    CALIBRATION_METHOD,
    PATH,
    PERCENTILES,
    Kind,
    integer,
    mapping,
    number,
    one_of,
)
from quark.onnx.quantization.config.option_treatments import ForSpecs, Into, Option, Refused, Remark

STREAMING = "calibration is a stream: it keeps no activations, and needs no workers"


def attributes_kind(operator: str) -> Kind:
    """A dictionary of the operator's attributes; the operator's own table checks it, where specs are made."""
    return mapping(f"a dictionary of the attributes of {operator}")


NUMBER_OPTIONS: tuple[Option, ...] = (
    # Block formats and floats
    Option("MXAttributes", attributes_kind("MXQuantizeDequantize"), ForSpecs(), "the microscaling format of type QMX"),
    Option(
        "WeightScaleRule",
        one_of(*(each.value for each in ScaleRule)),
        ForSpecs(),
        "the scale rule of weights in microscaling formats, where it is not that of MXAttributes; 'mse' tries three",
    ),
    Option("BFPAttributes", attributes_kind("BFPQuantizeDequantize"), ForSpecs(), "the block format of type QBFP"),
    Option(
        "BlockPlacement",
        one_of(*(each.value for each in BlockPlacement)),
        Into("choose", "block_placement", BlockPlacement),
        "where blocks and floats go: 'compute', on both operands of Conv, Gemm and MatMul, or 'all' tensors",
    ),
    Option("RefineBlockAxis", BOOL, ForSpecs(), "blocks along the axis that the reader sums over, not always `axis`"),
    Option("BF16WithClip", BOOL, ForSpecs(), "values beyond bfloat16 saturate instead of becoming Inf"),
    Option("BF16QDQToCast", BOOL, Into("insert", "has_casts"), "float16 and bfloat16 as Cast nodes"),
    Option("ActivationScaled", BOOL, ForSpecs(), "float16 and bfloat16 activations are scaled into range first"),
    Option("WeightScaled", BOOL, ForSpecs(), "float16 and bfloat16 weights are scaled into range first"),
    Option("PortableFunctions", BOOL, Into("save", "has_portable_functions"), "the file runs without our library"),
    # Integers
    Option("ActivationSymmetric", BOOL, ForSpecs(), "activations have their zero in the middle"),
    Option("WeightSymmetric", BOOL, ForSpecs(), "weights have their zero in the middle"),
    Option("WeightsSymmetric", BOOL, ForSpecs("WeightSymmetric"), "another spelling of WeightSymmetric"),
    Option("QuantizeBias", BOOL, ForSpecs(), "biases are quantized"),
    Option(
        "Int32Bias",
        BOOL,
        ForSpecs(),
        "int32 biases at the product of activation and weight scale; False: the weight's type",
    ),
    Option("Int16Bias", BOOL, ForSpecs(), "int16 biases with a scale of their own"),
    Option(
        "UseUnsignedReLU", BOOL, Into("choose", "has_unsigned_relu"), "zero point 0 for tensors that are never negative"
    ),
    Option(
        "AlignEltwiseQuantType",
        BOOL,
        Into("choose", "has_activation_constants"),
        "constants of Add, Mul ... have the activations' type",
    ),
    Option(
        "Int16Scale",
        BOOL,
        Refused("scales are floats, or powers of two with PowerOfTwoMethod; there is nothing in between: leave it out"),
        "scales that are a 16-bit integer over a power of two",
    ),
    Option(
        "AdjustBiasScale",
        BOOL,
        Remark("the scale of an int32 bias is always the product of the two others", (True,)),
        "biases follow changed scales",
    ),
    # Calibration
    Option("Percentile", number(50, 100), ForSpecs(), "what calibration by percentile keeps, in percent"),
    Option("PercentileCandidates", PERCENTILES, ForSpecs(), "what layerwise percentile chooses from"),
    Option("CalibMovingAverage", BOOL, ForSpecs(), "MinMax as a moving average over the samples"),
    Option("CalibMovingAverageConstant", number(0, 1), ForSpecs(), "the weight of the next sample in that average"),
    Option(
        "CalibTensorRangeSymmetric",
        BOOL,
        Into("calibrate", "has_symmetric_ranges"),
        "ranges widened to be even about zero",
    ),
    Option(
        "MinMSEModePof2Scale",
        one_of("All", "MostCommon"),
        ForSpecs(),
        "positions of least error over all data, or most often least over samples",
    ),
    Option(
        "WeightCalibrateMethod", CALIBRATION_METHOD, ForSpecs(), "how ranges of weights with float scales are found"
    ),
    Option("CalibDataSize", integer(1), Into("calibrate", "sample_limit"), "how many samples are used at most"),
    Option(
        "UseRandomData",
        BOOL,
        Into("calibrate", "has_random_data"),
        "calibrate on random data, even where there are others",
    ),
    Option("CalibOptimizeMem", BOOL, Remark(STREAMING), "keep tensors on disk while calibrating"),
    Option("CalibWorkerNum", integer(1), Remark(STREAMING, (1,)), "processes that calibrate"),
    Option(
        "TmpDir",
        PATH,
        Remark("temporary files go where the environment variable TMPDIR says"),
        "a folder for temporary files",
    ),
    Option(
        "CalibCacheDir",
        PATH,
        Into("calibrate", "cache", Path),
        "a folder that keeps ranges for the next run of the same model, data and settings",
    ),
)

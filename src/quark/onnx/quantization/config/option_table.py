"""The table of extra options: name, permitted values, treatment, description."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from quark.decide.end_layers import END_TYPES, EndLayers
from quark.decide.end_layers import OPTION as KEEP_FIRST_LAST
from quark.decide.options import BlockPlacement
from quark.devices import checked_device
from quark.features.bias_correction.options import CorrectionInputs
from quark.features.equalization.options import ClipTreatment
from quark.features.order import FEATURES
from quark.features.protection.options import ProtectMode
from quark.formats.spec import ScaleRule
from quark.onnx.quantization.config.finetune_options import FINETUNE_KEYS
from quark.onnx.quantization.config.mixed_precision_options import MIXED_PRECISION_KEYS
from quark.onnx.quantization.config.option_kinds import (
    AXES,
    BOOL,
    CALIBRATION_METHOD,
    DEVICE,
    GPTQ_KEYS,
    GROUP_SIZE,
    NAMES,
    NBITS_KEYS,
    PAIRS,
    PATH,
    PATHS,
    PERCENTILES,
    RANGES,
    READER,
    SHAPES,
    TEXT,
    channel_axes,
    custom_libraries,
    fixed_shapes,
    integer,
    kind_of,
    mapping,
    nbits_options,
    number,
    number_from,
    number_or,
    one_of,
    optional,
    ranges_by_name,
    shapes_by_name,
    tensor_overrides,
)
from quark.onnx.quantization.config.option_treatments import (
    AlignedRule,
    CopyRewrite,
    EvaluationData,
    ForNpu,
    ForSpecs,
    GptqSettings,
    ImpliedBfloat16,
    Into,
    IntoBoth,
    Member,
    Option,
    Passes,
    Refused,
    Remark,
    Restored,
    Rewrite,
    RewriteAndSubstitution,
    SameAs,
    SecondSwitch,
    Steers,
    Switch,
)
from quark.onnx.quantization.config.preference import PREFERENCES
from quark.onnx.quantization.config.run_fields import (
    BIAS_CORRECTION,
    COMPENSATION,
    CROSS_LAYER,
    FINETUNE,
    GPTQ,
    MIXED_PRECISION,
    ROTATION,
    SMOOTH,
)
from quark.onnx.quantization.config.tensor_specs import BFP_OPERATOR, MX_OPERATOR, NVFP4_OPERATOR

POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool")
_MIN_MSE_MODES = one_of("All", "MostCommon", "Percentile")
_STREAMING = "calibration is a stream: it keeps no activations, and needs no workers"
_MX_ATTRIBUTES = mapping(f"a dictionary of the attributes of {MX_OPERATOR}")
_NVFP4_ATTRIBUTES = mapping(f"a dictionary of the attributes of {NVFP4_OPERATOR}")
_BFP_ATTRIBUTES = mapping(f"a dictionary of the attributes of {BFP_OPERATOR}")

_choose, _insert, _calibrate = (partial(Into, step) for step in ("choose", "insert", "calibrate"))
_cle = partial(Steers, CROSS_LAYER, "cross_layer")
_correction = partial(Steers, BIAS_CORRECTION, "bias_correction")
_rotation = partial(Steers, ROTATION, "rotation")

# The rows are a table, formatted by hand: two lines where one is not enough.
# fmt: off
_NUMBER_OPTIONS: tuple[Option, ...] = (
    # Block formats and floats
    Option("MXAttributes", _MX_ATTRIBUTES, ForSpecs(), "the microscaling format of type QMX"),
    Option("WeightMXAttributes", _MX_ATTRIBUTES, ForSpecs(),
           "the microscaling format of weights of type QMX, if it differs from MXAttributes"),
    Option(
        "WeightScaleRule",
        one_of(*(rule.value for rule in ScaleRule)),
        ForSpecs(),
        "the scale rule of weights in microscaling formats and NVFP4, if it differs from the attributes; 'mse' "
        "tries several scales. Weights of 8-bit floats take 'floor' and 'mse'",
    ),
    Option("NVFP4Attributes", _NVFP4_ATTRIBUTES, ForSpecs(), "the block format of type QNVFP4"),
    Option("TensorScale", one_of("dynamic", "calibrated"), ForSpecs(),
           "the tensor scale of activations in NVFP4: 'dynamic' computes it at every run, 'calibrated' takes it from "
           "the range of the calibration data"),
    Option("BFPAttributes", _BFP_ATTRIBUTES, ForSpecs(), "the block format of type QBFP"),
    Option("BlockPlacement", one_of(*(placement.value for placement in BlockPlacement)),
           _choose("block_placement", BlockPlacement),
           "where blocks and floats go: 'compute', on both operands of Conv, Gemm and MatMul, or 'all' tensors"),
    Option("RefineBlockAxis", BOOL, ForSpecs(), "blocks along the axis that the reader sums over, not always `axis`"),
    Option("BF16WithClip", BOOL, ForSpecs(), "values beyond bfloat16 saturate instead of becoming Inf"),
    Option("BF16QDQToCast", BOOL, _insert("has_casts"), "float16 and bfloat16 as Cast nodes"),
    Option("EnableVaimlBF16", BOOL, ImpliedBfloat16(),
           "for a compiler that computes in bfloat16 by itself: weights are rounded, with Casts at graph inputs only"),
    Option("ActivationScaled", BOOL, ForSpecs(), "float16 and bfloat16 activations are scaled into range first"),
    Option("WeightScaled", BOOL, ForSpecs(), "float16 and bfloat16 weights are scaled into range first"),
    Option("PortableFunctions", BOOL, Into("save", "has_portable_functions"), "the file runs without our library"),
    # Integers
    Option("ActivationSymmetric", BOOL, ForSpecs(), "activations have their zero in the middle"),
    Option("WeightSymmetric", BOOL, ForSpecs(), "weights have their zero in the middle"),
    Option("WeightsSymmetric", BOOL, ForSpecs("WeightSymmetric"), "another spelling of WeightSymmetric"),
    Option("WeightGroupSize", GROUP_SIZE, ForSpecs(),
           "weights of 4 or 8 bits have a scale for each group of this many neighbours along the summed axis, searched "
           "for the least squared error; if that axis has fewer than 16, 8 bits with a scale for each channel"),
    Option("QuantizeBias", BOOL, ForSpecs(), "biases are quantized"),
    Option("Int32Bias", BOOL, ForSpecs(),
           "int32 biases at the product of activation and weight scale; False: the weight's type"),
    Option("Int16Bias", BOOL, ForSpecs(), "int16 biases with a scale of their own"),
    Option("UseUnsignedReLU", BOOL, _choose("has_unsigned_relu"), "zero point 0 for tensors that are never negative"),
    Option("AlignEltwiseQuantType", BOOL, _choose("has_activation_constants"),
           "constants of Add, Mul ... have the activations' type"),
    Option("Int16Scale", BOOL, ForSpecs(),
           "scales of integers are rounded to a 16-bit integer over a power of two of at most 2^16"),
    Option("AdjustWeightScaleForInt32Bias", BOOL, _choose("has_fitted_weights"),
           "a weight's scale is raised if its int32 bias would not fit; False: such a bias saturates"),
    Option("AdjustBiasScale", BOOL,
           Remark("the scale of an int32 bias is always the product of the two others", (True,)),
           "biases follow changed scales"),
    # Calibration
    Option("Percentile", number(50, 100), ForSpecs(), "the percentage of values that calibration by percentile keeps"),
    Option("PercentileCandidates", PERCENTILES, ForSpecs(), "the candidates of layerwise percentile"),
    Option("CalibMovingAverage", BOOL, ForSpecs(), "MinMax as a moving average over the samples"),
    Option("CalibMovingAverageConstant", number(0, 1), ForSpecs(), "the weight of the next sample in that average"),
    Option("CalibTensorRangeSymmetric", BOOL, _calibrate("has_symmetric_ranges"),
           "ranges are widened to be symmetric about zero"),
    Option("LWPMetric", one_of("mae", "mse"), ForSpecs(),
           "the error by which layerwise percentile chooses: mean of magnitudes, or of squares, which is the default"),
    Option("LWPUseHistogram", BOOL, ForSpecs(),
           "that error is predicted from a histogram; False: measured in another pass over the data"),
    Option("MinMSEModePof2Scale", _MIN_MSE_MODES, ForSpecs(),
           "positions of least error over all data, most often least over samples, or over the data within Percentile"),
    Option("MinMSEMode", _MIN_MSE_MODES, ForSpecs("MinMSEModePof2Scale"), "an earlier name of MinMSEModePof2Scale"),
    Option("MinMSEModeFloatScale", one_of("Percentile", "HistCenter", "All"), ForSpecs(),
           "how WeightCalibrateMethod MinMSE searches: best of four percentiles, by a histogram, or by all values"),
    Option("WeightCalibrateMethod", CALIBRATION_METHOD, ForSpecs(),
           "how ranges of weights with float scales are found"),
    Option("CalibDataSize", integer(1), _calibrate("sample_limit"), "the largest number of samples to use"),
    Option("UseRandomData", BOOL, _calibrate("has_random_data"),
           "calibrate on random data, even if there is calibration data"),
    Option("RandomDataReaderInputShape", SHAPES, _calibrate("random_shapes", shapes_by_name),
           "shapes of random data by input"),
    Option("RandomDataReaderInputDataRange", optional(RANGES), _calibrate("random_ranges", ranges_by_name),
           "[lowest, highest] of random data, for every input"),
    Option("CalibOptimizeMem", BOOL, Remark(_STREAMING), "keep tensors on disk while calibrating"),
    Option("CalibOptimizeDisk", BOOL, Remark(_STREAMING), "compute tensors again instead of keeping them"),
    Option("CalibWorkerNum", integer(1), Remark(_STREAMING, (1,)), "processes that calibrate"),
    Option("TmpDir", PATH, Remark("temporary files go where the environment variable TMPDIR says"),
           "a folder for temporary files"),
    Option("CalibCacheDir", PATH, _calibrate("cache", Path),
           "a folder that caches ranges for the next run with the same model, data and settings"),
    Option("SaveAndRestore", optional(PATH), Restored(has_layers=True),
           "a JSON file of ranges: those in it are not measured again, others are added; finetuned layers are stored "
           "next to it, so that an interrupted run resumes"),
    Option("TensorsRangeFile", optional(PATH), Restored(), "an earlier name of SaveAndRestore, for ranges only"),
    Option("CalibPassthroughOpTypes", NAMES, _calibrate("passthrough_op_types", frozenset),
           "outputs of these operators have the range of the nearest tensor before them that is computed by others"),
    Option("NumBins", integer(0), _calibrate("histogram_bins", lambda value: max(2, value) if value else None),
           "bins of the histograms that ranges are found from; 0: as many as usual"),
    Option("SaveTensorHistFig", BOOL,
           _calibrate("histogram_folder", lambda value: Path("tensor_hist") if value else None),
           "histograms of calibrated tensors as pictures, in the folder tensor_hist"),
)

_GRAPH_OPTIONS: tuple[Option, ...] = (
    # What is quantized
    Option("OpTypesToQuantize", NAMES, SameAs("op_types_to_quantize"), "only these operator types"),
    Option("ExtraOpTypesToQuantize", NAMES, SameAs("extra_op_types_to_quantize"), "these operator types too"),
    Option("NodesToQuantize", NAMES, SameAs("nodes_to_quantize"), "only these nodes"),
    Option("InputNodes", NAMES, SameAs("input_nodes"), "quantize from these nodes on"),
    Option("OutputNodes", NAMES, SameAs("output_nodes"), "quantize up to these nodes"),
    Option("QuantizeAllOpTypes", BOOL, Into("selection", "has_all_op_types"), "every operator type that can be"),
    Option("MatMulConstBOnly", BOOL, Into("selection", "needs_constant_matmul_operand"), "MatMul only with a constant"),
    Option("QuantizeEmbeddings", BOOL, Into("selection", "has_embeddings"),
           "also quantize tables that Gather takes rows from, if one scale is enough for their rows"),
    Option("EnableSubgraph", BOOL, IntoBoth(("selection", "has_bodies"), ("load", "has_bodies")),
           "the bodies of If, Loop and Scan are quantized too"),
    Option(KEEP_FIRST_LAST, one_of(*END_TYPES), _choose("ends", EndLayers.named),
           "the type of the first and the last layers, if theirs is narrower: products with a constant weight and no "
           "other one before or behind; 'float' leaves them in float, 'first_conv_float' only the first Conv"),
    Option("WeightsOnly", BOOL, _choose("is_weights_only"), "activations stay float"),
    Option("ForceQuantizeNoInputCheck", BOOL, _choose("has_forced_movers"),
           "MaxPool, Reshape ... even if their input is float"),
    Option("OpTypesToExclude", NAMES, Into("selection", "excluded_op_types", frozenset),
           "operators of these types stay float"),
    Option("OpTypesToExcludeOutputQuantization", NAMES, _choose("op_types_with_float_output", frozenset),
           "outputs of these stay float"),
    Option("NodesToExcludeOutputQuantization", NAMES, _choose("nodes_with_float_output", tuple),
           "outputs of these nodes stay float, for every reader"),
    Option("TensorQuantOverrides", mapping("a dictionary from tensor names to lists of dictionaries"),
           _choose("overrides", tensor_overrides),
           "type, range or scale of tensors by name"),
    Option("MixedPrecisionTensor", mapping("a dictionary from quant types to lists of tensor names"), ForSpecs(),
           "types of tensors by name; needs specific_tensor_precision"),
    Option("SpecificTensorPrecision", BOOL, SameAs("specific_tensor_precision"), "use MixedPrecisionTensor"),
    Option("NodesWithMixedPrecision", NAMES,
           Remark("the boundary between two types follows from the types of a layer and of its neighbours", ([], ())),
           "nodes whose neighbours have other types"),
    Option("QDQOpTypePerChannelSupportToAxis", AXES, _choose("channel_axes", channel_axes),
           "the channel axis of weights by operator type"),
    Option("UseMatMulNBits", BOOL, ForSpecs(), "weights of MatMul and Gemm as MatMulNBits, all else float"),
    Option("MatMulNBitsParams", mapping("a dictionary", NBITS_KEYS), _insert("matmul_nbits", nbits_options),
           "the settings of UseMatMulNBits; Algorithm is DEFAULT or RTN (nearest codes, searched scales), HQQ (scales "
           "for the least |error|^0.7), GPTQ or AWQ; Form 'dequantize_linear' has standard operators of opset 21"),
    # How nodes are written
    Option("AddQDQPairToWeight", BOOL, _insert("has_pairs_on_weights"),
           "weights stay float behind Quantize and Dequantize"),
    Option("EnableDualQuantNodePairs", BOOL, _choose("has_dual_pairs"),
           "between layers of two types a tensor has two pairs of nodes: the writer's type, then the reader's"),
    Option("DedicatedQDQPair", BOOL, _insert("has_dedicated_pairs"), "a pair of nodes for every reader of a tensor"),
    Option("FoldRelu", BOOL, _insert("has_folded_relu"), "drop a Relu if saturation has exactly the same effect"),
    *(
        Option(
            f"RemoveQDQConv{activation}",
            BOOL,
            Member("fused_activations", (activation,)),
            f"nothing quantized between Conv and {activation}",
        )
        for activation in ("Relu", "Clip", "LeakyRelu", "PRelu", "Gelu")
    ),
    Option("RemoveFusedQDQ", BOOL, _choose("has_fused_blocks"),
           "the RemoveQDQConv... options also hold for block formats that are placed on all tensors"),
    Option("RemoveQDQMulAdd", BOOL, _choose("unquantized_between", lambda value: (("Mul", "Add"),) if value else ()),
           "nothing quantized between Mul and Add"),
    Option("RemoveQDQBetweenOps", PAIRS, _choose("unquantized_between", lambda value: tuple(map(tuple, value))),
           "nothing quantized between these pairs of types"),
    Option(
        "RemoveQDQInstanceNorm",
        BOOL,
        Into(
            "choose",
            "unquantized_between",
            lambda value: (
                tuple(("InstanceNormalization", activation) for activation in ("Relu", "Clip", "LeakyRelu", "PRelu"))
                if value
                else ()
            ),
        ),
        "nothing quantized between InstanceNormalization and its activation",
    ),
    Option("AlignConcat", BOOL, AlignedRule("aligned", ("Concat",)), "one scale for inputs and output of Concat"),
    Option("AlignPool", BOOL, AlignedRule("aligned", POOLS), "one scale for inputs and output of pooling"),
    Option("AlignPad", BOOL, AlignedRule("aligned", ("Pad",)), "one scale for inputs and output of Pad"),
    Option("AlignSlice", BOOL, AlignedRule("aligned", ("Slice",)), "one scale for inputs and output of Slice"),
    Option("AlignTranspose", BOOL, Member("aligned", ("Transpose",)), "one scale for inputs and output of Transpose"),
    Option("AlignReshape", BOOL, Member("aligned", ("Reshape",)), "one scale for inputs and output of Reshape"),
    # Loading and rewriting
    Option("ConvertOpsetVersion", integer(13), Into("load", "opset"), "the opset of the result"),
    Option("FixShapes", TEXT, Into("load", "fixed_shapes", fixed_shapes),
           "sizes for symbolic dimensions: 'input:[1,3,224,224];output:[1,1000]'"),
    Option("RemoveInputInit", BOOL, Into("load", "has_initializers_as_inputs", lambda value: not value),
           "initializers are not inputs"),
    Option("QuantizeFP16", BOOL, Into("load", "is_fp16_kept"),
           "quantize a float16 model as it is; ONNX Runtime refuses some of the results"),
    Option("UseFP32Scale", BOOL, Into("load", "has_fp16_ports"),
           "a float16 model computes in float32, with float32 scales; its inputs and outputs stay float16"),
    Option("CopySharedInit", optional(NAMES), CopyRewrite("shared_init_op_types"),
           "each reader of a constant has its copy; the operator types, [] for all"),
    Option("CopyBiasInit", optional(NAMES), CopyRewrite("bias_init_op_types"),
           "each reader of a bias has its copy; the operator types, [] for all"),
    Option("PreprocessYAML", optional(PATH), Passes(), "an earlier name of ShapeShifterYaml"),
    Option("ShapeShifterYaml", optional(PATH), Passes(),
           "a YAML file of graph passes instead of the usual rewrites, or xint8, a8w8, a16w8, bf16, bfp16"),
    Option("PreprocessedModelPath", optional(PATH), Into("save", "preprocessed", lambda value: value),
           "where ShapeShifterYaml writes the float model after its passes; '': MODEL_preprocessed.onnx"),
    Option("SkipPreprocess", BOOL, Into("optimize", "is_skipped"), "no graph rewrites, regardless of other options"),
    Option("SimplifyModelOptions", mapping("a dictionary"), Remark("they are arguments of onnxslim, which is not used"),
           "settings of SimplifyModel"),
    Option("SimplifyModel", BOOL, Into("optimize", "is_simplified"),
           "graph rewrites that leave the output as it is, even if OptimizeModel is False"),
    Option("FoldBatchNorm", BOOL, Rewrite(), "BatchNormalization into the convolution before it"),
    Option("ConvertBNToConv", BOOL, Rewrite(), "a lone BatchNormalization as a depthwise convolution"),
    Option("ConvertReduceMeanToGlobalAvgPool", BOOL, Rewrite(), "ReduceMean over space as GlobalAveragePool"),
    Option("ConvertSplitToSlice", BOOL, Rewrite(), "Split as Slices"),
    Option("ConvertClipToRelu", BOOL, RewriteAndSubstitution(),
           "Clip from 0 on as Relu: by default if it has no upper bound, with True also if quantizers saturate"),
    Option("ReplaceClip6Relu", BOOL, Rewrite(), "Clip(0, 6) as Relu; changes the output"),
    Option("SplitLargeKernelPool", BOOL, Rewrite(), "pooling of a large window in two steps"),
    Option("FuseInstanceNorm", BOOL, Rewrite(), "the parts of an InstanceNormalization as one node"),
    Option("FuseL2Norm", BOOL, Rewrite(), "the parts of an LpNormalization as one node"),
    Option("FuseGelu", BOOL, Rewrite(), "the parts of a Gelu as one node"),
    Option("FuseLayerNorm", BOOL, Rewrite(), "the parts of a LayerNormalization as one node"),
)

_ALGORITHM_OPTIONS: tuple[Option, ...] = (
    Option("FastFinetune", mapping("a dictionary", FINETUNE_KEYS), Steers(FINETUNE, "finetune", "settings"),
           "settings of AdaRound and AdaQuant: [finetuning](finetuning.md)"),
    Option("AutoMixprecision", mapping("a dictionary", MIXED_PRECISION_KEYS),
           Steers(MIXED_PRECISION, "mix", "settings"),
           "settings of mixed precision: the lower types, and the limits for using them"),
    Option("CLESteps", integer(-1), _cle("steps"), "passes of cross-layer equalization; -1: until it settles"),
    Option("CLEScaleAppendBias", BOOL, _cle("has_appended_bias"), "the bias counts in the range of its channel"),
    Option("CLETotalLayerDiffThreshold", number(0), _cle("settled_at"),
           "the mean change of the scales at which it has settled"),
    Option("CLEWeightThreshold", number_from(0), _cle("weight_threshold"),
           "channels whose ranges before and behind add up to less are not rescaled"),
    Option("CLEScaleUseThreshold", BOOL, _cle("has_threshold"),
           "use `CLEWeightThreshold`; False: every channel is rescaled"),
    Option(
        "CLEBalanceMethod",
        TEXT,
        Refused("the range of a channel is its largest magnitude, 'max'; other values are not supported", ("max",)),
        "how the range of a channel is found",
    ),
    Option(
        "CLEClip",
        one_of(*(treatment.value for treatment in ClipTreatment)),
        _cle("clip", ClipTreatment),
        "Clip(0, 6) between layers: 'per_channel' gives it a bound for each channel, 'calibrated' leaves channels that "
        "reach the bound as they are, 'skip' rescales nothing through it",
    ),
    Option("CLEBiasAbsorption", BOOL, _cle("has_bias_absorption"),
           "the constant part of a channel moves into the biases behind it"),
    Option("SmoothAlpha", number_or("auto", number_from(0, 1)),
           Steers(SMOOTH, "smooth", "alpha", lambda value: None if value == "auto" else float(value)),
           "the share that SmoothQuant moves to the weights; 'auto': the best for each layer"),
    Option(GPTQ, BOOL, SecondSwitch(COMPENSATION), "another name of Compensation"),
    Option("GPTQParams", mapping("a dictionary", GPTQ_KEYS), GptqSettings(),
           "the settings of UseGPTQ: PercDamp and ActOrder"),
    Option("RMatrixDim", integer(2), _rotation("size"),
           "how many channels include_rotation rotates (4096 with RConfigPath; else those of the residual stream)"),
    Option("UseRandomHad", BOOL, _rotation("is_random"), "random signs in the matrix of include_rotation"),
    Option("RConfigPath", optional(PATH), _rotation("source"),
           "a JSON file that says what include_rotation rotates; without it, residual streams are found in the graph"),
    Option("R1", BOOL, _rotation("r1"), "include_rotation rotates the residual stream, folded into weights (True)"),
    Option("R2", optional(BOOL), _rotation("r2"),
           "include_rotation rotates the values of attention by heads, folded into weights (True without RConfigPath)"),
    Option("R3", BOOL, _rotation("r3"), "include_rotation rotates queries and keys at inference (False)"),
    Option("R4", BOOL, _rotation("r4"), "include_rotation rotates the inputs of down projections at inference (False)"),
    Option("RotationSize", optional(integer(2)), _rotation("block"),
           "R1 and R4 rotate blocks of this many channels separately, such as 32 for microscaling formats"),
    Option("OnlineR1Rotation", BOOL, _rotation("is_online"),
           "R1 rotates the inputs of the layers at inference, and is not folded (False)"),
    Option(BIAS_CORRECTION, BOOL, Switch(),
           "biases are corrected by the mean error that rounding makes in their layer"),
    Option("BiasCorrectionInputs", one_of(*(inputs.value for inputs in CorrectionInputs)),
           _correction("inputs", CorrectionInputs),
           "the network whose activations that error is measured with, 'float' or 'quantized'"),
    Option("BiasCorrectionSamples", integer(1), _correction("sample_limit"),
           "the largest number of calibration samples for it"),
)

# fmt: on
# The options of features/order.py: a switch for each feature that has one, and its settings.
_FEATURE_OPTIONS: tuple[Option, ...] = tuple(
    row
    for feature in FEATURES
    if feature.switch
    for row in (
        Option(feature.switch, BOOL, Switch(), feature.doc),
        *(
            Option(
                option,
                kind_of(default),
                Steers(feature.switch, feature.folder, field, type(default)),
                doc,
            )
            for option, (field, default, doc) in feature.settings().items()
        ),
    )
)

# fmt: off
_NPU_OPTIONS: tuple[Option, ...] = (
    *(
        Option(name, BOOL, ForNpu(), doc)
        for name, doc in {
            "SimulateDPU": "operators as an NPU computes them: the usual ones among the following",
            "ConvertLeakyReluToDPUVersion": "LeakyRelu as an NPU computes it",
            "ConvertSigmoidToHardSigmoid": "Sigmoid as HardSigmoid",
            "ConvertHardSigmoidToDPUVersion": "HardSigmoid as an NPU computes it",
            "ConvertAvgPoolToDPUVersion": "AveragePool as an NPU computes it",
            "ConvertReduceMeanToDPUVersion": "ReduceMean as an NPU computes it",
            "ConvertClipToDPUVersion": "Clip as an NPU computes it",
            "ConvertSoftmaxToDPUVersion": "Softmax with the NPU's exponential, in bfloat16",
            "NPULimitationCheck": "positions of power-of-two scales are brought within an NPU's limits, by the rules "
            "that follow and those for Concat, pooling, Pad and Slice",
            "AdjustShiftCut": "shifts from sum to output within limits",
            "AdjustShiftBias": "shifts of biases within limits",
            "AdjustShiftRead": "shifts of the inputs of elementwise operators within limits",
            "AdjustShiftWrite": "shifts of the outputs of elementwise operators within limits",
            "AdjustHardSigmoid": "positions around HardSigmoid within limits",
            "AdjustShiftSwish": "positions around Swish within limits",
        }.items()
    ),
    Option("MaxLoopNum", integer(0), ForNpu(), "rounds after which rules that contradict each other are given up"),
)

_RUN_OPTIONS: tuple[Option, ...] = (
    Option("EvalMetrics", BOOL, _calibrate("has_evaluation"),
           "compare outputs of the float and the quantized model: cosine and L2 distance, in the report"),
    Option("EvalDataReader", optional(READER), EvaluationData(),
           "the data that EvalMetrics compares on; else the calibration data"),
    Option("FillAllValueInfo", BOOL, Into("save", "has_all_value_info"),
           "the file declares type and shape of every tensor, with the sizes of the first sample also at its ends"),
    Option("UserCustomOpLibPath", optional(PATHS), Into("load", "custom_libraries", custom_libraries),
           "libraries with operators of the model, registered in every session"),
    Option("EncryptionAlgorithm", optional(one_of("AES-256")),
           Remark("crypto_mode writes nothing to disk, so there is nothing to encrypt", (None,)),
           "how the temporary files of crypto_mode are encrypted"),
    Option(
        "VerdictMemoryLimit",
        integer(0),
        _calibrate("verdict_limit_bytes", lambda megabytes: megabytes * 1_000_000),
        "MB of weights up to which both models run for the verdict; by default 1 GB, and half of the free memory",
    ),
    Option(
        "Protect",
        one_of(*(mode.value for mode in ProtectMode)),
        Into("protect", "mode", ProtectMode),
        "keep the parts in float that 8 bits break: 'auto', known 'structures' only, or 'none'; 8-bit presets: 'auto'",
    ),
    Option("ProtectBudget", number_from(0.0, 1.0), Into("protect", "mac_budget", float),
           "the share of multiply-accumulates that the search of `Protect` may leave in float"),
    Option("QuantizationPreference", optional(one_of(*PREFERENCES)), Switch(),
           "the resource that calibration and finetuning should save; sets their other options"),
    Option("PrintSummary", BOOL, SameAs("print_summary"), "a summary at the end"),
    Option("OptimizeModel", BOOL, SameAs("optimize_model"), "graph rewrites that leave the output as it is"),
    Option("ExecutionProviders", NAMES, SameAs("execution_providers"),
           "ONNX Runtime's providers for all measurements; a missing one is skipped with a warning"),
    Option("InferDevice", DEVICE, Into("calibrate", "providers", checked_device),
           "where calibration, verdict, evaluation, searches and the walk of finetuning run; a device that cannot be "
           "used is an error: [GPUs](gpu.md)"),
    Option("EnableNPUCnn", BOOL, SameAs("enable_npu_cnn"), "place quantizers for the NPU's convolutions"),
    Option("EnableNPUTransformer", BOOL, SameAs("enable_npu_transformer"),
           "place quantizers for transformers on the NPU"),
    Option("ConvertFP16ToFP32", BOOL, SameAs("convert_fp16_to_fp32"), "a float16 model becomes float32 first"),
    Option("ConvertNCHWToNHWC", BOOL, SameAs("convert_nchw_to_nhwc"),
           "inputs and outputs of four dimensions with channels last, by a Transpose; data is given as before"),
    Option("CryptoMode", BOOL, SameAs("crypto_mode"), "nothing is written to disk, and nothing logged"),
    Option("DebugMode", BOOL, SameAs("debug_mode"), "more messages"),
    Option("IgnoreWarnings", BOOL, SameAs("ignore_warnings"),
           "no UserWarning or ResourceWarning of Python while the model is quantized"),
)

# fmt: on
SECTIONS: Mapping[str, tuple[Option, ...]] = MappingProxyType(
    {
        "Numbers, scales and ranges": _NUMBER_OPTIONS,
        "What is quantized, and how the graph is written": _GRAPH_OPTIONS,
        "Accuracy algorithms": (*_ALGORITHM_OPTIONS, *_FEATURE_OPTIONS),
        "NPUs": _NPU_OPTIONS,
        "The run": _RUN_OPTIONS,
    }
)
OPTIONS: Mapping[str, Option] = MappingProxyType({row.name: row for rows in SECTIONS.values() for row in rows})

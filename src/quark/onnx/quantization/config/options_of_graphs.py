"""Extra options: what is quantized, how it is written, how the graph is loaded and rewritten."""

from __future__ import annotations

from quark.onnx.quantization.config.option_kinds import AXES, BOOL, NAMES, PAIRS, TEXT, integer, mapping, optional
from quark.onnx.quantization.config.option_treatments import (
    AlignedRule,
    CopyRewrite,
    ForSpecs,
    Into,
    Member,
    Option,
    Refused,
    Remark,
    Rewrite,
    SameAs,
)
from quark.onnx.quantization.config.option_values import (
    NBITS_KEYS,
    channel_axes,
    fixed_shapes,
    nbits_options,
    tensor_overrides,
)

POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool")

GRAPH_OPTIONS: tuple[Option, ...] = (
    # What is quantized
    Option("OpTypesToQuantize", NAMES, SameAs("op_types_to_quantize"), "only these operator types"),
    Option("ExtraOpTypesToQuantize", NAMES, SameAs("extra_op_types_to_quantize"), "these operator types too"),
    Option("NodesToQuantize", NAMES, SameAs("nodes_to_quantize"), "only these nodes"),
    Option("InputNodes", NAMES, SameAs("input_nodes"), "quantize from these nodes on"),
    Option("OutputNodes", NAMES, SameAs("output_nodes"), "quantize up to these nodes"),
    Option("QuantizeAllOpTypes", BOOL, Into("selection", "has_all_op_types"), "every operator type that can be"),
    Option("MatMulConstBOnly", BOOL, Into("selection", "needs_constant_matmul_operand"), "MatMul only with a constant"),
    Option("WeightsOnly", BOOL, Into("choose", "is_weights_only"), "activations stay float"),
    Option(
        "ForceQuantizeNoInputCheck",
        BOOL,
        Into("choose", "has_forced_movers"),
        "MaxPool, Reshape ... even where their input is float",
    ),
    Option(
        "OpTypesToExclude",
        NAMES,
        Into("selection", "excluded_op_types", frozenset),
        "operators of these types stay float",
    ),
    Option(
        "OpTypesToExcludeOutputQuantization",
        NAMES,
        Into("choose", "op_types_with_float_output", frozenset),
        "outputs of these stay float",
    ),
    Option(
        "TensorQuantOverrides",
        mapping("a dictionary from tensor names to lists of dictionaries"),
        Into("choose", "overrides", tensor_overrides),
        "type, range or scale of tensors by name",
    ),
    Option(
        "MixedPrecisionTensor",
        mapping("a dictionary from quant types to lists of tensor names"),
        ForSpecs(),
        "types of tensors by name; needs specific_tensor_precision",
    ),
    Option(
        "QDQOpTypePerChannelSupportToAxis",
        AXES,
        Into("choose", "channel_axes", channel_axes),
        "the channel axis of weights by operator type",
    ),
    Option("UseMatMulNBits", BOOL, ForSpecs(), "weights of MatMul as MatMulNBits, all else float"),
    Option(
        "MatMulNBitsParams",
        mapping("a dictionary", NBITS_KEYS),
        Into("insert", "matmul_nbits", nbits_options),
        "the settings of UseMatMulNBits",
    ),
    # How nodes are written
    Option(
        "AddQDQPairToWeight",
        BOOL,
        Into("insert", "has_pairs_on_weights"),
        "weights stay float behind Quantize and Dequantize",
    ),
    Option(
        "DedicatedQDQPair", BOOL, Into("insert", "has_dedicated_pairs"), "a pair of nodes for every reader of a tensor"
    ),
    Option("FoldRelu", BOOL, Into("insert", "has_folded_relu"), "drop a Relu where saturation does its work exactly"),
    Option(
        "RemoveQDQConvRelu", BOOL, Member("fused_activations", ("Relu",)), "nothing quantized between Conv and Relu"
    ),
    Option(
        "RemoveQDQConvClip", BOOL, Member("fused_activations", ("Clip",)), "nothing quantized between Conv and Clip"
    ),
    Option(
        "RemoveQDQConvLeakyRelu",
        BOOL,
        Member("fused_activations", ("LeakyRelu",)),
        "nothing quantized between Conv and LeakyRelu",
    ),
    Option(
        "RemoveQDQConvPRelu", BOOL, Member("fused_activations", ("PRelu",)), "nothing quantized between Conv and PRelu"
    ),
    Option(
        "RemoveQDQConvGelu", BOOL, Member("fused_activations", ("Gelu",)), "nothing quantized between Conv and Gelu"
    ),
    Option(
        "RemoveQDQMulAdd",
        BOOL,
        Into("choose", "unquantized_between", lambda value: (("Mul", "Add"),) if value else ()),
        "nothing quantized between Mul and Add",
    ),
    Option(
        "RemoveQDQBetweenOps",
        PAIRS,
        Into("choose", "unquantized_between", lambda value: tuple(map(tuple, value))),
        "nothing quantized between these pairs of types",
    ),
    Option(
        "RemoveQDQInstanceNorm",
        BOOL,
        Into(
            "choose",
            "unquantized_between",
            lambda value: (
                tuple(("InstanceNormalization", each) for each in ("Relu", "Clip", "LeakyRelu", "PRelu"))
                if value
                else ()
            ),
        ),
        "nothing quantized between InstanceNormalization and its activation",
    ),
    Option("AlignConcat", BOOL, AlignedRule("aligned", ("Concat",)), "one scale for inputs and output of Concat"),
    Option(
        "AlignPool",
        BOOL,
        AlignedRule("aligned", POOLS),
        "one scale for inputs and output of pooling",
    ),
    Option("AlignPad", BOOL, AlignedRule("aligned", ("Pad",)), "one scale for inputs and output of Pad"),
    Option("AlignSlice", BOOL, AlignedRule("aligned", ("Slice",)), "one scale for inputs and output of Slice"),
    Option("AlignTranspose", BOOL, Member("aligned", ("Transpose",)), "one scale for inputs and output of Transpose"),
    Option("AlignReshape", BOOL, Member("aligned", ("Reshape",)), "one scale for inputs and output of Reshape"),
    # Loading and rewriting
    Option("ConvertOpsetVersion", integer(13), Into("load", "opset"), "the opset of the result"),
    Option(
        "FixShapes",
        TEXT,
        Into("load", "fixed_shapes", fixed_shapes),
        "sizes for symbolic dimensions: 'input:[1,3,224,224]'",
    ),
    Option(
        "RemoveInputInit",
        BOOL,
        Into("load", "has_initializers_as_inputs", lambda value: not value),
        "initializers are not inputs",
    ),
    Option(
        "QuantizeFP16",
        BOOL,
        Remark("a float16 model is quantized as it is, unless convert_fp16_to_fp32 is set"),
        "quantize a float16 model as it is",
    ),
    Option(
        "UseFP32Scale",
        BOOL,
        Refused("scales have the type of what they scale; convert_fp16_to_fp32 makes both float32"),
        "float32 scales in float16 models",
    ),
    Option(
        "CopySharedInit",
        optional(NAMES),
        CopyRewrite("shared_init_op_types"),
        "each reader of a constant has its copy; the operator types, [] for all",
    ),
    Option(
        "CopyBiasInit",
        optional(NAMES),
        CopyRewrite("bias_init_op_types"),
        "each reader of a bias has its copy; the operator types, [] for all",
    ),
    Option("SimplifyModel", BOOL, Into("optimize", "is_on"), "graph rewrites that leave the output as it is"),
    Option("FoldBatchNorm", BOOL, Rewrite(), "BatchNormalization into the convolution before it"),
    Option("ConvertBNToConv", BOOL, Rewrite(), "a lone BatchNormalization as a depthwise convolution"),
    Option("ConvertReduceMeanToGlobalAvgPool", BOOL, Rewrite(), "ReduceMean over space as GlobalAveragePool"),
    Option("ConvertSplitToSlice", BOOL, Rewrite(), "Split as Slices"),
    Option("ConvertClipToRelu", BOOL, Rewrite(), "Clip from 0 on as Relu"),
    Option("ReplaceClip6Relu", BOOL, Rewrite(), "Clip(0, 6) as Relu; changes the output"),
    Option("SplitLargeKernelPool", BOOL, Rewrite(), "pooling of a large window in two steps"),
    Option("FuseInstanceNorm", BOOL, Rewrite(), "the parts of an InstanceNormalization as one node"),
    Option("FuseL2Norm", BOOL, Rewrite(), "the parts of an LpNormalization as one node"),
    Option("FuseGelu", BOOL, Rewrite(), "the parts of a Gelu as one node"),
    Option("FuseLayerNorm", BOOL, Rewrite(), "the parts of a LayerNormalization as one node"),
)

"""Which operators AMD's compiler takes in a network of bfloat16 numbers.

`BF16_OPERATORS` are those that AMD's table of supported operators has under BF16, for Ryzen AI 1.5.0, the last release
with a published table that we know of. It says of an operator that it is broadly covered, not in which forms. It leaves
out some, such as Relu and Softmax, that networks have which AMD compiles in BF16. `LIKELY_OPERATORS` are those left out
that AMD lists for Vitis AI 6.2, whose compiler also turns float32 into bfloat16. We have seen a part of that list only,
without Softmax, which is added because every transformer has it. We know of nothing published about the others. Nothing
here was compiled or run on an NPU.

`LANGUAGE_OPERATORS` are fused operators that AMD's flow for language models runs, through ONNX Runtime GenAI. The
compiler for ordinary sessions does not list them.
"""

# fmt: off
BF16_OPERATORS = frozenset({
    "Abs", "Add", "And", "ArgMax", "ArgMin", "AveragePool", "BatchNormalization", "BitShift", "BitwiseAnd",
    "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "Concat", "Constant", "ConstantOfShape", "Conv",
    "ConvTranspose", "CumSum", "DepthToSpace", "Div", "Einsum", "Equal", "Erf", "Exp", "Expand", "Flatten",
    "Floor", "Gather", "GatherElements", "Gemm", "GlobalAveragePool", "Greater", "GridSample", "Identity",
    "InstanceNormalization", "LSTM", "Less", "Log", "MatMul", "Max", "MaxPool", "Min", "Mod", "Mul", "Neg",
    "Not", "Or", "Pad", "Pow", "Reciprocal", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "Reshape",
    "Resize", "Round", "ScatterND", "Shape", "Sigmoid", "Sign", "Sin", "Size", "Slice", "Split", "Sqrt",
    "Squeeze", "Sub", "Tanh", "Tile", "Transpose", "Unsqueeze", "Upsample", "Where", "Xor",
})
LIKELY_OPERATORS = frozenset({
    "Attention", "Clip", "Cos", "Elu", "Gelu", "GreaterOrEqual", "HardSigmoid", "HardSwish",
    "LayerNormalization", "LeakyRelu", "LessOrEqual", "LogSoftmax", "Mish", "PRelu", "RMSNormalization",
    "Range", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare", "Relu", "Selu",
    "Softmax",
})
LANGUAGE_OPERATORS = frozenset({
    "GroupQueryAttention", "MatMulNBits", "RotaryEmbedding", "SimplifiedLayerNormalization",
    "SkipSimplifiedLayerNormalization",
})
# fmt: on

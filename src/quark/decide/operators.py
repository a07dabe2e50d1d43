"""What operators are to a quantizer: which inputs are data, weight and bias, and what a quantized tensor means there.

    COMPUTE        sums products: Conv, ConvTranspose, Gemm, MatMul
    RECURRENT      sums products step by step: LSTM, GRU, RNN. Weights are quantized; the state stays float
    PASS           moves values and makes none: output and input can share one scale
    JOIN           brings tensors together: Concat
    ACTIVATION     monotone, elementwise, cheap: may be computed with the operator before it
    ARITHMETIC     everything else with a quantized form: Add, Mul, pooling, Sigmoid ...

The axis that an operand is summed over, and the axis of a weight's output channels, are here as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quark.decide.view import Node


class Kind(str, Enum):
    """What an operator does with its inputs; the module's docstring explains each kind."""

    COMPUTE = "compute"
    RECURRENT = "recurrent"
    PASS = "pass"
    JOIN = "join"
    ACTIVATION = "activation"
    ARITHMETIC = "arithmetic"


@dataclass(frozen=True)
class OperatorFacts:
    """`data` are the inputs that hold activations; None means all."""

    kind: Kind
    data: tuple[int, ...] | None = (0,)
    weight: int | None = None
    bias: int | None = None
    state_weight: int | None = None  # for a recurrent operator, the weight of its state
    is_for_runtime: bool = True  # ONNX Runtime has an integer form of it, or passes integers through

    @property
    def weights(self) -> tuple[int, ...]:
        """The inputs that are weights."""
        return tuple(index for index in (self.weight, self.state_weight) if index is not None)


def _same(
    kind: Kind, names: str, is_for_runtime: bool = True, data: tuple[int, ...] | None = (0,)
) -> dict[str, OperatorFacts]:
    return {name: OperatorFacts(kind, data, is_for_runtime=is_for_runtime) for name in names.split()}


OPERATORS: dict[str, OperatorFacts] = {
    "Conv": OperatorFacts(Kind.COMPUTE, (0,), weight=1, bias=2),
    "ConvTranspose": OperatorFacts(Kind.COMPUTE, (0,), weight=1, bias=2),
    "Gemm": OperatorFacts(Kind.COMPUTE, (0,), weight=1, bias=2),
    "MatMul": OperatorFacts(Kind.COMPUTE, (0,), weight=1),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), OperatorFacts(Kind.RECURRENT, (0,), weight=1, state_weight=2)),
    **_same(Kind.PASS, "MaxPool Reshape Flatten Transpose Squeeze Unsqueeze Slice Gather Split Pad Expand Tile"),
    **_same(Kind.PASS, "DepthToSpace SpaceToDepth", is_for_runtime=False),
    **_same(Kind.JOIN, "Concat", data=None),
    **_same(Kind.ACTIVATION, "Relu Clip"),
    **_same(Kind.ARITHMETIC, "Add Mul", data=None),
    **_same(Kind.ARITHMETIC, "Sub Div Min Max Sum Mean PRelu", is_for_runtime=False, data=None),
    **_same(Kind.ARITHMETIC, "AveragePool GlobalAveragePool LeakyRelu Sigmoid Softmax Resize"),
    **_same(
        Kind.ARITHMETIC,
        "HardSigmoid HardSwish Tanh Elu Gelu Softplus Erf ReduceMean ReduceMax ReduceSum GlobalMaxPool Upsample "
        "InstanceNormalization LayerNormalization BatchNormalization LpNormalization GroupNormalization Swish Mish",
        is_for_runtime=False,
    ),
}

# With a constant they limit the result of the node before, as a Clip does; with two tensors they are arithmetic.
BOUNDS = ("Min", "Max")

RECURRENT_TYPES = frozenset(name for name, operator in OPERATORS.items() if operator.kind is Kind.RECURRENT)
TRANSFORMER_TYPES = frozenset({"Gemm", "MatMul"})  # the operators of transformers that NPUs compute in integers

FEWEST_TABLE_NUMBERS = 1024  # a smaller table is not an embedding, and there is no gain in quantizing it

# For an operator without a row that a user names: every float tensor that it reads or computes is quantized.
OTHER = OperatorFacts(Kind.ARITHMETIC, None, is_for_runtime=False)


def facts(node: Node) -> OperatorFacts | None:
    """The facts about the node's operator; None if it has no quantized form."""
    if not node.is_standard or not node.has_quantized_form:
        return None
    known = OPERATORS.get(node.op_type)
    if node.op_type in BOUNDS and len(node.inputs) == 2 and (limit := node.inputs[1]) is not None and limit.constant:
        return OperatorFacts(Kind.ACTIVATION, (0,), is_for_runtime=False)
    if node.op_type == "Pad":  # a Pad that adds zeros only moves values
        is_moving = node.setting("mode", "constant") != "constant" or node.setting("fill", 0.0) == 0
        return OperatorFacts(Kind.PASS if is_moving else Kind.ARITHMETIC)
    if node.op_type in ("Resize", "Upsample"):  # the nearest value is an existing one
        return OperatorFacts(Kind.PASS if node.setting("mode", "nearest") == "nearest" else Kind.ARITHMETIC)
    return known


def is_embedding(node: Node) -> bool:
    """True for a Gather of rows from a constant matrix: its table is a weight, and the largest of many networks."""
    table = node.input(0)
    if node.op_type != "Gather" or not node.is_standard or table is None or table.constant is None:
        return False
    shape = table.constant.shape
    is_matrix = len(shape) == 2 and shape[0] * shape[1] >= FEWEST_TABLE_NUMBERS
    return is_matrix and table.is_quantizable and node.setting("axis", 0) in (0, -2)


def weight_inputs(node: Node) -> tuple[int, ...]:
    """The inputs of a node whose channels can have scales of their own."""
    known = OPERATORS.get(node.op_type)
    return (0,) if is_embedding(node) else (1,) if known is None or not known.weights else known.weights


def has_dynamic_kernel(node: Node) -> bool:
    """True for a recurrent node that ONNX Runtime computes from integers with scales found at run time: its
    DynamicQuantizeLSTM takes float32, constant weights, and steps on the first axis."""
    data, weights = node.input(0), (node.input(1), node.input(2))
    is_plain = node.op_type == "LSTM" and node.setting("layout", 0) == 0
    is_float = data is not None and data.type_name in ("float", "float32")
    return is_plain and is_float and all(weight is not None and weight.constant is not None for weight in weights)


def reduction_axis(node: Node, index: int) -> int | None:
    """The axis of input `index` that the node sums over. It is counted from the end for MatMul, and for a Gemm whose
    data may have any rank. None for a bias, or if the operator does not sum."""
    op = node.op_type
    if op in ("Conv", "ConvTranspose"):
        return {0: 1, 1: 1 if op == "Conv" else 0}.get(index)
    if op == "Gemm":
        is_transposed = node.setting("transA", 0)
        first = -1 if is_transposed is None else int(is_transposed == 0)
        return {0: first, 1: int(node.setting("transB", 0) != 0)}.get(index)
    if op == "MatMul":
        operand = node.input(index)
        is_vector = operand is not None and operand.rank == 1
        return -1 if index == 0 or is_vector else -2
    if op in RECURRENT_TYPES:
        return {0: -1, 1: 2, 2: 2}.get(index)
    if is_embedding(node):  # a row is a vector of the network, and a projection with the same table sums over it
        return 1 if index == 0 else None
    return None


def channel_axis(node: Node, rank: int) -> int | None:
    """The axis of the weight that counts output channels; None if channels cannot have scales of their own."""
    op = node.op_type
    if op == "Conv":
        return 0
    if op == "ConvTranspose":
        return 1 if node.setting("group", 1) == 1 else None
    if op == "Gemm":
        return 0 if node.setting("transB", 0) else 1
    if op == "MatMul" and rank == 2:  # ONNX Runtime's kernels have no channels for a stack of matrices
        return 1
    if op in RECURRENT_TYPES:  # gates, the same for both directions
        return 1
    if is_embedding(node):
        return 1
    return None

"""What operators are to a quantizer: which inputs are data, weight and bias, and what a quantized tensor means there.

    COMPUTE        sums products: Conv, ConvTranspose, Gemm, MatMul
    PASS           moves values and makes none: output and input can share one scale
    JOIN           brings tensors together: Concat
    ACTIVATION     monotone, elementwise, cheap: may be computed with the operator before it
    ARITHMETIC     everything else with a quantized form: Add, Mul, pooling, Sigmoid ...

The axis that an operand is summed over, and the axis of a weight's output channels, are here as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import onnx_ir as ir

from quark.onnx.graph import attribute, constant


class Kind(str, Enum):
    COMPUTE = "compute"
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
    is_for_runtime: bool = True  # ONNX Runtime has an integer form of it, or moves integers through


def _same(
    kind: Kind, names: str, is_for_runtime: bool = True, data: tuple[int, ...] | None = (0,)
) -> dict[str, OperatorFacts]:
    return {name: OperatorFacts(kind, data, is_for_runtime=is_for_runtime) for name in names.split()}


OPERATORS: dict[str, OperatorFacts] = {
    "Conv": OperatorFacts(Kind.COMPUTE, (0,), weight=1, bias=2),
    "ConvTranspose": OperatorFacts(Kind.COMPUTE, (0,), weight=1, bias=2),
    "Gemm": OperatorFacts(Kind.COMPUTE, (0,), weight=1, bias=2),
    "MatMul": OperatorFacts(Kind.COMPUTE, (0,), weight=1),
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
# Resize that invents no values, and a Pad that adds zeros, only move them; others compute.
_CONDITIONAL_PASS = ("Resize", "Pad", "Upsample")

# With a constant they limit what is before them, as a Clip does; with two tensors they are arithmetic.
BOUNDS = ("Min", "Max")

_TRANSFORMER_TYPES = (
    "Conv ConvTranspose Gemm MatMul Add Mul Concat MaxPool Reshape Flatten Transpose Squeeze Unsqueeze Slice Gather "
    "Split Expand Tile Relu Clip Gelu Sigmoid AveragePool GlobalAveragePool"
)
TRANSFORMER_TYPES = frozenset(_TRANSFORMER_TYPES.split())


def facts(node: ir.Node) -> OperatorFacts | None:
    """What is known of the node's operator; None where it has no quantized form."""
    if node.domain not in ("", "ai.onnx"):
        return None
    known = OPERATORS.get(node.op_type)
    if node.op_type in BOUNDS and len(node.inputs) == 2 and constant(node.inputs[1]) is not None:
        return OperatorFacts(Kind.ACTIVATION, (0,), is_for_runtime=False)
    if known is not None and node.op_type in _CONDITIONAL_PASS:
        return OperatorFacts(Kind.PASS if _is_moving(node) else Kind.ARITHMETIC, (0,))
    return known


def _is_moving(node: ir.Node) -> bool:
    mode = attribute(node, "mode", "constant" if node.op_type == "Pad" else "nearest")
    if node.op_type != "Pad":
        return bool(mode == "nearest")
    if mode != "constant" or len(node.inputs) < 3 or node.inputs[2] is None:
        return True
    value = constant(node.inputs[2])
    return value is not None and not value.any()


def reduction_axis(node: ir.Node, index: int) -> int | None:
    """The axis of input `index` that the node sums over; counted from the end for MatMul. None where it is a bias, or
    where the operator sums nothing."""
    op = node.op_type
    if op in ("Conv", "ConvTranspose"):
        if index == 0:
            return 1
        return (1 if op == "Conv" else 0) if index == 1 else None
    if op == "Gemm":
        return (
            int(attribute(node, "transA", 0) == 0)
            if index == 0
            else int(attribute(node, "transB", 0) != 0)
            if index == 1
            else None
        )
    if op == "MatMul":
        operand = node.inputs[index] if index < len(node.inputs) else None
        is_vector = operand is not None and operand.shape is not None and len(operand.shape) == 1
        return -1 if index == 0 or is_vector else -2
    return None


def channel_axis(node: ir.Node, rank: int) -> int | None:
    """The axis of the weight that counts output channels; None where they cannot have scales of their own."""
    op = node.op_type
    if op == "Conv":
        return 0
    if op == "ConvTranspose":
        return 1 if attribute(node, "group", 1) == 1 else None
    if op == "Gemm":
        return 0 if attribute(node, "transB", 0) else 1
    if op == "MatMul" and rank == 2:  # ONNX Runtime's kernels take no channels of a stack of matrices
        return 1
    return None

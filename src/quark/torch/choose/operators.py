"""What aten operators are to a quantizer: the ONNX operators that they are the same as.

The roles of ONNX operators (`quark.onnx.choose.operators`) are the roles here, so that both roads place quantizers
alike. Batch norms, dropouts and fused layers are modules.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from quark.onnx.choose.operators import OPERATORS, Kind, OperatorFacts
from quark.torch.graph import attribute_of, module_of, rank_of
from quark.torch.train.conv_batch_norm import ConvBatchNorm

aten = torch.ops.aten

# In the order of ONNX's inputs, weight and bias behind the data.
ATEN_NAMES: dict[str, str] = {
    "Conv": "conv1d.default conv2d.default conv3d.default conv1d.padding conv2d.padding conv3d.padding",
    "ConvTranspose": "conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input",
    "Gemm": "linear.default",
    "MatMul": "matmul.default mm.default bmm.default",
    "MaxPool": "max_pool1d.default max_pool2d.default max_pool3d.default",
    "AveragePool": "avg_pool1d.default avg_pool2d.default avg_pool3d.default adaptive_avg_pool1d.default "
    "adaptive_avg_pool2d.default adaptive_avg_pool3d.default",
    "Reshape": "view.default reshape.default flatten.using_ints unflatten.int _unsafe_view.default",
    "Transpose": "permute.default transpose.int t.default movedim.int",
    "Squeeze": "squeeze.dim squeeze.default squeeze.dims",
    "Unsqueeze": "unsqueeze.default",
    "Slice": "slice.Tensor narrow.default",
    "Gather": "select.int index_select.default",
    "Split": "split.Tensor split_with_sizes.default chunk.default unbind.int",
    "Expand": "expand.default",
    "Tile": "repeat.default",
    "DepthToSpace": "pixel_shuffle.default",
    "SpaceToDepth": "pixel_unshuffle.default",
    "Concat": "cat.default concat.default stack.default",
    "Relu": "relu.default",
    "Clip": "hardtanh.default relu6.default clamp.default clamp_min.default",
    "Add": "add.Tensor",
    "Mul": "mul.Tensor",
    "Sub": "sub.Tensor",
    "Div": "div.Tensor",
    "LeakyRelu": "leaky_relu.default",
    "PRelu": "prelu.default",
    "Sigmoid": "sigmoid.default",
    "Softmax": "softmax.int _softmax.default",
    "HardSigmoid": "hardsigmoid.default",
    "HardSwish": "hardswish.default",
    "Swish": "silu.default",
    "Mish": "mish.default",
    "Tanh": "tanh.default",
    "Elu": "elu.default",
    "Gelu": "gelu.default",
    "Softplus": "softplus.default",
    "ReduceMean": "mean.dim",
    "ReduceMax": "amax.default",
    "ReduceSum": "sum.dim_IntList",
    "LayerNormalization": "layer_norm.default",
    "GroupNormalization": "group_norm.default",
    "InstanceNormalization": "instance_norm.default",
    "BatchNormalization": "batch_norm.default",
    "Resize": "upsample_nearest2d.vec upsample_nearest2d.default upsample_bilinear2d.vec upsample_bilinear2d.default",
    "Pad": "pad.default constant_pad_nd.default",
}
# Values go through unchanged, and so does everything that is said of them.
_TRANSPARENT = "contiguous.default clone.default alias.default detach.default lift_fresh_copy.default"
_SPATIAL = ([2, 3], [-2, -1], [-1, -2], [3, 2])


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload, None)  # not every version of torch has every operator


_OP_TYPES: dict[Any, str] = {
    found: op_type
    for op_type, names in ATEN_NAMES.items()
    for name in names.split()
    if (found := _overload(name)) is not None
}
_TRANSPARENT_TARGETS = frozenset(found for name in _TRANSPARENT.split() if (found := _overload(name)) is not None)
_NORM = OperatorFacts(Kind.ARITHMETIC, (0,), is_for_runtime=False)
_MOVING = OperatorFacts(Kind.PASS)


@dataclass(frozen=True)
class Operator:
    """A node's operator in ONNX's words, and what it is to a quantizer; `facts` None: it has no quantized form."""

    op_type: str
    facts: OperatorFacts | None

    @property
    def kind(self) -> Kind | None:
        return None if self.facts is None else self.facts.kind


def operator_of(network: fx.GraphModule, node: fx.Node) -> Operator:
    """What the node computes. Sums and products with plain numbers stay in float: there is no second tensor."""
    module = module_of(network, node)
    if isinstance(module, ConvBatchNorm):
        return Operator(_OP_TYPES[module.operation.target], OperatorFacts(Kind.COMPUTE, (0,)))
    if isinstance(module, _BatchNorm):
        return Operator("BatchNormalization", _NORM)
    if node.op != "call_function":
        return Operator(type(module).__name__ if module is not None else node.op, None)
    if node.target is operator.getitem:
        return Operator("Split", _MOVING)
    op_type = _OP_TYPES.get(node.target)
    if op_type is None:
        return Operator(_name(node), None)
    return Operator(_special(op_type, node), _facts(network, op_type, node))


def _special(op_type: str, node: fx.Node) -> str:
    """Means over all of an image are what ONNX calls global pooling."""
    size = node.args[1] if len(node.args) > 1 else None
    if op_type == "ReduceMean" and rank_of(node.all_input_nodes[0]) == 4 and size in _SPATIAL:
        return "GlobalAveragePool"
    if op_type == "AveragePool" and "adaptive" in str(node.target) and size in (1, [1], [1, 1], [1, 1, 1]):
        return "GlobalAveragePool"
    return op_type


def _facts(network: fx.GraphModule, op_type: str, node: fx.Node) -> OperatorFacts | None:
    known = OPERATORS[_special(op_type, node)]
    if op_type in ("Add", "Sub", "Mul", "Div"):
        has_two = len(node.args) > 1 and all(isinstance(each, fx.Node) for each in node.args[:2])
        return known if has_two and not node.kwargs else None
    if op_type == "Resize":
        is_nearest = "nearest" in str(node.target)
        return OperatorFacts(Kind.PASS if is_nearest else Kind.ARITHMETIC)
    if op_type == "Pad":
        return OperatorFacts(Kind.PASS if _pads_zeros(node) else Kind.ARITHMETIC)
    if op_type == "Gemm" and attribute_of(network, node.args[1]) is None:
        return OperatorFacts(Kind.COMPUTE, (0, 1))
    if op_type == "MatMul":
        return OperatorFacts(Kind.COMPUTE, (0, 1), weight=1)
    return known


def _pads_zeros(node: fx.Node) -> bool:
    mode = node.args[2] if len(node.args) > 2 else node.kwargs.get("mode", "constant")
    value = node.args[3] if len(node.args) > 3 else node.kwargs.get("value", 0)
    is_constant = mode == "constant" or isinstance(mode, (int, float))
    return is_constant and not (mode if isinstance(mode, (int, float)) else value)


def is_transparent(network: fx.GraphModule, node: fx.Node) -> bool:
    """That the node hands its input on as it is: dropout, which does in eval mode, and copies."""
    if isinstance(module_of(network, node), (nn.modules.dropout._DropoutNd, nn.Identity)):
        return True
    return node.op == "call_function" and node.target in _TRANSPARENT_TARGETS


def weight_axis(network: fx.GraphModule, node: fx.Node) -> int | None:
    """The axis of the node's weight that counts output channels; None where they cannot have scales of their own."""
    op_type = operator_of(network, node).op_type
    if op_type == "ConvTranspose":
        return 1 if _groups(network, node) == 1 else None
    return {"Conv": 0, "Gemm": 0, "MatMul": -1}.get(op_type)


def reduction_axis(op_type: str, index: int) -> int | None:
    """The axis of input `index` that the operator sums over; None where it sums nothing."""
    if op_type in ("Conv", "ConvTranspose"):
        return {0: 1, 1: 1 if op_type == "Conv" else 0}.get(index)
    if op_type == "Gemm":
        return {0: -1, 1: 1}.get(index)
    return {0: -1, 1: -2}.get(index) if op_type == "MatMul" else None


def _groups(network: fx.GraphModule, node: fx.Node) -> int:
    module = module_of(network, node)
    arguments = module.operation.arguments if isinstance(module, ConvBatchNorm) else tuple(node.args[3:])
    return int(arguments[3]) if len(arguments) > 3 else 1  # type: ignore[arg-type]


def _name(node: fx.Node) -> str:
    target = node.target
    return str(target._schema.name).removeprefix("aten::") if isinstance(target, torch._ops.OpOverload) else str(target)

"""The view of a captured torch network that decisions are made on (quark.decide.view): aten operators under the names
of their ONNX counterparts, with weight and bias as inputs 1 and 2. Batch norms, dropouts and fused layers are modules.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from quark.decide.view import MISSING, Array, ArrayConstant, Graph, Node, Value
from quark.errors import ModelError
from quark.torch.graph import (
    inputs_of,
    is_constant,
    is_float,
    layer_name,
    module_of,
    module_type,
    outputs_of,
    rank_of,
    shape_of,
)
from quark.torch.operators import input_first_linear, masked_softmax
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
    "Gather": "select.int index_select.default embedding.default",
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
# Operators that have no quantized form here but are known to equalization.
_FLOAT_ONLY: dict[str, str] = {
    "Neg": "neg.default",
    "Abs": "abs.default",
    "Mul": "mul.Scalar",
    "Div": "div.Scalar",
    "Max": "maximum.default",
    "Min": "minimum.default",
    "ReduceMin": "amin.default",
    "Resize": "upsample_nearest1d.vec",
    "Shape": "sym_size.int",
}
# Values pass through unchanged, so the properties of the input hold for the output.
_TRANSPARENT = "contiguous.default clone.default alias.default detach.default lift_fresh_copy.default"
_SPATIAL = ([2, 3], [-2, -1], [-1, -2], [3, 2])
# The names that users have for layers without a module of that name in the graph.
_CLASSES = {"Conv": ("Conv1d", "Conv2d", "Conv3d"), "Gemm": ("Linear",)}


def _targets(names: str) -> Iterator[Any]:
    for name in names.split():
        packet, _, overload = name.partition(".")
        target = getattr(getattr(aten, packet, None), overload, None)  # not every version of torch has every operator
        if target is not None:
            yield target


_OP_TYPES: dict[Any, str] = {target: op_type for op_type, names in ATEN_NAMES.items() for target in _targets(names)}
_OP_TYPES[input_first_linear] = "Gemm"
_FLOAT_TYPES: dict[Any, str] = {target: op_type for op_type, names in _FLOAT_ONLY.items() for target in _targets(names)}
_FLOAT_TYPES[masked_softmax] = "Softmax"
_WHY_FLOAT: dict[Any, str] = {
    **dict.fromkeys(
        (masked_softmax, aten.masked_fill.Scalar, aten.masked_fill.Tensor), "applies a mask, whose -inf has no codes"
    ),
    aten.scaled_dot_product_attention.default: "attention with dropout, or of unknown shape, stays one operator",
}
_TRANSPARENT_TARGETS = frozenset(_targets(_TRANSPARENT))


def view_of(network: fx.GraphModule) -> Graph:
    """All that the network computes. A value has the name of its fx node, a constant the name of its parameter."""
    values: dict[fx.Node | str, Value] = {}  # constants by name, which may also be the name of a node
    nodes: dict[fx.Node, Node] = {}

    def constant_of(name: str, is_number: bool = True) -> Value:
        if name not in values:
            held = ParameterConstant(network, name)
            values[name] = Value(name, name, held.shape, held.type_name, is_number, held)
        return values[name]

    def value_of(origin: fx.Node) -> Value:
        if origin.op == "get_attr":
            return constant_of(str(origin.target), is_float(origin))
        if origin not in values:
            shape = shape_of(origin)
            sizes = None if shape is None else tuple(size if isinstance(size, int) else None for size in shape)
            value = origin.meta.get("val")
            kind = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else None
            values[origin] = Value(str(origin.name), origin, sizes, kind, is_float(origin))
        return values[origin]

    for origin in network.graph.nodes:
        if origin.op not in ("call_function", "call_module"):
            continue
        node = nodes[origin] = _node(network, origin)
        inputs: dict[int, Value] = {}
        for index, source in inputs_of(origin):
            inputs.setdefault(index, value_of(source))  # the sizes of a shape are numbered from 0, too
        inputs |= _plain_numbers(node.op_type, origin)
        if isinstance(module_of(network, origin), ConvBatchNorm):
            inputs |= {1: constant_of(f"{origin.target}.weight"), 2: constant_of(f"{origin.target}.bias")}
        node.inputs = [inputs.get(index) for index in range(max(inputs, default=-1) + 1)]
        output = value_of(origin)
        output.producer = node
        node.outputs = [output]
        for index, value in inputs.items():
            value.readers.append((node, index))
    for index, origin in enumerate(outputs_of(network.graph)):
        value = value_of(origin)
        value.outputs = (*value.outputs, index)
    return Graph(list(nodes.values()), _matches, word="layer")


def _plain_numbers(op_type: str, origin: fx.Node) -> dict[int, Value]:
    """Operands of arithmetic that are Python numbers, such as the 2 of `x * 2`, by input index."""
    if op_type not in ("Mul", "Div", "Add", "Sub", "Max", "Min"):
        return {}
    numbers = ((i, arg) for i, arg in enumerate(origin.args[:2]) if isinstance(arg, (int, float)))
    return {i: Value("", None, (), constant=ArrayConstant(np.array(number, float))) for i, number in numbers}


def _matches(pattern: str, node: Node) -> bool:
    """A pattern with * and ?, or the path of a module that the node belongs to."""
    return any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for name in node.aliases)


def _node(network: fx.GraphModule, origin: fx.Node) -> Node:
    op_type, has_form = _op_type(network, origin)
    names = [str(origin.name), layer_name(origin)]
    if origin.op == "call_module":
        names.append(str(origin.target))
    names += [str(arg.target).rpartition(".")[0] for arg in origin.args if is_constant(arg)]  # type: ignore[union-attr]
    is_transparent = op_type in ("Dropout", "Identity")
    return Node(
        str(origin.name),
        op_type,
        origin,
        label=layer_name(origin),
        aliases=tuple(name for name in names if name),
        kinds=(module_type(origin), op_type, *_CLASSES.get(op_type, ())),
        has_quantized_form=has_form,
        is_plumbing=is_transparent or not is_float(origin),
        is_transparent=is_transparent,
        why_float=_WHY_FLOAT.get(origin.target, ""),
        settings=lambda name: _setting(network, origin, op_type, name),
    )


def _op_type(network: fx.GraphModule, node: fx.Node) -> tuple[str, bool]:
    """Return the ONNX name of the operator, and whether it has a quantized form. Sums and products with plain numbers
    stay in float, because their second operand has no tensor to quantize."""
    module = module_of(network, node)
    if isinstance(module, ConvBatchNorm):
        return _OP_TYPES[module.operation.target], True
    if isinstance(module, _BatchNorm):
        return "BatchNormalization", True
    if isinstance(module, (nn.modules.dropout._DropoutNd, nn.Identity)):
        return "Dropout", False
    if module is not None:
        return type(module).__name__, False
    if node.target is operator.getitem:
        return "Split", True
    if node.target in _TRANSPARENT_TARGETS:
        return "Identity", False
    if node.target in _FLOAT_TYPES:
        return _FLOAT_TYPES[node.target], False
    op_type = _OP_TYPES.get(node.target)
    if op_type is None:
        target: Any = node.target
        is_aten = isinstance(target, torch._ops.OpOverload)
        name = str(target._schema.name).removeprefix("aten::") if is_aten else getattr(target, "__name__", str(target))
        return name, False  # never the address of a function, which would be in the hash of the plan
    size = node.args[1] if len(node.args) > 1 else None  # means over all of an image are global pooling
    if op_type == "ReduceMean" and rank_of(node.all_input_nodes[0]) == 4 and size in _SPATIAL:
        return "GlobalAveragePool", True
    if op_type == "AveragePool" and "adaptive" in str(node.target) and size in (1, [1], [1, 1], [1, 1, 1]):
        return "GlobalAveragePool", True
    if op_type in ("Add", "Sub", "Mul", "Div"):
        has_two = len(node.args) > 1 and all(isinstance(arg, fx.Node) for arg in node.args[:2])
        return op_type, has_two and not node.kwargs
    return op_type, True


def _setting(network: fx.GraphModule, node: fx.Node, op_type: str, name: str) -> Any:
    """See `quark.decide.view.Node.setting`."""

    def argument(index: int, key: str, missing: Any = None) -> Any:
        return node.args[index] if len(node.args) > index else node.kwargs.get(key, missing)

    if name == "group" and op_type in ("Conv", "ConvTranspose"):
        module = module_of(network, node)
        arguments = module.operation.arguments if isinstance(module, ConvBatchNorm) else tuple(node.args[3:])
        return int(arguments[3]) if len(arguments) > 3 else 1  # type: ignore[arg-type]
    if op_type == "Gemm" and name in ("transA", "transB"):
        return None if name == "transA" else int(node.target is not input_first_linear)  # the data has any rank
    if op_type == "HardSigmoid":
        return {"alpha": 1 / 6, "beta": 0.5}.get(name, MISSING)
    if op_type == "Clip" and name == "bounds":
        return _bounds(node, argument)
    if op_type in ("Concat", "Softmax", "Split") and name == "axis":
        is_unknown = op_type == "Split" or node.target is aten.stack.default
        return None if is_unknown else int(argument(1, "dim", -1 if op_type == "Softmax" else 0))
    if op_type == "Transpose" and name == "perm":
        return _permutation(node, argument)
    if op_type.startswith("Reduce") and name == "axes":
        axes = argument(1, "dim")
        return None if axes is None or axes == [] else list(axes) if isinstance(axes, (list, tuple)) else [axes]
    if op_type == "Slice" and name == "axes":
        return [int(argument(1, "dim", 0))]
    if op_type == "Resize" and name == "mode":
        return "nearest" if "nearest" in str(node.target) else "linear"
    if op_type == "Pad":
        return _padding(node, argument, name)
    return MISSING


def _bounds(node: fx.Node, argument: Any) -> tuple[float, float] | None:
    if node.target is aten.relu6.default:
        return 0.0, 6.0
    is_hardtanh = node.target is aten.hardtanh.default
    low = argument(1, "min_val" if is_hardtanh else "min", -1.0 if is_hardtanh else None)
    high = argument(2, "max_val" if is_hardtanh else "max", 1.0 if is_hardtanh else None)
    if isinstance(low, fx.Node) or isinstance(high, fx.Node):
        return None
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)


def _permutation(node: fx.Node, argument: Any) -> list[int] | None:
    order = list(range(rank_of(node.all_input_nodes[0]) or 0))
    if node.target is aten.permute.default:
        return [int(axis) % len(order) for axis in argument(1, "dims")] if order else None
    if node.target not in (aten.transpose.int, aten.t.default):
        return None
    if len(order) > 1:
        first, second = (0, 1) if node.target is aten.t.default else (int(arg) for arg in node.args[1:3])  # type: ignore[arg-type]
        order[first], order[second] = order[second], order[first]
    return order


def _padding(node: fx.Node, argument: Any, name: str) -> Any:
    is_plain = node.target is aten.pad.default
    if name == "mode":
        return argument(2, "mode", "constant") if is_plain else "constant"
    if name == "fill":
        fill = argument(3 if is_plain else 2, "value", 0)
        return float(fill or 0)
    rank, pads = rank_of(node.all_input_nodes[0]), argument(1, "pad")
    if name != "pads" or rank is None or not isinstance(pads, (list, tuple)):
        return None if name == "pads" else MISSING
    pairs = [pads[i : i + 2] for i in range(0, len(pads), 2)]  # starting from the last axis
    return tuple((rank - 1 - i, *pair) for i, pair in enumerate(pairs))


@dataclass(frozen=True, eq=False)
class ParameterConstant:
    """A parameter or buffer, as inference uses it: of a layer with a batch norm, the folded one."""

    network: fx.GraphModule
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        parameter = parameter_of(self.network, self.name)
        return () if parameter is None else tuple(parameter.shape)

    @property
    def type_name(self) -> str | None:
        parameter = parameter_of(self.network, self.name)
        return None if parameter is None else str(parameter.dtype).removeprefix("torch.")

    def array(self) -> Array:
        tensor = parameter_of(self.network, self.name)
        if tensor is None:
            raise ModelError(f"parameter '{self.name}' is not in the network")
        return tensor.detach().float().cpu().numpy()

    def extremes(self, axis: int | None = None, group_size: int | None = None) -> tuple[Array, Array]:
        return ArrayConstant(self.array()).extremes(axis, group_size)

    def is_finite(self) -> bool:
        return bool(np.isfinite(self.array()).all())


def parameter_of(network: fx.GraphModule, name: str) -> torch.Tensor | None:
    """The tensor of that name; of a layer with a batch norm, the folded one. None if there is none."""
    path, _, last = name.rpartition(".")
    try:
        owner = network.get_submodule(path)
    except AttributeError:
        return None
    if isinstance(owner, ConvBatchNorm):
        return owner.folded_weight() if last == "weight" else owner.folded_bias()
    value = operator.attrgetter(last)(owner) if hasattr(owner, last) else None
    return value if isinstance(value, torch.Tensor) else None

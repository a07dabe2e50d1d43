"""Replace standard operators by what AMD's NPU computes for them, so that the quantized model predicts its results.

`SUBSTITUTIONS` lists the substitutions in their order. They change values a little, on purpose. They come after
calibration, because ranges are those of the float network, and before scales are chosen. Names of nodes and of tensors
that others read stay, so earlier decisions still apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import ml_dtypes
import numpy as np
import onnx_ir as ir

from quark.account import Rewrite
from quark.errors import unknown_name
from quark.npu import (
    EXPONENTIAL,
    HARD_SIGMOID_ALPHA,
    HARD_SIGMOID_BETA,
    HARD_SIGMOID_FACTOR,
    average_pool_factor,
    clip_bound,
    is_npu_hard_sigmoid,
    leaky_relu_alpha,
    mean_factor,
)
from quark.onnx.graph import (
    add_initializer,
    add_node,
    attribute,
    become,
    constant,
    dimensions,
    fresh_name,
    input_value,
    is_float,
    nodes,
    set_constant,
)
from quark.text import get_logger

_log = get_logger("quark.onnx.postprocess.simulation.simulate_dpu_screen")  # the name by which scripts filter messages


@dataclass(frozen=True)
class SimulateOptions:
    """Names of the substitutions to carry out; empty for none."""

    substitutions: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Substitution:
    """A change of operators from what the standard computes to what the NPU does. `apply` changes one node of these
    types in place, and returns whether there was something to change. The name is that function's."""

    apply: Callable[[ir.Model, ir.Node], bool]
    op_types: tuple[str, ...]
    is_default: bool = True

    @property
    def name(self) -> str:
        return self.apply.__name__


def simulate(model: ir.Model, options: SimulateOptions, excluded: Collection[str] = ()) -> tuple[Rewrite, ...]:
    """Carry out the substitutions in place, in the main graph; return those that changed something, in their order.

    `excluded` names the nodes that stay in float, which the NPU does not compute.
    """
    known = {substitution.name for substitution in SUBSTITUTIONS}
    for name in sorted(options.substitutions - known):
        raise unknown_name("substitution", name, sorted(known))
    excluded, counts = frozenset(excluded), {}
    for substitution in SUBSTITUTIONS:
        if substitution.name in options.substitutions:
            counts[substitution.name] = sum(
                substitution.apply(model, node)
                for node in nodes(model)
                if node.op_type in substitution.op_types
                and node.domain in ("", "ai.onnx")
                and node.name not in excluded
            )
    return tuple(Rewrite(name, count) for name, count in counts.items() if count)


def leaky_relu(model: ir.Model, node: ir.Node) -> bool:
    """Give LeakyRelu the slope that the NPU uses: a multiple of 1 / 256.

    alpha   becomes   round(256 * alpha) / 256
    """
    alpha = float(attribute(node, "alpha", 0.01))
    rounded = leaky_relu_alpha(alpha)
    if rounded == alpha:
        return False
    node.attributes["alpha"] = ir.AttrFloat32("alpha", rounded)
    return True


def sigmoid_to_hard_sigmoid(model: ir.Model, node: ir.Node) -> bool:
    """Replace Sigmoid by the piecewise linear function that the NPU computes for it.

        1 / (1 + exp(-x))   becomes   max(0, min(1, x / 6 + 1 / 2))

    which is off by up to 0.07. Not an approximation of choice: it is what the hardware computes.
    """
    become(node, "HardSigmoid", [input_value(node, 0)], {"alpha": HARD_SIGMOID_ALPHA, "beta": HARD_SIGMOID_BETA})
    return True


def hard_sigmoid(model: ir.Model, node: ir.Node) -> bool:
    """Multiply HardSigmoid(alpha 1/6, beta 1/2) by the error of the NPU's slope: 2731 / 2^14 instead of 1 / 6."""
    if not is_npu_hard_sigmoid(float(attribute(node, "alpha", 0.2)), float(attribute(node, "beta", 0.5))):
        return False
    return _scale_output(model, node, HARD_SIGMOID_FACTOR)


def average_pool(model: ir.Model, node: ir.Node) -> bool:
    """Multiply the mean of a pooling window by the error of the NPU's division; see `quark.npu.factors`.

    Applies to square windows in two dimensions; for GlobalAveragePool, the size of the image has to be known.
    """
    side = square_side(node)
    return side is not None and _scale_output(model, node, average_pool_factor(side, side))


def square_side(node: ir.Node) -> int | None:
    """The side of the pooling window, if it is a square and known."""
    if node.op_type == "AveragePool":
        window: tuple[int | None, ...] = tuple(attribute(node, "kernel_shape", ()))
    else:
        window = (dimensions(input_value(node, 0)) or ())[2:]
    is_square = len(window) == 2 and window[0] == window[1]
    return window[0] if is_square and window[0] else None


def reduce_mean(model: ir.Model, node: ir.Node) -> bool:
    """Multiply the mean along axes by the error of the NPU's division; see `quark.npu.factors`.

    Applies if the axes are given (an attribute before opset 18, an input since) and their sizes are known.
    """
    axes = attribute(node, "axes")
    if axes is None:
        array = constant(input_value(node, 1))
        axes = () if array is None else [int(axis) for axis in array.reshape(-1)]
    dims = dimensions(input_value(node, 0)) or ()
    if not axes or any(not -len(dims) <= axis < len(dims) for axis in axes):
        return False
    sizes = [dims[axis] for axis in axes]
    known = [size for size in sizes if size is not None and size > 0]
    return len(known) == len(sizes) and _scale_output(model, node, mean_factor(math.prod(known)))


def clip(model: ir.Model, node: ir.Node) -> bool:
    """Round the bounds of Clip to the integers from -128 to 127 that the NPU has for them; a missing bound becomes the
    outermost of these.

    Applies to constant bounds. Off by default: it turns Clip(0, 0.5) into Clip(0, 0).
    """
    value = input_value(node, 0)
    if value is None or not is_float(value):
        return False
    arrays = {index: constant(input_value(node, index)) for index in (1, 2)}
    for index, array in arrays.items():
        is_number = array is not None and array.size == 1 and not np.isnan(array).any()
        if input_value(node, index) is not None and not is_number:
            return False
    dtype = np.float32 if value.dtype is None else value.dtype.numpy()
    has_changed = False
    for (index, array), outermost in zip(arrays.items(), (-128.0, 127.0), strict=True):
        before = None if array is None else float(array.reshape(()))
        after = outermost if before is None else clip_bound(before)
        if before != after:
            set_constant(model, node, index, np.array(after).astype(dtype), f"{node.name}_bound")
            has_changed = True
    if not has_changed:
        return False
    bounds = [constant(input_value(node, index)) for index in (1, 2)]
    _log.info("Clip node '%s' is converted to DPU version, min is %s, max is %s.", node.name, *bounds)
    return True


def bounded_clip_to_relu(model: ir.Model, node: ir.Node) -> bool:
    """Turn Clip(x, 0, top) into Relu(x), for compilers that have no Clip.

    The quantizer behind it saturates near `top`, since its range was measured with the Clip; values between the two
    pass. Applies to a lower bound of zero. Off by default.
    """
    value, lowest = input_value(node, 0), constant(input_value(node, 1))
    if not is_float(value) or lowest is None or lowest.size != 1 or lowest.any():
        return False
    become(node, "Relu", [value])
    return True


def softmax(model: ir.Model, node: ir.Node) -> bool:
    """Compute Softmax with the NPU's exponential, in steps that are rounded to bfloat16.

        exp(x)   becomes   2^k * p(x - k ln 2)   with   k = floor(x / ln 2)   and a polynomial p of degree 3

    The largest input is not subtracted first, so inputs beyond 88 overflow. Off by default: the NPU's compilers keep
    Softmax exact unless they are told otherwise. The node becomes the first step, which reads what a plan says, and the
    last step computes the tensor that readers and graph outputs know.
    """
    source = input_value(node, 0)
    if source is None or source.dtype != ir.DataType.FLOAT:
        return False
    step, last, first = f"{node.name}_npu", node, node.outputs[0]
    axes = np.array([int(attribute(node, "axis", -1))], np.int64)

    def add(op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        nonlocal last
        last = add_node(model, op_type, inputs, after=last, name=step, attributes=attributes)
        return last.outputs[0]

    def narrowed(value: ir.Value) -> ir.Value:
        narrow = add("Cast", value, to=int(ir.DataType.BFLOAT16))
        narrow.type = ir.TensorType(ir.DataType.BFLOAT16)
        return narrow

    def widened(narrow: ir.Value) -> ir.Value:
        wide = add("Cast", narrow, to=int(ir.DataType.FLOAT))
        wide.type = ir.TensorType(ir.DataType.FLOAT)
        return wide

    def rounded(value: ir.Value) -> ir.Value:
        return widened(narrowed(value))

    def number(value: float) -> ir.Value:
        return add_initializer(model, f"{step}_constant", np.array(value, ml_dtypes.bfloat16).astype(np.float32))

    become(node, "Cast", [source], {"to": int(ir.DataType.BFLOAT16)})
    x = widened(first)
    second = last
    power = add("Floor", rounded(add("Mul", x, number(1 / math.log(2)))))
    rest = rounded(add("Sub", x, rounded(add("Mul", power, number(math.log(2))))))
    value = number(EXPONENTIAL[0])
    for coefficient in EXPONENTIAL[1:]:
        value = rounded(add("Add", add("Mul", rest, value), number(coefficient)))
    exponential = rounded(add("Mul", rounded(add("Pow", number(2.0), power)), value))
    total = rounded(add("ReduceSum", exponential, add_initializer(model, f"{step}_axis", axes), keepdims=1))
    result = rounded(add("Div", exponential, total))
    result.shape = first.shape
    first.replace_all_uses_with(result, replace_graph_outputs=True)
    second.replace_input_with(0, first)
    name, first.name = first.name, fresh_name(model, f"{node.name}_npu_narrow")
    result.name, first.type = name, ir.TensorType(ir.DataType.BFLOAT16)
    return True


def _scale_output(model: ir.Model, node: ir.Node, factor: float) -> bool:
    """Multiply the output of a node by a constant; False if that is 1.

    The Mul gets the name that readers and graph outputs know, and the node's own output a new one.
    """
    if factor == 1.0:
        return False
    raw = node.outputs[0]
    dtype = np.float32 if raw.dtype is None else raw.dtype.numpy()
    constant = add_initializer(model, f"{node.name}_npu_factor", np.array(factor).astype(dtype))
    mul = add_node(model, "Mul", [raw, constant], after=node, name=f"{node.name}_npu_mul")
    scaled = mul.outputs[0]
    scaled.type, scaled.shape = raw.type, raw.shape
    raw.replace_all_uses_with(scaled, replace_graph_outputs=True)
    mul.replace_input_with(0, raw)
    name, raw.name = raw.name, fresh_name(model, f"{node.name}_npu_raw")
    scaled.name = name
    return True


SUBSTITUTIONS: tuple[Substitution, ...] = (
    Substitution(leaky_relu, ("LeakyRelu",)),
    Substitution(sigmoid_to_hard_sigmoid, ("Sigmoid",)),  # before the one that multiplies a HardSigmoid
    Substitution(hard_sigmoid, ("HardSigmoid",)),
    Substitution(average_pool, ("AveragePool", "GlobalAveragePool")),
    Substitution(reduce_mean, ("ReduceMean",)),
    Substitution(clip, ("Clip",), is_default=False),
    Substitution(bounded_clip_to_relu, ("Clip",), is_default=False),
    Substitution(softmax, ("Softmax",), is_default=False),
)
DEFAULT_SUBSTITUTIONS = frozenset(substitution.name for substitution in SUBSTITUTIONS if substitution.is_default)

# The extra options that turn one substitution on or off.
SUBSTITUTION_OF_OPTION: Mapping[str, str] = MappingProxyType(
    {
        "ConvertLeakyReluToDPUVersion": "leaky_relu",
        "ConvertSigmoidToHardSigmoid": "sigmoid_to_hard_sigmoid",
        "ConvertHardSigmoidToDPUVersion": "hard_sigmoid",
        "ConvertAvgPoolToDPUVersion": "average_pool",
        "ConvertReduceMeanToDPUVersion": "reduce_mean",
        "ConvertClipToDPUVersion": "clip",
        "ConvertClipToRelu": "bounded_clip_to_relu",
        "ConvertSoftmaxToDPUVersion": "softmax",
    }
)

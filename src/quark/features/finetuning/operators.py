"""The operators of ONNX that training can compute with torch, and its gradients with them.

Each takes its inputs, None if one is left out, and its attributes, and computes what ONNX Runtime does, except for
rounding. Inputs are tensors; integers that are constants, such as axes, are numpy arrays.

Padding of convolutions and poolings is done by hand unless it is the same at both ends, since torch knows no other. A
pooling that rounds its size up reads beyond the padding, where there is nothing: no average counts it. A window that
would begin there is left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from quark.features.finetuning.problem import Array
from quark.features.finetuning.quantizers import tensor_of

Inputs = Sequence[Any]
Attributes = Mapping[str, Any]
Operator = Callable[[Inputs, Attributes], torch.Tensor]


def _of_one(function: Callable[[torch.Tensor], torch.Tensor]) -> Operator:
    return lambda inputs, attributes: function(inputs[0])


def _of_two(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Operator:
    return lambda inputs, attributes: function(inputs[0], inputs[1])


def _of_any(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Operator:
    return lambda inputs, attributes: functools.reduce(function, inputs)


def _divided(dividend: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    is_float = dividend.is_floating_point() or divisor.is_floating_point()
    return torch.div(dividend, divisor, rounding_mode=None if is_float else "trunc")


OPERATORS: dict[str, Operator] = {
    "Identity": _of_one(lambda x: x),
    "Relu": _of_one(torch.relu),
    "Sigmoid": _of_one(torch.sigmoid),
    "Tanh": _of_one(torch.tanh),
    "Erf": _of_one(torch.erf),
    "Sqrt": _of_one(torch.sqrt),
    "Exp": _of_one(torch.exp),
    "Neg": _of_one(torch.neg),
    "HardSwish": _of_one(lambda x: x * (x / 6 + 0.5).clamp(0, 1)),
    "GlobalAveragePool": _of_one(lambda x: x.mean(tuple(range(2, x.dim())), keepdim=True)),
    "Add": _of_two(torch.add),
    "Sub": _of_two(torch.sub),
    "Mul": _of_two(torch.mul),
    "Div": _of_two(_divided),
    "Pow": _of_two(torch.pow),
    "PRelu": _of_two(lambda x, slope: torch.where(x < 0, x * slope, x)),
    "MatMul": _of_two(torch.matmul),
    "Min": _of_any(torch.minimum),
    "Max": _of_any(torch.maximum),
    "LeakyRelu": lambda inputs, attributes: functional.leaky_relu(inputs[0], float(attributes.get("alpha", 0.01))),
    "Gelu": lambda inputs, attributes: functional.gelu(
        inputs[0], approximate=str(attributes.get("approximate", "none"))
    ),
    "Softmax": lambda inputs, attributes: torch.softmax(inputs[0], int(attributes.get("axis", -1))),
    "Concat": lambda inputs, attributes: torch.cat(tuple(inputs), int(attributes["axis"])),
}


def operand(values: Array, device: str) -> Any:
    """A constant as operators take it: a tensor, or a line of integers if it says what is computed."""
    if values.dtype.kind != "f":
        return values.reshape(-1)
    return tensor_of(values, device)


def _operator(name: str) -> Callable[[Operator], Operator]:
    """Put a function into OPERATORS."""

    def register(function: Operator) -> Operator:
        OPERATORS[name] = function
        return function

    return register


@_operator("Clip")
def _clip(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x, lowest, highest = (*inputs, None, None)[:3]
    if lowest is not None:
        x = torch.maximum(x, lowest)
    return x if highest is None else torch.minimum(x, highest)


@_operator("HardSigmoid")
def _hard_sigmoid(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    alpha, beta = float(attributes.get("alpha", 0.2)), float(attributes.get("beta", 0.5))
    return (inputs[0] * alpha + beta).clamp(0, 1)  # type: ignore[no-any-return]


@_operator("LayerNormalization")
def _layer_normalization(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x, scale, bias = (*inputs, None)[:3]
    first = int(attributes.get("axis", -1)) % x.dim()
    normal = _normalized(x, tuple(range(first, x.dim())), attributes)
    return normal * scale if bias is None else normal * scale + bias  # type: ignore[no-any-return]


@_operator("InstanceNormalization")
def _instance_normalization(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x, scale, bias = inputs
    by_channel = (-1, *[1] * (x.dim() - 2))
    normal = _normalized(x, tuple(range(2, x.dim())), attributes)
    return normal * scale.reshape(by_channel) + bias.reshape(by_channel)  # type: ignore[no-any-return]


def _normalized(x: torch.Tensor, axes: tuple[int, ...], attributes: Attributes) -> torch.Tensor:
    centred = x - x.mean(axes, keepdim=True)
    variance = centred.square().mean(axes, keepdim=True)
    return centred / torch.sqrt(variance + float(attributes.get("epsilon", 1e-5)))


@_operator("BatchNormalization")
def _batch_normalization(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x, *statistics = inputs
    scale, bias, mean, variance = (statistic.reshape(-1, *[1] * (x.dim() - 2)) for statistic in statistics)
    factor = scale / torch.sqrt(variance + float(attributes.get("epsilon", 1e-5)))
    return (x - mean) * factor + bias  # type: ignore[no-any-return]


@_operator("Gemm")
def _gemm(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    a, b, c = (*inputs, None)[:3]
    a = a.t() if attributes.get("transA", 0) else a
    b = b.t() if attributes.get("transB", 0) else b
    product = (a @ b) * float(attributes.get("alpha", 1.0))
    return product if c is None else product + c * float(attributes.get("beta", 1.0))  # type: ignore[no-any-return]


@_operator("ReduceMean")
def _reduce_mean(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x: torch.Tensor = inputs[0]
    given = inputs[1] if len(inputs) > 1 else attributes.get("axes")
    axes = () if given is None else tuple(int(axis) for axis in given)
    if not axes and attributes.get("noop_with_empty_axes", 0):
        return x
    return x.mean(axes or tuple(range(x.dim())), keepdim=bool(attributes.get("keepdims", 1)))


@_operator("Reshape")
def _reshape(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x: torch.Tensor = inputs[0]
    shape = [int(size) for size in inputs[1]]
    if not attributes.get("allowzero", 0):
        shape = [x.shape[axis] if size == 0 else size for axis, size in enumerate(shape)]
    return x.reshape(shape)


@_operator("Flatten")
def _flatten(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x: torch.Tensor = inputs[0]
    axis = int(attributes.get("axis", 1))
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(x.shape[:axis].numel(), -1)


@_operator("Transpose")
def _transpose(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x: torch.Tensor = inputs[0]
    return x.permute(tuple(attributes.get("perm") or reversed(range(x.dim()))))


@_operator("Pad")
def _pad(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x, pads, value, axes = (*inputs, None, None)[:4]
    names = range(x.dim()) if axes is None else [int(axis) % x.dim() for axis in axes]
    ends = {axis: (int(pads[i]), int(pads[i + len(names)])) for i, axis in enumerate(names)}
    flat = [end for axis in reversed(range(x.dim())) for end in ends.get(axis, (0, 0))]
    return torch.nn.functional.pad(x, flat, value=0.0 if value is None else float(value))


@_operator("Squeeze")
def _squeeze(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x: torch.Tensor = inputs[0]
    return x.squeeze() if len(inputs) < 2 else x.squeeze(tuple(int(axis) for axis in inputs[1]))


@_operator("Unsqueeze")
def _unsqueeze(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x: torch.Tensor = inputs[0]
    rank = x.dim() + len(inputs[1])
    for axis in sorted(int(axis) % rank for axis in inputs[1]):
        x = x.unsqueeze(axis)
    return x


_CONVOLUTIONS: Any = (functional.conv1d, functional.conv2d, functional.conv3d)
_TRANSPOSED: Any = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
_MAXIMA: Any = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_MEANS: Any = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)


@dataclass(frozen=True)
class _Windows:
    """Along each axis of space."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]  # all that begin, then all that end
    auto_pad: str
    has_ceil: bool

    @staticmethod
    def of(attributes: Attributes, kernel: Sequence[int]) -> _Windows:
        rank = len(kernel)
        strides, dilations, pads = (
            tuple(int(number) for number in attributes.get(name) or default)
            for name, default in (("strides", [1] * rank), ("dilations", [1] * rank), ("pads", [0] * 2 * rank))
        )
        auto_pad = str(attributes.get("auto_pad") or "NOTSET")
        has_ceil = bool(attributes.get("ceil_mode", 0))
        return _Windows(tuple(int(size) for size in kernel), strides, dilations, pads, auto_pad, has_ceil)

    @property
    def reach(self) -> tuple[int, ...]:
        return tuple(dilation * (size - 1) + 1 for size, dilation in zip(self.kernel, self.dilations, strict=True))

    def padding(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Before and behind, for an input of these sizes."""
        rank = len(self.kernel)
        if self.auto_pad == "VALID":
            return [(0, 0)] * rank
        if self.auto_pad == "NOTSET":
            return list(zip(self.pads[:rank], self.pads[rank:], strict=True))
        totals = [
            max(0, (math.ceil(size / stride) - 1) * stride + reach - size)
            for size, stride, reach in zip(sizes, self.strides, self.reach, strict=True)
        ]
        return [self.halves(total) for total in totals]

    def halves(self, total: int) -> tuple[int, int]:
        small, large = total // 2, total - total // 2
        return (small, large) if self.auto_pad == "SAME_UPPER" else (large, small)

    def beyond(self, sizes: Sequence[int], padding: Sequence[tuple[int, int]]) -> list[int]:
        """The amount that a size rounded up reads behind the padding; negative if the last numbers are not read."""
        ends = []
        for size, (begin, end), reach, stride in zip(sizes, padding, self.reach, self.strides, strict=True):
            steps = (size + begin + end - reach) / stride
            count = (math.ceil(steps) if self.has_ceil else math.floor(steps)) + 1
            if self.has_ceil and (count - 1) * stride >= size + begin:
                count -= 1
            ends.append((count - 1) * stride + reach - (size + begin + end))
        return ends


@_operator("Conv")
def _convolution(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x, weight, bias = (*inputs, None)[:3]
    rank = weight.dim() - 2
    windows = _Windows.of(attributes, weight.shape[2:])
    padding = windows.padding(x.shape[2:])
    own = tuple(begin for begin, _ in padding)
    if any(begin != end for begin, end in padding):
        x, own = _padded(x, padding), (0,) * rank
    groups = int(attributes.get("group", 1))
    result: torch.Tensor = _CONVOLUTIONS[rank - 1](x, weight, bias, windows.strides, own, windows.dilations, groups)
    return result


@_operator("ConvTranspose")
def _transposed_convolution(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x, weight, bias = (*inputs, None)[:3]
    rank = weight.dim() - 2
    windows = _Windows.of(attributes, weight.shape[2:])
    more = [int(size) for size in attributes.get("output_padding") or [0] * rank]
    groups = int(attributes.get("group", 1))
    full = _TRANSPOSED[rank - 1](x, weight, None, windows.strides, 0, 0, groups, windows.dilations)
    if windows.auto_pad.startswith("SAME"):
        wanted = [size * stride for size, stride in zip(x.shape[2:], windows.strides, strict=True)]
        totals = [size + extra - want for size, extra, want in zip(full.shape[2:], more, wanted, strict=True)]
        padding = [windows.halves(max(0, total)) for total in totals]
    else:
        padding = windows.padding(x.shape[2:])
    cropped = _padded(full, [(-begin, extra - end) for (begin, end), extra in zip(padding, more, strict=True)])
    return cropped if bias is None else cropped + bias.reshape(-1, *[1] * rank)


@_operator("MaxPool")
def _max_pool(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x = inputs[0]
    windows = _Windows.of(attributes, attributes["kernel_shape"])
    padding = windows.padding(x.shape[2:])
    beyond = windows.beyond(x.shape[2:], padding)
    spread = [(begin, end + more) for (begin, end), more in zip(padding, beyond, strict=True)]
    pool = _MAXIMA[len(windows.kernel) - 1]
    result: torch.Tensor = pool(_padded(x, spread, -math.inf), windows.kernel, windows.strides, 0, windows.dilations)
    return result


@_operator("AveragePool")
def _average_pool(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x = inputs[0]
    windows = _Windows.of(attributes, attributes["kernel_shape"])
    padding = windows.padding(x.shape[2:])
    beyond = [(0, more) for more in windows.beyond(x.shape[2:], padding)]
    ones = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
    counted = _padded(ones, padding, float(bool(attributes.get("count_include_pad", 0))))
    sums, counts = (_sums(_padded(padded, beyond), windows) for padded in (_padded(x, padding), counted))
    return sums / counts.clamp(min=1)


def _sums(x: torch.Tensor, windows: _Windows) -> torch.Tensor:
    rank = len(windows.kernel)
    if all(dilation == 1 for dilation in windows.dilations):
        means: torch.Tensor = _MEANS[rank - 1](x, windows.kernel, windows.strides)
        return means * math.prod(windows.kernel)
    flat = x.reshape(-1, 1, *x.shape[2:])
    ones = torch.ones((1, 1, *windows.kernel), dtype=x.dtype, device=x.device)
    sums = _CONVOLUTIONS[rank - 1](flat, ones, None, windows.strides, 0, windows.dilations)
    return sums.reshape(*x.shape[:2], *sums.shape[2:])  # type: ignore[no-any-return]


def _padded(x: torch.Tensor, padding: Sequence[tuple[int, int]], value: float = 0.0) -> torch.Tensor:
    """Along the last axes; cut where a number is negative."""
    if not any(begin or end for begin, end in padding):
        return x
    return functional.pad(x, [side for pair in reversed(padding) for side in pair], value=value)

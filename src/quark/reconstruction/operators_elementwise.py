"""Operators of ONNX that work number by number, and the normalizations, in torch.

Each takes its inputs, None where one is left out, and its attributes. Inputs are tensors; integers that are constants,
such as axes, are numpy arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Inputs = Sequence[Any]
Attributes = Mapping[str, Any]
Operator = Callable[[Inputs, Attributes], torch.Tensor]


def _clip(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x, lowest, highest = (*inputs, None, None)[:3]
    if lowest is not None:
        x = torch.maximum(x, lowest)
    return x if highest is None else torch.minimum(x, highest)


def _leaky_relu(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    return torch.nn.functional.leaky_relu(inputs[0], float(attributes.get("alpha", 0.01)))


def _p_relu(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x, slope = inputs
    return torch.where(x < 0, x * slope, x)


def _hard_sigmoid(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    alpha, beta = float(attributes.get("alpha", 0.2)), float(attributes.get("beta", 0.5))
    return (inputs[0] * alpha + beta).clamp(0, 1)  # type: ignore[no-any-return]


def _hard_swish(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    return inputs[0] * (inputs[0] / 6 + 0.5).clamp(0, 1)  # type: ignore[no-any-return]


def _gelu(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    return torch.nn.functional.gelu(inputs[0], approximate=str(attributes.get("approximate", "none")))


def _softmax(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    return torch.softmax(inputs[0], int(attributes.get("axis", -1)))


def _layer_normalization(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x, scale, bias = (*inputs, None)[:3]
    first = int(attributes.get("axis", -1)) % x.dim()
    normal = _normalized(x, tuple(range(first, x.dim())), attributes)
    return normal * scale if bias is None else normal * scale + bias  # type: ignore[no-any-return]


def _instance_normalization(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x, scale, bias = inputs
    by_channel = (-1, *[1] * (x.dim() - 2))
    normal = _normalized(x, tuple(range(2, x.dim())), attributes)
    return normal * scale.reshape(by_channel) + bias.reshape(by_channel)  # type: ignore[no-any-return]


def _normalized(x: torch.Tensor, axes: tuple[int, ...], attributes: Attributes) -> torch.Tensor:
    centred = x - x.mean(axes, keepdim=True)
    variance = centred.square().mean(axes, keepdim=True)
    return centred / torch.sqrt(variance + float(attributes.get("epsilon", 1e-5)))


def _batch_normalization(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x, *statistics = inputs
    scale, bias, mean, variance = (each.reshape(-1, *[1] * (x.dim() - 2)) for each in statistics)
    factor = scale / torch.sqrt(variance + float(attributes.get("epsilon", 1e-5)))
    return (x - mean) * factor + bias  # type: ignore[no-any-return]


def _of_one(function: Callable[[torch.Tensor], torch.Tensor]) -> Operator:
    return lambda inputs, attributes: function(inputs[0])


def _of_two(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Operator:
    return lambda inputs, attributes: function(inputs[0], inputs[1])


def _of_any(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Operator:
    return lambda inputs, attributes: functools.reduce(function, inputs)


ELEMENTWISE: Mapping[str, Operator] = {
    "Identity": _of_one(lambda x: x),
    "Relu": _of_one(torch.relu),
    "Sigmoid": _of_one(torch.sigmoid),
    "Tanh": _of_one(torch.tanh),
    "Erf": _of_one(torch.erf),
    "Sqrt": _of_one(torch.sqrt),
    "Exp": _of_one(torch.exp),
    "Neg": _of_one(torch.neg),
    "Clip": _clip,
    "LeakyRelu": _leaky_relu,
    "PRelu": _p_relu,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "Gelu": _gelu,
    "Add": _of_two(torch.add),
    "Sub": _of_two(torch.sub),
    "Mul": _of_two(torch.mul),
    "Div": _of_two(torch.div),
    "Pow": _of_two(torch.pow),
    "Min": _of_any(torch.minimum),
    "Max": _of_any(torch.maximum),
}
NORMALIZATIONS: Mapping[str, Operator] = {
    "Softmax": _softmax,
    "LayerNormalization": _layer_normalization,
    "InstanceNormalization": _instance_normalization,
    "BatchNormalization": _batch_normalization,
}

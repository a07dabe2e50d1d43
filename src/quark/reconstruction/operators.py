"""The operators of ONNX that training can compute with torch, and its gradients with them.

    operators_elementwise.py    number by number, and normalizations
    operators_windows.py        convolutions and poolings
    here                        matrix products, means, and those that only move numbers

Each equals what ONNX Runtime computes, but for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from quark.reconstruction.operators_elementwise import ELEMENTWISE, NORMALIZATIONS, Attributes, Inputs, Operator
from quark.reconstruction.operators_windows import WINDOWS
from quark.reconstruction.problem import Array


def operand(values: Array, device: str) -> Any:
    """A constant as operators take it: a tensor, or a line of integers where it says what is computed."""
    if values.dtype.kind != "f":
        return values.reshape(-1)
    return torch.from_numpy(np.array(values, np.float32)).to(device)


def _gemm(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    a, b, c = (*inputs, None)[:3]
    a = a.t() if attributes.get("transA", 0) else a
    b = b.t() if attributes.get("transB", 0) else b
    product = (a @ b) * float(attributes.get("alpha", 1.0))
    return product if c is None else product + c * float(attributes.get("beta", 1.0))  # type: ignore[no-any-return]


def _matmul(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    return torch.matmul(inputs[0], inputs[1])


def _global_average_pool(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x: torch.Tensor = inputs[0]
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


def _reduce_mean(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x: torch.Tensor = inputs[0]
    given = inputs[1] if len(inputs) > 1 else attributes.get("axes")
    axes = () if given is None else tuple(int(each) for each in given)
    if not axes and attributes.get("noop_with_empty_axes", 0):
        return x
    return x.mean(axes or tuple(range(x.dim())), keepdim=bool(attributes.get("keepdims", 1)))


def _reshape(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x: torch.Tensor = inputs[0]
    shape = [int(each) for each in inputs[1]]
    if not attributes.get("allowzero", 0):
        shape = [x.shape[axis] if size == 0 else size for axis, size in enumerate(shape)]
    return x.reshape(shape)


def _flatten(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x: torch.Tensor = inputs[0]
    axis = int(attributes.get("axis", 1))
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(x.shape[:axis].numel(), -1)


def _transpose(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x: torch.Tensor = inputs[0]
    return x.permute(tuple(attributes.get("perm") or reversed(range(x.dim()))))


def _concat(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    return torch.cat(tuple(inputs), int(attributes["axis"]))


def _pad(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x, pads, value, axes = (*inputs, None, None)[:4]
    names = range(x.dim()) if axes is None else [int(each) % x.dim() for each in axes]
    ends = {axis: (int(pads[i]), int(pads[i + len(names)])) for i, axis in enumerate(names)}
    flat = [each for axis in reversed(range(x.dim())) for each in ends.get(axis, (0, 0))]
    return torch.nn.functional.pad(x, flat, value=0.0 if value is None else float(value))


def _squeeze(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x: torch.Tensor = inputs[0]
    return x.squeeze() if len(inputs) < 2 else x.squeeze(tuple(int(each) for each in inputs[1]))


def _unsqueeze(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x: torch.Tensor = inputs[0]
    rank = x.dim() + len(inputs[1])
    for axis in sorted(int(each) % rank for each in inputs[1]):
        x = x.unsqueeze(axis)
    return x


OPERATORS: Mapping[str, Operator] = {
    **ELEMENTWISE,
    **NORMALIZATIONS,
    **WINDOWS,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "GlobalAveragePool": _global_average_pool,
    "ReduceMean": _reduce_mean,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Concat": _concat,
    "Pad": _pad,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
}

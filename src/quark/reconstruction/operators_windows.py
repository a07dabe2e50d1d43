"""Convolutions and poolings of ONNX in torch: any padding, one- to three-dimensional.

Padding is done by hand wherever it is not the same at both ends, since torch knows no other. A pooling that rounds its
size up reads beyond the padding, where there is nothing: no average counts it. A window that would begin there is
left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from quark.reconstruction.operators_elementwise import Attributes, Inputs, Operator

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
            tuple(int(each) for each in attributes.get(name) or default)
            for name, default in (("strides", [1] * rank), ("dilations", [1] * rank), ("pads", [0] * 2 * rank))
        )
        auto_pad = str(attributes.get("auto_pad") or "NOTSET")
        has_ceil = bool(attributes.get("ceil_mode", 0))
        return _Windows(tuple(int(each) for each in kernel), strides, dilations, pads, auto_pad, has_ceil)

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
        return [self.halves(each) for each in totals]

    def halves(self, total: int) -> tuple[int, int]:
        small, large = total // 2, total - total // 2
        return (small, large) if self.auto_pad == "SAME_UPPER" else (large, small)

    def beyond(self, sizes: Sequence[int], padding: Sequence[tuple[int, int]]) -> list[int]:
        """What a size that is rounded up reads behind the padding; less than nothing where the last numbers are not
        read."""
        found = []
        for size, (begin, end), reach, stride in zip(sizes, padding, self.reach, self.strides, strict=True):
            steps = (size + begin + end - reach) / stride
            count = (math.ceil(steps) if self.has_ceil else math.floor(steps)) + 1
            if self.has_ceil and (count - 1) * stride >= size + begin:
                count -= 1
            found.append((count - 1) * stride + reach - (size + begin + end))
        return found


def _convolution(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x, weight, bias = (*inputs, None)[:3]
    rank = weight.dim() - 2
    windows = _Windows.of(attributes, weight.shape[2:])
    padding = windows.padding(x.shape[2:])
    own = tuple(begin for begin, _ in padding)
    if any(begin != end for begin, end in padding):
        x, own = _padded(x, padding), (0,) * rank
    groups = int(attributes.get("group", 1))
    found: torch.Tensor = _CONVOLUTIONS[rank - 1](x, weight, bias, windows.strides, own, windows.dilations, groups)
    return found


def _transposed_convolution(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x, weight, bias = (*inputs, None)[:3]
    rank = weight.dim() - 2
    windows = _Windows.of(attributes, weight.shape[2:])
    more = [int(each) for each in attributes.get("output_padding") or [0] * rank]
    groups = int(attributes.get("group", 1))
    full = _TRANSPOSED[rank - 1](x, weight, None, windows.strides, 0, 0, groups, windows.dilations)
    if windows.auto_pad.startswith("SAME"):
        wanted = [size * stride for size, stride in zip(x.shape[2:], windows.strides, strict=True)]
        totals = [size + extra - want for size, extra, want in zip(full.shape[2:], more, wanted, strict=True)]
        padding = [windows.halves(max(0, each)) for each in totals]
    else:
        padding = windows.padding(x.shape[2:])
    cropped = _padded(full, [(-begin, extra - end) for (begin, end), extra in zip(padding, more, strict=True)])
    return cropped if bias is None else cropped + bias.reshape(-1, *[1] * rank)


def _max_pool(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x = inputs[0]
    windows = _Windows.of(attributes, attributes["kernel_shape"])
    padding = windows.padding(x.shape[2:])
    beyond = windows.beyond(x.shape[2:], padding)
    spread = [(begin, end + more) for (begin, end), more in zip(padding, beyond, strict=True)]
    pool = _MAXIMA[len(windows.kernel) - 1]
    found: torch.Tensor = pool(_padded(x, spread, -math.inf), windows.kernel, windows.strides, 0, windows.dilations)
    return found


def _average_pool(inputs: Inputs, attributes: Attributes) -> torch.Tensor:
    x = inputs[0]
    windows = _Windows.of(attributes, attributes["kernel_shape"])
    padding = windows.padding(x.shape[2:])
    beyond = [(0, more) for more in windows.beyond(x.shape[2:], padding)]
    ones = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
    counted = _padded(ones, padding, float(bool(attributes.get("count_include_pad", 0))))
    sums, counts = (_sums(_padded(each, beyond), windows) for each in (_padded(x, padding), counted))
    return sums / counts.clamp(min=1)


def _sums(x: torch.Tensor, windows: _Windows) -> torch.Tensor:
    rank = len(windows.kernel)
    if all(each == 1 for each in windows.dilations):
        means: torch.Tensor = _MEANS[rank - 1](x, windows.kernel, windows.strides)
        return means * math.prod(windows.kernel)
    flat = x.reshape(-1, 1, *x.shape[2:])
    ones = torch.ones((1, 1, *windows.kernel), dtype=x.dtype, device=x.device)
    found = _CONVOLUTIONS[rank - 1](flat, ones, None, windows.strides, 0, windows.dilations)
    return found.reshape(*x.shape[:2], *found.shape[2:])  # type: ignore[no-any-return]


def _padded(x: torch.Tensor, padding: Sequence[tuple[int, int]], value: float = 0.0) -> torch.Tensor:
    """Along the last axes; cut where a number is negative."""
    if not any(begin or end for begin, end in padding):
        return x
    return functional.pad(x, [each for pair in reversed(padding) for each in pair], value=value)


WINDOWS: Mapping[str, Operator] = {
    "Conv": _convolution,
    "ConvTranspose": _transposed_convolution,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
}

"""What a layer multiplies its weights with, on average over everything that it computes.

The mean of a convolution's output over all positions is linear in its input, and needs of that only a few sums: for
each channel and each tap of the kernel, the sum of the inputs that the tap ever falls on.

    mean y[o] = b[o] + sum over c, k of w[o, c, k] * taps[c, k],      taps[c, k] = (sum of x[c] under tap k) / positions

Along one axis of space the inputs under tap k are those of a 0/1 matrix; along all axes, of a product of such matrices.
A tap in the padding falls on nothing. For Gemm and MatMul there is one tap: the sums over all rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.onnx.graph import attribute

Array = NDArray[Any]
MAX_ROWS = 64


@dataclass(frozen=True)
class Window:
    """How the taps of a kernel fall on the input along one axis of space."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    pad_begin: int = 0
    pad_end: int = 0
    same: str = ""  # SAME_UPPER or SAME_LOWER: padded to ceil(size / stride) positions
    is_transposed: bool = False
    output_padding: int = 0

    def places(self, size: int) -> tuple[Array, int]:
        """A matrix of taps by inputs, 1 where the tap falls on the input, and how many positions are computed."""
        begin, end = self._padding(size)
        reach = self.dilation * (self.kernel - 1) + 1
        taps = np.arange(self.kernel) * self.dilation
        if self.is_transposed:
            positions = self.stride * (size - 1) + self.output_padding + reach - begin - end
            target = np.arange(size) * self.stride + taps[:, None] - begin
            return ((target >= 0) & (target < positions)).astype(np.float32), positions
        positions = (size + begin + end - reach) // self.stride + 1
        matrix = np.zeros((self.kernel, size), np.float32)
        for tap in range(self.kernel):
            source = np.arange(max(positions, 0)) * self.stride + taps[tap] - begin
            matrix[tap, source[(source >= 0) & (source < size)]] = 1
        return matrix, positions

    def sources(self, size: int) -> Array:
        """For every position, the input that each tap falls on, [positions, kernel]; -1 where it falls on none."""
        begin, end = self._padding(size)
        reach = self.dilation * (self.kernel - 1) + 1
        taps = np.arange(self.kernel) * self.dilation
        if self.is_transposed:
            count = self.stride * (size - 1) + self.output_padding + reach - begin - end
            ahead = np.arange(max(count, 0))[:, None] + begin - taps
            found = np.where(ahead % self.stride == 0, ahead // self.stride, -1)
        else:
            count = (size + begin + end - reach) // self.stride + 1
            found = np.arange(max(count, 0))[:, None] * self.stride + taps - begin
        return np.where((found >= 0) & (found < size), found, -1)

    def _padding(self, size: int) -> tuple[int, int]:
        if not self.same:
            return self.pad_begin, self.pad_end
        reach = self.dilation * (self.kernel - 1) + 1
        if self.is_transposed:
            total = max(0, self.stride * (size - 1) + self.output_padding + reach - size * self.stride)
        else:
            total = max(0, (math.ceil(size / self.stride) - 1) * self.stride + reach - size)
        small, large = total // 2, total - total // 2
        return (small, large) if self.same == "SAME_UPPER" else (large, small)


@dataclass(frozen=True)
class Taps:
    """What to sum of an input: channels of axis 1 under windows along the axes behind it, or, without windows, the
    elements of `axis` over all others."""

    windows: tuple[Window, ...] = ()
    axis: int = -1

    def sums(self, x: Array) -> tuple[Array, int]:
        """The sums for each row of the batch, [rows, channels, *kernel], and how many outputs a row has."""
        if not self.windows:
            return _row_sums(np.moveaxis(x, self.axis, -1))
        places = [window.places(size) for window, size in zip(self.windows, x.shape[2:], strict=True)]
        positions = math.prod(count for _, count in places)
        if all((matrix == 1).all() for matrix, _ in places):
            flat = x.reshape(*x.shape[:2], -1).sum(axis=2)
            return np.broadcast_to(
                flat.reshape(*x.shape[:2], *[1] * len(places)), (*x.shape[:2], *self._kernel)
            ), positions
        return _contract(x, [matrix for matrix, _ in places]), positions

    @property
    def _kernel(self) -> tuple[int, ...]:
        return tuple(window.kernel for window in self.windows)


def _row_sums(x: Array) -> tuple[Array, int]:
    """The sums over all axes but the first and the last. A matrix of many rows, which are tokens rather than samples,
    is cut into MAX_ROWS pieces."""
    if x.ndim == 2 and len(x) > MAX_ROWS:
        whole = x[: len(x) // MAX_ROWS * MAX_ROWS]
        x = whole.reshape(MAX_ROWS, -1, x.shape[-1])
    rows = x.reshape(x.shape[0] if x.ndim > 1 else 1, -1, x.shape[-1])
    return rows.sum(axis=1), rows.shape[1]


def _contract(x: Array, matrices: Sequence[Array]) -> Array:
    """Every axis of space times its matrix, the last one first: [batch, channels, *kernel]."""
    for behind, matrix in enumerate(reversed(matrices)):
        axis = x.ndim - 1 - behind
        is_last = behind == 0
        x = x @ matrix.T if is_last else np.moveaxis(np.tensordot(x, matrix, axes=([axis], [1])), -1, axis)
    return x


def taps_of(node: ir.Node, weight: Array) -> Taps | None:
    """The taps of a layer; None where they are not known."""
    if node.op_type == "Gemm":
        return Taps(axis=0 if attribute(node, "transA", 0) else 1)
    if node.op_type == "MatMul":
        return Taps(axis=-1) if weight.ndim == 2 else None
    rank = weight.ndim - 2
    kernel = tuple(weight.shape[2:])
    pads = list(attribute(node, "pads") or [0] * 2 * rank)
    strides, dilations = (list(attribute(node, name) or [1] * rank) for name in ("strides", "dilations"))
    extra = list(attribute(node, "output_padding") or [0] * rank)
    auto_pad = str(attribute(node, "auto_pad", "NOTSET"))
    is_transposed = node.op_type == "ConvTranspose"
    if is_transposed and attribute(node, "output_shape"):
        return None
    if auto_pad not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"):
        return None
    if auto_pad != "NOTSET":
        pads = [0] * 2 * rank
    same = auto_pad if auto_pad.startswith("SAME") else ""
    return Taps(
        tuple(
            Window(kernel[i], strides[i], dilations[i], pads[i], pads[i + rank], same, is_transposed, extra[i])
            for i in range(rank)
        ),
        axis=1,
    )


def mean_products(node: ir.Node, weight: Array, taps: Array) -> Array:
    """The mean output of each sample and channel, without the bias: weights times taps, [samples, channels]."""
    if node.op_type == "MatMul":
        return np.asarray(taps @ weight)
    if node.op_type == "Gemm":
        matrix = weight.T if attribute(node, "transB", 0) else weight
        return np.asarray(taps @ matrix * float(attribute(node, "alpha", 1.0)))
    groups = int(attribute(node, "group", 1))
    inputs = np.moveaxis(taps.reshape(len(taps), groups, -1), 0, -1)  # [groups, channels and taps, samples]
    if node.op_type == "ConvTranspose":  # its weights are [inputs, outputs of a group, *kernel]
        weight = np.moveaxis(weight.reshape(groups, -1, *weight.shape[1:]), 2, 1)
        kernels = weight.reshape(groups, weight.shape[1], -1)
    else:
        kernels = weight.reshape(groups, weight.shape[0] // groups, -1)
    return np.asarray((kernels @ inputs).reshape(-1, len(taps)).T)

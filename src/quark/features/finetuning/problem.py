"""The problem to fit: rows of inputs, the float network's outputs for them, weights and bias.

    outputs[r, g, o] = sum over k of rows[r, g, k] * weights[g, o, k] + bias[g, o]

Groups are those of a convolution: an ordinary one and a matrix product have one, a depthwise one and the scale of a
normalization (with k = 1) have as many as channels. `WeightLayout` maps the tensor of the model to weights[g, o, k].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.plan import Choice

Array = NDArray[Any]


@dataclass(frozen=True)
class Part:
    """Some outputs of a layer: of all groups, or all outputs of some groups."""

    groups: slice = field(default_factory=lambda: slice(None))
    outputs: slice = field(default_factory=lambda: slice(None))

    def of(self, matrices: Any) -> Any:
        """This part of a tensor [groups, outputs, ...], contiguous."""
        return matrices[self.groups, self.outputs].contiguous()


@dataclass(frozen=True)
class WeightLayout:
    """The tensor of the model, first seen in `split` shape, then with its axes in the order of `order`, is
    weights[g, o, k] but for the last axes, which are flattened. Works on numpy arrays and torch tensors."""

    shape: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Groups, outputs of a group, weights of an output."""
        sizes = [self.split[i] for i in self.order]
        return sizes[0], sizes[1], math.prod(sizes[2:])

    def to_matrices(self, weight: Any) -> Any:
        moved = weight.reshape(self.split)
        moved = moved.transpose(self.order) if isinstance(moved, np.ndarray) else moved.permute(self.order)
        return moved.reshape(self.matrices)

    def from_matrices(self, matrices: Any) -> Any:
        moved = matrices.reshape([self.split[i] for i in self.order])
        back = [self.order.index(i) for i in range(len(self.order))]
        moved = moved.transpose(back) if isinstance(moved, np.ndarray) else moved.permute(back)
        return moved.reshape(self.shape)

    @property
    def can_narrow(self) -> bool:
        """True if the outputs of a part are a tensor of the same kind: not for the scale of a normalization."""
        return self.shape == (self.split[0] * self.split[1], *self.split[2:])

    def narrowed(self, part: Part) -> WeightLayout:
        """The layout of the weights of a part."""
        split = list(self.split)
        for axis, chosen in zip(self.order, (part.groups, part.outputs), strict=False):
            split[axis] = len(range(*chosen.indices(split[axis])))
        if tuple(split) == self.split:
            return self
        assert self.can_narrow, self
        return WeightLayout((split[0] * split[1], *split[2:]), tuple(split), self.order)


@dataclass(frozen=True)
class Bounds:
    """The bounds that Relu, Clip or Min confine outputs to: one number, or one for each output."""

    lowest: Array | float
    highest: Array | float


Activation = Bounds | Callable[[Any], Any] | None  # a function of torch tensors [rows, outputs]


@dataclass(frozen=True)
class Rows:
    """`quantized` are the inputs, [rows, groups, weights of an output], and `targets` the outputs wanted for them,
    [rows, outputs]; `float` are the inputs of the float network, if they are needed. Arrays of numpy, or tensors."""

    quantized: Any
    targets: Any
    float: Any = None

    def __len__(self) -> int:
        return len(self.quantized)


@dataclass(frozen=True, eq=False)
class Problem:
    """A layer: rows for training and held-out rows, its weight and bias as they stand, and how weight, bias and the
    output of its activation are rounded (None: not). `start` is the weight that training starts from, if that is not
    the one that stands and that has to be beaten."""

    name: str
    training: Rows
    held_out: Rows
    weight: Array
    layout: WeightLayout
    bias: Array | None
    weight_choice: Choice
    bias_choice: Choice | None = None
    activation: Activation = None
    output_choice: Choice | None = None
    can_train_bias: bool = True
    start: Array | None = None


@dataclass(frozen=True, eq=False)
class Fitted:
    """`weight` and `bias` are None if the layer was left as it stood. Errors are relative, of held-out rows."""

    weight: Array | None
    bias: Array | None
    error_before: float
    error_after: float
    iterations: int
    learning_rate: float
    remark: str = field(default="")

    @property
    def is_kept(self) -> bool:
        return self.weight is not None

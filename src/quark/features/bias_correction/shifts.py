"""What the rounding of biases shifts, and the layers behind make up for.

A bias of 8 bits with one scale for all channels is off by up to half a step, which shifts a whole channel. A layer that
reads the channel can undo that with its own bias, before that is rounded in turn:

    d = -sum over c, k of w[o, c, k] * m[c]     m: the mean shift of what the layer reads
    b' = b + d
    r = Q(b') - b'                              the shift that this layer leaves to those behind it

so that shifts do not add up along the network. The shift of a tensor follows from those before it, to first order:

    Relu, Clip          the shift before it, times the share of positions strictly within the bounds
    Add                 the sum, which is how shifts go along the identity path of a residual network
    pooling, Flatten    the same shift
    Concat              one after the other

Anything else, such as a product of two activations, ends it: what is behind counts as not shifted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.decide.view import Graph, Node, Value
from quark.formats.affine import integer_format
from quark.plan import AffineChoice, Choice, DynamicChoice

Array = NDArray[Any]
MOST_BITS = 8  # with 16 or 32 a bias is as good as exact
POOLS = ("GlobalAveragePool", "AveragePool", "MaxPool", "Identity", "Flatten", "ReduceMean")


def is_coarse(choice: Choice | None) -> bool:
    """True if a bias that is rounded so is noticeably off."""
    if choice is None or isinstance(choice, DynamicChoice):
        return False
    return not isinstance(choice, AffineChoice) or integer_format(choice.format).bits <= MOST_BITS


def bounds_of(node: Node | None) -> tuple[float, float] | None:
    """The bounds of a Relu or Clip; None for other nodes, and if they are not known."""
    if node is None or node.op_type not in ("Relu", "Clip") or not node.is_standard:
        return None
    if node.op_type == "Relu":
        return 0.0, math.inf
    bounds: tuple[float, float] | None = node.setting("bounds", (-math.inf, math.inf))
    return bounds


def pooled_activations(graph: Graph) -> list[Value]:
    """The inputs of pooling nodes that come from a Relu or Clip: no layer reads them, and their share within the bounds
    is needed."""
    pooled = [node.inputs[0] for node in graph if node.op_type in POOLS and node.inputs]
    return [value for value in pooled if value is not None and bounds_of(value.producer) is not None]


@dataclass
class Shifts:
    """The mean shift of tensors, by channel. `shares` are the shares of positions within the bounds of the Relu or Clip
    that a tensor comes from; `left` what the rounding of biases leaves, by the tensor that the bias is added to."""

    shares: Mapping[str, Array]
    left: dict[str, Array] = field(default_factory=dict)
    _known: dict[str, Array | None] = field(default_factory=dict)

    def of(self, value: Value | None) -> Array | None:
        """The shift of each channel of a tensor; None if there is none, or it is not known."""
        if value is None:
            return None
        if value.name not in self._known:
            self._known[value.name] = self._found(value)
        return self._known[value.name]

    def _found(self, value: Value) -> Array | None:
        if value.name in self.left:
            return self.left[value.name]
        node = value.producer
        rule = None if node is None or not node.is_standard else RULES.get(node.op_type)
        return None if rule is None or node is None else rule(self, node)

    def through_bounds(self, node: Node) -> Array | None:
        before, share = self.of(node.inputs[0]), self.shares.get(node.outputs[0].name)
        return None if before is None or share is None or share.shape != before.shape else before * share

    def of_sum(self, node: Node) -> Array | None:
        shifts = [shift for shift in map(self.of, node.inputs) if shift is not None]
        return None if not shifts or len({shift.shape for shift in shifts}) > 1 else np.sum(shifts, axis=0)

    def of_parts(self, node: Node) -> Array | None:
        sizes = [None if value is None else value.size(1) for value in node.inputs]
        shifts = list(map(self.of, node.inputs))
        if node.setting("axis") != 1 or None in sizes or all(shift is None for shift in shifts):
            return None
        pairs = zip(shifts, sizes, strict=True)
        return np.concatenate([np.zeros(size or 0) if shift is None else shift for shift, size in pairs])


RULES: Mapping[str, Callable[[Shifts, Node], Array | None]] = {
    "Relu": Shifts.through_bounds,
    "Clip": Shifts.through_bounds,
    "Add": Shifts.of_sum,
    "Concat": Shifts.of_parts,
    **dict.fromkeys(POOLS, lambda shifts, node: shifts.of(node.inputs[0])),
}

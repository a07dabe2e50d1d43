"""Subtract the mean of channels in front of a convolution, and add it again in its bias.

    W x + b = W (x - m) + (b + W m)        exact for any m

Small floats and blocks round large numbers more coarsely than small ones. If a channel stays close to m, as channels of
the first layers that carry the brightness of an image do, the size of m decides how coarsely it is rounded. A filter
that detects edges takes differences of such numbers, of which little but the rounding error is left. MobileNet-V2 loses
more at the input of its first depthwise convolution than in all other activations together.

A convolution pads with zeros, which are values like any other. So the tensor is padded before the mean is subtracted:

    x -> Pad -> Sub(m) -> Conv without padding

m is the mean of a channel that varies little, and 0 for all others, whose zeros stay zeros: they are exact in every
format. A layer is centered if that removes most of the power of its input, with channels weighted by their weights.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.account import AlgorithmFacts
from quark.decide.specs import AffineSpec
from quark.features.centering.options import CenteringOptions
from quark.onnx.calibrate import FloatRunner, survey
from quark.onnx.deciding import Work
from quark.onnx.graph import (
    READS_FLOAT,
    add_initializer,
    add_node,
    attribute,
    constant,
    input_value,
    rank,
    replace_input,
    set_constant,
)
from quark.plan import SkippedNode

Array = NDArray[Any]
NAME = "centering"
STEADY = 0.25  # the share of its power that a channel has around its mean, up to which it is centered
WORTHWHILE = 0.5  # the share of the power of a layer's input that may be left


class _Means:
    """The sum, the sum of squares and the count of the values of every channel."""

    is_mergeable = True

    def __init__(self) -> None:
        self.total: Array = np.zeros(1)
        self.squares: Array = np.zeros(1)
        self.count = 0

    def observe(self, x: Array) -> None:
        lines = x.reshape(x.shape[0], x.shape[1], -1)
        for channels in lines:  # without arrays of float64 as large as the tensor; squares need not be as exact
            self.total = self.total + channels.sum(axis=1, dtype=np.float64)
            self.squares = self.squares + np.einsum("cp,cp->c", channels, channels)
        self.count += lines.shape[0] * lines.shape[2]

    def end_of_sample(self) -> None:
        pass

    def merge(self, other: _Means) -> None:
        self.total, self.squares = self.total + other.total, self.squares + other.squares
        self.count += other.count


def before_calibration(work: Work, options: CenteringOptions) -> list[AlgorithmFacts]:
    """Center the inputs of convolutions in place, if that is worthwhile."""
    reason, choose = "", work.settings.choose
    activation = None if choose.is_weights_only else choose.default.activation
    if work.samples.is_random or not work.samples.count:
        reason = "no calibration data was given, and random numbers have other means"
    elif activation is None:
        reason = "activations are not quantized"
    elif isinstance(activation, AffineSpec):
        reason = "integers round all numbers alike"
    if reason:
        return [AlgorithmFacts(NAME, (), (SkippedNode("", "", reason),))]
    left: list[SkippedNode] = []
    layers: list[ir.Node] = []
    for node in work.model.graph:
        if node.op_type == "Conv" and not node.domain:
            obstacle = _obstacle(node)
            if obstacle is None:
                layers.append(node)
            else:
                left.append(SkippedNode(str(node.name), node.op_type, obstacle))
    wanted = {str(node.inputs[0].name): _Means() for node in layers if node.inputs[0] is not None}
    calibrate = work.settings.calibrate
    with FloatRunner(work.model, wanted, providers=calibrate.providers) as runner:
        surveyed = survey(runner, wanted, work.samples, calibrate, sample_limit=options.sample_limit)
    changed = []
    for node in layers:
        value = node.inputs[0]
        assert value is not None
        means = surveyed[str(value.name)]
        weight = constant(input_value(node, 1))
        assert weight is not None
        centers = _centers(means, weight, int(attribute(node, "group", 1)))
        if centers is None:
            left.append(SkippedNode(str(node.name), node.op_type, "its input is not far from zero"))
            continue
        center(work.model, node, centers)
        changed.append(f"{node.name}: {np.count_nonzero(centers)} of {centers.size} channels")
    return [AlgorithmFacts(NAME, tuple(changed), tuple(left))]


def _obstacle(node: ir.Node) -> str | None:
    """The reason why the input of a convolution cannot be centered; None if it can."""
    value, weight, bias = node.inputs[0], constant(input_value(node, 1)), input_value(node, 2)
    if weight is None or (bias is not None and constant(bias) is None):
        return "its weight or its bias is not constant"
    if value is None or value.const_value is not None or rank(value) != weight.ndim:
        return "its input is constant, or of unknown rank"
    if weight.dtype != np.float32:
        return f"its numbers are {weight.dtype}"
    if attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return "its padding follows from its input"
    return None


def _centers(means: _Means, weight: Array, groups: int) -> Array | None:
    """The numbers to subtract from every channel; None if that is not worthwhile."""
    mean, power = means.total / means.count, means.squares / means.count
    around = np.maximum(power - np.square(mean), 0.0)
    is_steady = around < STEADY * power
    outputs, inputs = weight.shape[:2]
    squares = np.square(weight, dtype=np.float64).reshape(groups, outputs // groups, inputs, -1).sum(axis=(1, 3))
    share = squares.reshape(-1)
    before, after = float(share @ power), float(share @ np.where(is_steady, around, power))
    if not is_steady.any() or not math.isfinite(before) or after > WORTHWHILE * before:
        return None
    return np.where(is_steady, mean, 0.0).astype(np.float32)


def center(model: ir.Model, node: ir.Node, centers: Array) -> None:
    """Subtract `centers`, one number per channel, from a convolution's input. Its output stays the same."""
    value, weight, groups = node.inputs[0], constant(input_value(node, 1)), int(attribute(node, "group", 1))
    assert value is not None
    assert weight is not None
    outputs, inputs = weight.shape[:2]
    spatial = weight.ndim - 2
    taps = weight.astype(np.float64).reshape(groups, outputs // groups, inputs, -1).sum(axis=3)
    offset = np.einsum("goi,gi->go", taps, centers.astype(np.float64).reshape(groups, inputs)).reshape(-1)
    bias = constant(input_value(node, 2))
    total = offset if bias is None else bias.astype(np.float64) + offset
    set_constant(model, node, 2, total.astype(np.float32), f"{node.name}_bias")
    source, shape = value, value.shape
    pads = [int(pad) for pad in attribute(node, "pads", [0] * 2 * spatial)]
    if any(pads) and attribute(node, "auto_pad", "NOTSET") == "NOTSET":
        sizes = np.array([0, 0, *pads[:spatial], 0, 0, *pads[spatial:]], np.int64)
        pad = add_node(
            model,
            "Pad",
            [source, add_initializer(model, f"{node.name}_pads", sizes)],
            before=node,
            name=f"{node.name}_pad",
        )
        pad.meta[READS_FLOAT] = NAME
        node.attributes["pads"] = ir.AttrInt64s("pads", [0] * 2 * spatial)
        source = pad.outputs[0]
        known = [] if value.shape is None else list(value.shape)
        added = [0, 0, *(pads[axis] + pads[axis + spatial] for axis in range(spatial))]
        shape = ir.Shape(
            [
                size + more if isinstance(size, int) else None if more else size
                for size, more in zip(known, added, strict=True)
            ]
        )
        source.shape = shape
    held = add_initializer(model, f"{node.name}_centers", centers.astype(np.float32).reshape(-1, *[1] * spatial))
    sub = add_node(model, "Sub", [source, held], before=node, name=f"{node.name}_center")
    sub.meta[READS_FLOAT] = NAME
    sub.outputs[0].shape = shape
    replace_input(node, 0, sub.outputs[0])

"""Regions: tensors whose channels can only be rescaled together, with the layers that write and read them.

A region grows from the output of a layer along every operator that lets a positive scale of each channel through,
f(x / s) = f(x) / s, forwards and backwards: all writers and all readers of a residual stream are in one. A layer ends
it: as a source, whose output channels are divided, or as a sink, whose input channels are multiplied. Layers with the
same weight draw each other's tensors in. Any other node on the region makes it impossible, and is its `obstacle`.

The rules (`RULES`) answer for one operator: where channels that are known of one of its tensors lie in its others, and
which of its constants have to be scaled along. What has no rule, or does not fit its rule, is a CannotScaleError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from quark.decide.view import Array, Graph, Node, Shape, Value

LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


class CannotScaleError(Exception):
    """Raised where channels cannot be rescaled; the text says why."""


@dataclass(frozen=True)
class Channels:
    """The axis of a tensor that counts channels; each takes `width` places of it, more than one where the positions of
    an image were flattened into it."""

    axis: int
    width: int = 1


Ends: TypeAlias = tuple[Channels, Channels]
Link: TypeAlias = tuple[Value, Channels]


@dataclass(frozen=True, eq=False)
class Layer:
    """A node that multiplies by a constant weight: in every group, `inputs` channels into `outputs`."""

    node: Node
    weight: Value
    groups: int
    outputs: int
    inputs: int
    is_input_first: bool  # the weight counts its input channels before its output channels

    @property
    def is_depthwise(self) -> bool:
        """True if each channel is computed from a single channel."""
        return self.outputs == self.inputs == 1

    @property
    def source(self) -> Link:
        """The tensor that it reads."""
        value = self.node.inputs[0]
        assert value is not None
        return value, Channels(self._axis_of(value))

    @property
    def result(self) -> Link:
        """The tensor that it makes."""
        value = self.node.outputs[0]
        return value, Channels(self._axis_of(value))

    def _axis_of(self, value: Value) -> int:
        has_any_rank = self.node.op_type == "Gemm" and self.node.setting("transA", 0) is None
        if self.node.op_type != "MatMul" and not has_any_rank:
            return 1
        if not value.rank:
            raise CannotScaleError("the rank of its tensors is not known")
        return value.rank - 1

    def view(self, array: Array) -> Array:
        """A weight by group, output channel, input channel, and the rest; as a view where it can be one."""
        sizes = (self.inputs, self.outputs) if self.is_input_first else (self.outputs, self.inputs)
        by_group = array.reshape(self.groups, *sizes, -1)
        return by_group.swapaxes(1, 2) if self.is_input_first else by_group

    def resembles(self, other: Layer) -> bool:
        """True if the two read the same weight in the same way."""
        mine = (self.node.op_type, self.groups, self.outputs, self.inputs, self.is_input_first)
        return mine == (other.node.op_type, other.groups, other.outputs, other.inputs, other.is_input_first)


def layer_of(node: Node) -> Layer:
    """The node as a layer; CannotScaleError where its weight is not a constant of a known form."""
    weight, data = node.input(1), node.input(0)
    if weight is None or weight.constant is None or not weight.is_number:
        raise CannotScaleError("its weight is not constant")
    if weight.outputs:
        raise CannotScaleError("its weight is an output of the graph")
    if data is not None and data.constant is not None:
        raise CannotScaleError("its input is constant")
    shape = weight.constant.shape
    if node.op_type in ("Conv", "ConvTranspose"):
        groups = int(node.setting("group", 1))
        if len(shape) < 3 or 0 in shape or groups < 1 or shape[0] % groups:
            raise CannotScaleError("its weight does not fit its groups")
        if node.outputs[0].rank not in (None, len(shape)):
            raise CannotScaleError("its weight does not fit its data")
        first, second = shape[0] // groups, shape[1]
        if node.op_type == "Conv":
            return Layer(node, weight, groups, first, second, is_input_first=False)
        return Layer(node, weight, groups, second, first, is_input_first=True)
    if len(shape) != 2 or 0 in shape or node.setting("transA", 0):
        raise CannotScaleError("it is not a product with one matrix from the right")
    is_input_first = not node.setting("transB", 0)
    inputs, outputs = shape if is_input_first else shape[::-1]
    return Layer(node, weight, 1, outputs, inputs, is_input_first)


@dataclass(eq=False)
class Region:
    """`count` channels; by value, where they lie; and what is scaled with them. Dictionaries, for their order."""

    count: int
    members: dict[Value, Channels] = field(default_factory=dict)
    sources: dict[Node, Layer] = field(default_factory=dict)
    sinks: dict[Node, tuple[Layer, int]] = field(default_factory=dict)  # with the width of the channels there
    constants: dict[tuple[Node, int], Channels] = field(default_factory=dict)
    clips: dict[Node, float] = field(default_factory=dict)  # with the bound
    passed: dict[Node, None] = field(default_factory=dict)  # nodes that let the scale through
    obstacle: str | None = None  # the reason why it is impossible


def find_regions(
    graph: Graph, obstacle_of: Callable[[Layer, bool], str | None] = lambda layer, is_source: None
) -> list[Region]:
    """All regions that start at a layer, in the order of their first layers. `obstacle_of` says why a layer cannot take
    part as a source, or as a sink, for a reason that the graph does not show."""
    regions: list[Region] = []
    seen: dict[Value, Region] = {}
    for node in graph:
        if node.op_type not in LAYERS or not node.is_standard or node.outputs[0] in seen:
            continue
        try:
            layer = layer_of(node)
            start = layer.result
        except CannotScaleError:
            continue
        region = Region(layer.groups * layer.outputs)
        _Growth(region, seen, obstacle_of).from_tensor(*start)
        regions.append(region)
    return regions


class _Growth:
    """One region as it grows. It is followed to its ends even when it is known to be impossible, so that none of its
    tensors becomes the start of another."""

    def __init__(
        self, region: Region, seen: dict[Value, Region], obstacle_of: Callable[[Layer, bool], str | None]
    ) -> None:
        self.region, self.seen, self.obstacle_of = region, seen, obstacle_of
        self.pending: list[Link] = []

    def from_tensor(self, value: Value, channels: Channels) -> None:
        self.pending.append((value, channels))
        while self.pending:
            value, channels = self.pending.pop()
            known = self.region.members.get(value)
            if known is None and value not in self.seen:
                self.region.members[value] = channels
                self.seen[value] = self.region
                self._visit_around(value, channels)
            elif known != channels:
                self._obstruct(value.producer, f"'{value.name}' has channels along two axes")

    def _visit_around(self, value: Value, channels: Channels) -> None:
        if value.outputs:
            self._obstruct(value.producer, f"'{value.name}' is an output of the graph")
        if value.producer is None:
            self._obstruct(None, f"'{value.name}' is an input of the graph or a constant")
        for node in dict.fromkeys((value.producer, *(node for node, _ in value.readers))):
            try:
                if node is not None:
                    self._go_through(node, value, channels)
            except CannotScaleError as reason:  # noqa: PERF203 - each node has its own reason
                self._obstruct(node, str(reason))

    def _go_through(self, node: Node, value: Value, channels: Channels) -> None:
        if node.op_type in LAYERS and node.is_standard and not node.is_inner:
            layer, is_source = layer_of(node), value is node.outputs[0]
            obstacle = self.obstacle_of(layer, is_source)
            if obstacle is not None:
                raise CannotScaleError(obstacle)
            self._end_at_source(layer, channels) if is_source else self._end_at_sink(layer, value, channels)
            return
        way = passage(node, value, channels)
        self.pending.extend(way.links)
        if way.links:
            self.region.passed[node] = None
        if way.bound is not None:
            self.region.clips[node] = way.bound
        for index, where in way.constants:
            self.region.constants[node, index] = where

    def _end_at_source(self, layer: Layer, channels: Channels) -> None:
        bias = layer.node.input(2)
        if bias is not None and bias.constant is None:
            raise CannotScaleError("its bias is not constant")
        if channels != layer.result[1] or layer.groups * layer.outputs != self.region.count:
            raise CannotScaleError("its output channels lie along another axis")
        self.region.sources[layer.node] = layer
        self.pending.extend(twin.result for twin in self._twins(layer))

    def _end_at_sink(self, layer: Layer, value: Value, channels: Channels) -> None:
        if any(value is input_ for input_ in layer.node.inputs[1:]):
            raise CannotScaleError("reads it as something other than its data")
        size = self.region.count * channels.width
        if channels.axis != layer.source[1].axis or layer.groups * layer.inputs != size:
            raise CannotScaleError("its input channels lie along another axis")
        self.region.sinks[layer.node] = (layer, channels.width)
        for twin in self._twins(layer):
            value, where = twin.source
            self.pending.append((value, Channels(where.axis, channels.width)))

    def _twins(self, layer: Layer) -> Iterator[Layer]:
        """The other layers that read the same weight."""
        for node, index in layer.weight.readers:
            if node is layer.node and index == 1:
                continue
            is_layer = node.op_type in LAYERS and node.is_standard and not node.is_inner and index == 1
            twin = layer_of(node) if is_layer else None
            if twin is None or not twin.resembles(layer):
                raise CannotScaleError(f"its weight is also read by '{node.label}' ({node.op_type})")
            yield twin

    def _obstruct(self, node: Node | None, reason: str) -> None:
        if self.region.obstacle is None:
            self.region.obstacle = reason if node is None else f"'{node.label}': {reason}"


@dataclass(frozen=True)
class Passage:
    """The tensors that share channels at a node, and the inputs that hold constants to divide along. `bound`: the node
    is Clip(0, bound), which lets a scale through only if the bound is divided too."""

    links: tuple[Link, ...]
    constants: tuple[tuple[int, Channels], ...] = ()
    bound: float | None = None


Rule: TypeAlias = Callable[[Node, Value, Channels], Passage]


def passage(node: Node, value: Value, channels: Channels) -> Passage:
    """What the node does with the channels of `value`, one of its tensors; CannotScaleError where it mixes them, or
    where a scale does not come through."""
    rule = RULES.get(node.op_type) if node.is_standard else None
    if rule is None or node.is_inner:
        raise CannotScaleError(f"{node.op_type} does not commute with a scale")
    return rule(node, value, channels)


def _first(node: Node) -> Value:
    first = node.input(0)
    if first is None or first.constant is not None:
        raise CannotScaleError(f"{node.op_type} has no tensor to scale")
    return first


def _same(node: Node, value: Value, channels: Channels) -> Passage:
    links = (_first(node), channels), (node.outputs[0], channels)
    if all(value is not tensor for tensor, _ in links):
        raise CannotScaleError(f"{node.op_type} reads it as something other than its data")
    return Passage(links)


def _pool(node: Node, value: Value, channels: Channels) -> Passage:
    before, behind = _first(node).size(1), node.outputs[0].size(1)
    if channels.axis != 1 or (before is not None and behind is not None and before != behind):
        raise CannotScaleError(f"{node.op_type} goes over the channels")
    return _same(node, value, channels)


def _prelu(node: Node, value: Value, channels: Channels) -> Passage:
    slope = node.input(1)
    if slope is None or slope.constant is None:
        raise CannotScaleError("its slope is not constant")
    return _same(node, value, channels)


def _clip(node: Node, value: Value, channels: Channels) -> Passage:
    bounds = node.setting("bounds")
    if bounds is None:
        raise CannotScaleError("Clip has a bound that is not constant")
    low, high = bounds
    passed = _same(node, value, channels)
    if all(bound == 0 or math.isinf(bound) for bound in bounds):
        return passed
    if low != 0 or not 0 < high < math.inf:
        raise CannotScaleError(f"Clip from {low:g} to {high:g} does not commute with a scale")
    if channels.width != 1 or value.rank is None:
        raise CannotScaleError("Clip of a tensor that was flattened, or whose rank is not known")
    return Passage(passed.links, bound=high)


def _factor(node: Node, value: Value, channels: Channels) -> Passage:
    """Multiplied or divided by a constant: linear, so that the constant stays."""
    indexes = [i for i in (0, 1) if (input_ := node.input(i)) is None or input_.constant is None]
    if len(indexes) != 1 or (node.op_type == "Div" and indexes != [0]):
        raise CannotScaleError(f"{node.op_type} of two activations")
    data, result = node.input(indexes[0]), node.outputs[0]
    if data is None or data.rank is None or data.rank != result.rank:
        raise CannotScaleError(f"{node.op_type} changes the rank")
    if data.size(channels.axis) is None or data.size(channels.axis) != result.size(channels.axis):
        raise CannotScaleError(f"{node.op_type} changes the number of channels")
    return Passage(((data, channels), (result, channels)))


def _together(node: Node, value: Value, channels: Channels) -> Passage:
    """Sums and extremes of several: all are scaled the same."""
    total, own, size = node.outputs[0].rank, value.rank, value.size(channels.axis)
    if total is None or own is None or size is None:
        raise CannotScaleError(f"{node.op_type} of tensors of unknown shape")
    from_end = channels.axis - own  # broadcasting counts from the end
    links: list[Link] = [(node.outputs[0], Channels(total + from_end, channels.width))]
    constants = []
    for index, input_ in enumerate(node.inputs):
        if input_ is None:
            continue
        shape: Shape | None = input_.shape if input_.constant is None else input_.constant.shape
        axis = -1 if shape is None else len(shape) + from_end
        known = shape[axis] if shape is not None and 0 <= axis < len(shape) else None
        if known == size:
            target = Channels(axis, channels.width)
            if input_.constant is None:
                links.append((input_, target))
            else:
                constants.append((index, target))
        elif input_.constant is None or input_.constant.array().any():
            raise CannotScaleError(f"{node.op_type} with something that has no such channels")
    if any(tensor.size(where.axis) not in (size, None) for tensor, where in links):
        raise CannotScaleError(f"{node.op_type} changes the number of channels")
    return Passage(tuple(links), tuple(constants))


def _concat(node: Node, value: Value, channels: Channels) -> Passage:
    axis = node.setting("axis", 0)
    if value.rank is None or axis is None or int(axis) % value.rank == channels.axis:
        raise CannotScaleError("Concat joins channels")
    inputs = [(index, input_) for index, input_ in enumerate(node.inputs) if input_ is not None]
    links = [(input_, channels) for _, input_ in inputs if input_.constant is None]
    constants = tuple((index, channels) for index, input_ in inputs if input_.constant is not None)
    return Passage(((node.outputs[0], channels), *links), constants)


def _split(node: Node, value: Value, channels: Channels) -> Passage:
    axis = node.setting("axis", 0)
    if value.rank is None or axis is None or int(axis) % value.rank == channels.axis:
        raise CannotScaleError("Split takes channels apart")
    return Passage(((_first(node), channels), *((output, channels) for output in node.outputs)))


def _over_other_axes(node: Node, value: Value, channels: Channels) -> Passage:
    """Reductions, Slice: of any axes but that of the channels."""
    first, axes = node.input(0), node.setting("axes")
    own = None if first is None else first.rank
    if own is None or axes is None:
        raise CannotScaleError(f"{node.op_type} over axes that are not known")
    axes = [int(axis) % own for axis in axes]
    if channels.axis in axes:
        raise CannotScaleError(f"{node.op_type} goes over the channels")
    if node.outputs[0].rank != own and any(axis < channels.axis for axis in axes):
        raise CannotScaleError(f"{node.op_type} moves the channels")
    return _same(node, value, channels)


def _pad(node: Node, value: Value, channels: Channels) -> Passage:
    first, pads = node.input(0), node.setting("pads")
    own = None if first is None else first.rank
    if own is None or pads is None:
        raise CannotScaleError("Pad by a number that is not known")
    if any(axis % own == channels.axis and (before or behind) for axis, before, behind in pads):
        raise CannotScaleError("Pad adds channels")
    if node.setting("mode", "constant") == "constant" and node.setting("fill", 0.0) != 0:
        raise CannotScaleError("Pad with something other than zeros")
    return _same(node, value, channels)


def _resize(node: Node, value: Value, channels: Channels) -> Passage:
    before, after = _first(node).size(channels.axis), node.outputs[0].size(channels.axis)
    if before is None or before != after:
        raise CannotScaleError("Resize goes over the channels")
    if node.setting("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        raise CannotScaleError("Resize fills in a number")
    return _same(node, value, channels)


def _transpose(node: Node, value: Value, channels: Channels) -> Passage:
    first = _first(node)
    order = node.setting("perm", list(reversed(range(first.rank or 0))))
    if order is None:
        raise CannotScaleError("Transpose in an order that is not known")
    before, behind = through_permutation(list(order), channels, value is first, node.op_type)
    return Passage(((first, before), (node.outputs[0], behind)))


def _reshape(node: Node, value: Value, channels: Channels) -> Passage:
    first, last = _first(node), node.outputs[0]
    before, behind = through_shapes(first.shape, last.shape, channels, value is first, node.op_type)
    return Passage(((first, before), (last, behind)))


def through_permutation(order: Sequence[int], channels: Channels, is_before: bool, name: str) -> Ends:
    """The channels before and behind a transposition, from those of one of the two."""
    if channels.axis >= len(order):
        raise CannotScaleError(f"{name} of a tensor of unknown rank")
    if is_before:
        return channels, Channels(list(order).index(channels.axis), channels.width)
    return Channels(order[channels.axis], channels.width), channels


def through_shapes(
    before: Sequence[int | None] | None,
    after: Sequence[int | None] | None,
    channels: Channels,
    is_before: bool,
    name: str,
) -> Ends:
    """The channels before and behind a reshape that keeps the first axis, from those of one of the two.

    Either the channels stay what they are, as in [N, C, H, W] to [N, C, H*W], or what follows them is flattened into
    their axis, as in [N, C, H, W] to [N, C*H*W], where each is H*W wide. All sizes but the first must be known.
    """
    if before is None or after is None or channels.axis != 1 or len(before) < 2 or len(after) < 2:
        raise CannotScaleError(f"{name} mixes axes")
    inner, outer = [size for size in before[1:] if size], [size for size in after[1:] if size]
    if len(inner) != len(before) - 1 or len(outer) != len(after) - 1 or math.prod(inner) != math.prod(outer):
        raise CannotScaleError(f"{name} mixes axes")
    if inner[0] == outer[0]:
        return channels, channels
    width = math.prod(inner[1:])
    if outer[0] != inner[0] * width or (not is_before and channels.width % width):
        raise CannotScaleError(f"{name} mixes channels")
    narrow = channels.width if is_before else channels.width // width
    return Channels(1, narrow), Channels(1, narrow * width)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("Relu", "LeakyRelu", "Identity", "Dropout", "Neg", "Abs"), _same),
    **dict.fromkeys(("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"), _pool),
    "PRelu": _prelu,
    "Clip": _clip,
    **dict.fromkeys(("Mul", "Div"), _factor),
    **dict.fromkeys(("Add", "Sub", "Sum", "Mean", "Max", "Min"), _together),
    "Concat": _concat,
    "Split": _split,
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "Slice"), _over_other_axes),
    "Pad": _pad,
    "Resize": _resize,
    "Transpose": _transpose,
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze", "Unsqueeze"), _reshape),
    **dict.fromkeys(("Shape", "Size"), lambda node, value, channels: Passage(())),
}

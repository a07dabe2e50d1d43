"""The layers whose weights are trained, in the order in which the network computes them.

The computation of a layer is rows times weights: `RowSource` says which numbers of its input go into which number of
its output. A sample has far more positions than training needs, and neighbours are alike: a few of each sample, chosen
at random, make the rows. The output goes through the activation that alone reads it before it is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.features.bias_correction.taps import Window, taps_of
from quark.features.finetuning.problem import Activation, Bounds, WeightLayout
from quark.formats.arrays import FLOAT32, FLOAT64, array_kind
from quark.formats.native import NativeFinetuning, RowGather, native_finetuning
from quark.onnx.graph import attribute, constant, dimensions, input_value, is_read_once, rank, readers
from quark.plan import AffineChoice, Choice, DynamicChoice, FloatChoice, QuantizationPlan, SkippedNode

Array = NDArray[Any]
_INFINITE = float("inf")
_ALONG_CHANNELS = ("Conv", "ConvTranspose", "InstanceNormalization")  # their outputs are along axis 1


@dataclass(frozen=True, eq=False)
class TrainedLayer:
    """A layer, by the name of its node, and how its weight, its bias and its output are rounded."""

    name: str
    op_type: str
    weight: Choice
    bias: Choice | None
    output: Choice | None
    has_bias: bool
    source: RowSource
    layout: WeightLayout
    activation: Activation

    @property
    def row_numbers(self) -> int:
        """The length of a row of the input."""
        groups, _, length = self.layout.matrices
        return groups * length

    @property
    def output_numbers(self) -> int:
        groups, outputs, _ = self.layout.matrices
        return groups * outputs


def trained_layers(
    model: ir.Model, plan: QuantizationPlan, op_types: Collection[str]
) -> tuple[list[TrainedLayer], list[SkippedNode]]:
    """The layers whose weight the plan quantizes; those that cannot be trained with the reason."""
    choices = {(reader.node, reader.index): entry.choice for entry in plan for reader in entry.readers}
    layers: list[TrainedLayer] = []
    left: list[SkippedNode] = []
    for node in model.graph:
        weight = choices.get((str(node.name), 1)) if node.op_type in op_types and not node.domain else None
        if weight is None:
            continue
        layer = _layer(node, weight, choices)
        if isinstance(layer, str):
            left.append(SkippedNode(str(node.name), node.op_type, layer))
        else:
            layers.append(layer)
    return layers, left


def _layer(node: ir.Node, weight: Choice, choices: dict[tuple[str, int], Choice]) -> TrainedLayer | str:
    """The layer, or why it cannot be trained."""
    value = input_value(node, 1)
    values = constant(value)
    if value is None or values is None:
        return "has no constant weight"
    if not is_read_once(value):
        return "shares its weight with another layer"
    if isinstance(weight, DynamicChoice):
        return "its scale is not known before run time"
    rows = row_source(node, values)
    if isinstance(rows, str):
        return rows
    source, layout = rows
    has_bias = _has_own_bias(node, layout)
    if isinstance(has_bias, str):
        return has_bias
    activation, behind = activation_behind(node)
    return TrainedLayer(
        str(node.name),
        node.op_type,
        weight,
        choices.get((str(node.name), 2)) if attribute(node, "beta", 1.0) == 1.0 else None,
        _choice_behind(behind, choices, node.op_type in _ALONG_CHANNELS),
        has_bias,
        source,
        layout,
        activation,
    )


def _has_own_bias(node: ir.Node, layout: WeightLayout) -> bool | str:
    """True if the layer has a bias that no other reads; why it cannot be trained, if it adds anything but a constant
    with one number for each output."""
    value = input_value(node, 2) if node.op_type != "MatMul" else None
    beta = attribute(node, "beta", 1.0)
    if value is None or beta == 0.0:
        return False
    values = constant(value)
    if values is None:
        return "its bias is computed"
    groups, outputs, _ = layout.matrices
    is_by_row = node.op_type == "Gemm" and values.shape[-1:] != (outputs,)
    if is_by_row or values.size != groups * outputs:
        return "its bias is not one number for each output"
    return bool(beta == 1.0 and is_read_once(value))


def _choice_behind(value: ir.Value, choices: dict[tuple[str, int], Choice], is_along_channels: bool) -> Choice | None:
    """The rounding of an output for its first quantized reader, as a choice for rows [positions, outputs]; None if
    numbers of several rows are rounded together."""
    seen = (choices.get((str(reader.name), index)) for reader, index in readers(value))
    choice = next((choice for choice in seen if choice is not None and not isinstance(choice, DynamicChoice)), None)
    if choice is None or isinstance(choice, DynamicChoice | FloatChoice) or choice.axis is None:
        return choice
    axes = rank(value)
    axis = choice.axis if choice.axis >= 0 or axes is None else choice.axis + axes
    own = 1 if is_along_channels else -1 if axes is None else axes - 1
    has_groups = isinstance(choice, AffineChoice) and choice.group_size is not None
    return replace(choice, axis=1) if axis == own and not has_groups else None


def bias_of(node: ir.Node) -> NDArray[Any] | None:
    """The constant that the node adds, as it counts in the output."""
    values = constant(input_value(node, 2)) if node.op_type != "MatMul" else None
    beta = float(attribute(node, "beta", 1.0))
    if values is None or beta == 0.0:
        return None
    return values if beta == 1.0 else values * values.dtype.type(beta)


class RowSource(Protocol):
    """`picks` are numbers of positions, as `outputs` counts them: those of the first sample of a batch first. Rows of a
    numpy array are one, and those of a tensor lie where it does."""

    def count(self, output_shape: tuple[int, ...]) -> int:
        """The number of positions of an output of that shape."""

    def inputs(self, x: Any, picks: Array) -> Any:
        """The rows, [picks, groups, weights of an output]."""

    def outputs(self, y: Any, picks: Array) -> Any:
        """The float outputs at these positions, [picks, outputs]."""

    def rows(self, buffer: Any, layout: WeightLayout) -> Any:
        """A matrix with a line for each row as such rows, in the memory order in which they are used fastest."""

    def write_inputs(self, x: Any, picks: Array, places: Array, rows: Any) -> None:
        """Make the rows those of these numbers, in what `rows` returned."""


class _Rows:
    """The common part of all sources of rows."""

    def rows(self, buffer: Any, layout: WeightLayout) -> Any:
        groups, _, length = layout.matrices
        return buffer.reshape(len(buffer), groups, length)

    def write_inputs(self, x: Any, picks: Array, places: Array, rows: Any) -> None:
        rows[placed(places, rows)] = placed(self.inputs(x, picks), rows)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ConvolutionRows(_Rows):
    """A convolution as a product of rows: each output position reads the input values under its windows."""

    windows: tuple[Window, ...]
    groups: int

    def count(self, output_shape: tuple[int, ...]) -> int:
        return output_shape[0] * math.prod(output_shape[2:])

    def rows(self, buffer: Any, layout: WeightLayout) -> Any:
        groups, _, length = layout.matrices
        if length == math.prod(window.kernel for window in self.windows):  # one channel for each group
            return buffer.reshape(len(buffer), length, groups).swapaxes(1, 2)
        return super().rows(buffer, layout)

    def write_inputs(self, x: Any, picks: Array, places: Array, rows: Any) -> None:
        native = _native_for(x, rows)
        if native is None:
            return super().write_inputs(x, picks, places, rows)
        sources, row_step, group_step, step = self._sources(x.shape, picks), *_steps(rows)
        taps = sources.shape[1]
        # one channel for each group, or all taps of a channel before those of the next
        plane_step = group_step if self.groups == x.shape[1] else taps * step
        _gather(native, x, sources, places, rows, (row_step, step, plane_step))
        return None

    def _sources(self, shape: tuple[int, ...], picks: Array) -> Array:
        """The positions of each window's inputs in the first channel of an input of that shape, [picks, taps]; -1 is
        padding."""
        sources = [window.sources(size) for window, size in zip(self.windows, shape[2:], strict=True)]
        batch, *places = np.unravel_index(picks, (shape[0], *(len(source) for source in sources)))
        positions = (batch * math.prod(shape[1:]))[:, None]
        is_inside: Any = True
        for axis, (source, place) in enumerate(zip(sources, places, strict=True)):
            chosen = source[place]
            inside, step = chosen >= 0, math.prod(shape[axis + 3 :])
            positions = (positions[:, :, None] + (chosen * step)[:, None]).reshape(len(picks), -1)
            is_inside = inside if axis == 0 else (is_inside[:, :, None] & inside[:, None]).reshape(len(picks), -1)
        return np.where(is_inside, positions, -1)

    def inputs(self, x: Any, picks: Array) -> Any:
        native = _native_for(x)
        if native is not None:
            origins = self._sources(x.shape, picks)
            taps = origins.shape[1]
            rows = np.empty((len(picks), self.groups, x.shape[1] // self.groups * taps), np.float32)
            _gather(native, x, origins, np.arange(len(picks)), rows, (x.shape[1] * taps, 1, taps))
            return rows
        sources = [window.sources(size) for window, size in zip(self.windows, x.shape[2:], strict=True)]
        batch, *places = np.unravel_index(picks, (x.shape[0], *(len(source) for source in sources)))
        index: list[Any] = [batch.reshape(-1, *[1] * len(sources)), slice(None)]
        is_inside: Any = True
        for axis, (source, place) in enumerate(zip(sources, places, strict=True)):
            shape = [len(picks)] + [1] * len(sources)
            shape[axis + 1] = source.shape[1]
            chosen = source[place].reshape(shape)
            is_inside = is_inside & (chosen >= 0)
            index.append(chosen)
        xp = array_kind(x).xp
        # [picks, *kernel, channels]: the slice stands between indices
        patches = x[tuple(placed(positions, x) for positions in index)]
        if not np.all(is_inside):
            patches = xp.where(placed(is_inside[..., None], x), patches, xp.zeros_like(patches[:1]))
        rows = xp.moveaxis(patches, -1, 1).reshape(len(picks), self.groups, -1)
        return _float32(rows)

    def outputs(self, y: Any, picks: Array) -> Any:
        native = _native_for(y)
        if native is not None:
            rows, size = np.empty((len(picks), y.shape[1]), np.float32), math.prod(y.shape[2:])
            sources = picks // size * (y.shape[1] * size) + picks % size
            _gather(native, y, sources[:, None], np.arange(len(picks)), rows, (y.shape[1], 0, 1))
            return rows
        batch, *places = np.unravel_index(picks, (y.shape[0], *y.shape[2:]))
        index = tuple(placed(place, y) for place in (batch, slice(None), *places))
        return _float32(y[index])


def _native_for(*arrays: Any) -> NativeFinetuning | None:
    """The compiled code, if it can gather rows of the first array, and write them to the others."""
    are_plain = all(isinstance(array, np.ndarray) and array.dtype == np.float32 for array in arrays)
    return native_finetuning() if are_plain and arrays[0].flags.c_contiguous else None


def _steps(array: Array) -> tuple[int, ...]:
    return tuple(stride // array.itemsize for stride in array.strides)


def _gather(
    native: NativeFinetuning, x: Array, sources: Array, places: Array, rows: Array, steps: tuple[int, int, int]
) -> None:
    """Write rows of x, [batch, channels, ...]; `steps` lead to the next row, tap and channel."""
    row_step, tap_step, plane_step = steps
    sources, places = (np.ascontiguousarray(indices, np.int64) for indices in (sources, places))
    native.gather(
        RowGather(
            values=x.ctypes.data,
            planes=x.shape[1],
            plane_size=math.prod(x.shape[2:]),
            sources=sources.ctypes.data,
            places=places.ctypes.data,
            picks=sources.shape[0],
            taps=sources.shape[1],
            rows=rows.ctypes.data,
            row=row_step,
            tap_step=tap_step,
            plane_step=plane_step,
        )
    )


@dataclass(frozen=True)
class MatrixRows(_Rows):
    """The rows of a matrix product: along the last axis of its input, or the first of a transposed one."""

    is_transposed: bool = False
    factor: float = 1.0

    def count(self, output_shape: tuple[int, ...]) -> int:
        return math.prod(output_shape[:-1])

    def inputs(self, x: Any, picks: Array) -> Any:
        matrix = x.T if self.is_transposed else x.reshape(-1, x.shape[-1])
        rows = _float32(matrix[placed(picks, x)])
        return (rows if self.factor == 1.0 else rows * float(np.float32(self.factor)))[:, None]

    def outputs(self, y: Any, picks: Array) -> Any:
        return _float32(y.reshape(-1, y.shape[-1])[placed(picks, y)])


@dataclass(frozen=True)
class NormalizedRows(_Rows):
    """A normalization before its scale. `first` is the first axis that is normalized over; a channel of the scale is
    along `channel`, or, where that is None, all of the normalized axes."""

    first: int
    epsilon: float
    channel: int | None = None

    def count(self, output_shape: tuple[int, ...]) -> int:
        kept = output_shape[: self.first] if self.channel is None else (output_shape[0], *output_shape[2:])
        return math.prod(kept)

    def inputs(self, x: Any, picks: Array) -> Any:
        kind = array_kind(x)
        wide = kind.widen(x, FLOAT64)
        axes = tuple(range(self.first % x.ndim, x.ndim))
        centred = wide - wide.mean(axes, keepdims=True)
        normal = centred / kind.xp.sqrt(kind.xp.square(centred).mean(axes, keepdims=True) + self.epsilon)
        return self._lines(_float32(normal))[placed(picks, x)][..., None]

    def outputs(self, y: Any, picks: Array) -> Any:
        return self._lines(_float32(y))[placed(picks, y)]

    def _lines(self, values: Any) -> Any:
        if self.channel is not None:
            moved = array_kind(values).xp.moveaxis(values, self.channel, -1)
            return moved.reshape(-1, values.shape[self.channel])
        first = self.first % values.ndim
        return values.reshape(math.prod(values.shape[:first]), -1)


def _float32(x: Any) -> Any:
    return array_kind(x).widen(x, FLOAT32)


def placed(array: Any, like: Any) -> Any:
    """An array of numpy where `like` is; slices and tensors stay as they are."""
    kind = array_kind(like)
    if kind.name == "numpy" or not isinstance(array, np.ndarray):
        return array
    return kind.xp.asarray(np.ascontiguousarray(array), device=like.device)


def row_source(node: ir.Node, weight: Array) -> tuple[RowSource, WeightLayout] | str:
    """The source of a layer's rows, and the layout of its weight for them; or the reason why there is none."""
    if node.op_type in ("Conv", "ConvTranspose"):
        taps = taps_of(node, weight)
        if taps is None:
            return "the shape of its output is given, not computed"
        groups = int(attribute(node, "group", 1))
        split = (groups, weight.shape[0] // groups, *weight.shape[1:])
        order = tuple(range(len(split)))
        if node.op_type == "ConvTranspose":  # its weights are [inputs, outputs of a group, *kernel]
            order = (0, 2, 1, *order[3:])
        return ConvolutionRows(taps.windows, groups), WeightLayout(weight.shape, split, order)
    if node.op_type == "Gemm":
        shape = (1, *weight.shape)
        order = (0, 1, 2) if attribute(node, "transB", 0) else (0, 2, 1)
        is_transposed = bool(attribute(node, "transA", 0))
        rows = MatrixRows(is_transposed, float(attribute(node, "alpha", 1.0)))
        return rows, WeightLayout(weight.shape, shape, order)
    if node.op_type == "MatMul":
        if weight.ndim != 2:
            return "its weight is not one matrix"
        return MatrixRows(), WeightLayout(weight.shape, (1, *weight.shape), (0, 2, 1))
    epsilon = float(attribute(node, "epsilon", 1e-5))
    layout = WeightLayout(weight.shape, (weight.size, 1, 1), (0, 1, 2))
    if node.op_type == "InstanceNormalization":
        return NormalizedRows(2, epsilon, channel=1), layout
    if node.op_type == "LayerNormalization":
        first = int(attribute(node, "axis", -1))
        sizes = dimensions(node.inputs[0])
        if sizes is None:
            return "the rank of its input is not known"
        first %= len(sizes)
        if not _is_one_for_each(weight.shape, sizes[first:]):
            return "its scale is broadcast"
        return NormalizedRows(first, epsilon), layout
    return f"{node.op_type} has no weights that are known how to train"


def _is_one_for_each(shape: tuple[int, ...], sizes: tuple[int | None, ...]) -> bool:
    """True if a scale of that shape has a number for each element of axes of those sizes; None is an unknown size."""
    more = len(sizes) - len(shape)
    own = (1,) * more + shape[max(0, -more) :]
    is_covered = all(count > 1 or size == 1 for count, size in zip(own, sizes, strict=True))
    return is_covered and all(count == 1 for count in shape[: max(0, -more)])


def activation_behind(node: ir.Node) -> tuple[Activation, ir.Value]:
    """The activation behind a layer, and its output; None and the layer's own output if there is none, or none that
    training knows. A chain of bounds, such as Relu and Min, is one activation."""
    value, place = node.outputs[0], _channels(node)
    bounds: Bounds | None = None
    while is_read_once(value):
        reader, index = readers(value)[0]
        if reader.graph is not value.graph:
            break  # a branch that captures it is not always computed
        limits = _bounds(reader, index, place)
        if limits is None:
            function = _function(reader) if index == 0 and not reader.domain and bounds is None else None
            if function is not None:
                return function, reader.outputs[0]
            break
        if bounds is not None:
            ends = (np.clip(bound, limits.lowest, limits.highest) for bound in (bounds.lowest, bounds.highest))
            limits = Bounds(*ends)
        bounds, value = limits, reader.outputs[0]
    return bounds, value


def _channels(node: ir.Node) -> tuple[int, int] | None:
    """The number of channels, and of axes behind theirs; None if they are not along one axis."""
    weight = dimensions(node.inputs[1])
    if weight is None:
        return None
    if node.op_type in ("Conv", "ConvTranspose"):
        groups = int(attribute(node, "group", 1)) if node.op_type == "ConvTranspose" else 1
        count = weight[1] if node.op_type == "ConvTranspose" else weight[0]
        return None if count is None else (count * groups, len(weight) - 2)
    if node.op_type == "InstanceNormalization":
        sizes = dimensions(node.inputs[0])
        return None if sizes is None or weight[0] is None else (weight[0], len(sizes) - 2)
    if node.op_type == "LayerNormalization" and any(size != 1 for size in weight[:-1]):
        return None
    count = weight[0] if node.op_type == "Gemm" and attribute(node, "transB", 0) else weight[-1]
    return None if count is None else (count, 0)


def _bounds(node: ir.Node, index: int, place: tuple[int, int] | None) -> Bounds | None:
    """The bounds that a node confines its input to, if they are constant: numbers, or one for each channel."""
    if node.domain or (index and node.op_type not in ("Min", "Max")):
        return None
    if node.op_type == "Relu":
        return Bounds(0.0, _INFINITE)
    if node.op_type == "Clip":
        ends = []
        for input_index, infinite in ((1, -_INFINITE), (2, _INFINITE)):
            value = input_value(node, input_index)
            number = constant(value)
            if value is not None and number is None:
                return None
            ends.append(infinite if number is None else float(number.reshape(-1)[0]))
        return Bounds(*ends)
    values = constant(node.inputs[1 - index]) if node.op_type in ("Min", "Max") and len(node.inputs) == 2 else None
    if values is None:
        return None
    if values.size != 1:
        count, behind = place or (-1, 0)
        if values.size != count or values.ndim <= behind or values.shape[values.ndim - 1 - behind] != count:
            return None
    flat = values.astype(np.float32).reshape(-1)
    return Bounds(-_INFINITE, flat) if node.op_type == "Min" else Bounds(flat, _INFINITE)


def _function(node: ir.Node) -> Callable[[Any], Any] | None:
    """An activation as a function of torch tensors; None if training does not know it."""
    if node.op_type == "Gelu" and str(attribute(node, "approximate", "none")) == "tanh":
        return lambda x: 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())
    alpha = float(attribute(node, "alpha", 0.2 if node.op_type == "HardSigmoid" else 0.01))
    beta = float(attribute(node, "beta", 0.5))
    functions: dict[str, Callable[[Any], Any]] = {
        "LeakyRelu": lambda x: x.clamp(min=0) + alpha * x.clamp(max=0),
        "Sigmoid": lambda x: x.sigmoid(),
        "Tanh": lambda x: x.tanh(),
        "HardSigmoid": lambda x: (alpha * x + beta).clamp(0, 1),
        "HardSwish": lambda x: x * (x / 6 + 0.5).clamp(0, 1),
        "Gelu": lambda x: 0.5 * x * (1 + (x * math.sqrt(0.5)).erf()),
    }
    return functions.get(node.op_type)

"""Compensation of Conv, ConvTranspose, Gemm and MatMul, from the float network's activations and their rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.account import AlgorithmFacts
from quark.errors import InvalidValueError
from quark.features.compensation.options import CompensationOptions
from quark.features.compensation.rounding import Round, best_weights, compensated, squared_error
from quark.features.finetuning.layers import ConvolutionRows, MatrixRows, TrainedLayer, trained_layers
from quark.formats.affine import integer_format
from quark.onnx.calibrate import survey
from quark.onnx.deciding import Decision, Work, quantized_error
from quark.onnx.graph import constant, input_value, set_constant
from quark.onnx.progress import track
from quark.onnx.view import view_of
from quark.plan import AffineChoice, BlockChoice, Choice, DynamicChoice, FloatChoice, SkippedNode
from quark.rounded import block_values, parameters_of, rounded

Array = NDArray[Any]
NAME = "compensation"
LAYER_TYPES = ("Conv", "ConvTranspose", "Gemm", "MatMul")
COLUMNS = 64  # of a unit where columns round independently: what is behind it is updated once for all of them
ROWS_PER_COLUMN = 4  # rows of inputs that a Gram matrix is made from, for every column of it
FEWEST_ROWS = 4096
GOLDEN = (math.sqrt(5) - 1) / 2


def watched(work: Work, options: CompensationOptions) -> list[str]:
    """The inputs of layers with constant weights."""
    if work.samples.is_random:
        return []
    nodes = [node for node in view_of(work.model) if node.op_type in LAYER_TYPES and node.is_standard]
    nodes = [node for node in nodes if (weight := node.input(1)) is not None and weight.constant is not None]
    return [value.name for node in nodes if (value := node.input(0)) is not None and value.constant is None]


def after_choosing(work: Decision, options: CompensationOptions) -> list[AlgorithmFacts]:
    """Round weights in place; those of an output that would be worse for it stay as they are. All of it is taken back
    if the network's outputs on held-out samples get worse: a layer knows nothing of those behind it."""
    if work.samples.is_random or not work.samples.count:
        reason = "no calibration data was given, and random numbers do not vary together as inputs do"
        return [AlgorithmFacts(NAME, (), (SkippedNode("", "", reason),))]
    found, left = trained_layers(work.model, work.plan, LAYER_TYPES)
    nodes = {str(node.name): node for node in work.model.graph}
    choices = {(reader.node, reader.index): each.choice for each in work.plan for reader in each.readers}
    wanted: dict[str, InputProducts] = {}
    count = min(options.sample_limit, work.samples.count)
    for layer in list(found):
        value, data = input_value(nodes[layer.name], 0), choices.get((layer.name, 0))
        if value is None or value.const_value is not None or isinstance(data, DynamicChoice):
            found.remove(layer)
            left.append(SkippedNode(layer.name, layer.op_type, "its input is not known before run time"))
            continue
        wanted.setdefault(str(value.name), InputProducts()).add(layer, data, count)
    products = survey(
        work.runner,
        wanted,
        work.samples,
        work.settings.calibrate,
        sample_limit=options.sample_limit,
        title="how inputs vary together",
    )
    changed: list[str] = []
    standing = {name: value.const_value for name, value in work.model.graph.initializers.items()}
    before = quantized_error(work) if work.expected else math.inf
    with track(len(found), "compensating") as advance:
        for layer in found:
            node = nodes[layer.name]
            weight = constant(input_value(node, 1))
            assert weight is not None, layer.name
            sums = products[str(node.inputs[0].name)].sums[layer.name]  # type: ignore[union-attr]
            result = _compensate(layer, weight, sums, options)
            if isinstance(result, str):
                left.append(SkippedNode(layer.name, layer.op_type, result))
            else:
                set_constant(work.model, node, 1, result[0].astype(weight.dtype))
                changed.append(f"{layer.name}: {result[1]}")
            advance()
    if changed and work.expected and quantized_error(work) > before:
        for name, value in work.model.graph.initializers.items():
            value.const_value = standing.get(name, value.const_value)
        reason = "the outputs on held-out samples got worse with it"
        left += [SkippedNode(each.partition(": ")[0], "", reason) for each in changed]
        changed.clear()
    return [AlgorithmFacts(NAME, tuple(changed), tuple(left))]


@dataclass
class _Sums:
    """The sums of z z' and of x z' over rows, with x the inputs of a layer and z what rounding makes of them."""

    layer: TrainedLayer
    data: Choice | None
    row_count: int  # of one sample
    inner: Array = field(init=False)
    cross: Array = field(init=False)

    def __post_init__(self) -> None:
        groups, _, columns = self.layer.layout.matrices
        self.inner, self.cross = (np.zeros((groups, columns, columns)) for _ in range(2))


class InputProducts:
    """How the inputs of the layers that read one tensor vary together; each sample gives a few rows."""

    is_mergeable = False  # so that the sums are the same for any number of workers

    def __init__(self) -> None:
        self.sums: dict[str, _Sums] = {}

    def add(self, layer: TrainedLayer, data: Choice | None, samples: int) -> None:
        columns = layer.layout.matrices[2]
        rows = max(FEWEST_ROWS, ROWS_PER_COLUMN * columns)
        self.sums[layer.name] = _Sums(layer, data, math.ceil(rows / samples))

    def observe(self, x: Array) -> None:
        x = x.astype(np.float32, copy=False)
        if not np.isfinite(x).all():
            raise InvalidValueError("has NaN or Inf")
        blocks: dict[Choice, Array] = {}
        for each in self.sums.values():
            # a sequence that is spread evenly, and the same on every machine
            places = np.arange(1, each.row_count + 1) * GOLDEN % 1 * _positions(each.layer, x.shape)
            picks = np.unique(places.astype(np.int64))
            exact = np.moveaxis(each.layer.source.inputs(x, picks), 0, 1)
            own = exact
            if each.data is not None and _is_elementwise(each.data) and not _is_scaled(each.layer):
                own = rounded(exact, each.data)
            elif each.data is not None:
                if each.data not in blocks:
                    blocks[each.data] = rounded(x, each.data)
                own = np.moveaxis(each.layer.source.inputs(blocks[each.data], picks), 0, 1)
            each.inner += own.swapaxes(1, 2) @ own
            each.cross += exact.swapaxes(1, 2) @ own

    def end_of_sample(self) -> None:
        pass

    def merge(self, other: InputProducts) -> None:
        raise NotImplementedError("the sums are made in the order of the samples")


def _is_elementwise(choice: Choice) -> bool:
    """True if a number is rounded by itself: rows can be rounded instead of the tensor that they are taken from."""
    return isinstance(choice, FloatChoice) or (isinstance(choice, AffineChoice) and choice.axis is None)


def _is_scaled(layer: TrainedLayer) -> bool:
    """True if rows are the input times the alpha of a Gemm, which comes after rounding."""
    return isinstance(layer.source, MatrixRows) and layer.source.factor != 1.0


def _positions(layer: TrainedLayer, shape: tuple[int, ...]) -> int:
    source = layer.source
    if isinstance(source, ConvolutionRows):
        sizes = (len(window.sources(size)) for window, size in zip(source.windows, shape[2:], strict=True))
        return shape[0] * math.prod(sizes)
    is_transposed = getattr(source, "is_transposed", False)
    return shape[1] if is_transposed else math.prod(shape[:-1])


def _compensate(
    layer: TrainedLayer, weight: Array, sums: _Sums, options: CompensationOptions
) -> tuple[Array, str] | str:
    """The weights and what was gained; or why they stay."""
    grid = _grid(layer, weight)
    if isinstance(grid, str):
        return grid
    quantize, units, is_joint = grid
    matrices = layer.layout.to_matrices(weight.astype(np.float64))
    best = best_weights(matrices, sums.inner, sums.cross, options.damping)
    if options.has_activation_order:
        power = np.einsum("gii->i", sums.inner)
        if is_joint:
            units = sorted(units, key=lambda unit: -float(power[unit].mean()))
        else:
            order = np.argsort(-power, kind="stable")
            units = [order[start : start + COLUMNS] for start in range(0, len(order), COLUMNS)]
    found = compensated(best, sums.inner, units, quantize, options.damping, is_joint=is_joint)
    plain = layer.layout.to_matrices(rounded(weight, layer.weight).astype(np.float64))
    # as the network will see them: the scale of a block is that of the values that are stored
    stored = layer.layout.from_matrices(found).astype(np.float32)
    found = layer.layout.to_matrices(rounded(stored, layer.weight).astype(np.float64))
    before, after = (squared_error(best - each, sums.inner) for each in (plain, found))
    is_better = after < before
    kept = np.where(is_better[:, :, None], found, layer.layout.to_matrices(weight.astype(np.float64)))
    total = float(before.sum())
    ratio = float(np.where(is_better, after, before).sum()) / total if total > 0 else 1.0
    if not is_better.any():
        return "no output would be closer to the float network"
    return layer.layout.from_matrices(kept), f"squared error {ratio:.3g} of what it was"


def _grid(layer: TrainedLayer, weight: Array) -> tuple[Round, list[Array], bool] | str:
    """How columns round, which of them have their turn together, and whether they share a scale; or why not."""
    choice, layout = layer.weight, layer.layout
    columns = layout.matrices[2]
    apart = [np.arange(start, min(start + COLUMNS, columns)) for start in range(0, columns, COLUMNS)]
    if isinstance(choice, AffineChoice):
        scale, zero_point = (layout.to_matrices(each) for each in _spread(choice, weight.shape))
        fmt = integer_format(choice.format)

        def quantize(values: Array, of: Array) -> Array:
            step, zero = scale[:, :, of], zero_point[:, :, of]
            codes = np.clip(np.rint(values / step) + zero, fmt.qmin, fmt.qmax)
            return np.asarray((codes - zero) * step)

        return quantize, apart, False
    if isinstance(choice, BlockChoice):
        units = _blocks(choice, layer, weight.shape)
        if units is None:
            return "its blocks go across outputs"
        own = replace(choice, axis=-1)
        return (lambda values, of: block_values(values.astype(np.float32), own).astype(np.float64)), units, True
    return (lambda values, of: rounded(values, choice).astype(np.float64)), apart, False


def _spread(choice: AffineChoice, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Scale and zero point of every weight."""
    parameters = parameters_of(choice, shape)
    found = []
    for each in (parameters.scale, parameters.zero_point):
        numbers = np.asarray(each, np.float64)
        if choice.axis is not None:
            if choice.group_size is not None:
                numbers = np.repeat(numbers, choice.group_size, choice.axis)
                numbers = np.take(numbers, np.arange(shape[choice.axis]), choice.axis)
            else:
                numbers = numbers.reshape([-1 if axis == choice.axis % len(shape) else 1 for axis in range(len(shape))])
        found.append(np.broadcast_to(numbers, shape))
    return found[0], found[1]


def _blocks(choice: BlockChoice, layer: TrainedLayer, shape: tuple[int, ...]) -> list[Array] | None:
    """The columns of each block; None if a block has weights of several outputs."""
    places = layer.layout.to_matrices(np.arange(math.prod(shape)).reshape(shape))
    axis = choice.axis % len(shape)
    index = np.array(np.unravel_index(places, shape))  # [axes, groups, outputs, columns]
    along = index[axis]
    if (along != along[:1, :1]).any():
        return None
    others = [index[each][0, 0] for each in range(len(shape)) if each != axis]
    keys = np.stack([*others, along[0, 0] // choice.quantizer.format.block_size])
    _, inverse = np.unique(keys, axis=1, return_inverse=True)
    flat = inverse.reshape(-1)
    units = [np.flatnonzero(flat == number) for number in range(int(flat.max()) + 1)]
    return [unit[np.argsort(along[0, 0][unit], kind="stable")] for unit in units]

"""Correlations of the inputs of layers: sums of products over a few rows of every sample."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.errors import InvalidValueError
from quark.features.finetuning.layers import ConvolutionRows, MatrixRows, TrainedLayer, trained_layers
from quark.formats.affine import integer_format
from quark.formats.native import native_row_products
from quark.onnx.calibrate import Statistic, survey_together
from quark.onnx.deciding import Decision, Work
from quark.onnx.graph import input_value
from quark.onnx.tied import tied_products
from quark.onnx.view import view_of
from quark.plan import (
    AffineChoice,
    BlockChoice,
    Choice,
    DynamicChoice,
    FloatChoice,
    QuantizationPlan,
    Role,
    SkippedNode,
    TensorChoice,
)
from quark.rounded import block_values, rounded

Array = NDArray[Any]
ROWS_PER_COLUMN = 8  # rows of inputs that a Gram matrix is made from, for every column of it
FEWEST_ROWS = 1024
SURVEY_BYTES = 1 << 28  # bytes of sums in memory together
WAITING_BYTES = 1 << 20  # bytes of rows that are multiplied together: every product passes over a whole Gram matrix
MOST_SHRINKING = 0.9
PIECE = 256  # columns of sums that are copied together
HELD_BACK = 4  # every fourth sample
GOLDEN = (math.sqrt(5) - 1) / 2


StatisticSet = tuple[Mapping[str, Statistic], int]  # statistics by tensor, and the largest number of samples for them
Surveyed = tuple[list[TrainedLayer], dict[str, "Sums"]]  # layers, and by their names how their inputs vary together


def surveyed_layers(
    work: Decision, op_types: Collection[str], sample_limit: int, *beside: StatisticSet
) -> tuple[int, list[SkippedNode], Iterator[Surveyed]]:
    """The layers of these types whose weight the plan quantizes: how many there are, those that are left out with the
    reason, and the layers with their sums. A matrix that is stored together with the table of an embedding is left out.

    The float network runs once for as many layers as have SURVEY_BYTES of sums. Whoever takes sums out of a dictionary
    frees their memory. The first run also fills in what is given as `beside`, each with
    the most samples that it takes.
    """
    layers, left = trained_layers(work.model, work.plan, op_types)
    nodes = {str(node.name): node for node in work.model.graph}
    choices = {(reader.node, reader.index): entry.choice for entry in work.plan for reader in entry.readers}
    tied = tied_products(work.model, work.settings.choose)
    wanted: dict[str, InputProducts] = {}
    count = min(work.samples.batches(sample_limit), work.samples.count)
    for layer in list(layers):
        value, data = input_value(nodes[layer.name], 0), choices.get((layer.name, 0))
        reason = f"its weight is stored together with the table '{tied[layer.name]}'" if layer.name in tied else ""
        if value is None or value.const_value is not None or isinstance(data, DynamicChoice):
            reason = "its input is not known before run time"
        elif not reason:
            wanted.setdefault(str(value.name), InputProducts()).add(layer, data, count)
            continue
        layers.remove(layer)
        left.append(SkippedNode(layer.name, layer.op_type, reason))
    return len(layers), left, _surveys(work, layers, wanted, sample_limit, beside)


def _surveys(
    work: Decision,
    layers: Sequence[TrainedLayer],
    wanted: dict[str, InputProducts],
    sample_limit: int,
    beside: Sequence[StatisticSet],
) -> Iterator[Surveyed]:
    while wanted or beside:
        part: dict[str, InputProducts] = {}
        room = SURVEY_BYTES
        for name in list(wanted):
            room -= wanted[name].bytes
            if part and room < 0:
                break
            part[name] = wanted.pop(name)
        survey_together(
            work.runner,
            [*beside, (part, sample_limit)],
            work.samples,
            work.settings.calibrate,
            title="how inputs vary together",
        )
        beside = ()
        work.runner.rest()  # rounding takes as much memory
        sums = {name: sums for products in part.values() for name, sums in products.sums.items()}
        del part
        for own in {id(own): own for own in sums.values()}.values():  # layers that read the same rows share them
            own.finish()
            own.shrink()
        yield [layer for layer in layers if layer.name in sums], sums


def watched_inputs(work: Work, op_types: Collection[str]) -> list[str]:
    """The inputs of layers of these types with constant weights, which `surveyed_layers` reads; none without data."""
    if work.samples.is_random:
        return []
    nodes = [node for node in view_of(work.model) if node.op_type in op_types and node.is_standard]
    nodes = [node for node in nodes if (weight := node.input(1)) is not None and weight.constant is not None]
    return [value.name for node in nodes if (value := node.input(0)) is not None and value.constant is None]


@functools.lru_cache(maxsize=1024)
def evenly_spread(count: int, wanted: int) -> Array:
    """About `wanted` places out of `count`, in order, as a sequence that is spread evenly and the same everywhere. The
    array is read-only."""
    places = np.arange(1, wanted + 1) * GOLDEN % 1 * count
    kept_places = np.unique(places.astype(np.int64))
    kept_places.flags.writeable = False
    return kept_places


def with_weight_choices(plan: QuantizationPlan, choices: Mapping[str, AffineChoice]) -> QuantizationPlan:
    """The plan with other choices for the weights of these nodes, which nothing else reads."""

    def renewed(entry: TensorChoice) -> TensorChoice:
        own = [choices[reader.node] for reader in entry.readers if reader.index == 1 and reader.node in choices]
        return replace(entry, choice=own[0]) if own and entry.role is Role.WEIGHT else entry

    return replace(plan, tensors=tuple(renewed(entry) for entry in plan))


@dataclass
class Sums:
    """The sums of z z' and of x z' over rows, with x the inputs of a layer and z what rounding makes of them.

    `cross` is None if inputs stay in float, x being z, and for integers: weights that were to make up for the rounding
    of 8-bit inputs as well left MobileNet-V2 further from float than plain rounding (divergence 0.070, 0.047 without
    compensation, 0.036 without these sums), while those of 6-bit blocks gain by it (0.168; 0.253 without).
    `aside` is the part of `inner` from every fourth sample, for float inputs only."""

    layer: TrainedLayer
    data: Choice | None
    sample_count: int
    row_count: int  # rows of one sample
    seen: int = 0  # rows so far
    inner: Array = field(init=False)
    cross: Array | None = field(init=False)
    aside: Array | None = field(init=False)

    def __post_init__(self) -> None:
        groups, _, columns = self.layer.layout.matrices
        self.inner = np.zeros((groups, columns, columns), np.float32)
        is_exact = self.data is None or isinstance(self.data, AffineChoice)
        self.cross = None if is_exact else np.zeros_like(self.inner)
        self.aside = np.zeros_like(self.inner) if self.data is None else None
        self._waiting: list[tuple[Array, Array | None]] = []  # rows of x and of z that are not in the sums yet

    @property
    def bytes(self) -> int:
        """The largest number of bytes while rows are added."""
        return (
            sum(matrix.nbytes for matrix in (self.inner, self.cross, self.aside) if matrix is not None)
            + 2 * WAITING_BYTES
        )

    def add(self, exact: Array, own: Array | None, is_held_back: bool) -> None:
        """Add rows of x and z, [rows, groups, columns]. Without rows of z, they are those of x, rounded if `data` says
        how."""
        if self.aside is not None and is_held_back:
            add_products(exact, exact, self.aside, None)
        self.seen += len(exact)
        self._waiting.append((exact, own))
        if sum(rows.nbytes for rows, _ in self._waiting) >= WAITING_BYTES:
            self._add_waiting()

    def _add_waiting(self) -> None:
        if not self._waiting:
            return
        exact = np.concatenate([rows for rows, _ in self._waiting])
        given = [rows for _, rows in self._waiting if rows is not None]
        self._waiting.clear()
        if given or self.data is None:
            add_products(np.concatenate(given) if given else exact, exact, self.inner, self.cross)
        elif isinstance(self.data, AffineChoice):
            add_rounded_products(exact, self.data, self.inner)
        else:
            add_products(rounded(exact, self.data), exact, self.inner, self.cross)

    def finish(self) -> None:
        """Add the last rows, and fill the symmetric sums left of their diagonal, where `add_products` may leave
        zeros."""
        self._add_waiting()
        for matrices in (self.inner, self.aside):
            if matrices is None:
                continue
            for start in range(0, matrices.shape[-1], PIECE):  # with small arrays only
                stop = start + PIECE
                own = np.triu(matrices[:, start:stop, start:stop])
                matrices[:, start:stop, start:stop] = own + np.triu(own, 1).swapaxes(1, 2)
                matrices[:, stop:, start:stop] = matrices[:, start:stop, stop:].swapaxes(1, 2)

    def merge(self, other: Sums) -> None:
        """Add the sums over the rows of other samples."""
        self._add_waiting()
        other._add_waiting()
        self.sample_count += other.sample_count
        self.seen += other.seen
        for mine, more in ((self.inner, other.inner), (self.cross, other.cross), (self.aside, other.aside)):
            if mine is not None and more is not None:
                mine += more

    def in_float64(self) -> Sums:
        """The same in float64."""
        wide = copy.copy(self)
        for name in ("inner", "cross", "aside"):
            matrices = getattr(self, name)
            setattr(wide, name, None if matrices is None else matrices.astype(np.float64))
        return wide

    def shrink(self) -> None:
        """Add to the diagonal what so few rows cannot tell from chance: fewer rows than columns show correlations that
        other inputs do not have (Chen et al., Shrinkage algorithms for MMSE covariance estimation, 2010)."""
        size = self.inner.shape[-1]
        for matrices in (self.inner,) if self.cross is None else (self.inner, self.cross):
            for matrix in matrices:
                total, squares = float(np.trace(matrix)), float(np.vdot(matrix, matrix))
                spread = squares - total**2 / size
                if not self.seen or total <= 0 or spread <= 0:
                    continue
                share = min(
                    ((1 - 2 / size) * squares + total**2) / ((self.seen + 1 - 2 / size) * spread), MOST_SHRINKING
                )
                matrix[np.diag_indices(size)] += share / (1 - share) * total / size


class InputProducts:
    """The correlations of the inputs of the layers that read one tensor; each sample contributes a few rows."""

    is_mergeable = False  # not merged, so that the sums are the same for any number of workers

    def __init__(self) -> None:
        self.sums: dict[str, Sums] = {}
        self._samples = 0

    def add(self, layer: TrainedLayer, data: Choice | None, samples: int) -> None:
        """Look at the inputs of a layer as well. Layers that read the same rows share their sums."""
        groups, _, columns = layer.layout.matrices
        for sums in self.sums.values():
            is_same = sums.inner.shape == (groups, columns, columns) and sums.layer.source == layer.source
            if is_same and sums.data == data:
                self.sums[layer.name] = sums
                return
        rows = max(FEWEST_ROWS, ROWS_PER_COLUMN * columns)
        self.sums[layer.name] = Sums(layer, data, samples, math.ceil(rows / samples))

    @property
    def bytes(self) -> int:
        """The largest number of bytes while the sums are computed."""
        distinct = {id(sums): sums for sums in self.sums.values()}.values()
        return sum(sums.bytes for sums in distinct)

    def observe(self, x: Array) -> None:
        x = x.astype(np.float32, copy=False)
        blocks: dict[Choice, Array] = {}
        for sums in {id(sums): sums for sums in self.sums.values()}.values():
            picks = evenly_spread(_positions(sums.layer, x.shape), sums.row_count)
            exact, own = sums.layer.source.inputs(x, picks), None
            if not np.isfinite(exact).all():
                raise InvalidValueError("has NaN or Inf")
            if sums.data is not None and (_is_scaled(sums.layer) or not _is_elementwise(sums.data)):
                own = None if _is_scaled(sums.layer) else rows_in_blocks(sums.layer, sums.data, exact, x.ndim)
                if own is None:
                    if sums.data not in blocks:
                        blocks[sums.data] = rounded(x, sums.data)
                    own = sums.layer.source.inputs(blocks[sums.data], picks)
            sums.add(exact, own, self._samples % HELD_BACK == HELD_BACK - 1)

    def end_of_sample(self) -> None:
        self._samples += 1

    def merge(self, other: InputProducts) -> None:
        """Add the sums of another process."""
        own = {id(sums): (sums, other.sums[name]) for name, sums in self.sums.items()}
        for sums, others in own.values():
            sums.merge(others)


def rows_in_blocks(layer: TrainedLayer, choice: Choice, rows: Array, rank: int) -> Array | None:
    """The rows of a tensor of that rank, rounded in blocks as the whole tensor would be; None if a block has numbers of
    several rows, or a scale that depends on other rows."""
    if not isinstance(choice, BlockChoice) or not choice.quantizer.is_fixed or _is_transposed(layer):
        return None
    source, axis = layer.source, choice.axis % rank
    if isinstance(source, ConvolutionRows) and axis == 1:
        taps = math.prod(window.kernel for window in source.windows)
        channels = rows.reshape(len(rows), -1, taps)  # if a tap is in the padding, its whole block is zero
        return block_values(channels, replace(choice, axis=1)).reshape(rows.shape)
    return block_values(rows, replace(choice, axis=-1)) if isinstance(source, MatrixRows) and axis == rank - 1 else None


def add_products(own: Array, exact: Array, inner: Array, cross: Array | None) -> None:
    """Add the sums of z z' to `inner`, at least on its diagonal and right of it, and of x z' to `cross`.

    `own` are rows of z and `exact` of x, [rows, groups, columns]. Compiled code and numpy agree up to the rounding of a
    float32 sum over the rows. Compiled code does not start threads, which would only wait for each other here: two
    samples are looked at at a time, and most of the products are small.
    """
    native = native_row_products()
    if native is not None:
        native.add(np.ascontiguousarray(own), np.ascontiguousarray(exact), inner, cross)
        return
    right = own.swapaxes(0, 1)
    inner += right.swapaxes(1, 2) @ right
    if cross is not None:
        cross += np.moveaxis(exact, 0, 2) @ right


def add_rounded_products(rows: Array, choice: AffineChoice, inner: Array) -> None:
    """The same for rows that are rounded with one scale, without cross products."""
    native, fmt, zero_point = native_row_products(), integer_format(choice.format), choice.zero_point[0]
    if native is None:
        add_products(rounded(rows, choice), rows, inner, None)
        return
    rounding = (choice.scale[0], fmt.qmin - zero_point, fmt.qmax - zero_point)
    native.add(np.ascontiguousarray(rows), None, inner, None, rounding)


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
    return shape[1] if _is_transposed(layer) else math.prod(shape[:-1])


def _is_transposed(layer: TrainedLayer) -> bool:
    return isinstance(layer.source, MatrixRows) and layer.source.is_transposed

"""The built-in measures: what each computes from the float and the quantized network's output, sample by sample.

A meter needs little memory. NaN and infinite values of the quantized network count as wrong.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.compare.measures import cosine_of, decibels, edit_distance, same_largest, structural_similarity
from quark.errors import InvalidValueError, ModelError
from quark.measures.boxes import MATCH_IOU, NMS_IOU, Layout, count_matches, detections, find_layout

Array = NDArray[Any]
Value = str | int | float | None


class Meter(ABC):
    """Collects samples; `result` is the value of the measure over all of them."""

    has_equal_shapes = True  # False: the outputs of the two networks may differ in shape
    least_samples = 1

    @abstractmethod
    def add(self, expected: Array, actual: Array) -> None:
        """Add one sample: the float network's output and the quantized one's."""

    @abstractmethod
    def result(self) -> float: ...


class CosineMeter(Meter):
    """Mean cosine between the outputs."""

    def __init__(self, pool: str = "none") -> None:
        self._has_pooling = pool == "mean"
        self._cosines: list[float] = []

    def add(self, expected: Array, actual: Array) -> None:
        if self._has_pooling:
            expected, actual = _pooled(expected), _pooled(actual)
        y, z = _finite_pair(expected, actual)
        is_equal = np.array_equal(y, z)
        if is_equal or not np.isfinite(z).all():
            self._cosines.append(float(is_equal))
            return
        self._cosines.append(cosine_of(float(y @ z), float(y @ y), float(z @ z)) or 0.0)

    def result(self) -> float:
        return _mean(self._cosines)


class RankMeter(Meter):
    """Spearman correlation of the similarities between samples."""

    least_samples = 3

    def __init__(self) -> None:
        self._vectors: tuple[list[Array], list[Array]] = [], []

    def add(self, expected: Array, actual: Array) -> None:
        for vectors, output in zip(self._vectors, (expected, actual), strict=True):
            vectors.append(_pooled(output))

    def result(self) -> float:
        first, second = (_similarities(np.stack(vectors)) for vectors in self._vectors)
        if not np.isfinite(second).all() or np.ptp(second) == 0.0:
            return 0.0
        if not np.isfinite(first).all() or np.ptp(first) == 0.0:
            raise InvalidValueError(
                "the float network's embeddings are all equally similar, so that they have no order to compare with: "
                "give other samples"
            )
        ranks = _ranks(first), _ranks(second)
        return 1.0 if np.array_equal(*ranks) else float(np.corrcoef(*ranks)[0, 1])


class ArgmaxMeter(Meter):
    """Share of positions with the same largest class along an axis."""

    def __init__(self, axis: int = -1) -> None:
        self._axis = axis
        self._same = self._count = 0

    def add(self, expected: Array, actual: Array) -> None:
        if not -expected.ndim <= self._axis < expected.ndim:
            raise InvalidValueError(f"axis {self._axis}: the output has shape {list(expected.shape)}")
        same = same_largest(expected, actual, self._axis)
        if actual.dtype.kind == "f":
            same = same & ~np.isnan(actual).any(self._axis)
        self._same += int(np.sum(same))
        self._count += int(np.size(same))

    def result(self) -> float:
        return self._same / self._count if self._count else 1.0


class Top1Meter(ArgmaxMeter):
    """Share of samples with the same largest class."""

    def add(self, expected: Array, actual: Array) -> None:
        if expected.ndim < 2 or expected.shape[1] < 2 or math.prod(expected.shape[2:]) != 1:
            raise ModelError(
                f"the output of shape {list(expected.shape)} has no scores of classes: expected [n, classes]; for "
                "classes along another axis use argmax?axis=AXIS"
            )
        super().add(expected.reshape(expected.shape[:2]), actual.reshape(actual.shape[:2]))


@dataclass
class BoxMeter(Meter):
    """F1 of the quantized network's boxes over all samples, with the float network's as the truth."""

    threshold: float = 0.25
    iou: float = MATCH_IOU
    nms: float = NMS_IOU
    layout: str = "auto"
    has_equal_shapes = False
    _resolved: Layout | None = None
    _matches: int = 0
    _expected: int = 0
    _actual: int = 0

    def add(self, expected: Array, actual: Array) -> None:
        if self._resolved is None:  # once, from the float network: a broken output may look like another layout
            self._resolved = find_layout(expected, self.layout)
        pairs = [detections(output, self._resolved, self.threshold, self.nms) for output in (expected, actual)]
        if len(pairs[0]) != len(pairs[1]):
            raise ModelError(f"outputs of shapes {list(expected.shape)} and {list(actual.shape)} cannot be compared")
        for truth, predicted in zip(*pairs, strict=True):
            self._matches += count_matches(truth, predicted, self.iou)
            self._expected += len(truth)
            self._actual += len(predicted)

    def result(self) -> float:
        if not self._expected:
            raise InvalidValueError(
                f"the float network finds no boxes with a score above {self.threshold:g} in the samples: give samples "
                "with objects, or lower the threshold"
            )
        return 2 * self._matches / (self._expected + self._actual)


class MaskMeter(Meter):
    """Mean intersection over union of the values above a threshold."""

    def __init__(self, threshold: float = 0.5) -> None:
        self._threshold = threshold
        self._overlaps: list[float] = []
        self._has_pixels = False

    def add(self, expected: Array, actual: Array) -> None:
        first, second = expected > self._threshold, actual > self._threshold
        union = int(np.sum(first | second))
        self._has_pixels |= bool(first.any())
        self._overlaps.append(int(np.sum(first & second)) / union if union else 1.0)

    def result(self) -> float:
        if not self._has_pixels:
            raise InvalidValueError(
                f"the float network's masks are empty: no value is above {self._threshold:g}. Give samples with "
                "objects, or another threshold"
            )
        return _mean(self._overlaps)


class PsnrMeter(Meter):
    """Decibels of the mean squared error relative to the squared peak; infinite for equal outputs."""

    def __init__(self, peak: float | None = None) -> None:
        self._peak = peak
        self._errors: list[float] = []

    def add(self, expected: Array, actual: Array) -> None:
        y, z = _finite_pair(expected, actual)
        peak = _range_of(y) if self._peak is None else self._peak
        with np.errstate(over="ignore", invalid="ignore"):
            error = float(np.mean((y - z) ** 2)) / peak**2 if y.size else 0.0
        self._errors.append(error if math.isfinite(error) else math.inf)

    def result(self) -> float:
        return -decibels(_mean(self._errors))


class SsimMeter(Meter):
    """Mean structural similarity with a Gaussian window of 11 pixels; smaller images have a smaller window."""

    def __init__(self, peak: float | None = None, layout: str = "nchw") -> None:
        self._peak, self._layout = peak, layout
        self._values: list[float] = []

    def add(self, expected: Array, actual: Array) -> None:
        if expected.ndim < 2 or (self._layout == "nhwc" and expected.ndim < 3):
            raise ModelError(f"an output of shape {list(expected.shape)} is not an image: expected [n, channels, h, w]")
        y, z = (_planes(output, self._layout) for output in (expected, actual))
        if not np.isfinite(z).all():
            self._values.append(0.0)
            return
        peak = _range_of(y) if self._peak is None else self._peak
        self._values.append(structural_similarity(y, z, peak))

    def result(self) -> float:
        return _mean(self._values)


@dataclass
class ErrorRateMeter(Meter):
    """Edit distance between the decoded sequences, over all samples, as a share of the float network's length."""

    blank: int = 0
    separator: int | None = None
    layout: str = "ntc"
    has_words: bool = False
    has_equal_shapes = False
    _edits: int = 0
    _length: int = 0

    def __post_init__(self) -> None:
        if self.has_words and self.separator is None:
            raise InvalidValueError(
                "measure 'wer' needs the class that separates words: give wer?separator=ID, or use cer"
            )

    def add(self, expected: Array, actual: Array) -> None:
        first, second = self._decoded(expected), self._decoded(actual)
        if len(first) != len(second):
            raise ModelError(f"outputs of shapes {list(expected.shape)} and {list(actual.shape)} cannot be compared")
        for wanted, predicted in zip(first, second, strict=True):
            if self.has_words:
                wanted, predicted = self._words(wanted), self._words(predicted)
            numbers: dict[Any, int] = {}
            sides = [
                np.array([numbers.setdefault(symbol, len(numbers)) for symbol in ids], int)
                for ids in (wanted, predicted)
            ]
            self._edits += edit_distance(*sides)
            self._length += len(wanted)

    def result(self) -> float:
        if not self._length:
            return float(self._edits)
        return self._edits / self._length

    def _decoded(self, output: Array) -> list[list[Any]]:
        """Return the ids of each sample: integers unchanged, class scores by greedy CTC decoding."""
        if output.dtype.kind in "iu":
            return [list(row) for row in np.atleast_2d(output).reshape(-1, output.shape[-1] if output.ndim else 1)]
        scores = output[None] if output.ndim == 2 else output
        if scores.ndim != 3:
            raise ModelError(
                f"the output of shape {list(output.shape)} holds no sequences: expected class scores [n, time, "
                "classes], or integer ids [n, time]"
            )
        if self.layout == "tnc":
            scores = scores.swapaxes(0, 1)
        sequences = []
        for best in scores.argmax(-1):
            starts = np.flatnonzero(np.diff(best, prepend=-1))  # a class that repeats counts once
            sequences.append([int(label) for label in best[starts] if label != self.blank])
        return sequences

    def _words(self, ids: Sequence[Any]) -> list[Any]:
        words: list[list[Any]] = [[]]
        for symbol in ids:
            if symbol == self.separator:
                words.append([])
            else:
                words[-1].append(symbol)
        return [tuple(word) for word in words if word]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a measure: its type, its default, and its valid values."""

    kind: type
    default: Value = None
    lowest: float = -math.inf
    highest: float = math.inf
    choices: tuple[str, ...] = ()

    def parse(self, text: str, where: str) -> Value:
        """Parse text; an error names `where` and what is expected."""
        try:
            value: Value = self.kind(text)
        except ValueError:
            raise InvalidValueError(f"{where}: expected {self.expected}, got {text!r}") from None
        if self.choices and value not in self.choices:
            raise InvalidValueError(f"{where}: expected {self.expected}, got {text!r}")
        if isinstance(value, (int, float)) and not self.lowest <= value <= self.highest:
            raise InvalidValueError(f"{where}: expected {self.expected}, got {text!r}")
        return value

    @property
    def expected(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        noun = {int: "an integer", float: "a number"}.get(self.kind, "text")
        if math.isfinite(self.lowest) and math.isfinite(self.highest):
            return f"{noun} from {self.lowest:g} to {self.highest:g}"
        return f"{noun} of at least {self.lowest:g}" if math.isfinite(self.lowest) else noun


@dataclass(frozen=True)
class BuiltIn:
    """A measure with a name. `make` takes its parameters, except `output`, which every measure has."""

    line: str
    make: Callable[..., Meter]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    is_higher_better: bool = True


_PEAK = Parameter(float, lowest=1e-30)
_SEQUENCES = {"blank": Parameter(int, 0, lowest=0), "layout": Parameter(str, "ntc", choices=("ntc", "tnc"))}
_SEPARATOR = {"separator": Parameter(int, lowest=0)}

BUILT_IN: Mapping[str, BuiltIn] = {
    "cosine": BuiltIn(
        "cosine between the outputs of each sample; the mean",
        CosineMeter,
        {"pool": Parameter(str, "none", choices=("none", "mean"))},
    ),
    "rank": BuiltIn("embeddings: rank correlation (Spearman) of all similarities between samples", RankMeter),
    "argmax": BuiltIn(
        "share of positions with the same largest class along an axis", ArgmaxMeter, {"axis": Parameter(int, -1)}
    ),
    "top1": BuiltIn("classifiers: share of samples with the same largest class", Top1Meter),
    "box_f1": BuiltIn(
        "detectors: F1 of the boxes, same class and enough overlap",
        BoxMeter,
        {
            "threshold": Parameter(float, 0.25, lowest=0, highest=1),
            "iou": Parameter(float, MATCH_IOU, lowest=0, highest=1),
            "nms": Parameter(float, NMS_IOU, lowest=0, highest=1),
            "layout": Parameter(str, "auto", choices=("auto", *(layout.value for layout in Layout))),
        },
    ),
    "mask_iou": BuiltIn(
        "masks: overlap (intersection over union) of the values above a threshold; the mean over samples",
        MaskMeter,
        {"threshold": Parameter(float, 0.5)},
    ),
    "psnr": BuiltIn("images: peak signal-to-noise ratio in decibels", PsnrMeter, {"peak": _PEAK}),
    "ssim": BuiltIn(
        "images: structural similarity",
        SsimMeter,
        {"peak": _PEAK, "layout": Parameter(str, "nchw", choices=("nchw", "nhwc"))},
    ),
    "cer": BuiltIn("text: character error rate of greedy CTC decoding, or of ids", ErrorRateMeter, _SEQUENCES, False),
    "wer": BuiltIn(
        "text: word error rate; separator=ID is the class between words",
        lambda **given: ErrorRateMeter(has_words=True, **given),
        _SEQUENCES | _SEPARATOR,
        False,
    ),
}


def _finite_pair(expected: Array, actual: Array) -> tuple[Array, Array]:
    """Return both as flat float64, without the positions where the float network is not finite."""
    y, z = expected.astype(np.float64).ravel(), actual.astype(np.float64).ravel()
    usable = np.isfinite(y)
    return (y, z) if usable.all() else (y[usable], z[usable])


def _pooled(output: Array) -> Array:
    """Return the mean over all axes except the last: one vector per sample."""
    if not output.ndim or not output.size:
        raise ModelError(f"an output of shape {list(output.shape)} has no embeddings: expected [n, features]")
    vector: Array = output.reshape(-1, output.shape[-1]).astype(np.float64).mean(0)
    return vector


def _range_of(values: Array) -> float:
    """Return the range of the values; 1 for a constant image."""
    finite = values[np.isfinite(values)]
    return (float(np.ptp(finite)) if finite.size else 0.0) or 1.0


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 1.0


def _similarities(vectors: Array) -> Array:
    """Return the cosine similarities of all pairs of rows."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(norms > 0, norms, 1.0)
    # rounded, so that pairs that differ only by the order of summation tie
    similarities: Array = np.round(unit @ unit.T, 12)[np.triu_indices(len(vectors), 1)]
    return similarities


def _ranks(values: Array) -> Array:
    """Return the rank of each value; equal values share their mean rank."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean_ranks: Array = np.cumsum(counts) - (counts - 1) / 2
    return mean_ranks[places]


def _planes(images: Array, layout: str) -> Array:
    values = images.astype(np.float64)
    if layout == "nhwc":
        values = np.moveaxis(values, -1, -3)
    return values.reshape(-1, *values.shape[-2:])

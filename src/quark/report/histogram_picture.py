"""Histograms as PNG pictures: bars, axes with ticks, a title, and vertical lines at values of interest.

Drawn with pillow alone. Both the option SaveTensorHistFig and the tools that show distributions use these functions.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from quark.errors import InvalidValueError
from quark.files.output import complete, writing
from quark.text import printable

WIDTH, HEIGHT = 960, 600
LEFT, TOP, RIGHT, BOTTOM = 110, 60, WIDTH - 30, HEIGHT - 80  # of the area between the axes
MOST_BARS = 256
_TICKS = 8
_MOST_NAME = 200  # bytes of a file name, with room for a suffix
_MOST_TITLE = 90
_INK, _GRID, _BAR, _MARK = (40, 40, 40), (226, 226, 226), (52, 106, 166), (200, 40, 40)

Numbers = npt.ArrayLike
Mark = tuple[float, str]  # a value and its label


def write_histogram(
    path: str | os.PathLike[str],
    counts: Numbers,
    edges: Numbers,
    title: str,
    marks: Iterable[Mark] = (),
    value_label: str = "Values",
    count_label: str = "Frequency",
) -> Path:
    """Draw a histogram and write it as a PNG file. Return its path.

    `counts[i]` values lie between `edges[i]` and `edges[i + 1]`. Neighbouring bins are joined if there are more than
    256. Each mark is a value and its label, drawn as a dashed vertical line with an entry in the legend.
    """
    heights, places = _checked(counts, edges)
    drawn = [(float(value), label) for value, label in marks if math.isfinite(value)]
    return _save(_draw(*_joined(heights, places), title, drawn, (value_label, count_label)), Path(path))


def write_ranges(
    path: str | os.PathLike[str], lowest: Numbers, highest: Numbers, title: str, labels: tuple[str, str]
) -> Path:
    """Draw a vertical line from `lowest[i]` to `highest[i]` at each i, such as the range of every channel, and write it
    as a PNG file. Return its path. `labels` are those of the two axes."""
    low, high = np.asarray(lowest, np.float64).ravel(), np.asarray(highest, np.float64).ravel()
    if not low.size or low.shape != high.shape or not np.isfinite([low, high]).all():
        raise InvalidValueError(f"{low.size} lowest and {high.size} highest values: expected as many finite numbers")
    bottom, top = float(low.min()), float(high.max())
    if not top > bottom:
        bottom, top = bottom - 0.5, top + 0.5
    margin = (top - bottom) * 0.03
    plot = _Plot((-0.5, max(low.size, 2) - 0.5), (bottom - margin, top + margin))
    width = max(1, round(0.6 * (RIGHT - LEFT) / max(low.size, 40)))
    for index in range(low.size):
        x, end = plot.across(index), plot.up(float(low[index]))
        plot.draw.line((x, min(plot.up(float(high[index])), end - 1), x, end), fill=_BAR, width=width)
    plot.add_axes(title, labels)
    return _save(plot.image, Path(path))


def _save(image: Image.Image, target: Path) -> Path:
    with writing(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
    with complete(target) as unfinished, unfinished.open("r+b") as file:
        image.save(file, format="PNG")
    return target


def histogram_of(values: Any, bins: int = 2048) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return counts and edges of the finite numbers of an array, evenly spaced between its extremes."""
    numbers = np.asarray(values, np.float64).ravel()
    numbers = numbers[np.isfinite(numbers)]
    if not numbers.size:
        return np.zeros(1, np.int64), np.array([-0.5, 0.5])
    lowest, highest = float(numbers.min()), float(numbers.max())
    if not highest - lowest > np.spacing(max(abs(lowest), abs(highest))) * bins:  # too narrow for distinct edges
        reach = max(0.5, abs(highest) / 2)
        return np.array([numbers.size], np.int64), np.array([lowest - reach, highest + reach])
    counts, edges = np.histogram(numbers, bins, (lowest, highest))
    return counts.astype(np.int64), edges


def picture_names(tensors: Iterable[str], suffix: str = ".png") -> dict[str, str]:
    """Return a file name for the picture of each tensor: slashes, dots and colons become underscores, and names that
    would be the same are numbered.

    >>> picture_names(["/conv/out:0", "_conv.out_0"])
    {'/conv/out:0': '_conv_out_0.png', '_conv.out_0': '_conv_out_0_2.png'}
    """
    names: dict[str, str] = {}
    taken: set[str] = set()
    for tensor in tensors:
        plain = "".join("_" if letter in '/\\.:*?"<>|' or not letter.isprintable() else letter for letter in tensor)
        plain = plain.encode(errors="replace")[:_MOST_NAME].decode(errors="ignore") or "_"
        name, number = plain, 1
        while name.casefold() in taken:  # some file systems ignore case
            number += 1
            name = f"{plain}_{number}"
        taken.add(name.casefold())
        names[tensor] = name + suffix
    return names


def _checked(counts: Numbers, edges: Numbers) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    heights, places = np.asarray(counts, np.float64).ravel(), np.asarray(edges, np.float64).ravel()
    if not heights.size or places.size != heights.size + 1:
        raise InvalidValueError(
            f"a histogram of {heights.size} counts needs {heights.size + 1} edges, not {places.size}"
        )
    if not (np.isfinite(heights).all() and np.isfinite(places).all() and (heights >= 0).all()):
        raise InvalidValueError("counts and edges of a histogram are finite numbers, and counts are not negative")
    if (np.diff(places) < 0).any():
        raise InvalidValueError("the edges of a histogram are in ascending order")
    if places[0] == places[-1]:
        places = np.linspace(places[0] - 0.5, places[0] + 0.5, places.size)
    return heights, places


def _joined(
    heights: npt.NDArray[np.float64], places: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Join neighbouring bins until there are at most MOST_BARS."""
    step = -(-heights.size // MOST_BARS)
    if step == 1:
        return heights, places
    starts = np.arange(0, heights.size, step)
    return np.add.reduceat(heights, starts), np.append(places[starts], places[-1])


def _draw(
    heights: npt.NDArray[np.float64],
    places: npt.NDArray[np.float64],
    title: str,
    marks: Sequence[Mark],
    labels: tuple[str, str],
) -> Image.Image:
    lowest = min([float(places[0]), *(value for value, _ in marks)])
    highest = max([float(places[-1]), *(value for value, _ in marks)])
    plot = _Plot((lowest, highest), (0.0, max(1.0, float(heights.max()) * 1.05)))
    for start, end, height in zip(places[:-1], places[1:], heights, strict=True):
        if height:
            left, right = plot.across(start), plot.across(end)
            plot.draw.rectangle((left, min(plot.up(height), BOTTOM - 1), max(left, right - 1), BOTTOM), fill=_BAR)
    plot.add_axes(title, labels)
    for value, _ in marks:
        _dashed(plot.draw, plot.across(value))
    _legend(plot.draw, marks, plot.small)
    return plot.image


class _Plot:
    """An empty picture with a grid, for values `x` from left to right and `y` from bottom to top."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.x, self.y = x, y
        self.image = Image.new("RGB", (WIDTH, HEIGHT), "white")
        self.draw = ImageDraw.Draw(self.image)
        self.small, self.large = _font(14), _font(18)
        for tick in ticks(*y):
            self.draw.line((LEFT, self.up(tick), RIGHT, self.up(tick)), fill=_GRID)
            self.draw.text((LEFT - 8, self.up(tick)), f"{tick:.6g}", _INK, self.small, anchor="rm")

    def across(self, value: float) -> float:
        """The pixel column of a value."""
        return LEFT + (value - self.x[0]) / (self.x[1] - self.x[0]) * (RIGHT - LEFT)

    def up(self, value: float) -> float:
        """The pixel row of a value."""
        return BOTTOM - (value - self.y[0]) / (self.y[1] - self.y[0]) * (BOTTOM - TOP)

    def add_axes(self, title: str, labels: tuple[str, str]) -> None:
        """Draw both axes, over what was drawn before."""
        for tick in ticks(*self.x):
            self.draw.line((self.across(tick), BOTTOM, self.across(tick), BOTTOM + 5), fill=_INK)
            self.draw.text((self.across(tick), BOTTOM + 9), f"{tick:.6g}", _INK, self.small, anchor="mt")
        self.draw.line((LEFT, TOP, LEFT, BOTTOM, RIGHT, BOTTOM), fill=_INK)
        self.draw.text(((LEFT + RIGHT) / 2, 24), _shown(title), _INK, self.large, anchor="mm")
        self.draw.text(((LEFT + RIGHT) / 2, HEIGHT - 24), _shown(labels[0]), _INK, self.small, anchor="mm")
        self.draw.text((LEFT, TOP - 8), _shown(labels[1]), _INK, self.small, anchor="rb")


def ticks(lowest: float, highest: float) -> list[float]:
    """Return round numbers between both, in steps of 1, 2 or 5 times a power of ten; at most nine or so.

    >>> ticks(-0.4, 1.1)
    [-0.4, -0.2, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    rough = (highest - lowest) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(lowest / step - 1e-9), math.floor(highest / step + 1e-9)
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(index * step, min(digits, 300)) + 0.0 for index in range(first, last + 1)]


def _dashed(draw: ImageDraw.ImageDraw, x: float) -> None:
    for y in range(TOP, BOTTOM, 12):
        draw.line((x, y, x, min(y + 7, BOTTOM)), fill=_MARK, width=2)


def _legend(draw: ImageDraw.ImageDraw, marks: Sequence[Mark], font: Any) -> None:
    for index, (value, label) in enumerate(marks):
        text = f"{_shown(label)}: {value:.6g}"
        y = TOP + 12 + 20 * index
        box = draw.textbbox((RIGHT - 10, y), text, font, anchor="rm")
        draw.rectangle((box[0] - 4, box[1] - 2, box[2] + 4, box[3] + 2), fill="white")
        draw.text((RIGHT - 10, y), text, _MARK, font, anchor="rm")


def _shown(text: str) -> str:
    """Return text for a picture: one printable line of limited length, in characters that the built-in font has."""
    line = printable(text).encode("ascii", "replace").decode()
    if len(line) <= _MOST_TITLE:
        return line
    half = (_MOST_TITLE - 3) // 2
    return f"{line[:half]}...{line[-half:]}"


def _font(size: int) -> Any:
    try:
        return ImageFont.load_default(size)
    except (TypeError, ImportError):  # pillow 10.0, or a build without FreeType: one small font
        return ImageFont.load_default()

"""Size against drop as an SVG: every trial a dot, the front a line, the budgets dashed.

Drops reach from hundredths of a point to a hundred, and may be negative: the axis is asinh(drop), which is even around
zero and logarithmic far from it. What takes part in the line is best in size and drop; the front of the table also
counts latency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from quark.report.quantities import size_text
from quark.search.budget import Limits
from quark.search.ranking import is_within
from quark.search.trial import Measurement, Trial

WIDTH, HEIGHT = 880, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 20, 52
_DROPS = (-10.0, -5.0, -2.0, -1.0, 0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_LINE_HEIGHT, _LETTER_WIDTH = 13.0, 7.6


@dataclass(frozen=True)
class _Scale:
    """From sizes and drops to places in the drawing."""

    least_bytes: float
    most_bytes: float
    lowest: float
    highest: float

    def x(self, size: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (size - self.least_bytes) / (self.most_bytes - self.least_bytes)

    def y(self, drop: float) -> float:
        low, high = math.asinh(self.lowest), math.asinh(self.highest)
        share = (math.asinh(min(max(drop, self.lowest), self.highest)) - low) / (high - low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def plot(trials: Sequence[Trial], limits: Limits) -> str:
    """The drawing; names in it are escaped."""
    points = [(each, each.measured) for each in trials if each.measured is not None]
    if not points:
        return "<p>Nothing to draw: no trial worked.</p>"
    scale = _scale([figures for _, figures in points], limits)
    line = _best_in_two(points)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="File size against accuracy drop of every trial">',
        *_axes(scale),
        *_limits(scale, limits),
        _front_line(scale, [figures for _, figures in line]),
        *(_dot(scale, trial, figures, limits) for trial, figures in points),
        *_labels(scale, line),
        "</svg>",
    ]
    return "\n".join(parts)


def _scale(figures: Sequence[Measurement], limits: Limits) -> _Scale:
    sizes = [each.size_bytes for each in figures]
    shown = [*sizes, *([limits.size_bytes] if limits.size_bytes <= 1.5 * max(sizes) else [])]
    least, most = 0.75 * min(shown), 1.05 * max(shown) + 1
    drops = [each.drop for each in figures if math.isfinite(each.drop)] or [0.0]
    return _Scale(least, most, min(0.0, *drops) - 0.2, max(1.0, *drops) * 1.15)


def _best_in_two(points: Sequence[tuple[Trial, Measurement]]) -> list[tuple[Trial, Measurement]]:
    """Those with less drop than everything that is as small, the smallest first."""
    best: list[tuple[Trial, Measurement]] = []
    for trial, figures in sorted(points, key=lambda each: (each[1].size_bytes, each[1].drop, each[0].name)):
        if not best or figures.drop < best[-1][1].drop:
            best.append((trial, figures))
    return best


def _axes(scale: _Scale) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for drop in _DROPS:
        if scale.lowest <= drop <= scale.highest:
            y = scale.y(drop)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{drop:g}</text>')
    for size in _round_sizes(scale.least_bytes, scale.most_bytes):
        x = scale.x(size)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{size_text(int(size))}</text>'
        )
    middle = (TOP + bottom) / 2
    parts.append(f'<text class="axis" x="{(LEFT + right) / 2}" y="{HEIGHT - 10}" text-anchor="middle">file size</text>')
    parts.append(
        f'<text class="axis" x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">'
        f"drop, percentage points</text>"
    )
    return parts


def _round_sizes(least: float, most: float) -> list[float]:
    """About five, at round numbers."""
    rough = (most - least) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough)
    return [step * number for number in range(math.ceil(least / step), int(most / step) + 1)]


def _limits(scale: _Scale, limits: Limits) -> list[str]:
    parts = []
    if scale.least_bytes <= limits.size_bytes <= scale.most_bytes:
        x = scale.x(limits.size_bytes)
        parts.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    if scale.lowest <= limits.drop <= scale.highest:
        y = scale.y(limits.drop)
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    return parts


def _front_line(scale: _Scale, figures: Sequence[Measurement]) -> str:
    places = " ".join(f"{scale.x(each.size_bytes):.1f},{scale.y(each.drop):.1f}" for each in figures)
    return f'<polyline class="front" points="{places}"/>'


def _dot(scale: _Scale, trial: Trial, figures: Measurement, limits: Limits) -> str:
    words = f"{trial.name}: {size_text(figures.size_bytes)}, {figures.drop:.2f} points, {figures.latency_ms:.2f} ms"
    kind = f"dot {trial.stage.value}{'' if is_within(trial, limits) else ' beyond'}"
    place = f'cx="{scale.x(figures.size_bytes):.1f}" cy="{scale.y(figures.drop):.1f}"'
    return f'<circle class="{kind}" {place} r="5"><title>{escape(words)}</title></circle>'


def _labels(scale: _Scale, line: Sequence[tuple[Trial, Measurement]]) -> list[str]:
    """Names of the dots on the line, below and to the left of them: nothing is smaller and better, so that no dot lies
    there. Moved down where they would overlap, and to the right where the axis is near."""
    parts: list[str] = []
    places: list[tuple[float, float]] = []
    for trial, figures in reversed(line):
        x, y, width = scale.x(figures.size_bytes), scale.y(figures.drop) + 14, _LETTER_WIDTH * len(trial.name)
        is_left = x - width > LEFT
        start = x - 7 - width if is_left else x + 9
        while any(abs(y - other) < _LINE_HEIGHT and abs(start - beside) < width for beside, other in places):
            y += _LINE_HEIGHT
        places.append((start, y))
        anchor = 'end" x="' + f"{x - 7:.1f}" if is_left else 'start" x="' + f"{start:.1f}"
        parts.append(f'<text class="label" text-anchor="{anchor}" y="{y:.1f}">{escape(trial.name)}</text>')
    return parts

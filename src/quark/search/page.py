"""The page of a search: the recommendation, a plot and a table, in the style of the accuracy report.

The plot shows size against drop: every trial is a dot, budgets are dashed, and a line connects the trials with the
smallest drop for their size. (The front of the table also counts latency.) Drops reach from hundredths of a point to a
hundred, and may be negative, so the axis is asinh(drop): symmetric around zero and logarithmic far from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from quark.report.page import document
from quark.report.quantities import count_of, size_text
from quark.search.trial import Limits, Measurement, Trial, is_within

if TYPE_CHECKING:
    from quark.search.searching import SearchResult

WIDTH, HEIGHT = 880, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 20, 52
_DROPS = (-10.0, -5.0, -2.0, -1.0, 0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_LINE_HEIGHT, _LETTER_WIDTH = 13.0, 7.6
_STYLE = """
.verdict h1 { font-size: 1.4rem; overflow-wrap: anywhere; }
.chart svg { cursor: auto; }
.chart .limit { stroke: var(--collapsed); }
.chart .front { fill: none; stroke: var(--accumulated); stroke-width: 1.5; }
.chart .dot { stroke: var(--surface); }
.chart .dot.beyond { fill-opacity: 0.35; }
.chart .dot.direct { fill: var(--accumulated); }
.chart .dot.recipe { fill: var(--ok); }
.chart .dot.mixed { fill: var(--local); }
.chart .dot.finetuned { fill: var(--share); }
.chart .label { fill: var(--text); font-weight: 400; }
.legend i { width: 0.7rem; height: 0.7rem; border: 0; border-radius: 50%; background: var(--accumulated); }
.legend .recipe i { background: var(--ok); }
.legend .mixed i { background: var(--local); }
.legend .finetuned i { background: var(--share); }
#trials .within td { background: var(--ok-soft); }
#trials td.name, #trials td.reason { white-space: normal; overflow-wrap: anywhere; }
"""
_SCRIPT = """
setUpTheme();
const command = byId("command");
if (command) command.replaceWith(copyable(command.textContent, "the command"));

const table = byId("trials");
const rows = [...table.tBodies[0].rows];
const able = rows.filter((row) => !row.classList.contains("failed"));
const failed = rows.filter((row) => row.classList.contains("failed"));
let sorted = { column: null, direction: 1 };

function valueOf(row, column) {
  const { dataset, textContent } = row.cells[column];
  return dataset.value === undefined ? textContent : dataset.value === "" ? null : Number(dataset.value);
}

function sortBy(column) {
  sorted = { column, direction: sorted.column === column ? -sorted.direction : 1 };
  const order = (a, b) => compareValues(valueOf(a, column), valueOf(b, column), sorted.direction);
  table.tBodies[0].replaceChildren(...[...able].sort(order), ...failed);
  markSorted(table, column, sorted.direction);
}

for (const heading of table.tHead.rows[0].cells) {
  heading.replaceChildren(sortButton(heading.textContent, () => sortBy(heading.cellIndex)));
}
document.documentElement.dataset.ready = "true";
"""
_HEADINGS = ("configuration", "stage", "size", "of float", "drop", "divergence", "ms/sample", "seconds", "front")
_STAGES = (("direct", "preset"), ("recipe", "with a recipe"), ("mixed", "mixed"), ("finetuned", "finetuned"))


def page(result: SearchResult) -> str:
    """Return the page as HTML. Names are escaped."""
    source = result.source
    top1 = "" if source.top1 is None else f", top-1 {100 * source.top1:.2f} %"
    top1 += "" if source.value is None else f", {source.metric} {source.value:.4g}; drop in percent of it"
    facts = f"float: {size_text(source.size_bytes)}, {source.latency_ms:.2f} ms{top1}; judged on {source.judged_on}"
    legend = "".join(f'<span class="{name}"><i></i>{words}</span>' for name, words in _STAGES)
    tone, headline = ("is-collapsed", "nothing worked") if result.trials else ("is-unchecked", "nothing was tried yet")
    if result.best is not None:
        tone, headline = "is-ok", f"{result.best.name} fits best"
    elif result.nearest is not None:
        tone, headline = "is-degraded", f"nothing is within the budgets, {result.nearest.name} is nearest"
    front = {trial.name for trial in result.front}
    kinds = ["", "", *(' class="number"' for _ in _HEADINGS[2:])]
    heads = "".join(f'<th scope="col"{kind}>{heading}</th>' for kind, heading in zip(kinds, _HEADINGS, strict=True))
    rows = "\n".join(_row(trial, result, trial.name in front) for trial in result.trials)
    table = f'<table id="trials" class="sheet"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    limits = result.limits
    budgets = [f"size {size_text(int(limits.size_bytes))}"] if limits.size_bytes < math.inf else []
    budgets += [f"drop {limits.drop:g} points"] if limits.drop < math.inf else []
    budgets += [f"latency {limits.latency_ms:.2f} ms"] if limits.latency_ms < math.inf else []
    lists = _list("Notes", list(result.notes))
    lists += _list("Not tried", [f"{name}: {reason}" for name, reason in result.skipped])
    body = f"""<main id="main" tabindex="-1">
<section class="verdict {tone}">
<p class="verdict-files">{escape(source.name)}</p>
<h1>{escape(headline)}</h1>
<p class="why">{escape(facts)}{f"<br>budgets: {', '.join(budgets)}" if budgets else ""}</p>
{f'<code id="command">{escape(result.command)}</code>' if result.command else ""}
</section>
<section id="plot" aria-labelledby="plot-title">
<h2 id="plot-title">Size and accuracy drop</h2>
<p class="lead">Pale dots are beyond a budget. The line connects the smallest drops for their size.</p>
<p class="legend">{legend}</p>
<div class="chart">{plot(result.trials, limits)}</div>
</section>
<section id="table" aria-labelledby="table-title">
<h2 id="table-title">All trials</h2>
<p class="lead">Rows within the budgets are highlighted.</p>
<div class="table-frame" role="region" aria-labelledby="table-title" tabindex="0">{table}</div>
</section>
<section aria-label="Notes">{lists}</section>
</main>"""
    sections = (("plot", "Plot"), ("table", "Trials"))
    return document("search", f"Search: {source.name}", body, style=_STYLE, script=_SCRIPT, sections=sections)


def _row(trial: Trial, result: SearchResult, is_on_front: bool) -> str:
    figures = trial.measured
    start = f'<td class="name">{escape(trial.name)}</td><td>{trial.stage.value}</td>'
    if figures is None:
        return f'<tr class="failed">{start}<td class="reason" colspan="7">{escape(trial.failure)}</td></tr>'
    share = 100 * figures.size_bytes / result.source.size_bytes
    error = "" if figures.error is None else f" ± {figures.error:.2f}"
    cells = (
        (figures.size_bytes, size_text(figures.size_bytes)),
        (share, f"{share:.1f} %"),
        (figures.drop, f"{figures.drop:.2f}{error}"),
        (figures.kl, "-" if figures.kl is None else f"{figures.kl:.4f}"),
        (figures.latency_ms, f"{figures.latency_ms:.2f}"),
        (trial.seconds, f"{trial.seconds:.1f}"),
        (int(is_on_front), "yes" if is_on_front else ""),
    )
    kind = ' class="within"' if is_within(trial, result.limits) else ""
    rest = ""
    for value, text in cells:  # scripts sort by the value, in the spelling of JavaScript
        key = "" if value is None or math.isnan(value) else str(value).replace("inf", "Infinity")
        rest += f'<td class="number" data-value="{key}">{text}</td>'
    return f"<tr{kind}>{start}{rest}</tr>"


def _list(heading: str, items: list[str]) -> str:
    if not items:
        return ""
    words = f"{heading} ({count_of(len(items), 'line')})" if len(items) > 1 else heading
    lines = "".join(f"<li>{escape(item)}</li>" for item in items)
    is_open = " open" if heading == "Notes" else ""
    return f"<details{is_open}><summary>{words}</summary><ul>{lines}</ul></details>"


@dataclass(frozen=True)
class _Scale:
    """Maps sizes and drops to coordinates."""

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
    """Return the plot as SVG. Names are escaped."""
    points = [(trial, trial.measured) for trial in trials if trial.measured is not None]
    if not points:
        return "<p>Nothing to draw: no trial worked.</p>"
    sizes = [figures.size_bytes for _, figures in points]
    shown = [*sizes, *([limits.size_bytes] if limits.size_bytes <= 1.5 * max(sizes) else [])]
    drops = [figures.drop for _, figures in points if math.isfinite(figures.drop)] or [0.0]
    scale = _Scale(0.75 * min(shown), 1.05 * max(shown) + 1, min(0.0, *drops) - 0.2, max(1.0, *drops) * 1.15)
    line: list[tuple[Trial, Measurement]] = []  # trials with less drop than every smaller or equally small one
    for trial, figures in sorted(points, key=lambda point: (point[1].size_bytes, point[1].drop, point[0].name)):
        if not line or figures.drop < line[-1][1].drop:
            line.append((trial, figures))
    places = " ".join(f"{scale.x(figures.size_bytes):.1f},{scale.y(figures.drop):.1f}" for _, figures in line)
    marks = []
    if scale.least_bytes <= limits.size_bytes <= scale.most_bytes:
        x = scale.x(limits.size_bytes)
        marks.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    if scale.lowest <= limits.drop <= scale.highest:
        y = scale.y(limits.drop)
        marks.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    dots = []
    for trial, figures in points:
        words = f"{trial.name}: {size_text(figures.size_bytes)}, {figures.drop:.2f} points, {figures.latency_ms:.2f} ms"
        kind = f"dot {trial.stage.value}{'' if is_within(trial, limits) else ' beyond'}"
        place = f'cx="{scale.x(figures.size_bytes):.1f}" cy="{scale.y(figures.drop):.1f}"'
        dots.append(f'<circle class="{kind}" {place} r="5"><title>{escape(words)}</title></circle>')
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="File size against accuracy drop of every trial">',
        *_axes(scale),
        *marks,
        f'<polyline class="front" points="{places}"/>',
        *dots,
        *_labels(scale, line),
        "</svg>",
    ]
    return "\n".join(parts)


def _axes(scale: _Scale) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for drop in _DROPS:
        if scale.lowest <= drop <= scale.highest:
            y = scale.y(drop)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{drop:g}</text>')
    rough = (scale.most_bytes - scale.least_bytes) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    for number in range(math.ceil(scale.least_bytes / step), int(scale.most_bytes / step) + 1):
        size = step * number
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


def _labels(scale: _Scale, line: Sequence[tuple[Trial, Measurement]]) -> list[str]:
    """Return the names of the dots on the line, below and to the left of them, where no dot can be.

    Names that would overlap are moved down; those near the axis are moved to the right.
    """
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

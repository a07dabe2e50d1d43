"""Pages about a study: the score of every trial, and how much each parameter mattered."""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH, _HEIGHT, _MARGIN = 720, 320, 40
_FRAME = (
    '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>body{{font-family:'
    "sans-serif;margin:2em}}td{{padding:0 1em 0 0}}circle{{fill:#36c}}polyline{{fill:none;stroke:#c33}}"
    "rect{{fill:#36c}}</style></head><body><h1>{title}</h1>{body}</body></html>\n"
)


def history_page(trials: Sequence[Mapping[str, Any]], direction: str) -> str:
    """Return a page with the score of each trial, and a line for the best so far."""
    done = [(trial["number"], trial["value"]) for trial in trials if trial["value"] is not None]
    finite = [value for _, value in done if math.isfinite(value)]
    if not finite:
        return _FRAME.format(title="Optimization history", body="<p>No trial has a score.</p>")
    low, high = min(finite), max(finite)
    last = max(number for number, _ in done) or 1

    def place(number: int, value: float) -> str:
        x = _MARGIN + (_WIDTH - 2 * _MARGIN) * number / last
        y = _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * ((value - low) / (high - low) if high > low else 0.5)
        return f"{x:.1f},{y:.1f}"

    better = max if direction == "maximize" else min
    best, line, dots = done[0][1], [], []
    for number, value in done:
        best = better(best, value)
        line.append(place(number, best))
        x, y = place(number, value).split(",")
        dots.append(f'<circle cx="{x}" cy="{y}" r="4"><title>trial {number}: {value:g}</title></circle>')
    drawing = f'<polyline points="{" ".join(line)}"/>{"".join(dots)}'
    note = f"Scores from {low:g} to {high:g}; trial 0 on the left, {last} on the right. The line is the best so far."
    body = f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{drawing}</svg><p>{note}</p>'
    return _FRAME.format(title="Optimization history", body=body)


def importances(trials: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return for each parameter the share of the variance of the scores that its values explain, largest first.

    Numbers are grouped into quarters by rank. A parameter with one value explains nothing.
    """
    done = [trial for trial in trials if trial["value"] is not None and math.isfinite(trial["value"])]
    mean = sum(trial["value"] for trial in done) / max(len(done), 1)
    total = sum((trial["value"] - mean) ** 2 for trial in done)
    shares = {}
    for name in dict.fromkeys(key for trial in done for key in trial["params"]):
        groups: dict[str, list[float]] = defaultdict(list)
        values = sorted({trial["params"][name] for trial in done if _is_number(trial["params"].get(name))})
        for trial in done:
            value = trial["params"].get(name)
            quarter = values.index(value) * 4 // len(values) if _is_number(value) and len(values) > 4 else None
            groups[repr(value) if quarter is None else f"quarter {quarter}"].append(trial["value"])
        between = sum(len(group) * (sum(group) / len(group) - mean) ** 2 for group in groups.values())
        shares[name] = between / total if total else 0.0
    return dict(sorted(shares.items(), key=lambda named: -named[1]))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def importance_page(trials: Sequence[Mapping[str, Any]]) -> str:
    """Return a page with the importance of each parameter."""
    rows = "".join(
        f'<tr><td>{html.escape(name)}</td><td><svg width="300" height="12">'
        f'<rect width="{300 * share:.0f}" height="12"/></svg></td><td>{share:.0%}</td></tr>'
        for name, share in importances(trials).items()
    )
    note = "<p>The share of the variance of the scores that the values of each parameter explain.</p>"
    return _FRAME.format(title="Parameter importance", body=f"{note}<table>{rows}</table>")

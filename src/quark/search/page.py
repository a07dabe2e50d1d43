"""The search as one page: the recommendation, the plot and the table. It needs no network, and opens from the disk."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from quark.report.quantities import count_of, size_text
from quark.search.plot import plot
from quark.search.ranking import is_within
from quark.search.trial import Trial

if TYPE_CHECKING:
    from quark.search.searching import SearchResult

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2024; --soft: #60666c; --line: #dfe3e6; --front: #0b68cb;
  --direct: #0b68cb; --recipe: #12805c; --mixed: #a35200; --finetuned: #8e3fb0; --limit: #c62a2f; --good: #e6f6ec; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181b; --ink: #e8eaec; --soft: #9aa2a9; --line: #2c3237;
  --front: #6cb2ff; --direct: #6cb2ff; --recipe: #4cc38a; --mixed: #ffb86b; --finetuned: #cf8ff0; --limit: #ff6369;
  --good: #14301f; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto;
  max-width: 1040px; padding: 0 1rem; }
h1 { font-size: 1.35rem; margin: 0 0 .3rem; } p { margin: .3rem 0 .8rem; } .soft { color: var(--soft); }
code { background: var(--line); border-radius: 4px; padding: .15em .35em; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.grid { stroke: var(--line); } svg .tick, svg .axis { fill: var(--soft); }
.limit { stroke: var(--limit); stroke-dasharray: 6 4; } .front { fill: none; stroke: var(--front); stroke-width: 1.5; }
.dot { stroke: var(--paper); stroke-width: 1; } .dot.beyond { fill-opacity: .35; }
.direct { fill: var(--direct); } .recipe { fill: var(--recipe); } .mixed { fill: var(--mixed); }
.finetuned { fill: var(--finetuned); } .legend span { margin-right: 1.1em; }
.legend i { border-radius: 50%; display: inline-block; height: .7em; margin-right: .35em; width: .7em; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, td.words { text-align: left; white-space: normal; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid var(--front); }
tr.within { background: var(--good); } li { margin: .15rem 0; }
@media print { body { margin: 0; } }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_SCRIPT = """
document.querySelectorAll("th button").forEach((button) => button.addEventListener("click", () => {
  const head = button.closest("th"), body = head.closest("table").tBodies[0];
  const column = head.cellIndex, up = head.getAttribute("aria-sort") !== "ascending";
  head.parentNode.querySelectorAll("th").forEach((each) => each.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const order = (a, b) => { const [x, y] = [key(a), key(b)], [m, n] = [Number(x), Number(y)];
    return Number.isNaN(m) || Number.isNaN(n) ? x.localeCompare(y) : m - n; };
  const [able, failed] = ["tr:not(.failed)", "tr.failed"].map((each) => [...body.querySelectorAll(each)]);
  body.append(...able.sort((a, b) => (up ? 1 : -1) * order(a, b)), ...failed);
}));
"""
_HEADINGS = ("configuration", "stage", "size", "of float", "drop", "divergence", "ms/sample", "seconds", "front")
_STAGES = (("direct", "preset"), ("recipe", "with a recipe"), ("mixed", "mixed"), ("finetuned", "finetuned"))


def page(result: SearchResult) -> str:
    """HTML, all in one; whatever came from names is escaped."""
    source = result.source
    top1 = "" if source.top1 is None else f", top-1 {100 * source.top1:.2f} %"
    top1 += "" if source.value is None else f", {source.metric} {source.value:.4g}; drop in percent of it"
    facts = f"float: {size_text(source.size_bytes)}, {source.latency_ms:.2f} ms{top1}; judged on {source.judged_on}"
    legend = "".join(f'<span><i style="background:var(--{name})"></i>{words}</span>' for name, words in _STAGES)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<title>Search: {escape(source.name)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(source.name)}: {escape(_headline(result))}</h1>",
        f'<p class="soft">{escape(facts)}{_limits(result)}</p>',
        f"<p><code>{escape(result.command)}</code></p>" if result.command else "",
        plot(result.trials, result.limits),
        f'<p class="legend soft">{legend}pale: beyond a budget; line: least drop for its size</p>',
        f'<div class="wide">{_table(result)}</div>',
        _list("Notes", list(result.notes)),
        _list("Not tried", [f"{name}: {reason}" for name, reason in result.skipped]),
        f"<script>{_SCRIPT}</script></body></html>",
    ]
    return "\n".join(part for part in parts if part)


def _headline(result: SearchResult) -> str:
    if result.best is not None:
        return f"{result.best.name} fits best"
    if result.nearest is not None:
        return f"nothing is within the budgets, {result.nearest.name} is nearest"
    return "nothing worked" if result.trials else "nothing was tried yet"


def _limits(result: SearchResult) -> str:
    limits = result.limits
    words = [
        f"size {size_text(int(limits.size_bytes))}" if limits.size_bytes < math.inf else "",
        f"drop {limits.drop:g} points" if limits.drop < math.inf else "",
        f"latency {limits.latency_ms:.2f} ms" if limits.latency_ms < math.inf else "",
    ]
    given = [each for each in words if each]
    return f"<br>budgets: {', '.join(given)}" if given else ""


def _table(result: SearchResult) -> str:
    front = {each.name for each in result.front}
    heads = "".join(f'<th scope="col"><button type="button">{each}</button></th>' for each in _HEADINGS)
    rows = "\n".join(_row(each, result, each.name in front) for each in result.trials)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _row(trial: Trial, result: SearchResult, is_on_front: bool) -> str:
    figures = trial.measured
    start = f"<td>{escape(trial.name)}</td><td>{trial.stage.value}</td>"
    if figures is None:
        return f'<tr class="failed">{start}<td class="words" colspan="7">{escape(trial.failure)}</td></tr>'
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
    rest = "".join(f'<td data-value="{value}">{text}</td>' for value, text in cells)
    return f"<tr{kind}>{start}{rest}</tr>"


def _list(heading: str, items: list[str]) -> str:
    if not items:
        return ""
    words = f"{heading} ({count_of(len(items), 'line')})" if len(items) > 1 else heading
    lines = "".join(f"<li>{escape(each)}</li>" for each in items)
    return f"<details{' open' if heading == 'Notes' else ''}><summary>{words}</summary><ul>{lines}</ul></details>"

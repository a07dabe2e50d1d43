"""The page of a search: the recommendation, the plot and the table, in the frame and style of the report's page."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from quark.report.page import document
from quark.report.quantities import count_of, size_text
from quark.search.plot import plot
from quark.search.ranking import is_within
from quark.search.trial import Trial

if TYPE_CHECKING:
    from quark.search.searching import SearchResult

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
    tone, headline = _headline(result)
    lists = _list("Notes", list(result.notes))
    lists += _list("Not tried", [f"{name}: {reason}" for name, reason in result.skipped])
    body = f"""<main id="main" tabindex="-1">
<section class="verdict {tone}">
<p class="verdict-files">{escape(source.name)}</p>
<h1>{escape(headline)}</h1>
<p class="why">{escape(facts)}{_limits(result)}</p>
{f'<code id="command">{escape(result.command)}</code>' if result.command else ""}
</section>
<section id="plot" aria-labelledby="plot-title">
<h2 id="plot-title">Size and accuracy drop</h2>
<p class="lead">Pale dots are beyond a budget. The line connects the smallest drops for their size.</p>
<p class="legend">{legend}</p>
<div class="chart">{plot(result.trials, result.limits)}</div>
</section>
<section id="table" aria-labelledby="table-title">
<h2 id="table-title">All trials</h2>
<p class="lead">Rows within the budgets are highlighted.</p>
<div class="table-frame" role="region" aria-labelledby="table-title" tabindex="0">{_table(result)}</div>
</section>
<section aria-label="Notes">{lists}</section>
</main>"""
    sections = (("plot", "Plot"), ("table", "Trials"))
    return document("search", f"Search: {source.name}", body, style=_STYLE, script=_SCRIPT, sections=sections)


def _headline(result: SearchResult) -> tuple[str, str]:
    """The tone of the headline, a class of the shared style, and its words."""
    if result.best is not None:
        return "is-ok", f"{result.best.name} fits best"
    if result.nearest is not None:
        return "is-degraded", f"nothing is within the budgets, {result.nearest.name} is nearest"
    return ("is-collapsed", "nothing worked") if result.trials else ("is-unchecked", "nothing was tried yet")


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
    kinds = ["", "", *(' class="number"' for _ in _HEADINGS[2:])]
    heads = "".join(f'<th scope="col"{kind}>{each}</th>' for kind, each in zip(kinds, _HEADINGS, strict=True))
    rows = "\n".join(_row(each, result, each.name in front) for each in result.trials)
    return f'<table id="trials" class="sheet"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'


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
    rest = "".join(f'<td class="number" data-value="{_sort_key(value)}">{text}</td>' for value, text in cells)
    return f"<tr{kind}>{start}{rest}</tr>"


def _sort_key(value: float | None) -> str:
    """A number as JavaScript reads it; empty if there is none."""
    return "" if value is None or math.isnan(value) else str(value).replace("inf", "Infinity")


def _list(heading: str, items: list[str]) -> str:
    if not items:
        return ""
    words = f"{heading} ({count_of(len(items), 'line')})" if len(items) > 1 else heading
    lines = "".join(f"<li>{escape(each)}</li>" for each in items)
    is_open = " open" if heading == "Notes" else ""
    return f"<details{is_open}><summary>{words}</summary><ul>{lines}</ul></details>"

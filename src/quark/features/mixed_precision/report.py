"""Mixed precision in the report: a line, a short table, and the targets that were missed."""

from __future__ import annotations

from math import inf, isfinite
from typing import TYPE_CHECKING

from quark.features.mixed_precision.plan import Figure, Metric, MixedPlan, Precision
from quark.report.console import cell, plain_table
from quark.report.quantities import count_of

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_HIGH, MOST_LOW = 6, 3


def mixed_line(plan: MixedPlan) -> str:
    """The number of layers with each of the types, and the figures of the network.

    >>> from quark.features.mixed_precision.plan import LayerPrecision
    >>> plan = MixedPlan((LayerPrecision("a"), LayerPrecision("b")), "int16", "int8")
    >>> mixed_line(plan.with_lowered(["b"], (Figure(Metric.SQNR, 31.2, 25.0),)))
    'mixed precision: 1 of 2 layers in int8, 1 in int16; SQNR 31.2 dB (wanted at least 25.0 dB)'
    """
    if not plan.layers:
        return "mixed precision: found no layer that could have the lower types"
    lowered, total = len(plan.lowered), len(plan.layers)
    parts = [f"{lowered} of {count_of(total, 'layer')} in {plan.low}"]
    if lowered < total:
        parts.append(f"{total - lowered} in {plan.high}")
    figures = [
        f"{figure} (wanted {figure.wanted})" if isfinite(figure.limit) else str(figure) for figure in plan.figures
    ]
    return f"mixed precision: {'; '.join([', '.join(parts), *figures])}"


def mixed_table(plan: MixedPlan) -> RenderableType:
    """The most sensitive layers at the higher types, and at the lower ones; the JSON has all."""

    table = plain_table()
    table.add_column("layer", overflow="fold")
    table.add_column("sensitivity", justify="right")
    table.add_column("choice")
    falling = sorted(plan.layers, key=lambda layer: 0.0 if layer.rank == inf else -layer.rank)
    high = [layer for layer in falling if layer.choice is Precision.HIGH][:MOST_HIGH]
    low = [layer for layer in falling if layer.choice is Precision.LOW][:MOST_LOW]
    shown = [layer for layer in falling if layer in high or layer in low]
    for planned in shown:
        types = plan.high if planned.choice is Precision.HIGH else plan.low
        known = "-" if planned.rank == inf else f"{planned.rank:.2e}"
        table.add_row(cell(planned.layer), known, cell(f"{planned.choice.value}: {types}"))
    rest = len(plan.layers) - len(shown)
    if rest:
        more = sum(layer.choice is Precision.HIGH for layer in plan.layers if layer not in shown)
        table.add_row(f"and {rest} more" + (f", {more} of them high" if more else ""))
    return table


def missed_remarks(plan: MixedPlan) -> list[str]:
    """A remark for each target that was missed, with both numbers."""
    return [f"mixed precision: {figure}, wanted {figure.wanted}: {_reason(plan, figure)}" for figure in plan.missed]


def _reason(plan: MixedPlan, figure: Figure) -> str:
    lowered, total = len(plan.lowered), len(plan.layers)
    if figure.metric in (Metric.BITS, Metric.BIT_OPERATIONS):
        return f"it cannot be reached, even with all layers in {plan.low}"
    if not lowered:
        return f"it is not reached even with all layers in {plan.high}"
    return f"with {lowered} of {total} layers in {plan.low}, as they were chosen before it was measured"

"""Mixed precision for reading: a line, a short table, and what was missed."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from quark.mixed_precision import Figure, LayerPrecision, Metric, MixedPlan, Precision
from quark.report.quantities import count_of

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_HIGH, MOST_LOW = 6, 3


def mixed_line(plan: MixedPlan) -> str:
    """How many layers have which types, and how the network does.

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
    figures = [f"{each} (wanted {each.wanted})" if isfinite(each.limit) else str(each) for each in plan.figures]
    return f"mixed precision: {'; '.join([', '.join(parts), *figures])}"


def mixed_table(plan: MixedPlan) -> RenderableType:
    """The layers that stayed high and the most sensitive of the others; the JSON has all."""
    from quark.report.console import cell, plain_table

    table = plain_table()
    table.add_column("layer", overflow="fold")
    table.add_column("sensitivity", justify="right")
    table.add_column("choice")
    shown = _shown(plan)
    for each in shown:
        types = plan.high if each.choice is Precision.HIGH else plan.low
        known = "-" if each.sensitivity is None else f"{each.sensitivity:.2e}"
        table.add_row(cell(each.layer), known, cell(f"{each.choice.value}: {types}"))
    rest = len(plan.layers) - len(shown)
    if rest:
        high = sum(each.choice is Precision.HIGH for each in plan.layers if each not in shown)
        table.add_row(f"and {rest} more" + (f", {high} of them high" if high else ""))
    return table


def _shown(plan: MixedPlan) -> list[LayerPrecision]:
    falling = sorted(plan.layers, key=lambda each: -(each.sensitivity or 0.0))
    high = [each for each in falling if each.choice is Precision.HIGH][:MOST_HIGH]
    low = [each for each in falling if each.choice is Precision.LOW][:MOST_LOW]
    return [each for each in falling if each in high or each in low]


def missed_remarks(plan: MixedPlan) -> list[str]:
    """What was wanted and not reached, with both numbers."""
    return [f"mixed precision: {each}, wanted {each.wanted}: {_reason(plan, each)}" for each in plan.missed]


def _reason(plan: MixedPlan, figure: Figure) -> str:
    lowered, total = len(plan.lowered), len(plan.layers)
    if figure.metric in (Metric.BITS, Metric.BIT_OPERATIONS):
        return f"it cannot be reached, even with all layers in {plan.low}"
    if not lowered:
        return f"it is not reached even with all layers in {plan.high}"
    return f"with {lowered} of {total} layers in {plan.low}, as they were chosen before it was measured"

"""The summary of a quantization that a person reads when it is done.

The verdict comes first, in a frame and a colour where it is bad, with what to do about it. Then sizes, what was
quantized with what, what stayed in float and why, what was protected, what the ranges came from, what algorithms did,
how close each output is, and remarks.

Without a terminal it is plain text of 80 columns. Long lists end in "and N more": the JSON beside the model has all.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from quark.account import Report
from quark.fidelity import OutputFidelity, Verdict, worst_text
from quark.plan import Role, SkippedNode
from quark.report.advice import advice, measured_alternatives
from quark.report.algorithms import MIXED_PRECISION, algorithm_line
from quark.report.mixed_precision import mixed_line, mixed_table
from quark.report.quantities import count_of, listed, size_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType  # noqa: TID251

MOST_OUTPUTS = 6
MOST_REASONS = 4
MOST_REMARKS = 5
MOST_LAYERS = 3
PROTECTED = "protected: "  # how the reasons begin that protection gives
COLOURS = {
    Verdict.OK: "green",
    Verdict.DEGRADED: "yellow",
    Verdict.COLLAPSED: "red",
    Verdict.UNCHECKED: "yellow",
}
MEANINGS = {
    Verdict.OK: "outputs agree with the float network",
    Verdict.DEGRADED: "Some outputs differ clearly from the float network's. Measure the task before using this file.",
    Verdict.COLLAPSED: "Outputs no longer follow the float network's. Do not use this file.",
    Verdict.UNCHECKED: "Nothing was compared with the float network, so the quality of this file is unknown.",
}


def print_summary(report: Report, console: Console | None = None) -> None:
    """Write the summary to a console; to stdout where none is given."""
    from quark.report.console import Console as PrintableConsole

    console = console or PrintableConsole()
    for part in summary_parts(report, has_boxes=console.is_terminal):
        console.print(part)


def summary_text(report: Report, columns: int = 80) -> str:
    """The summary as plain text, no line longer than `columns`."""
    import io

    from quark.report.console import Console

    stream = io.StringIO()
    print_summary(report, Console(file=stream, width=columns, force_terminal=False, color_system=None))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def report_json(report: Report) -> dict[str, Any]:
    """The report as JSON can hold it: the same content as the file beside the model."""
    content: dict[str, Any] = json.loads(report.to_json())
    return content


def summary_parts(report: Report, has_boxes: bool) -> Iterator[RenderableType]:
    """The verdict, the facts, the outputs, the remarks: what rich prints, in this order."""
    yield _verdict(report, has_boxes)
    yield _facts(report)
    if report.outputs:
        yield ""
        yield _outputs(report.outputs)
        failing = [
            f"output '{output.name}' {part.text()}: {part.verdict.value}"
            for output in report.outputs
            for part in sorted(output.parts, key=lambda part: -part.severity)
            if part.verdict is not Verdict.OK and len(output.parts) > 1
        ]
        if failing:
            yield ""
            yield _remarks(failing, "failing part")
    if report.mixed is not None and report.mixed.layers:
        yield ""
        yield mixed_table(report.mixed)
    if report.remarks:
        yield ""
        yield _remarks(report.remarks)


def _verdict(report: Report, has_boxes: bool) -> RenderableType:
    from rich import box
    from rich.panel import Panel

    from quark.report.console import cell

    verdict, colour = report.verdict, COLOURS[report.verdict]
    count, sample = _samples(report)
    worst = worst_text(report.outputs, sample)
    if verdict is Verdict.OK:
        says_little = report.calibration.is_random
        word = ("OK, PERHAPS: ", "bold yellow") if says_little else ("OK: ", f"bold {colour}")
        doubt = ", which says little" if says_little else ""
        reason = f"{MEANINGS[verdict]} on {count_of(count, sample)}{doubt} (worst: {worst})"
        return cell("").append(*word).append_text(cell(reason))
    lines = [MEANINGS[verdict]]
    if worst:
        lines.append(f"Worst of {count_of(count, sample)}: {worst}")
    lines += [f"- {tip}" if verdict is Verdict.UNCHECKED else f"- try: {tip}" for tip in advice(report)]
    frame = box.HEAVY if has_boxes else box.ASCII
    return Panel(
        _stacked(lines),
        title=f" {verdict.value.upper()} ",
        title_align="left",
        border_style=f"bold {colour}",
        box=frame,
    )


def _samples(report: Report) -> tuple[int, str]:
    """How many samples the verdict is about, and what to call one of them."""
    facts = report.calibration
    where = "calibration" if facts.is_verdict_on_calibration else "held-out"
    count = facts.samples if facts.is_verdict_on_calibration else facts.held_out
    return count, f"{'random' if facts.is_random else where} sample"


def _facts(report: Report) -> RenderableType:
    from quark.report.console import Table, cell

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _fact_rows(report):
        grid.add_row(name, cell(value))
    return grid


def _fact_rows(report: Report) -> Iterator[tuple[str, str]]:
    yield "file", f"{report.source.name}  {size_text(report.source.bytes)}"
    if report.result is not None:
        ratio = report.result.bytes / max(report.source.bytes, 1)
        yield (
            "written",
            f"{report.result.name}  {size_text(report.result.bytes)}, {100 * ratio:.1f} % of the float file",
        )
    if report.packing is not None:
        packing = report.packing
        weights = count_of(packing.weights, "weight")
        yield "packed", f"{weights} at {packing.bits_per_weight:.2f} bits, {packing.profile}"
    if report.measure is not None:
        yield "measure", str(report.measure)
    yield "config", report.config_name
    for role in Role:
        formats = report.formats(role)
        if formats:
            yield _plural(role), listed(f"{count} {name}" for name, count in formats.items())
    op_types = Counter(report.op_types.get(node, "rewritten") for node in report.quantized_nodes)
    yield "quantized", listed(f"{count} {name}" for name, count in op_types.most_common()) or "nothing"
    yield from _float_rows(report)
    yield from _protected_rows(report)
    yield "calibration", _calibration(report)
    if report.rewrites:
        yield "rewrites", listed(f"{each.count} {each.name.replace('_', ' ')}" for each in report.rewrites)
    for index, facts in enumerate(report.algorithms):
        is_mixed = facts.name == MIXED_PRECISION
        line = mixed_line(report.mixed) if is_mixed and report.mixed else algorithm_line(facts)
        yield "" if index else "algorithms", line


def _plural(role: Role) -> str:
    return {Role.ACTIVATION: "activations", Role.WEIGHT: "weights", Role.BIAS: "biases"}[role]


def _float_rows(report: Report) -> Iterator[tuple[str, str]]:
    """What stayed in float, one line for each reason, the commonest first."""
    ordered = _by_reason(node for node in report.plan.skipped if not node.reason.startswith(PROTECTED))
    for index, (reason, op_types) in enumerate(ordered[:MOST_REASONS]):
        nodes = listed(f"{count} {name}" for name, count in op_types.most_common())
        yield "" if index else "in float", f"{nodes}: {reason}"
    if len(ordered) > MOST_REASONS:
        rest = sum(op_types.total() for _, op_types in ordered[MOST_REASONS:])
        yield "", f"and {count_of(rest, 'node')} for {count_of(len(ordered) - MOST_REASONS, 'other reason')}"


def _by_reason(nodes: Iterable[SkippedNode]) -> list[tuple[str, Counter[str]]]:
    """Reasons and the operators of their nodes, the commonest reason first."""
    by_reason: dict[str, Counter[str]] = {}
    for node in nodes:
        # a reason that names the operator is the same reason for another operator
        by_reason.setdefault(node.reason.replace(f" {node.op_type}", ""), Counter())[node.op_type] += 1
    return sorted(by_reason.items(), key=lambda item: -item[1].total())


def _protected_rows(report: Report) -> Iterator[tuple[str, str]]:
    """What protection kept out of 8 bits and why, what it cost, and the wider presets that were measured."""
    facts = report.protection
    if facts is None:
        return
    layers = {layer.node for layer in facts.layers}
    nodes = (node for node in report.plan.skipped if node.reason.startswith(PROTECTED) and node.node not in layers)
    lines = []
    for reason, op_types in _by_reason(nodes):
        lines.append(
            f"{listed(f'{count} {name}' for name, count in op_types.most_common())}: {reason.removeprefix(PROTECTED)}"
        )
    if facts.layers:
        names = [f"'{each.node}' ({each.op_type}, {_percent(each.mac_share)})" for each in facts.layers]
        lines.append(f"{count_of(len(names), 'sensitive layer')} in float: {listed(names, MOST_LAYERS)}")
    if facts.methods:
        lines.append(f"ranges chosen by the outputs: {listed(f'{n} {name}' for name, n in facts.methods.items())}")
    if facts.float_mac_share or facts.extra_weight_bytes:
        share = f"{_percent(facts.float_mac_share)} of multiply-accumulates are not in 8 bits"
        lines.append(f"{share}, which adds {size_text(facts.extra_weight_bytes)} of weights")
    if facts.tried:
        trials = f"{count_of(len(facts.tried), 'network')} tried"
        before = facts.before.partition(" ")[2]  # behind the severity
        lines.append(
            f"{trials}; without protection: {before}" if facts.after else f"{trials}; no change in 8 bits was better"
        )
    if report.verdict is not Verdict.OK:
        lines += [f"{name} was measured ok: {figures}" for name, figures in measured_alternatives(report)]
    for index, line in enumerate(lines):
        yield "" if index else "protected", line


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _calibration(report: Report) -> str:
    facts = report.calibration
    data = "RANDOM NUMBERS" if facts.is_random else facts.source
    if not facts.methods:
        who = "algorithms and verdict" if report.algorithms else "verdict"
        return "none needed" if facts.is_verdict_skipped else f"none needed; {who} on {data}"
    return f"{count_of(facts.samples, 'sample')} ({data}), {listed(facts.methods)}"


def _outputs(outputs: tuple[OutputFidelity, ...]) -> RenderableType:
    from quark.report.console import cell, plain_table

    table = plain_table()
    table.add_column("output", overflow="fold")
    for heading in ("cosine", "SQNR dB", "same class", "largest error", "verdict"):
        table.add_column(heading, justify="right" if heading != "verdict" else "left")
    worst_first = sorted(outputs, key=lambda each: -each.severity) if len(outputs) > MOST_OUTPUTS else outputs
    for each in worst_first[:MOST_OUTPUTS]:
        agreement = "-" if each.agreement is None else f"{100 * each.agreement:.1f} %"
        figures = (f"{each.cosine:.4f}", sqnr_text(each.sqnr_db), agreement, f"{each.max_error:.3g}")
        table.add_row(cell(each.name), *figures, cell(each.verdict.value, COLOURS[each.verdict]))
    if len(outputs) > MOST_OUTPUTS:
        table.add_row(f"and {len(outputs) - MOST_OUTPUTS} more, all better")
    return table


def sqnr_text(sqnr_db: float) -> str:
    """Decibels for reading.

    >>> sqnr_text(float("inf")), sqnr_text(12.345)
    ('exact', '12.3')
    """
    if math.isinf(sqnr_db):
        return "exact" if sqnr_db > 0 else "-inf"
    return f"{sqnr_db:.1f}"


def _remarks(remarks: Iterable[str], noun: str = "remark") -> RenderableType:
    lines = list(remarks)
    shown = lines[:MOST_REMARKS]
    if len(lines) > MOST_REMARKS:
        shown.append(f"and {count_of(len(lines) - MOST_REMARKS, f'more {noun}')} in the JSON beside the model")
    return _stacked([f"- {line}" for line in shown])


def _stacked(lines: Iterable[str]) -> RenderableType:
    from rich.console import Group

    from quark.report.console import cell

    return Group(*map(cell, lines))

"""`quark lint`: whether an NPU would take a quantized file."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.terminal import say_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quark.onnx.lint import Finding
    from quark.report.console import Table

HAS_FINDINGS = 3
ROWS_PER_RULE = 5  # a file for another target breaks the same rule hundreds of times


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print all findings as JSON instead of a table.")
@click.option("--strict", is_flag=True, help="Treat warnings as errors.")
def lint(model: Path, as_json: bool, strict: bool) -> None:
    """Check a quantized MODEL against the rules of AMD's NPU.

    The rules are those for convolutional networks.

    \b
    Exit status: 0 no errors; there may be warnings, unless --strict
                 1 the file is not a model
                 2 invalid command line
                 3 errors were found
    """
    from quark.onnx.lint import Level
    from quark.onnx.lint import lint as find

    findings = find(model)
    counts = {level.value: sum(each.level is level for each in findings) for level in Level}
    if as_json:
        say_json({"findings": [asdict(each) for each in findings], "summary": counts})
    else:
        _show(findings)
    if counts["error"] or (strict and findings):
        raise SystemExit(HAS_FINDINGS)


def _show(findings: Sequence[Finding]) -> None:
    from quark.report.console import Console

    console = Console()
    if findings:
        console.print(_table(findings))
    console.print(_summary(findings))


def _table(findings: Sequence[Finding]) -> Table:
    from quark.report.console import Table, cell

    table = Table.grid(padding=(0, 2))
    seen: Counter[str] = Counter()
    totals = Counter(each.rule for each in findings)
    rules = list(totals)
    for each in sorted(findings, key=lambda each: (each.level.value, rules.index(each.rule))):  # errors first
        seen[each.rule] += 1
        colour = "bold red" if each.level.value == "error" else "yellow"
        if seen[each.rule] <= ROWS_PER_RULE:
            where = " ".join(dict.fromkeys(name for name in (each.node, each.tensor) if name))
            detail = cell(f"{where}{': ' if where else ''}{each.message}").append("\n").append_text(cell(each.fix))
            detail.overflow = "fold"
            table.add_row(cell(each.level.value, colour), cell(each.rule, "bold"), detail)
        elif seen[each.rule] == totals[each.rule]:
            table.add_row("", cell(each.rule, "bold"), f"and {totals[each.rule] - ROWS_PER_RULE} more; --json has all")
    return table


def _summary(findings: Sequence[Finding]) -> str:
    if not findings:
        return "no findings: the NPU takes it"
    counts = Counter(each.level.value for each in findings)
    return ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items())

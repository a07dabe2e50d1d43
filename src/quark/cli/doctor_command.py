"""`quark doctor`: whether this installation works."""

from __future__ import annotations

import json

import click

MARKS = {"ok": ("ok", "green"), "info": ("--", "cyan"), "broken": ("BROKEN", "bold red")}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def doctor(as_json: bool) -> None:
    """Check this installation: packages, the compiled library, an operator, conflicts with amd-quark.

    Exit status 1 when something is broken.
    """
    from quark.report.environment import examine, is_healthy

    findings = examine()
    if as_json:
        content = {"healthy": is_healthy(findings), "findings": [each.to_json() for each in findings]}
        click.echo(json.dumps(content, indent=2))
    else:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for each in findings:
            detail = f"{each.detail}\n{each.remedy}" if each.remedy else each.detail
            table.add_row(Text(*MARKS[each.health.value]), Text(each.check, "bold"), Text(detail, overflow="fold"))
        Console(highlight=False).print(table)
    if not is_healthy(findings):
        raise SystemExit(1)

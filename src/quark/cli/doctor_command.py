"""`quark doctor`: whether this installation works."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from quark.cli.terminal import say, say_json
from quark.text import printable

if TYPE_CHECKING:
    from quark.report.checks.finding import Finding

MARKS = {"ok": ("ok", "green"), "info": ("--", "cyan"), "warning": ("WARNING", "yellow"), "broken": ("BROKEN", "red")}


@click.command()
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, for a bug report: only the last part of each path is shown."
)
@click.option("--paths", "has_paths", is_flag=True, help="With --json: print full paths.")
def doctor(as_json: bool, has_paths: bool) -> None:
    """Check this installation and suggest fixes.

    Checks the packages and their versions, ONNX Runtime and torch, the compiled library, an operator, conflicts with
    amd-quark, and the resources that this machine or container gives to a process. The exit status is 1 if something
    required is broken. WARNING marks what works with limitations.
    """
    from quark.report.environment import examine, is_healthy

    findings = examine()
    if as_json:
        shown = findings if has_paths else [each.without_paths() for each in findings]
        content = {"healthy": is_healthy(findings), "findings": [each.to_json() for each in shown]}
        say_json(content)
    else:
        for each in findings:
            _print(each, width=max(len(finding.check) for finding in findings))
    if not is_healthy(findings):
        raise SystemExit(1)


def _print(finding: Finding, width: int) -> None:
    """Plain lines: the package that makes tables may be what is broken."""
    mark, color = MARKS[finding.health.value]
    shown = click.style(f"{mark:<7}", fg=color)
    click.echo(f"{shown}  {printable(f'{finding.check:<{width}}  {finding.detail}')}")  # noqa: TID251, for the colour
    for words, text in (("leads to", finding.consequence), ("mend", finding.remedy)):
        if text:
            say(f"{'':<7}  {'':<{width}}  {words}: {text}")

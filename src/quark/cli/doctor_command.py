"""`quark doctor`: check whether this installation works."""

from __future__ import annotations

import click

from quark.cli.options import json_option
from quark.cli.terminal import say, say_json
from quark.report.environment import examine, is_healthy
from quark.text import printable

MARKS = {"ok": ("ok", "green"), "info": ("--", "cyan"), "warning": ("WARNING", "yellow"), "broken": ("BROKEN", "red")}


@click.command()
@json_option("Print JSON, for a bug report: only the last part of each path is shown.")
@click.option("--paths", "has_paths", is_flag=True, help="With --json: print full paths.")
def doctor(as_json: bool, has_paths: bool) -> None:
    """Check this installation and suggest fixes.

    Checks the packages and their versions, ONNX Runtime and torch, the compiled library, an operator, conflicts with
    amd-quark, and the resources that this machine or container gives to a process. The exit status is 1 if something
    required is broken. WARNING marks what works with limitations.
    """
    findings = examine()
    if as_json:
        shown = findings if has_paths else [finding.without_paths() for finding in findings]
        say_json({"healthy": is_healthy(findings), "findings": [finding.to_json() for finding in shown]})
    else:
        width = max(len(finding.check) for finding in findings)
        for finding in findings:  # plain lines: the package that prints tables may be the broken one
            mark, colour = MARKS[finding.health.value]
            line = printable(f"{finding.check:<{width}}  {finding.detail}")
            click.echo(f"{click.style(f'{mark:<7}', fg=colour)}  {line}")  # noqa: TID251, for the colour
            for words, text in (("leads to", finding.consequence), ("fix", finding.remedy)):
                if text:
                    say(f"{'':<7}  {'':<{width}}  {words}: {text}")
    if not is_healthy(findings):
        raise SystemExit(1)

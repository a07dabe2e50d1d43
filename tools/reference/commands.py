"""docs/cli.md: every command of `quark` with its help, as click prints it."""

from __future__ import annotations

import click

from quark.cli.main import main
from tools.reference.markdown import code, fenced, generated, table

_WIDTH = 100
INTRODUCTION = """
This page shows the output of `quark COMMAND --help` for every command. `--debug`, anywhere on the command line, shows
the traceback of an error. Exit codes: [quantizing ONNX models](quantizing_onnx.md#exit-codes-and-errors).
"""


def command_reference(command: str) -> str:
    """The text of docs/cli.md."""
    group = click.Context(main, info_name="quark", max_content_width=_WIDTH, terminal_width=_WIDTH)
    commands = {name: each for name in main.list_commands(group) if (each := main.get_command(group, name)) is not None}
    rows = [(f"[{code(f'quark {name}')}](#quark-{name})", _first_line(command)) for name, command in commands.items()]
    sections = [_section(group, name, command) for name, command in commands.items()]
    return "\n".join([generated(command, "Commands") + INTRODUCTION, table(("command", ""), rows), *sections])


def _first_line(command: click.Command) -> str:
    return (command.help or "").strip().splitlines()[0]


def _section(group: click.Context, name: str, command: click.Command) -> str:
    width = {"max_content_width": _WIDTH, "terminal_width": _WIDTH}
    context = click.Context(command, parent=group, info_name=name, help_option_names=["-h", "--help"], **width)  # type: ignore[arg-type]
    return f"## quark {name}\n\n{fenced(command.get_help(context))}"

"""What becomes of errors, and of log messages, on the command line.

QuarkError      one line on stderr, exit status 1: the message says what to do
anything else   one line that names the exception, status 1: a bug, or the machine's own trouble (disk, memory)
usage           status 2, as click has it
interruption    status 1; where work was kept, one line says how to go on
--debug         shows the traceback instead, and the log; it may stand anywhere on the line
"""

from __future__ import annotations

import logging
from typing import Any

import click

from quark.errors import QuarkError


class ErrorReportingCommand(click.Command):
    """A command of its own, such as an example script."""

    def invoke(self, ctx: click.Context) -> Any:
        if ctx.parent is not None:
            return super().invoke(ctx)  # the group reports
        return _reporting(ctx, super().invoke)


class ErrorReportingGroup(click.Group):
    """Commands, each of which takes --debug after its name too."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        cmd.params.append(debug_option())
        super().add_command(cmd, name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of use, not of the alphabet

    def invoke(self, ctx: click.Context) -> Any:
        return _reporting(ctx, super().invoke)


def debug_option() -> click.Option:
    """--debug for a command: it is the whole run's, not the command's."""
    return click.Option(
        ["--debug"], is_flag=True, expose_value=False, is_eager=True, hidden=True, callback=_remember_debug
    )


def _remember_debug(ctx: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given:
        ctx.find_root().meta["quark.debug"] = True


def is_debugging(ctx: click.Context) -> bool:
    root = ctx.find_root()
    return bool(root.params.get("debug") or root.meta.get("quark.debug"))


def _reporting(ctx: click.Context, invoke: Any) -> Any:
    _set_up_log(has_messages=bool(ctx.params.get("debug")))
    try:
        return invoke(ctx)
    except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
        raise
    except KeyboardInterrupt as error:
        if str(error):
            click.echo(f"\n{error}", err=True)
        raise
    except Exception as error:
        if is_debugging(ctx):
            raise
        raise click.ClickException(one_line(error)) from error


def one_line(error: Exception) -> str:
    """The message of an error as one line; an unexpected one also says its name and how to learn more."""
    text = " ".join(str(error).split())
    if isinstance(error, QuarkError):
        return text
    if isinstance(error, MemoryError):
        return f"not enough memory{': ' if text else ''}{text}; try fewer or smaller samples, or a smaller batch"
    if isinstance(error, OSError):
        return text
    return f"{type(error).__name__}: {text}; this should not happen, --debug shows where it did"


def _set_up_log(has_messages: bool) -> None:
    """What the library logs is in the summary, too: shown only when debugging.

    Without any handler Python would write warnings to stderr by itself, in the midst of everything.
    """
    logger = logging.getLogger("quark")
    if has_messages:
        logger.setLevel(logging.DEBUG)
        logger.addHandler(logging.StreamHandler())
    elif not logger.handlers:
        logger.addHandler(logging.NullHandler())

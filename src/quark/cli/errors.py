"""What becomes of errors, and of log messages, on the command line.

QuarkError      one line on stderr, exit status 1: the message says what to do
anything else   one line that names the exception, status 1: a bug, or the machine's own trouble (disk, memory)
usage           status 2, as click has it
interruption    status 1; where work was kept, one line says how to go on
stdout fails    status 1 and one line on stderr; without it if the reader of a pipe has gone
--debug         shows the traceback instead, and the log; it may stand anywhere on the line
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from typing import Any

import click

from quark.cli.terminal import flush, printable_streams, say, say_lines
from quark.errors import QuarkError
from quark.text import one_line

_HELP_ERRORS = getattr(click.exceptions, "NoArgsIsHelpError", ())  # its message is the help; click 8.1 has none


class ErrorReportingCommand(click.Command):
    """A command of its own, such as an example script."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        return _run(super().main, standalone_mode, *args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        if ctx.parent is not None:
            return super().invoke(ctx)  # the group reports
        return _reporting(ctx, super().invoke)


class ErrorReportingGroup(click.Group):
    """Commands, each of which takes --debug after its name too."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        return _run(super().main, standalone_mode, *args, **extra)

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


def _run(main: Callable[..., Any], standalone_mode: bool, *args: Any, **extra: Any) -> Any:
    """Run click's `main` with printable streams, show the error that ends it, and exit with its status."""
    if not standalone_mode:
        return main(*args, standalone_mode=False, **extra)
    with printable_streams() as output:
        status: Any = 1
        try:
            result = main(*args, standalone_mode=False, **extra)
            status = result if isinstance(result, int) else 0  # click returns the status of ctx.exit()
        except SystemExit as error:
            status = error.code
        except click.Abort:
            say("Aborted!", err=True)
        except click.ClickException as error:
            _show(error)
            status = error.exit_code
        except Exception:
            say_lines(traceback.format_exc(), err=True)  # with --debug; names in it are made printable, too
        failure = flush(output)
        if failure is not None and not status:
            status = 1
            if not isinstance(failure, BrokenPipeError):
                say(f"Error: {_os_error(failure)}", err=True)
        sys.exit(status)


def _show(error: click.ClickException) -> None:
    """As click shows it, in printable lines."""
    if isinstance(error, _HELP_ERRORS):
        error.show()
        return
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is not None:
        say_lines(context.get_usage(), err=True)
        if context.command.get_help_option(context) is not None:
            say(f"Try '{context.command_path} {context.help_option_names[0]}' for help.", err=True)
        say(err=True)
    say(f"Error: {error.format_message()}", err=True)


def _reporting(ctx: click.Context, invoke: Any) -> Any:
    _set_up_log(has_messages=bool(ctx.params.get("debug")))
    try:
        return invoke(ctx)
    except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
        raise
    except KeyboardInterrupt as error:
        if str(error):
            say(err=True)
            say_lines(str(error), err=True)
        raise
    except Exception as error:
        if is_debugging(ctx):
            raise
        raise click.ClickException(error_line(error)) from error


def error_line(error: Exception) -> str:
    """The message of an error as one line; an unexpected one also says its name and how to learn more."""
    if isinstance(error, QuarkError):
        return str(error)
    text = one_line(error)
    if isinstance(error, MemoryError):
        return f"not enough memory{': ' if text else ''}{text}; try fewer or smaller samples, or a smaller batch"
    if isinstance(error, OSError):
        return _os_error(error)
    if isinstance(error, ImportError):
        return f"{text}; 'quark doctor' checks the installed packages"
    return f"{type(error).__name__}: {text}; this should not happen, --debug shows where it did"


def _os_error(error: OSError) -> str:
    """The message of the operating system without its number.

    >>> _os_error(OSError(28, "No space left on device", "standard output"))
    'standard output: No space left on device'
    """
    if error.strerror is None:
        return one_line(error)
    places = [one_line(each) for each in (error.filename, error.filename2) if each is not None]
    return f"{', '.join(places)}{': ' if places else ''}{one_line(error.strerror)}"


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

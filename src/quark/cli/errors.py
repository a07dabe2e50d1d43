"""How errors and log messages appear on the command line.

QuarkError      one line on stderr, exit status 1; the message says what to do
anything else   one line that names the exception, status 1: a bug, or a problem of the machine (disk, memory)
usage           status 2, as in click
interruption    status 1; if work was saved, a line says how to continue. Never lost, unlike Python's own
stdout fails    status 1 and one line on stderr; no line if the reader of a pipe has gone
--debug         shows the log and the traceback instead; accepted anywhere on the command line
"""

from __future__ import annotations

import difflib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from quark.cli.terminal import flush, printable_streams, say, say_lines
from quark.errors import QuarkError
from quark.text import one_line

COMPLETION = "_QUARK_COMPLETE"  # set by shell completion, see docs/quickstart.md
# commands that people try, and their names here
COMMAND_SYNONYMS = {"diagnose": "report", "benchmark": "evaluate", "info": "inspect", "verify": "compare"}
SYNONYMS = {
    "--preset": "--config",
    "--calibration": "--calib",
    "--calibration-data": "--calib",
    "--preprocessing": "--preprocess",
    "--samples": "--num-calib",
    "--num-samples": "--num-calib",
}
_HELP_ERRORS = getattr(click.exceptions, "NoArgsIsHelpError", ())  # its message is the help; not in click 8.1


class ErrorReportingCommand(click.Command):
    """A command that also runs on its own, as an example script."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        return _run(super().main, standalone_mode, *args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        if ctx.parent is not None:
            return super().invoke(ctx)  # the group reports errors
        return _reporting(ctx, super().invoke)


class ErrorReportingGroup(click.Group):
    """A group whose commands also accept --debug after their name."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        return _run(super().main, standalone_mode, *args, **extra)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        cmd.params.append(debug_option())
        super().add_command(cmd, name)

    def invoke(self, ctx: click.Context) -> Any:
        return _reporting(ctx, super().invoke)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            alike = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            meant = COMMAND_SYNONYMS.get(name) or next(iter(alike), None)
            if meant is not None:
                ctx.fail(f"No such command '{name}'. Did you mean '{meant}'?")
        return super().resolve_command(ctx, args)


def debug_option() -> click.Option:
    """--debug after a command's name, with the effect of `quark --debug`."""

    def remember(ctx: click.Context, _: click.Parameter, is_given: bool) -> None:
        if is_given:
            ctx.find_root().meta["quark.debug"] = True

    return click.Option(["--debug"], is_flag=True, expose_value=False, is_eager=True, hidden=True, callback=remember)


def _run(main: Callable[..., Any], standalone_mode: bool, *args: Any, **extra: Any) -> Any:
    """Run click's `main` with printable streams, show the error that ends it, and exit with its status."""
    if not standalone_mode or COMPLETION in os.environ:  # click writes bytes to a shell that completes a command
        return main(*args, standalone_mode=standalone_mode, **extra)
    with printable_streams() as output, _interruptions_repeated():
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
        except Exception:  # noqa: BLE001 - the outermost boundary: the traceback is shown
            say_lines(traceback.format_exc(), err=True)  # with --debug; names in it are made printable, too
        failure = flush(output)
        if failure is not None and not status:
            status = 1
            if not isinstance(failure, BrokenPipeError):
                say(f"Error: {_os_error(failure)}", err=True)
        sys.exit(status)


@contextmanager
def _interruptions_repeated() -> Iterator[None]:
    """Interrupt the program again if Python dropped the exception, as in destructors and callbacks of weak references.

    Freed graphs run thousands of these, so about one Ctrl-C in a hundred would have no effect.
    """
    show = sys.unraisablehook

    def repeat(dropped: sys.UnraisableHookArgs) -> None:
        if not isinstance(dropped.exc_value, KeyboardInterrupt):
            show(dropped)
            return
        # delayed until the callback has returned, or this exception would be dropped, too
        timer = threading.Timer(0.01, _interrupt)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        sys.unraisablehook = show


def _interrupt() -> None:
    main_thread = threading.main_thread().ident
    if hasattr(signal, "pthread_kill") and main_thread is not None:
        signal.pthread_kill(main_thread, signal.SIGINT)  # also ends a blocking call
    else:  # Windows
        signal.raise_signal(signal.SIGINT)


def _show(error: click.ClickException) -> None:
    """Print an error in click's format, with printable names."""
    if isinstance(error, _HELP_ERRORS):
        error.show()
        return
    context = error.ctx if isinstance(error, click.UsageError) else None
    if isinstance(error, click.NoSuchOption) and context is not None:
        known = {name for option in context.command.params for name in option.opts}
        meant = SYNONYMS.get(error.option_name)
        if meant in known:
            error = click.UsageError(f"No such option '{error.option_name}'. Did you mean '{meant}'?", context)
    if context is not None:
        say_lines(context.get_usage(), err=True)
        if context.command.get_help_option(context) is not None:
            say(f"Try '{context.command_path} {context.help_option_names[0]}' for help.", err=True)
        say(err=True)
    say(f"Error: {error.format_message()}", err=True)


def _reporting(ctx: click.Context, invoke: Any) -> Any:
    """Invoke a command, and turn any exception into the error line that click prints."""
    try:
        with _logging(is_debug=bool(ctx.params.get("debug"))):
            return invoke(ctx)
    except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
        raise
    except KeyboardInterrupt as error:
        if str(error):
            say(err=True)
            say_lines(str(error), err=True)
        raise
    except Exception as error:
        root = ctx.find_root()
        if root.params.get("debug") or root.meta.get("quark.debug"):
            raise
        raise click.ClickException(error_line(error)) from error


@contextmanager
def _logging(*, is_debug: bool) -> Iterator[None]:
    """Show all messages, or none: the summary repeats the warnings, and Python would print them in the middle of the
    output. The logger is restored afterwards, for programs that call a command."""
    logger = logging.getLogger("quark")
    handler = logging.StreamHandler() if is_debug else logging.NullHandler()
    level = logger.level
    if is_debug:
        logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def error_line(error: Exception) -> str:
    """Return an error as one line. For an unexpected one, add its class and how to get details."""
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
    """Return the operating system's message without its number.

    >>> _os_error(OSError(28, "No space left on device", "standard output"))
    'standard output: No space left on device'
    """
    if error.strerror is None:
        return one_line(error)
    places = [one_line(name) for name in (error.filename, error.filename2) if name is not None]
    return f"{', '.join(places)}{': ' if places else ''}{one_line(error.strerror)}"

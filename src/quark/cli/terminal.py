"""Output of the command line: lines, JSON, and the two standard streams.

Every command prints through `say` and `say_json`, or through the consoles of `quark.report.console`. While a command
runs, standard output and standard error are `PrintableStream`s, so that names printed by other libraries are safe too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

import click

from quark.text import PrintableStream, printable


def say(text: str = "", *, err: bool = False) -> None:
    """Print one line; a line break in a name is shown as an escape."""
    click.echo(printable(text), err=err)


def say_lines(text: str, *, err: bool = False) -> None:
    """Print several lines of quark's own text."""
    for line in text.removesuffix("\n").split("\n"):
        say(line, err=err)


def say_json(content: Any, indent: int = 2) -> None:
    """Print JSON in ASCII, with exact names. A string is printed as it is."""
    text = content if isinstance(content, str) else json.dumps(content, indent=indent)
    click.echo(text.replace("\x7f", "\\u007f"))  # the only control character that json does not escape


@contextmanager
def printable_streams() -> Iterator[PrintableStream]:
    """Replace both standard streams by PrintableStreams, and yield standard output.

    A descriptor that the caller closed is opened on the null device. Otherwise the next file to be opened would get its
    number, and messages that native libraries write there would end up in that file.
    """
    opened = os.open(os.devnull, os.O_RDWR)
    while opened <= 2:  # the lowest free number is used first
        opened = os.open(os.devnull, os.O_RDWR)
    os.close(opened)
    before = sys.stdout, sys.stderr
    output = PrintableStream(_lenient(sys.stdout), "standard output")
    # a failure to write messages cannot be reported anywhere, and does not stop the work
    messages = PrintableStream(_lenient(sys.stderr), "standard error", ignores_failures=True)
    sys.stdout, sys.stderr = cast(TextIO, output), cast(TextIO, messages)
    try:
        yield output
    finally:
        flush(messages)
        sys.stdout, sys.stderr = before


def flush(stream: PrintableStream) -> OSError | None:
    """Write what is buffered. If that fails, drop it and return the error."""
    try:
        stream.stream.flush()
    except OSError as error:
        # the interpreter flushes once more at exit, which must not fail again
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        return OSError(error.errno, error.strerror, stream.name)
    return None


def _lenient(stream: TextIO | None) -> TextIO:
    """Let a stream escape characters that it cannot encode. A closed stream becomes the null device."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    return stream

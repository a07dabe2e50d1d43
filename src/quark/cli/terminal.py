"""Where the command line prints: lines, JSON, and the two streams.

Every command prints through `say` and `say_json`, or through the consoles of `quark.report.console`. While a command
runs, standard output and standard error are `PrintableStream`s, which also catches what other libraries print.
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
    """Print a text of several lines that is quark's own."""
    for line in text.removesuffix("\n").split("\n"):
        say(line, err=err)


def say_json(content: Any, indent: int = 2) -> None:
    """Print JSON, with names exact and everything in ASCII. Text is taken for JSON that is ready."""
    text = content if isinstance(content, str) else json.dumps(content, indent=indent)
    click.echo(text.replace("\x7f", "\\u007f"))  # the only control character that json leaves as it is


@contextmanager
def printable_streams() -> Iterator[PrintableStream]:
    """Let everything that is printed pass through PrintableStream, in the encoding of the stream or as escapes.

    Gives standard output. A descriptor that the caller closed is opened on the null device: otherwise the next file
    that is opened would get its number, and messages that native libraries write there would end up in that file.
    """
    _open_descriptors()
    before = sys.stdout, sys.stderr
    output = PrintableStream(_lenient(sys.stdout), "standard output")
    # there is nowhere to report that messages cannot be written, and the work goes on without them
    messages = PrintableStream(_lenient(sys.stderr), "standard error", ignores_failures=True)
    sys.stdout, sys.stderr = cast(TextIO, output), cast(TextIO, messages)
    try:
        yield output
    finally:
        flush(messages)
        sys.stdout, sys.stderr = before


def flush(stream: PrintableStream) -> OSError | None:
    """Write what is still buffered. Returns the error if that fails; what is left is dropped then."""
    try:
        stream.stream.flush()
    except OSError as error:
        # the interpreter flushes once more when it ends, and would fail again
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        return OSError(error.errno, error.strerror, stream.name)
    return None


def _open_descriptors() -> None:
    opened = os.open(os.devnull, os.O_RDWR)
    while opened <= 2:  # the lowest number that is free is given first
        opened = os.open(os.devnull, os.O_RDWR)
    os.close(opened)


def _lenient(stream: TextIO | None) -> TextIO:
    """The stream with characters that it cannot encode as escapes; the null device in the place of a closed one."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    return stream

"""A progress bar for long steps, on standard error if that is a terminal. Messages use `logging` instead, under the
name `quark`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

from quark.text import PrintableStream, printable

Advance: TypeAlias = Callable[[], None]
Track: TypeAlias = Callable[[int, str], AbstractContextManager[Advance]]


@contextmanager
def track(total: int, description: str) -> Iterator[Advance]:
    """Inside the block, each call of the yielded function is one of `total` steps; any thread may call it.

    >>> with track(2, "calibrating") as advance:
    ...     advance()
    """
    if sys.stderr is None or not sys.stderr.isatty():  # None: the caller closed it
        yield lambda: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from quark.report.console import Console

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # The bar moves the cursor, which the streams of the command line filter out, so it uses the stream behind them. A
    # bar around this one has replaced sys.stderr by a stream of rich.
    stream = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    console = Console(file=stream.stream if isinstance(stream, PrintableStream) else stream)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(printable(description), total=total)
        yield lambda: progress.advance(task)

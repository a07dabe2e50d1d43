"""A line that shows how far a long step is, and when it will be done.

On standard error and only where that is a terminal; elsewhere nothing is written. Messages go through `logging` under
the name `quark`, never through this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

Advance: TypeAlias = Callable[[], None]
Track: TypeAlias = Callable[[int, str], AbstractContextManager[Advance]]


@contextmanager
def track(total: int, description: str) -> Iterator[Advance]:
    """Within it, each call of the given function is one of `total` steps; any thread may call it.

    >>> with track(2, "calibrating") as advance:
    ...     advance()
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)

"""Python's search for cycles of objects, less often than usual.

A graph is thousands of small objects that live as long as the run, and views, plans and messages made from it are
thousands more. Python looks for cycles among them after every 700 new ones. That is a tenth of the processor time of
MobileNet-V2 in XINT8 and a quarter of that of a network with a thousand layers, and other threads wait meanwhile. Most
objects are freed without it, and none of those that are left to it holds large arrays.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 50_000  # new ones between two searches
_LOCK = threading.Lock()
_users: list[tuple[int, int, int]] = []  # for each `with` that has begun and not ended, the thresholds before it


@contextmanager
def rare_collections() -> Iterator[None]:
    """Search for cycles after every `OBJECTS` new objects inside the block; never more often than before."""
    with _LOCK:
        before = gc.get_threshold() if not _users else _users[0]
        _users.append(before)
        if before[0]:  # 0: switched off
            gc.set_threshold(max(before[0], OBJECTS), *before[1:])
    try:
        yield
    finally:
        with _LOCK:
            before = _users.pop()
            if not _users:
                gc.set_threshold(*before)

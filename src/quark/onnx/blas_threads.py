"""Products and factors of matrices on the thread that asks for them.

OpenBLAS, which numpy comes with, divides even small products among all processors, and its threads wait for each other
by spinning: the layers of MobileNet-V2 took four times the processor time that one thread needs, and far more on a busy
machine. Layers side by side, each on one thread, use several processors better, and the results are the same for any
number of processors.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

_FOLDERS = ("../numpy.libs", ".dylibs")  # the folders of libraries in wheels of numpy
_NAMES = ("scipy_openblas_{}_num_threads64_", "scipy_openblas_{}_num_threads", "openblas_{}_num_threads64_")
_LOCK = threading.Lock()
_users: list[int] = []  # for each open `with`, the number of threads before it


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Keep numpy's matrix products on one thread. Does nothing if numpy uses another library than its own OpenBLAS."""
    library = _openblas()
    if library is None:
        yield
        return
    threads, set_threads = library
    with _LOCK:
        _users.append(threads() if not _users else _users[0])
        set_threads(1)
    try:
        yield
    finally:
        with _LOCK:
            before = _users.pop()
            if not _users:
                set_threads(before)


@functools.cache
def _openblas() -> tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer] | None:
    """The functions of numpy's OpenBLAS that return and set its number of threads; None if there are none."""
    package = Path(np.__file__).parent
    for file in (file for folder in _FOLDERS for file in sorted((package / folder).glob("*openblas*"))):
        try:
            library = ctypes.CDLL(str(file))
        except OSError:  # not for this processor: numpy has not loaded it either
            continue
        for name in _NAMES:
            if hasattr(library, name.format("set")):
                return getattr(library, name.format("get")), getattr(library, name.format("set"))
    return None

"""Files that are there whole or not at all.

Everything is written under a temporary name, `.quark-...`, in the folder of the result, and renamed when it is
complete: a crash leaves the old file, the new file or none. What cannot be written is an OutputError that names it.

A process that is killed cannot remove its temporary file. It holds a lock on it, though, which ends with the process,
so that the next one that writes into the folder knows what nobody works on any more, and removes it. Where there are no
such locks (Windows, some network disks), these files stay until somebody removes them; nothing ever reads them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

from quark.errors import OutputError, QuarkError

PREFIX = ".quark-"
_FRESH_SECONDS = 60.0  # a file that was just made may not have its lock yet

# files that are complete and wait for others, each with how it takes its place; None outside of `together`
_WAITING: ContextVar[dict[Path, Callable[[], None]] | None] = ContextVar("waiting", default=None)

_REMEDIES = {
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some space, or choose another disk",
    errno.EFBIG: "the system or its limits (ulimit -f) allow no file as large; choose another disk",
    errno.EROFS: "choose another folder",
    errno.EACCES: "choose another folder, or get the right to write there",
    errno.EPERM: "choose another folder, or get the right to write there",
}


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """What the system refuses inside the block becomes an OutputError that names the file or folder, and what to do."""
    try:
        yield
    except QuarkError:
        raise
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "")
        reason = error.strerror or str(error)
        raise OutputError(f"'{os.fspath(path)}' cannot be written: {reason}{'; ' if remedy else ''}{remedy}") from error


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Files that are written inside the block take their places when it ends well, one right after the other, or none
    of them does: a model and the report on it. Within another such block, they wait for the end of that one."""
    if _WAITING.get() is not None:
        yield
        return
    waiting: dict[Path, Callable[[], None]] = {}
    token = _WAITING.set(waiting)
    try:
        yield
        for take_place in waiting.values():
            take_place()
    finally:
        _WAITING.reset(token)
        for unfinished in waiting:
            unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def complete(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well, and is gone when it does not."""
    with temporary(path) as unfinished:
        yield unfinished
        put(unfinished, path)


@contextlib.contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """An empty file beside `path` that is gone when the block ends, unless it was given its place. To be opened for
    `r+b`: what is truncated and written anew, ext4 writes to the disk before it closes the file."""
    with writing(path):
        _remove_abandoned(path.parent)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=PREFIX, suffix=path.suffix)
        try:
            _take_lock(descriptor)
            yield Path(name)
        finally:
            os.close(descriptor)
            if Path(name) not in (_WAITING.get() or {}):
                Path(name).unlink(missing_ok=True)


def put(unfinished: Path, path: Path, then: Callable[[], None] = lambda: None) -> None:
    """Give a temporary file its place, and do what is to be done then. mkstemp makes files that only their owner reads;
    a result is an ordinary one."""
    umask = os.umask(0)
    os.umask(umask)
    unfinished.chmod(0o666 & ~umask)

    def take_place() -> None:
        with writing(path):
            unfinished.replace(path)
            then()

    waiting = _WAITING.get()
    if waiting is None:
        take_place()
    else:
        waiting[unfinished] = take_place


def _remove_abandoned(folder: Path) -> None:
    """Temporary files of processes that are no more."""
    for each in folder.glob(f"{PREFIX}*"):
        # another process may do the same, or be its owner; what cannot be looked at is left
        with contextlib.suppress(OSError):
            if each.is_symlink() or not each.is_file() or time.time() - each.stat().st_mtime < _FRESH_SECONDS:
                continue
            descriptor = os.open(each, os.O_RDWR)
            try:
                if _take_lock(descriptor):
                    each.unlink()
            finally:
                os.close(descriptor)


def _take_lock(descriptor: int) -> bool:
    """Whether the file is this process's now; never, where there are no locks."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True

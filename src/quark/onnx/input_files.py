"""Files that a run reads: small ones are held in memory, large ones are mapped and must not change.

Other programs can change a mapped file. If it shrinks, touching a page beyond its new end kills the process with
SIGBUS; if it is written to in place, other weights are used from then on. So the state of a file is remembered when it
is opened, and `check` raises a ModelError if it is another one:

    device and inode    another file has the name now. The mapping still has the old content, but ONNX Runtime opens
                        files by their names
    size                the file was cut off, or is still being written
    modification time   it was written to
    change time         it was written to, and the modification time was set back. A program cannot set this one. New
                        permissions or a new hard link change it as well, which costs a run but never a wrong weight

`MappedFile.read_bytes` copies bytes without touching the mapping, so that it cannot fault, and checks afterwards: what
it returns is what was opened. ONNX Runtime maps files itself; `held_still` keeps other programs from writing to them
while it reads, where the system allows that. Views of the mapping are checked right before they are used: if the file
shrinks between that and the last use of the view, the process still dies.
"""

from __future__ import annotations

import functools
import mmap
import os
import signal
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from io import FileIO
from pathlib import Path

from quark.errors import ModelError
from quark.text import get_logger

_LOG = get_logger(__name__)

_RECENT_BYTES = 32 << 20  # bytes of weights that were read as a whole and stay mapped
_NEIGHBOURHOOD = 1 << 21  # bytes that the system may map around a page that is read
_MOST_LEASES = 64  # each takes a descriptor, of which a process has about a thousand


@dataclass(frozen=True)
class WatchedFile:
    """The state of a file when it was opened."""

    path: Path
    device: int
    inode: int
    bytes: int
    written_ns: int
    changed_ns: int

    @staticmethod
    def of(path: Path, status: os.stat_result) -> WatchedFile:
        return WatchedFile(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def check(self, descriptor: int | None = None) -> None:
        """Raise a ModelError if the file at the path, or behind the descriptor, is not in this state any more."""
        try:
            now = WatchedFile.of(self.path, os.stat(self.path) if descriptor is None else os.fstat(descriptor))
        except FileNotFoundError as error:
            raise self._changed("it was removed or renamed") from error
        except OSError as error:
            raise self._changed(f"it cannot be reached any more ({error.strerror or error})") from error
        if now == self:
            return
        if (now.device, now.inode) != (self.device, self.inode):
            raise self._changed("another file has taken its place")
        if now.bytes != self.bytes:
            raise self._changed(
                f"its size went from {self.bytes} to {now.bytes} bytes, written at {_time(now.written_ns)}"
            )
        if now.written_ns != self.written_ns:
            raise self._changed(f"it was written to at {_time(now.written_ns)}")
        raise self._changed(f"its content or attributes were changed at {_time(now.changed_ns)}")

    def _changed(self, what: str) -> ModelError:
        return ModelError(
            f"'{self.path}' changed while it was in use: {what}. A model is read until its result is saved: start "
            "again once the file is complete"
        )


def read_file(path: Path) -> bytes:
    """All of a regular file, read once. Raises a ModelError if it changes meanwhile."""
    with _opened(path) as file:
        watched = WatchedFile.of(path, os.fstat(file.fileno()))
        data = _read(file, 0, watched.bytes)
        watched.check(file.fileno())
    return data


class MappedFile(mmap.mmap):
    """A file mapped for reading. An empty file cannot be mapped."""

    watched: WatchedFile | None = None  # None for a file without a name, which no other program can open

    @property
    def path(self) -> Path:
        """The path of the file; empty if it has no name."""
        return Path() if self.watched is None else self.watched.path

    @staticmethod
    def open(path: Path) -> MappedFile:
        with _opened(path) as file:
            watched = WatchedFile.of(path, os.fstat(file.fileno()))
            try:
                result = MappedFile(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:  # it was emptied since its size was looked at
                raise ModelError(f"'{path}' is empty now: start again once the file is complete") from error
        result.watched = watched
        return result

    def check(self) -> None:
        """Raise a ModelError if the file has changed since it was opened."""
        if self.watched is not None:
            self.watched.check()

    def read_bytes(self, start: int, stop: int) -> bytes:
        """A copy of these bytes, as they were when the file was opened; a ModelError if they are not any more."""
        if self.watched is None:
            data = self[start:stop]
            self.release(start, stop)
            return data
        try:
            with _opened(self.watched.path) as file:
                data = _read(file, start, stop)
                self.watched.check(file.fileno())
        except OSError as error:
            self.watched.check()
            raise ModelError(f"'{self.watched.path}' cannot be read: {error.strerror or error}") from error
        if len(data) != stop - start:
            self.watched.check()
            raise ModelError(f"'{self.watched.path}' cannot be read: it ends before byte {stop}")
        return data

    def release(self, start: int, stop: int) -> None:
        """Release the pages of these bytes, and neighbouring pages that were mapped with them."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = max(0, start - _NEIGHBOURHOOD) // mmap.PAGESIZE * mmap.PAGESIZE
            self.madvise(mmap.MADV_DONTNEED, first, min(len(self), stop + _NEIGHBOURHOOD) - first)

    def note_read(self, start: int, stop: int) -> None:
        """Note that these bytes are read through a view. Only the last of such bytes stay in memory."""
        if (start, stop) in self._recent:
            self._recent.remove((start, stop))
        self._recent.append((start, stop))
        while len(self._recent) > 1 and sum(last - first for first, last in self._recent) > _RECENT_BYTES:
            self.release(*self._recent.popleft())

    @functools.cached_property
    def _recent(self) -> deque[tuple[int, int]]:
        """Bytes that were read and not released, the oldest first."""
        return deque()


def check_unchanged(files: Iterable[MappedFile | WatchedFile]) -> None:
    """Raise a ModelError if one of the files has changed since it was opened."""
    for file in files:
        file.check()


@contextmanager
def held_still(files: Iterable[MappedFile | WatchedFile]) -> Iterator[None]:
    """Check that the files are unchanged before and after a block, and keep others from writing to them inside it.

    A lease of Linux makes a program that opens a file for writing, or truncates it, wait until the block ends, but no
    longer than /proc/sys/fs/lease-break-time, 45 seconds. Only the owner of a file gets one, on a local disk, and while
    no program has the file open for writing. Otherwise the block is run without.
    """
    named = [file.watched if isinstance(file, MappedFile) else file for file in files]
    watched = [file for file in named if file is not None]
    with ExitStack() as stack:
        if len(watched) <= _MOST_LEASES:
            for file in watched:
                stack.enter_context(_leased(file.path))
        check_unchanged(watched)
        yield
        check_unchanged(watched)


@contextmanager
def _leased(path: Path) -> Iterator[None]:
    """Hold a read lease on a file, if there are leases and this process may have one."""
    try:
        import fcntl

        lease, signal_number, harmless = fcntl.F_SETLEASE, fcntl.F_SETSIG, signal.SIGURG
    except (ImportError, AttributeError):  # not Linux
        yield
        return
    with ExitStack() as stack:
        try:
            descriptor = stack.enter_context(_opened(path)).fileno()
            # if another program wants to write, the system sends a signal; the default one would end the process
            fcntl.fcntl(descriptor, signal_number, harmless)
            fcntl.fcntl(descriptor, lease, fcntl.F_RDLCK)
        except OSError as error:
            _LOG.debug("'%s' can be written to by others: %s", path, error)
            yield
            return
        try:
            yield
        finally:
            with suppress(OSError):  # the system has taken it back already
                fcntl.fcntl(descriptor, lease, fcntl.F_UNLCK)


@contextmanager
def _opened(path: Path) -> Iterator[FileIO]:
    """A regular file; a pipe that took its name meanwhile is not waited for."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is not a regular file")
        yield FileIO(descriptor, closefd=False)
    finally:
        os.close(descriptor)


def _read(file: FileIO, start: int, stop: int) -> bytes:
    """These bytes of the file; fewer where it ends before."""
    file.seek(start)
    data = file.read(stop - start)
    if len(data) == stop - start or not data:
        return data
    parts = [data]  # the system reads 2 GB at most at once
    while (done := sum(map(len, parts))) < stop - start and (data := file.read(stop - start - done)):
        parts.append(data)
    return b"".join(parts)


def _time(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9).isoformat(" ", "milliseconds")

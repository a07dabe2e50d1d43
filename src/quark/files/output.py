"""Everything that quark writes goes through this module: files are complete or do not exist.

A file is written under a temporary name in the folder of the result and renamed when it is complete: a crash leaves the
old file, the new file or none. Only regular files are ever replaced. Failures to write are an OutputError that names
the file.

The files of one result (`together`) are renamed one right after the other, under a lock on the name of the result: if
two processes write the same result, the second waits for the first.

    .quark-<16 hex>.tmp.*    a file that is being written
    .quark-<16 hex>.lock     the lock on a result; it lists weights that are unused if the process dies while renaming

A process that is killed cannot remove these. But it holds a lock of the operating system on each of them, which ends
with the process, so the next process that writes into the folder knows which ones are abandoned, and removes them.
Temporary folders (`scratch_folder`) are locked and removed in the same way. Without such locks (Windows, some network
disks), leftovers stay until somebody removes them, and two processes do not wait for each other.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from quark.errors import InvalidValueError, OutputError, QuarkError
from quark.text import get_logger

try:
    import fcntl

    _HAS_LOCKS = True
except ImportError:  # Windows
    _HAS_LOCKS = False

PREFIX = ".quark-"
SCRATCH_PREFIX = "quark-"
_TEMPORARY = re.compile(r"\.quark-[0-9a-f]{16}\.tmp(\.[A-Za-z0-9]+)?")
_LOCK = re.compile(r"\.quark-[0-9a-f]{16}\.lock")
_SCRATCH = re.compile(r"quark-[0-9a-f]{16}")
_SCRATCH_LOCK = "lock"
_PIECE = 1 << 20
_PATIENCE_SECONDS = 1.0  # before a message says what is waited for
_MOST_JOURNAL = 1 << 16

_LOG = get_logger(__name__)

_REMEDIES = {
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some space, or choose another disk",
    errno.EFBIG: "the system or its limits (ulimit -f) allow no file as large; choose another disk",
    errno.EROFS: "choose another folder",
    errno.EACCES: "choose another folder, or get the right to write there",
    errno.EPERM: "choose another folder, or get the right to write there",
}
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an OSError inside the block into an OutputError that names the file or folder, and what to do."""
    try:
        yield
    except QuarkError:
        raise
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "")
        reason = error.strerror or str(error)
        raise OutputError(f"'{os.fspath(path)}' cannot be written: {reason}{'; ' if remedy else ''}{remedy}") from error


@contextlib.contextmanager
def nothing_on_disk() -> Iterator[None]:
    """Refuse to write files inside the block, also temporary ones and for all threads. What is usually kept in
    temporary files stays in memory."""
    _REFUSALS.append(True)
    try:
        yield
    finally:
        _REFUSALS.pop()


_REFUSALS: list[bool] = []  # one entry for each open block of `nothing_on_disk`


def is_disk_forbidden() -> bool:
    """True inside of `nothing_on_disk`."""
    return bool(_REFUSALS)


def temporary_file(prefix: str) -> IO[bytes]:
    """An open temporary file without a name, which is removed with the process. Raises OSError inside of
    `nothing_on_disk`."""
    _refuse_if_forbidden()
    return tempfile.TemporaryFile(prefix=prefix)


def _refuse_if_forbidden() -> None:
    if _REFUSALS:
        raise OSError("crypto_mode keeps everything in memory")


def check_place(path: str | os.PathLike[str], reads: Iterable[str | os.PathLike[str]] = ()) -> Path:
    """Return the path if a file can be written there without losing anything: the name is free or that of a regular
    file which the run does not read."""
    target = Path(path)
    if "\0" in os.fspath(path):
        raise InvalidValueError(f"output {os.fspath(path)!r}: a name cannot have a null character in it")
    if target.is_dir():
        raise InvalidValueError(f"output '{target}' is a folder: expected the name of a file, such as model.onnx")
    if not target.parent.is_dir():
        raise InvalidValueError(f"output '{target}': there is no folder '{target.parent}'; create it first")
    _refuse_special(target)
    for source in reads:
        if is_same_file(target, source):
            raise InvalidValueError(
                f"output '{target}' is a file that is read, '{os.fspath(source)}': choose another name, it is not "
                "overwritten"
            )
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise InvalidValueError(f"output '{target}': its folder cannot be written to ({error.strerror})") from error
    return target


def is_same_file(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> bool:
    """True if both names refer to one file, through links too, or would if it existed."""
    try:
        return os.path.samefile(first, second)
    except ValueError:  # a null character, which no name can contain
        return False
    except OSError:  # one of them is not there
        return os.path.realpath(first) == os.path.realpath(second)


def _refuse_special(path: Path) -> None:
    """Refuse a name of anything but a regular file: replacing it would destroy a device or a link."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:  # a name that is too long, for example
        raise InvalidValueError(f"output '{path}' cannot be used: {error.strerror}") from error
    if stat.S_ISREG(mode):
        return
    kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "not a file")
    if stat.S_ISLNK(mode):
        kind += f" to '{os.readlink(path)}'"
    raise InvalidValueError(f"output '{path}' is {kind}, and only a regular file is replaced: choose another name")


@dataclass(eq=False)
class _Temporary:
    """A file that is being written. Its descriptor holds the lock until the file has its place or is removed."""

    path: Path
    descriptor: int | None  # None without locks: not every system can rename an open file

    @staticmethod
    def create(folder: Path, suffix: str) -> _Temporary:
        suffix = suffix if re.fullmatch(r"\.[A-Za-z0-9]+", suffix) else ""
        while True:
            path = folder / f"{PREFIX}{secrets.token_hex(8)}.tmp{suffix}"
            try:
                # with the permissions of an ordinary file, according to the umask
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileExistsError:
                continue
            is_taken = _take_lock(descriptor)
            # a process that cleans up may have found the file before it was locked, and removed it
            if is_taken and _is_at(descriptor, path):
                return _Temporary(path, descriptor)
            os.close(descriptor)
            if is_taken is None:
                return _Temporary(path, None)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        _close(self.descriptor)


@dataclass(eq=False)
class _Transaction:
    """Files that are renamed together, and the locks that are held until then."""

    waiting: list[tuple[_Temporary, Path]] = field(default_factory=list)
    companions: list[tuple[Path, str]] = field(default_factory=list)  # a model, and weights that it uses or will use
    locks: dict[Path, int | None] = field(default_factory=dict)

    def lock(self, path: Path) -> None:
        """Wait for other processes and threads that write the result of this name, whatever its suffix."""
        file = _lock_file(path)
        if file in self.locks:
            return
        with writing(path):
            self.locks[file] = _wait_for_lock(file, path)

    def place(self) -> None:
        """Give all files their names. The lock lists the files that are unused if this process dies before the end."""
        for _, path in self.waiting:
            _refuse_special(path)
        for file, descriptor in self.locks.items():
            names = [[owner.name, name] for owner, name in self.companions if _lock_file(owner) == file]
            if names and descriptor is not None:
                with writing(file):
                    os.write(descriptor, json.dumps(names).encode())
        try:
            while self.waiting:
                unfinished, path = self.waiting[0]
                with writing(path):
                    unfinished.path.replace(path)
                _close(unfinished.descriptor)
                del self.waiting[0]
        finally:  # weights of the old model or, after a failure, of the new one
            for owner, name in self.companions:
                _remove_unused(owner.parent, [(owner.name, name)])

    def close(self) -> None:
        for unfinished, _ in self.waiting:
            unfinished.remove()
        for file, descriptor in self.locks.items():
            if descriptor is not None:
                file.unlink(missing_ok=True)  # while locked, so that a waiting process sees that it is gone
                os.close(descriptor)


_CURRENT: ContextVar[_Transaction | None] = ContextVar("transaction", default=None)


@contextlib.contextmanager
def together(path: Path | None = None) -> Iterator[None]:
    """Rename all files that are written inside the block when it ends without an error, one right after the other: a
    model, its weights and the report on it. After an error, none of them is renamed.

    Blocks can be nested; the outermost one renames. Until then the result called `path` is locked, and other processes
    that want to write it wait.
    """
    current = _CURRENT.get()
    if current is not None:
        if path is not None:
            current.lock(path)
        yield
        return
    transaction = _Transaction()
    token = _CURRENT.set(transaction)
    try:
        if path is not None:
            with contextlib.suppress(OSError):  # there may be no usable folder for temporary files
                _remove_abandoned_folders(Path(tempfile.gettempdir()))
            transaction.lock(path)
        yield
        transaction.place()
    finally:
        _CURRENT.reset(token)
        transaction.close()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let other processes that want to write the result of this name wait until the block ends. Files that are written
    inside get their names at once, unlike those of `together`: for results that are made over many steps."""
    transaction = _Transaction()
    try:
        transaction.lock(path)
        yield
    finally:
        transaction.close()


@contextlib.contextmanager
def complete(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that replaces it if the block ends without an error, and is removed otherwise."""
    with temporary(path) as unfinished:
        yield unfinished
        put(unfinished, path)


@contextlib.contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """An empty file beside `path` that is removed when the block ends, unless `put` renamed it. Open it with `r+b`:
    ext4 flushes files on close that were truncated before writing."""
    with writing(path):
        _refuse_if_forbidden()
        _refuse_special(path)
        _remove_abandoned(path.parent)
        file = _Temporary.create(path.parent, path.suffix)
        _UNFINISHED[file.path] = file
        try:
            yield file.path
        finally:
            if _UNFINISHED.pop(file.path, None) is not None:
                file.remove()


_UNFINISHED: dict[Path, _Temporary] = {}  # from all threads; the names are random


def put(unfinished: Path, path: Path) -> None:
    """Rename a file of `temporary`, now or at the end of `together`."""
    file = _UNFINISHED.pop(unfinished)
    transaction = _CURRENT.get()
    if transaction is not None:
        transaction.waiting.append((file, path))
        return
    try:
        with writing(path):
            _refuse_special(path)
            file.path.replace(path)
    except BaseException:
        file.path.unlink(missing_ok=True)
        raise
    finally:
        _close(file.descriptor)


def move(finished: Path, path: Path) -> None:
    """Give a complete file of the same disk another name, in the place of a regular file if there is one."""
    with writing(path):
        _refuse_if_forbidden()
        _refuse_special(path)
        finished.replace(path)


def note_weights(model: Path, names: Iterable[str]) -> None:
    """Note the weights files that a model at this path refers to now or will refer to.

    When `together` has renamed everything, those that no model in the folder refers to any more are removed. If this
    process dies before that, the next process that writes this result removes them.
    """
    transaction = _CURRENT.get()
    assert transaction is not None, "note_weights belongs inside together()"
    transaction.companions += [(model, name) for name in names]


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder that is removed when the block ends. If the process is killed, the next one removes it."""
    folder = Scratch()
    try:
        yield folder.path
    finally:
        folder.remove()


class Scratch:
    """A temporary folder until `remove` is called, as `scratch_folder` does."""

    def __init__(self) -> None:
        with writing("a temporary folder"):
            _refuse_if_forbidden()
            root = Path(tempfile.gettempdir())
            _remove_abandoned_folders(root)
            while True:
                self._folder = root / f"{SCRATCH_PREFIX}{secrets.token_hex(8)}"
                self._folder.mkdir(mode=0o700)
                lock = self._folder / _SCRATCH_LOCK
                descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                is_taken = _take_lock(descriptor)
                is_ours = is_taken and _is_at(descriptor, lock)  # else a process that cleans up was faster
                self._descriptor = descriptor if is_ours else None
                if not is_ours:
                    os.close(descriptor)
                if is_ours or is_taken is None:
                    self.path = self._folder / "files"
                    self.path.mkdir()
                    return

    def remove(self) -> None:
        """Delete the folder and what is in it."""
        shutil.rmtree(self._folder, ignore_errors=True)
        _close(self._descriptor)
        self._descriptor = None


def _take_lock(descriptor: int) -> bool | None:
    """True if this process has locked the file now, False if another holds the lock, None if there are no locks."""
    if not _HAS_LOCKS:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EAGAIN, errno.EACCES) else None
    return True


def _lock_file(path: Path) -> Path:
    """The lock on a result: a model, its weights and its report differ in the suffix alone."""
    name = hashlib.sha256(os.fsencode(path.stem)).hexdigest()[:16]
    return path.parent / f"{PREFIX}{name}.lock"


def _wait_for_lock(file: Path, result: Path) -> int | None:
    """Lock a file and return its descriptor, or None if the file system has no locks.

    The owner removes the file before it gives up the lock. A process that waited for it then makes a new one.
    """
    patience = time.monotonic() + _PATIENCE_SECONDS
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            while (is_taken := _take_lock(descriptor)) is False and time.monotonic() < patience:
                time.sleep(_PATIENCE_SECONDS / 100)
            if is_taken is False:
                _LOG.warning("'%s' is being written by another process: waiting for it", result)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if is_taken is not None and _is_at(descriptor, file):
                _remove_unused(file.parent, _journal(descriptor))  # left over from a process that was killed
                os.ftruncate(descriptor, 0)
                os.lseek(descriptor, 0, os.SEEK_SET)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if is_taken is None:
            file.unlink(missing_ok=True)
            return None


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """True if the open file still has this name."""
    try:
        there = os.lstat(path)
    except OSError:
        return False
    own = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)


def _remove_abandoned(folder: Path) -> None:
    """Remove temporary files and locks of processes that have ended, where they can be opened."""
    for name in _names(folder):
        is_lock = _LOCK.fullmatch(name) is not None
        if not is_lock and not _TEMPORARY.fullmatch(name):
            continue
        path = folder / name
        with contextlib.suppress(OSError), _opened_if_abandoned(path) as descriptor:
            if descriptor is not None:
                if is_lock:
                    _remove_unused(folder, _journal(descriptor))
                path.unlink()


def _remove_abandoned_folders(root: Path) -> None:
    """Remove temporary folders of this user's processes that have ended."""
    for name in _names(root):
        if not _SCRATCH.fullmatch(name):
            continue
        with contextlib.suppress(OSError):
            status = os.lstat(root / name)
            if not stat.S_ISDIR(status.st_mode) or (hasattr(os, "getuid") and status.st_uid != os.getuid()):
                continue
            with _opened_if_abandoned(root / name / _SCRATCH_LOCK) as descriptor:
                if descriptor is not None:
                    shutil.rmtree(root / name, ignore_errors=True)


@contextlib.contextmanager
def _opened_if_abandoned(path: Path) -> Iterator[int | None]:
    """The descriptor of a file whose lock nobody holds, locked; None if somebody does, or there are no locks."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        yield descriptor if is_file and _take_lock(descriptor) and _is_at(descriptor, path) else None
    finally:
        os.close(descriptor)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # a folder may be writable but not listable; then nothing is cleaned up
        return []


def _journal(descriptor: int) -> list[tuple[str, str]]:
    """The entries of an abandoned lock: pairs of an owner's name and the name of a file beside it."""
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        content = json.loads(os.read(descriptor, _MOST_JOURNAL) or b"[]")
        return [(str(owner), str(name)) for owner, name in content]
    # a process died while writing it, or it is another program's
    except (OSError, ValueError, TypeError, RecursionError):
        return []


_WEIGHTS = re.compile(r"(.+)-[0-9a-f]{12}\.data", re.DOTALL)


def _remove_unused(folder: Path, companions: Iterable[tuple[str, str]]) -> None:
    """Remove weights that neither their own model nor another one in the folder, such as a copy, refers to."""
    for owner, name in companions:
        match = _WEIGHTS.fullmatch(name)
        if match is None or match[1] != Path(owner).stem or Path(name).name != name or Path(owner).name != owner:
            continue
        path = folder / name
        with contextlib.suppress(OSError):
            models = [
                file for file in _names(folder) if file.lower().endswith(".onnx") and not _TEMPORARY.fullmatch(file)
            ]
            if stat.S_ISREG(os.lstat(path).st_mode) and not any(
                _mentions(folder / file, os.fsencode(name)) for file in {owner, *models}
            ):
                path.unlink()


def _mentions(path: Path, name: bytes) -> bool:
    """True if a file contains this text or cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return False
    except OSError:
        return True
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        rest = b""
        while piece := file.read(_PIECE):
            if name in rest + piece:
                return True
            rest = piece[-len(name) :]
    return False

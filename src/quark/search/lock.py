"""One search at a time in a folder: the other would take away its files.

The lock is the operating system's, on a file that stays: it ends with the process that holds it, however that ends, so
that a search that was killed leaves no folder that cannot be entered. Where there are no such locks (Windows, some
network disks), two searches at once are not noticed.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import IO

from quark.errors import InvalidValueError

LOCK = ".search.lock"


def take(path: Path, remedy: str = "give --out another folder") -> IO[bytes]:
    """Hold the lock until the file is closed; an error where another process, or another search of this one, has it."""
    file = path.open("ab")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            file.close()
            raise InvalidValueError(
                f"folder '{path.parent}': another search is at work in it; wait for it, or {remedy}"
            ) from error
    return file

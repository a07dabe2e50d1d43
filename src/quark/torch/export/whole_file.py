"""A file that is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def complete(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well, and is gone when it does not."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".quark-", suffix=path.suffix)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp's files are for their owner only
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

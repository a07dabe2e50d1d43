"""How much memory this process can still have."""

from __future__ import annotations

from pathlib import Path

_MEMORY_INFO = Path("/proc/meminfo")
_GROUP_LIMIT, _GROUP_USE = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.stat")


def free_memory() -> int | None:
    """Bytes that this process can still have; None if the system does not say."""
    found = [each for each in (_free_of_machine(), _free_of_group()) if each is not None]
    return min(found, default=None)


def _free_of_machine() -> int | None:
    try:
        return _number(_MEMORY_INFO, "MemAvailable:") * 1024
    except (OSError, ValueError):
        return None


def _free_of_group() -> int | None:
    """What a container may still take. Pages of files that it holds can be dropped, and are not counted."""
    try:
        return int(_GROUP_LIMIT.read_text(encoding="ascii")) - _number(_GROUP_USE, "anon")
    except (OSError, ValueError):
        return None  # there is no group, or its limit is "max"


def _number(path: Path, name: str) -> int:
    """The number in the line of that name."""
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    found = next((words[1] for words in lines if len(words) > 1 and words[0] == name), None)
    if found is None:
        raise ValueError(name)
    return int(found)

"""Text for sizes, counts and lists."""

from __future__ import annotations

from collections.abc import Iterable

MOST_LISTED = 6


def size_text(size_bytes: int) -> str:
    """Return a size with its unit, in powers of 1000.

    >>> size_text(999), size_text(13_600_000)
    ('999 B', '13.6 MB')
    """
    size = float(size_bytes)
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def count_of(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural if needed.

    >>> count_of(1, "sample"), count_of(1200, "sample")
    ('1 sample', '1,200 samples')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listed(items: Iterable[str], most: int = MOST_LISTED) -> str:
    """Return the items separated by commas; beyond `most`, only the number of the rest.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    names = list(items)
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"

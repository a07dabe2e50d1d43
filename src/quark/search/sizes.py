"""How large a quantized file really is: what lies on the disk, packed where that is smaller."""

from __future__ import annotations

from pathlib import Path

PROFILE = "portable"


def stored_bytes(path: Path) -> int:
    """A model with the weights beside it."""
    beside = path.parent.glob(f"{path.stem}-????????????.data")
    return path.stat().st_size + sum(each.stat().st_size for each in beside)

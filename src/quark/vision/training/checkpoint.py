"""The state of a run.

    best.pt    the network where it was best: its state dict under `model`, the epoch, top-1
    last.pt    everything that a run needs to go on after its last whole epoch

Both hold tensors and plain values only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quark.errors import InvalidValueError
from quark.vision.tensor_file import read_tensor_file, write_tensor_file

BEST, LAST = "best.pt", "last.pt"


def save_checkpoint(content: dict[str, Any], path: Path) -> None:
    write_tensor_file(content, path)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """On the CPU."""
    content = read_tensor_file(path, "checkpoint")
    if not isinstance(content, dict) or "model" not in content:
        raise InvalidValueError(f"checkpoint '{path}' is none of a run: it has no 'model'")
    return content

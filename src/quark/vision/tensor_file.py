"""Files of tensors and plain values: written whole or not at all, and read without running anything in them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from quark.errors import InvalidValueError


def read_tensor_file(path: Path, what: str) -> Any:
    """The content, on the CPU. `what` names it in errors: weights, checkpoint."""
    if not path.is_file():
        raise InvalidValueError(f"{what} '{path}': {'it is a folder' if path.is_dir() else 'there is no such file'}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch has no root of its own for files that are none: KeyError, struct.error ...
        reason = str(error).partition("\n")[0]
        raise InvalidValueError(
            f"{what} '{path}' cannot be read: {type(error).__name__}: {reason} (expected what torch.save writes of "
            f"tensors in dictionaries; of a module, save its state_dict())"
        ) from error


def write_tensor_file(content: dict[str, Any], path: Path) -> None:
    """Written under another name, and renamed when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise

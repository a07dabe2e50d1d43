"""Files of tensors and plain values: written whole or not at all, and read without running anything in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from quark.errors import InvalidValueError, OutputError
from quark.onnx.save import complete, writing


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
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    with complete(path) as unfinished, unfinished.open("r+b") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch's name for an OSError while it writes
            raise OutputError(f"'{path}' cannot be written: {str(error).partition(chr(10))[0]}") from error
        file.flush()
        os.fsync(file.fileno())

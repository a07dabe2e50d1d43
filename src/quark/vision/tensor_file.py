"""Files of tensors and plain values: written completely or not at all, and read without executing anything in them.

best.pt    the network at its best epoch: its state dict under `model`, the epoch, top-1
last.pt    everything that a run needs to resume after its last complete epoch
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quark.errors import InvalidValueError, OutputError
from quark.onnx.save import complete, writing

BEST, LAST = "best.pt", "last.pt"
COUNTER = "num_batches_tracked"


def read_tensor_file(path: Path, what: str) -> Any:
    """Return the content, on the CPU. `what` names it in errors: weights, checkpoint."""
    if not path.is_file():
        raise InvalidValueError(f"{what} '{path}': {'it is a folder' if path.is_dir() else 'there is no such file'}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch has no base class for invalid files: KeyError, struct.error ...
        reason = str(error).partition("\n")[0]
        raise InvalidValueError(
            f"{what} '{path}' cannot be read: {type(error).__name__}: {reason} (expected what torch.save writes of "
            f"tensors in dictionaries; of a module, save its state_dict())"
        ) from error


def save_checkpoint(content: dict[str, Any], path: Path) -> None:
    """Write a file under another name, and rename it when it is complete."""
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    with complete(path) as unfinished, unfinished.open("r+b") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch raises it for an OSError while it writes
            raise OutputError(f"'{path}' cannot be written: {str(error).partition(chr(10))[0]}") from error
        file.flush()
        os.fsync(file.fileno())


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read best.pt or last.pt, on the CPU."""
    content = read_tensor_file(path, "checkpoint")
    if not isinstance(content, dict) or "model" not in content:
        raise InvalidValueError(f"checkpoint '{path}' is not of a training run: it has no 'model'")
    return content


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a state dict, on the CPU.

    It may be inside a dictionary, under `state_dict` or `model`, and names may have the prefix `module.` of
    data-parallel training.
    """
    content = read_tensor_file(path, "weights")
    for name in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    tensors = isinstance(content, Mapping) and content and all(isinstance(item, Tensor) for item in content.values())
    if not tensors:
        raise InvalidValueError(f"weights '{path}' hold no state dict: expected names with a tensor each")
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}


def fill(network: nn.Module, weights: Mapping[str, Tensor], what: str) -> None:
    """Load all weights except counters of batches, which old files lack.

    A name that is missing, unknown or of another shape is an error.
    """
    expected = {name: tensor for name, tensor in network.state_dict().items() if not name.endswith(COUNTER)}
    given = {name: weight for name, weight in weights.items() if not name.endswith(COUNTER)}
    for name, tensor in expected.items():
        if name not in given:
            names = f" Theirs are called {', '.join(list(given)[:2])} and so on."
            raise InvalidValueError(f"weights {what} have no '{name}': are they those of another network?{names}")
        if given[name].shape != tensor.shape:
            raise InvalidValueError(
                f"weights {what}: '{name}' has shape {list(given[name].shape)}, expected {list(tensor.shape)}"
            )
    for name in given:
        if name not in expected:
            raise InvalidValueError(f"weights {what} have '{name}', which the network has not: another network's?")
    network.load_state_dict(dict(given), strict=False)

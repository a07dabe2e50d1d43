"""State dicts in files: read without running anything in them, and checked before they are used.

What training scripts wrap around a state dict is taken off: a dictionary that has it under `state_dict` or `model`,
and the prefix `module.` of data-parallel training. Counters of batches, which old files lack, stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from quark.errors import InvalidValueError
from quark.vision.tensor_file import read_tensor_file

WRAPPINGS = ("state_dict", "model")
PREFIX = "module."
COUNTER = "num_batches_tracked"


def read_weights(path: Path) -> dict[str, Tensor]:
    """Name -> tensor, on the CPU."""
    content = read_tensor_file(path, "weights")
    for name in WRAPPINGS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    tensors = isinstance(content, Mapping) and content and all(isinstance(each, Tensor) for each in content.values())
    if not tensors:
        raise InvalidValueError(f"weights '{path}' hold no state dict: expected names with a tensor each")
    return {str(name).removeprefix(PREFIX): tensor for name, tensor in content.items()}


def fill(network: nn.Module, weights: Mapping[str, Tensor], what: str) -> None:
    """Load the weights, all of them. The first name that is missing, unknown or of another shape is an error."""
    expected = {name: each for name, each in network.state_dict().items() if not name.endswith(COUNTER)}
    given = {name: each for name, each in weights.items() if not name.endswith(COUNTER)}
    for name, tensor in expected.items():
        if name not in given:
            raise InvalidValueError(
                f"weights {what} have no '{name}': are they those of another network?{_like(given)}"
            )
        if given[name].shape != tensor.shape:
            raise InvalidValueError(
                f"weights {what}: '{name}' has shape {list(given[name].shape)}, expected {list(tensor.shape)}"
            )
    for name in given:
        if name not in expected:
            raise InvalidValueError(f"weights {what} have '{name}', which the network has not: another network's?")
    network.load_state_dict(dict(given), strict=False)


def _like(given: Mapping[str, Tensor]) -> str:
    return f" Theirs are called {', '.join(list(given)[:2])} and so on."

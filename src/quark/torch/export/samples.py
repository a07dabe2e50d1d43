"""Inputs to compare a network with its exported file on: the example, and what lies around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from quark.errors import InvalidValueError
from quark.torch.export.translate import batch_size

Inputs: TypeAlias = tuple[torch.Tensor, ...]

SAMPLES = 8
_NOISE = 0.1  # in standard deviations of the example


def example_inputs(network: fx.GraphModule, example: Any) -> Inputs:
    """The inputs of the network in their order, on the CPU, from a tensor, a sequence of them or a dictionary.

    An InvalidValueError says which input is missing, or too much.
    """
    names = [str(node.target) for node in network.graph.nodes if node.op == "placeholder"]
    if isinstance(example, Mapping):
        strange = [str(key) for key in example if key not in names]
        missing = [name for name in names if name not in example]
        if strange or missing:
            raise InvalidValueError(
                f"example input has {', '.join(map(str, example)) or 'nothing'}, and the network takes "
                f"{', '.join(names)}: name the inputs alike"
            )
        values = [example[name] for name in names]
    else:
        values = list(example) if isinstance(example, (list, tuple)) else [example]
    if len(values) != len(names):
        raise InvalidValueError(
            f"example input has {len(values)} tensors, and the network takes {len(names)}: {', '.join(names)}"
        )
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, torch.Tensor):
            raise InvalidValueError(f"example input '{name}': expected a tensor, got {type(value).__name__}")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise InvalidValueError(f"example input '{name}' holds NaN or Inf: expected what the network is fed with")
    return tuple(value.detach().cpu() for value in values)


def samples_around(example: Sequence[torch.Tensor], *, has_dynamic_batch: bool, seed: int = 0) -> list[Inputs]:
    """Batches: the example, and with noise on numbers that are no integers. With a dynamic batch it is one of
    `SAMPLES`, else two of the example's size."""
    generator = torch.Generator().manual_seed(seed)
    if not has_dynamic_batch:
        return [tuple(example), tuple(_noisy(each, 0, generator) for each in example)]
    size = batch_size(example)
    rows = [each.dim() > 0 and each.shape[0] == size for each in example]
    longer = [_repeated(each) if is_batch else each for each, is_batch in zip(example, rows, strict=True)]
    noisy = (_noisy(each, size, generator) if is_batch else each for each, is_batch in zip(longer, rows, strict=True))
    return [tuple(noisy)]


def _repeated(x: torch.Tensor) -> torch.Tensor:
    copies = -(-SAMPLES // x.shape[0])
    return torch.cat([x] * copies)[:SAMPLES]


def _noisy(x: torch.Tensor, first: int, generator: torch.Generator) -> torch.Tensor:
    """With noise from row `first` on."""
    if not x.is_floating_point() or not x.dim():
        return x
    noise = torch.randn(x.shape, generator=generator) * (_NOISE * float(x.float().std(correction=0)))
    noise[:first] = 0
    return x + noise.to(x.dtype)

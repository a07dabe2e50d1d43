"""The origin of a quantized network, for the card of its export: digests of the float module and of the data.

Every network that `quantize_model` returns has an `Origin`, which copies, pickles and frozen networks keep.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from quark.account import FileFacts
from quark.card import DataFacts, DataKind
from quark.torch.capture import Batches


@dataclass(frozen=True)
class Origin:
    """`source` is the state of the float module, `calibrated_sha256` that of the quantized one before training.

    `unkept` names arguments that a card cannot hold. `request` says what `quark quantize-torch` was asked for.
    `state_sha256` is the state that a frozen network was made from; empty before freezing.
    """

    source: FileFacts
    config: Mapping[str, Any]
    data: DataFacts
    calibrated_sha256: str
    unkept: tuple[str, ...] = ()
    request: Mapping[str, Any] = field(default_factory=dict)
    state_sha256: str = ""


def state_digest(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of names, types, shapes and bytes of a state dict, in its order.

    >>> one, other = {"w": torch.zeros(2)}, {"w": torch.zeros(2, dtype=torch.bfloat16)}
    >>> state_digest(one) == state_digest({"w": torch.zeros(2)}), state_digest(one) == state_digest(other)
    (True, False)
    """
    digest = hashlib.sha256()
    for name, value in state.items():
        for piece in _pieces(name, value):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(name: str, value: Any) -> Iterator[Any]:
    """The parts of an entry to hash. Extra state may hold anything: plain values are hashed, and the type of all
    others, whose repr may contain an address."""
    if isinstance(value, torch.Tensor):
        yield f"{name}:{value.dtype}:{tuple(value.shape)};".encode()
        content = value.detach().cpu().contiguous().reshape(-1)
        yield content.view(torch.uint8).numpy().data if content.numel() else b""
    elif isinstance(value, Mapping):
        yield f"{name}:{len(value)} entries;".encode()
        for key, item in value.items():
            yield from _pieces(f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        yield f"{name}:{len(value)} items;".encode()
        for index, item in enumerate(value):
            yield from _pieces(f"{name}[{index}]", item)
    else:
        is_plain = isinstance(value, (str, bytes, bool, int, float, complex, type(None)))
        known = value if is_plain else type(value)
        yield f"{name}:{known!r};".encode()


def source_facts(model: nn.Module | ExportedProgram) -> FileFacts:
    """Return the class of a float module, the size of its state, and its digest."""
    state = model.state_dict if isinstance(model, ExportedProgram) else model.state_dict()
    size = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    return FileFacts(type(model).__name__, size, state_digest(state))


def data_facts(batches: Batches | None, loader: Any, seed: int) -> DataFacts:
    """Return the facts about the batches; `loader` is None if they are random numbers."""
    if batches is None:
        return DataFacts(DataKind.UNUSED, seed=seed)
    digest, size = hashlib.sha256(), 0
    for batch in batches:
        size = size or (int(batch[0].shape[0]) if batch[0].dim() else 1)
        digest.update(state_digest(dict(zip(batches.call.names, batch, strict=True))).encode())
    return DataFacts(
        DataKind.RANDOM if loader is None else DataKind.OBJECT,
        name="" if loader is None else type(loader).__name__,
        batch_size=size or 1,
        samples=batches.samples,
        sha256=digest.hexdigest(),
        seed=seed,
    )

"""Texts as token ids: for calibration, and for perplexity."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from quark.errors import InvalidValueError, ModelError
from quark.files.foreign import read_text

_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Text:
    """A text file, and how much of it is used: at most `samples` pieces of `length` tokens, evenly spaced over the
    text; None: all."""

    path: str | os.PathLike[str]
    samples: int | None = None
    length: int = 512

    def token_ids(self, tokenizer: Any) -> list[torch.Tensor]:
        """The pieces, [1, length] each. A text that is shorter than one piece is one piece."""
        label = f"text '{os.fspath(self.path)}'"
        content = read_text(self.path, label, _MOST_BYTES)
        ids = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) < 2:
            raise InvalidValueError(f"{label} has {len(ids)} tokens: expected at least 2")
        return pieces(torch.tensor(ids), self.length, self.samples)


def pieces(ids: torch.Tensor, length: int, count: int | None = None) -> list[torch.Tensor]:
    """At most `count` evenly spaced pieces of that length; what is left over at the end is not used.

    >>> [each.tolist() for each in pieces(torch.arange(9), 2, 2)]
    [[[0, 1]], [[6, 7]]]
    """
    length = min(length, len(ids))
    parts = list(ids[: len(ids) // length * length].reshape(-1, 1, length))
    if count is None or count >= len(parts):
        return parts
    chosen = np.linspace(0, len(parts) - 1, count).round().astype(int)
    return [parts[index] for index in chosen]


def perplexity(model: nn.Module, batches: Sequence[torch.Tensor]) -> float:
    """The exponential of the mean negative log likelihood of each token, given those before it in its piece."""
    total, count = 0.0, 0
    device = next(model.parameters()).device
    for batch in batches:
        ids = batch.to(device)
        try:
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        except (RuntimeError, ValueError, IndexError) as error:
            raise ModelError(
                f"{type(model).__name__} does not run on a piece of {ids.shape[1]} tokens up to {int(ids.max())}: "
                f"{error}; its length or its tokens may be beyond those of the model"
            ) from error
        wanted = ids[:, 1:]
        total += float(nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum"))
        count += wanted.numel()
    if not count:
        raise InvalidValueError("perplexity of no tokens: expected pieces of at least 2 tokens")
    return math.exp(min(total / count, 700.0))  # beyond, it is not a number any more

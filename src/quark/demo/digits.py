"""The 1797 handwritten digits of scikit-learn, split into a training and a held-out part.

Images are 8x8 with grey values 0..16; the network takes them as [N, 1, 8, 8], divided by 16. The split is a permutation
from numpy's legacy generator, whose streams never change, so the held-out part is the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark.errors import MissingDependencyError

SPLIT_SEED = 0
HELD_OUT_COUNT = 450
GREY_LEVELS = 16.0


@dataclass(frozen=True)
class Digits:
    """Images [N, 1, 8, 8] of float32 in 0..1, and their labels [N]."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


def load_digits() -> tuple[Digits, Digits]:
    """Return the training part (1347 images) and the held-out part (450)."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise MissingDependencyError(
            'the digits come with scikit-learn, which is not installed: pip install "quark-quantizer[demo]"'
        ) from error
    data = datasets.load_digits()
    order = np.random.RandomState(SPLIT_SEED).permutation(len(data.target))
    images = (data.images[order, None] / GREY_LEVELS).astype(np.float32)
    labels = data.target[order].astype(np.int64)
    cut = len(labels) - HELD_OUT_COUNT
    return Digits(images[:cut], labels[:cut]), Digits(images[cut:], labels[cut:])

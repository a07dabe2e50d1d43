"""1797 handwritten digits, split into a training and a held-out part.

`digits.npz` has them as `sklearn.datasets.load_digits` returns them: the test set of UCI's "Optical Recognition of
Handwritten Digits" (NOTICE has the source and the licence). Images are 8x8 with grey values 0..16; the network takes
them as [N, 1, 8, 8], divided by 16. The split is a permutation from numpy's legacy generator, whose streams never
change, so the held-out part is the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
    with np.load(Path(__file__).with_name("digits.npz")) as data:
        pixels, classes = data["images"], data["labels"]
    order = np.random.RandomState(SPLIT_SEED).permutation(len(classes))
    images = (pixels[order, None] / GREY_LEVELS).astype(np.float32)
    labels = classes[order].astype(np.int64)
    cut = len(labels) - HELD_OUT_COUNT
    return Digits(images[:cut], labels[:cut]), Digits(images[cut:], labels[cut:])

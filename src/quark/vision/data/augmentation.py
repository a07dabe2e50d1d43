"""A random part of an image, at a random aspect, perhaps mirrored: what a network is trained on.

An area of `smallest_area` to 1 of the image and an aspect of 3/4 to 4/3 are drawn until the rectangle fits; after ten
times it is the largest square in the middle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quark.onnx.data.images import Preprocessing, read_image

TRIES = 10
MOST_ASPECT = 4 / 3
Box = tuple[int, int, int, int]


def random_box(width: int, height: int, smallest_area: float, random: np.random.Generator) -> Box:
    """Left, upper, right and lower edge."""
    for _ in range(TRIES):
        area = width * height * random.uniform(smallest_area, 1)
        aspect = math.exp(random.uniform(-1, 1) * math.log(MOST_ASPECT))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            left, upper = int(random.integers(width - wide + 1)), int(random.integers(height - high + 1))
            return left, upper, left + wide, upper + high
    side = min(width, height)
    left, upper = (width - side) // 2, (height - side) // 2
    return left, upper, left + side, upper + side


@dataclass(frozen=True)
class TrainingTransform:
    """An image file as an array [3, size, size], prepared as for evaluation after a random cut."""

    size: int = 224
    smallest_area: float = 0.25  # a trained network is tuned: the 0.08 of training from nothing would only disturb it
    preprocessing: Preprocessing = field(default_factory=Preprocessing)

    def load(self, path: Path, random: np.random.Generator) -> NDArray[np.float32]:
        image = read_image(path, "RGB")
        width, height = image.size
        box = random_box(width, height, self.smallest_area, random)
        cut = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        pixels = np.asarray(cut, np.float32)
        if random.random() < 0.5:
            pixels = pixels[:, ::-1]
        return np.ascontiguousarray(self.preprocessing.normalize(pixels).transpose(2, 0, 1))

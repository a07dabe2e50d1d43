"""Augmentation: batches are cut, mirrored and mixed at random, so that a few hundred samples are not learned by heart.

The float network says what is right for any input, so that a varied sample needs no label. For images, a sample is a
rectangle of 35 to 100 % of the area, stretched to the full size, mirrored half of the time, and with other contrast and
colour. Every kind of sample can be mixed with another: a part of each number, or, for images, every other time a
rectangle that comes from the other.

All random numbers come from numpy on the host, so that a run repeats itself and can go on at any step.
"""

from __future__ import annotations

import math
from enum import Enum

import numpy as np
import torch

from quark.errors import InvalidValueError

LEAST_AREA = 0.35
LARGEST_ASPECT = 4 / 3
CONTRAST = 0.25  # the deviation of the logarithm
COLOUR = 0.15  # deviation of each channel's factor and of its offset, in deviations of the image
IMAGE_CHANNELS = 3
LEAST_SIDE = 32
LEAST_SHARE = 0.5  # the least share of a sample in a mixture

Tensors = dict[str, torch.Tensor]


class Augmentation(Enum):
    """The augmentation of samples before they are mixed."""

    AUTO = "auto"
    IMAGES = "images"
    NONE = "none"


def takes_images(batch: Tensors, augmentation: Augmentation) -> bool:
    """True if samples like these are cut and mirrored. `auto`: if every input is a batch of colour images.

    Raises InvalidValueError if they were said to be images and are not. Integers cannot be stretched.
    """
    are_images = {name: x.dim() == 4 and x.is_floating_point() for name, x in batch.items()}
    if augmentation is Augmentation.IMAGES and not all(are_images.values()):
        name = next(name for name, is_image in are_images.items() if not is_image)
        kind, shape = str(batch[name].dtype).removeprefix("torch."), tuple(batch[name].shape)
        raise InvalidValueError(
            f"DistillationAugmentation 'images': input '{name}' is {kind} of shape {shape}, expected float images of "
            "shape (batch, channels, height, width); use auto or none"
        )
    if augmentation is not Augmentation.AUTO:
        return augmentation is Augmentation.IMAGES
    return all(
        are_images[name] and x.shape[1] == IMAGE_CHANNELS and min(x.shape[2:]) >= LEAST_SIDE
        for name, x in batch.items()
    )


def cut_and_mirrored(batch: Tensors, chance: np.random.Generator) -> Tensors:
    """Each image of the batch replaced by a random rectangle of it; several inputs are cut in the same way."""
    count = len(next(iter(batch.values())))
    area = chance.uniform(LEAST_AREA, 1.0, count)
    aspect = np.exp(chance.uniform(-math.log(LARGEST_ASPECT), math.log(LARGEST_ASPECT), count))
    width, height = np.minimum(1, np.sqrt(area * aspect)), np.minimum(1, np.sqrt(area / aspect))
    side = np.where(chance.random(count) < 0.5, -1.0, 1.0)
    # in the coordinates of grid_sample, which go from -1 to 1
    place = np.zeros((count, 2, 3), np.float32)
    place[:, 0, 0], place[:, 0, 2] = side * width, chance.uniform(-1, 1, count) * (1 - width)
    place[:, 1, 1], place[:, 1, 2] = height, chance.uniform(-1, 1, count) * (1 - height)
    tensors = {}
    for name, x in batch.items():
        matrices = torch.from_numpy(place).to(x.device, non_blocking=True)
        grid = torch.nn.functional.affine_grid(matrices, list(x.shape), align_corners=False)
        tensors[name] = torch.nn.functional.grid_sample(x, grid, padding_mode="border", align_corners=False)
    return tensors


def coloured(batch: Tensors, chance: np.random.Generator) -> Tensors:
    """Each image with its channels scaled and moved at random."""
    tensors = {}
    for name, x in batch.items():
        shape = (len(x), x.shape[1], 1, 1)
        gain = np.exp(chance.normal(0, CONTRAST, (len(x), 1, 1, 1)) + chance.normal(0, COLOUR, shape))
        offset = chance.normal(0, COLOUR, shape)
        scale, shift = (
            torch.from_numpy(value.astype(np.float32)).to(x.device, non_blocking=True) for value in (gain, offset)
        )
        middle, spread = x.mean((2, 3), keepdim=True), x.std((1, 2, 3), keepdim=True)
        tensors[name] = (x - middle) * scale + middle + shift * spread
    return tensors


def mixed(batch: Tensors, chance: np.random.Generator, *, are_images: bool) -> Tensors:
    """Each sample with a part of the one at the other end of the batch; integers stay as they are."""
    share = float(chance.uniform(LEAST_SHARE, 1.0))
    if not are_images or chance.random() < 0.5:
        return {name: x * share + x.flip(0) * (1 - share) if x.is_floating_point() else x for name, x in batch.items()}
    across, down = chance.random(2)
    side = math.sqrt(1 - share)
    tensors = {}
    for name, x in batch.items():
        height, width = (max(1, round(side * size)) for size in x.shape[2:])
        top, left = round(down * (x.shape[2] - height)), round(across * (x.shape[3] - width))
        window = (..., slice(top, top + height), slice(left, left + width))
        tensors[name] = x.clone()
        tensors[name][window] = x.flip(0)[window]
    return tensors

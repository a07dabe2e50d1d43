"""Images that fit into memory, as uint8 arrays, kept and augmented on the device.

An image is shifted by up to `PADDING` pixels, with black borders, and possibly mirrored, as is usual for CIFAR. Random
numbers are drawn on the CPU, so that all devices see the same images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from quark.errors import InvalidValueError
from quark.onnx.data.array_files import read_array_file
from quark.onnx.data.images import Preprocessing
from quark.vision.training.evaluation import Batch
from quark.vision.training.processes import Processes

PADDING = 4


@dataclass(frozen=True, eq=False)
class Arrays:
    """Images [n, height, width, channels] of uint8, and classes [n]."""

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8 or len(self.images) != len(self.labels):
            raise InvalidValueError(
                f"images {list(self.images.shape)} of {self.images.dtype} with {len(self.labels)} labels: expected "
                f"[n, height, width, channels] of uint8, with n labels"
            )

    @classmethod
    def read(cls, path: Path, images: str, labels: str) -> Arrays:
        """Read two arrays of an .npz archive by name."""
        arrays = read_array_file(path, f"data '{path}'", (images, labels))
        if len(arrays) != 2:
            raise InvalidValueError(f"data '{path}': expected an .npz archive with arrays '{images}' and '{labels}'")
        if arrays[images].dtype != np.uint8 or arrays[labels].dtype.kind not in "iu" or arrays[labels].ndim != 1:
            content = ", ".join(f"'{name}' of {array.dtype} {list(array.shape)}" for name, array in arrays.items())
            raise InvalidValueError(
                f"data '{path}' has {content}: expected images of uint8, and a list of integer labels"
            )
        return cls(torch.from_numpy(arrays[images]), torch.from_numpy(arrays[labels].astype(np.int64)))

    def to(self, device: torch.device) -> Arrays:
        return Arrays(self.images.to(device), self.labels.to(device))

    def some(self, count: int) -> Arrays:
        """Return the first `count` images."""
        return Arrays(self.images[:count], self.labels[:count])

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class ArrayBatches:
    """Training data. An incomplete last batch is left out; its images differ between epochs."""

    arrays: Arrays
    batch_size: int
    seed: int = 0
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    processes: Processes = field(default_factory=Processes)
    is_augmented: bool = True

    def __len__(self) -> int:
        return len(self.arrays) // self.processes.count // self.batch_size

    def epoch(self, number: int) -> Iterator[Batch]:
        random = torch.Generator()
        random.manual_seed(int(np.random.SeedSequence((self.seed, number)).generate_state(1)[0]))
        count = len(self.arrays)
        order = torch.randperm(count, generator=random)
        shifts = torch.randint(2 * PADDING + 1, (count, 2), generator=random)
        is_mirrored = torch.rand(count, generator=random) < 0.5
        device = self.arrays.images.device
        mine = order[self.processes.rank :: self.processes.count].to(device)
        shifts, is_mirrored = shifts.to(device), is_mirrored.to(device)
        for batch in torch.split(mine[: len(self) * self.batch_size], self.batch_size):
            images = self.arrays.images[batch]
            if self.is_augmented:
                images = moved(images, shifts[batch], is_mirrored[batch])
            yield normalized(images, self.preprocessing), self.arrays.labels[batch]


@dataclass(frozen=True)
class ArrayHeldOut:
    """Held-out or calibration data: the part of this process, in order, without augmentation."""

    arrays: Arrays
    batch_size: int
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    processes: Processes = field(default_factory=Processes)

    def __iter__(self) -> Iterator[Batch]:
        images, labels = (
            array[self.processes.rank :: self.processes.count] for array in (self.arrays.images, self.arrays.labels)
        )
        for batch, classes in zip(*(torch.split(tensor, self.batch_size) for tensor in (images, labels)), strict=True):
            yield normalized(batch, self.preprocessing), classes


def moved(images: Tensor, shifts: Tensor, is_mirrored: Tensor) -> Tensor:
    """Shift each image [height, width, channels] within a black border, and mirror some. A shift of PADDING is none."""
    count, height, width, _ = images.shape
    padded = functional.pad(images, (0, 0, PADDING, PADDING, PADDING, PADDING))
    columns = torch.arange(width, device=images.device)
    columns = torch.where(is_mirrored[:, None], width - 1 - columns, columns) + shifts[:, 1:]
    rows = torch.arange(height, device=images.device) + shifts[:, :1]
    numbers = torch.arange(count, device=images.device)
    return padded[numbers[:, None, None], rows[:, :, None], columns[:, None, :]]


def normalized(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Return images as normalized float32 [n, channels, height, width]."""
    mean, std = (torch.tensor(numbers, device=images.device) for numbers in (preprocessing.mean, preprocessing.std))
    return ((images.float() / preprocessing.divisor - mean) / std).permute(0, 3, 1, 2).contiguous()

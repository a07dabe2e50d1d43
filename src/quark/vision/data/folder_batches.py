"""Batches of image files, decoded by worker processes.

What is random about an image depends on the seed, the epoch and its number, so that neither the number of workers nor
of processes changes what an image looks like.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from quark.onnx.data.images import ImageLoader, Preprocessing
from quark.vision.data.augmentation import TrainingTransform
from quark.vision.data.folders import LabelledImages
from quark.vision.training.data import Batch
from quark.vision.training.processes import Processes


class _AugmentedImages(Dataset[tuple[Tensor, int]]):
    """The images as one epoch sees them."""

    def __init__(self, images: LabelledImages, transform: TrainingTransform, seed: int, epoch: int) -> None:
        self._images, self._transform, self._seed, self._epoch = images, transform, seed, epoch

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        random = np.random.default_rng((self._seed, self._epoch, number))
        pixels = self._transform.load(self._images.files[number], random)
        return torch.from_numpy(pixels), self._images.labels[number]


class PlainImages(Dataset[tuple[Tensor, int]]):
    """The images as `quark.evaluate` prepares them: short side, centre crop, normalized."""

    def __init__(self, images: LabelledImages, size: int) -> None:
        self._images = images
        self._loader = ImageLoader(Preprocessing(), size, 3, has_channels_last=False, dtype=np.dtype(np.float32))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self._loader.load(self._images.files[number])), self._images.labels[number]


@dataclass(frozen=True)
class FolderBatches:
    """Training data. Images that make no whole batch are left out, others in every epoch."""

    images: LabelledImages
    batch_size: int
    transform: TrainingTransform = field(default_factory=TrainingTransform)
    seed: int = 0
    workers: int = 0
    processes: Processes = field(default_factory=Processes)

    def __len__(self) -> int:
        return len(self.images) // self.processes.count // self.batch_size

    def epoch(self, number: int) -> Iterator[Batch]:
        images = _AugmentedImages(self.images, self.transform, self.seed, number)
        ranks = {"num_replicas": self.processes.count, "rank": self.processes.rank}
        sampler: DistributedSampler[tuple[Tensor, int]] = DistributedSampler(
            images, shuffle=True, seed=self.seed, drop_last=True, **ranks
        )
        sampler.set_epoch(number)
        loader = DataLoader(
            images,
            self.batch_size,
            sampler=sampler,
            num_workers=self.workers,
            drop_last=True,
            pin_memory=self.processes.device.type == "cuda",
            generator=torch.Generator(),  # workers take their seeds from it, and not from torch's own
        )
        yield from loader


@dataclass(frozen=True)
class FolderHeldOut:
    """Held-out data, and what calibration wants: the part of this process, in order."""

    images: LabelledImages
    batch_size: int
    size: int = 224
    workers: int = 0
    processes: Processes = field(default_factory=Processes)

    def __iter__(self) -> Iterator[Batch]:
        yield from self.loader()

    def loader(self) -> DataLoader[tuple[Tensor, int]]:
        part = self.images.part(self.processes.rank, self.processes.count)
        return DataLoader(
            PlainImages(part, self.size),
            self.batch_size,
            num_workers=self.workers,
            pin_memory=self.processes.device.type == "cuda",
            generator=torch.Generator(),
        )

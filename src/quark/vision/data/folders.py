"""Class folders of images, as in ImageNet, for training, calibration and evaluation.

    DIR/train/n01440764/*.JPEG     for training, and for calibration if there is no calib
    DIR/calib/n01440764/*.JPEG     for calibration, and for training if there is no train
    DIR/val/n01440764/*.JPEG       for evaluation
    DIR/n01440764/*.JPEG           the same images for calibration and evaluation

The classes are the sorted names of all class folders, or the lines of DIR/classes.txt, with which a few of ImageNet's
classes can keep their numbers.

Batches are decoded by worker processes. The randomness of an image depends only on the seed, the epoch and its number,
not on the number of workers or processes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from quark.errors import InvalidValueError
from quark.evaluate.datasets import MOST_LABEL_BYTES, class_folders, evenly_spaced, images_in
from quark.files.foreign import read_text
from quark.onnx.data.images import ImageLoader, Preprocessing, read_image
from quark.vision.training.evaluation import Batch
from quark.vision.training.processes import Processes

TRAIN, CALIB, VAL = ("train", "train_data"), ("calib", "calib_data"), ("val", "val_data", "validation")
CLASSES_FILE = "classes.txt"
TRIES = 10
MOST_ASPECT = 4 / 3
Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class LabelledImages:
    """Image files and the numbers of their classes."""

    source: str
    files: tuple[Path, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.files)

    def some(self, count: int | None) -> LabelledImages:
        """Return `count` evenly spaced images, or all of them if it is None or larger."""
        return self._picked(evenly_spaced(len(self), count))

    def part(self, rank: int, count: int) -> LabelledImages:
        """Return every `count`-th image, starting with number `rank`."""
        return self._picked(list(range(rank, len(self), count)))

    def _picked(self, numbers: list[int]) -> LabelledImages:
        files, labels = (tuple(values[number] for number in numbers) for values in (self.files, self.labels))
        return LabelledImages(self.source, files, labels)  # type: ignore[arg-type]  # the two have different types


@dataclass(frozen=True)
class ImageFolders:
    """`training` is None if all images are for evaluation; then `calibration` is `held_out`."""

    classes: tuple[str, ...]
    held_out: LabelledImages
    calibration: LabelledImages
    training: LabelledImages | None

    @property
    def is_calibrated_on_held_out(self) -> bool:
        return self.calibration == self.held_out


def open_folders(root: Path) -> ImageFolders:
    """Find the images under `root`, which has one of the layouts above."""
    if not root.is_dir():
        what = "it is a file" if root.exists() else "there is no such folder"
        raise InvalidValueError(f"data '{root}': {what}; expected a folder with val/CLASS/*.jpg, and train or calib")
    val, train, calib = (
        next((root / name for name in names if (root / name).is_dir()), None) for names in (VAL, TRAIN, CALIB)
    )
    if val is None and (train or calib):
        raise InvalidValueError(f"data '{root}' has no folder val: expected images to judge by in val/CLASS")
    classes = _classes(root, [folder for folder in (val or root, train, calib) if folder])
    held_out = _labelled(val or root, classes)
    training, calibration = (None if folder is None else _labelled(folder, classes) for folder in (train, calib))
    return ImageFolders(classes, held_out, calibration or training or held_out, training or calibration)


def _classes(root: Path, parts: list[Path]) -> tuple[str, ...]:
    file = root / CLASSES_FILE
    if os.path.lexists(file):
        text = read_text(file, f"'{file}'", MOST_LABEL_BYTES)
        names = tuple(line.split()[0] for line in text.splitlines() if line.strip())
        if len(set(names)) != len(names):
            raise InvalidValueError(f"'{file}' has a class twice: expected the name of one class folder in each line")
        return names
    return tuple(sorted({folder.name for part in parts for folder in class_folders(part)}))


def _labelled(folder: Path, classes: tuple[str, ...]) -> LabelledImages:
    numbers = {name: number for number, name in enumerate(classes)}
    labelled: list[tuple[Path, int]] = []
    for class_folder in class_folders(folder):
        if class_folder.name not in numbers:
            raise InvalidValueError(f"class folder '{class_folder}' is not in {CLASSES_FILE}: add its name there")
        labelled += [(image, numbers[class_folder.name]) for image in images_in(class_folder)]
    if not labelled:
        raise InvalidValueError(f"folder '{folder}' holds no class folders with images: expected {folder}/CLASS/*.jpg")
    return LabelledImages(folder.name, tuple(image for image, _ in labelled), tuple(label for _, label in labelled))


def random_box(width: int, height: int, smallest_area: float, random: np.random.Generator) -> Box:
    """Return the left, upper, right and lower edge of a random part of an image.

    Its share of the area is from `smallest_area` to 1, its aspect from 3/4 to 4/3. If no rectangle fits in ten tries,
    it is the largest square in the middle.
    """
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
    """Reads a random part of an image file as an array [3, size, size], possibly mirrored, normalized."""

    size: int = 224
    smallest_area: float = 0.25  # for a trained network; the usual 0.08 is for training from scratch
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


# Batches of image files, decoded by worker processes.
#
# What is random about an image depends on the seed, the epoch and its number, so that neither the number of workers
# nor of processes changes what an image looks like.


class _AugmentedImages(Dataset[tuple[Tensor, int]]):
    """The images of one epoch."""

    def __init__(self, images: LabelledImages, transform: TrainingTransform, seed: int, epoch: int) -> None:
        self._images, self._transform, self._seed, self._epoch = images, transform, seed, epoch

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        random = np.random.default_rng((self._seed, self._epoch, number))
        pixels = self._transform.load(self._images.files[number], random)
        return torch.from_numpy(pixels), self._images.labels[number]


class PlainImages(Dataset[tuple[Tensor, int]]):
    """The images as in `quark.evaluate`: short side, centre crop, normalized."""

    def __init__(self, images: LabelledImages, size: int) -> None:
        self._images = images
        self._loader = ImageLoader(Preprocessing(), size, size, 3, has_channels_last=False, dtype=np.dtype(np.float32))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self._loader.load(self._images.files[number])), self._images.labels[number]


@dataclass(frozen=True)
class FolderBatches:
    """Training data. An incomplete last batch is left out; its images differ between epochs."""

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

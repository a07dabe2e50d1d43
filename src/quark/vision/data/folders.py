"""A folder of ImageNet's kind: class folders of images, for training, for calibration and for evaluation.

    DIR/train/n01440764/*.JPEG     to train on, and to calibrate on where there is no calib
    DIR/calib/n01440764/*.JPEG     to calibrate on, and to train on where there is no train
    DIR/val/n01440764/*.JPEG       to judge by
    DIR/n01440764/*.JPEG           all in one: the same images calibrate and judge

The sorted names of all class folders are the classes, in that order. Where DIR has a file classes.txt, its lines are:
so can a few of ImageNet's classes keep their numbers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from quark.errors import InvalidValueError
from quark.evaluate.datasets import evenly_spaced
from quark.evaluate.prepare import MOST_LABEL_BYTES, class_folders, images_in
from quark.files.foreign import read_text

TRAIN, CALIB, VAL = ("train", "train_data"), ("calib", "calib_data"), ("val", "val_data", "validation")
CLASSES_FILE = "classes.txt"


@dataclass(frozen=True)
class LabelledImages:
    """Files, and the number of the class of each."""

    source: str
    files: tuple[Path, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.files)

    def some(self, count: int | None) -> LabelledImages:
        """`count` of them, evenly spaced; all where it is None or there are no more."""
        return self._picked(evenly_spaced(len(self), count))

    def part(self, rank: int, count: int) -> LabelledImages:
        """Every `count`-th, from number `rank` on."""
        return self._picked(list(range(rank, len(self), count)))

    def _picked(self, numbers: list[int]) -> LabelledImages:
        files, labels = (tuple(values[number] for number in numbers) for values in (self.files, self.labels))
        return LabelledImages(self.source, files, labels)  # type: ignore[arg-type]  # the two have types of their own


@dataclass(frozen=True)
class ImageFolders:
    """`training` is None where every image is needed to judge by; then `calibration` is `held_out`."""

    classes: tuple[str, ...]
    held_out: LabelledImages
    calibration: LabelledImages
    training: LabelledImages | None

    @property
    def is_calibrated_on_held_out(self) -> bool:
        return self.calibration == self.held_out


def open_folders(root: Path) -> ImageFolders:
    """The images under `root`, which is laid out in one of the ways above."""
    if not root.is_dir():
        what = "it is a file" if root.exists() else "there is no such folder"
        raise InvalidValueError(f"data '{root}': {what}; expected a folder with val/CLASS/*.jpg, and train or calib")
    val, train, calib = (_first_of(root, names) for names in (VAL, TRAIN, CALIB))
    if val is None and (train or calib):
        raise InvalidValueError(f"data '{root}' has no folder val: expected images to judge by in val/CLASS")
    classes = _classes(root, [each for each in (val or root, train, calib) if each])
    held_out = _labelled(val or root, classes)
    training, calibration = (None if each is None else _labelled(each, classes) for each in (train, calib))
    return ImageFolders(classes, held_out, calibration or training or held_out, training or calibration)


def _first_of(root: Path, names: tuple[str, ...]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


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
    found: list[tuple[Path, int]] = []
    for each in class_folders(folder):
        if each.name not in numbers:
            raise InvalidValueError(f"class folder '{each}' is not in {CLASSES_FILE}: add its name there")
        found += [(image, numbers[each.name]) for image in images_in(each)]
    if not found:
        raise InvalidValueError(f"folder '{folder}' holds no class folders with images: expected {folder}/CLASS/*.jpg")
    return LabelledImages(folder.name, tuple(image for image, _ in found), tuple(label for _, label in found))

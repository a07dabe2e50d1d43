"""CIFAR-10 for a network in ONNX: test images with their classes, and training images to calibrate on.

The archive has train_x, train_y, test_x and test_y, the images as uint8 [n, 32, 32, 3] in RGB. The network reads
(x / 255 - mean) / deviation, channels first.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.models import NamedModel
from bench.samples import SampleFile
from quark.evaluate import Dataset, Network
from quark.evaluate.datasets import evenly_spaced
from quark.onnx.data.samples import held_out_count

NAME = "cifar_resnet20"
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)

Array = NDArray[Any]


def prepare(images: Array) -> Array:
    """Images [n, height, width, 3] of bytes as the network reads them."""
    scaled = (images.astype(np.float32) / np.float32(255) - MEAN) / DEVIATION
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))


@dataclass(frozen=True)
class CifarSource:
    """The archive, for one model."""

    archive: Path
    model: NamedModel

    def data(self, limit: int | None) -> Dataset:
        """The test images, or `limit` of them evenly spaced."""
        images, labels = self._read("test_x"), self._read("test_y")
        chosen = evenly_spaced(len(images), limit)
        name = Network(self.model.path).image_input.name
        return Dataset(
            source=self.archive.name,
            count=len(chosen),
            labels=labels[chosen].astype(np.int64),
            read=lambda number: {name: prepare(images[chosen[number]][None])[0]},
        )

    def samples(self, count: int, folder: Path) -> SampleFile:
        """Training images: `count` evenly spaced ones to calibrate on, and a few between them that are held out."""
        images = self._read("train_x")
        taken = evenly_spaced(len(images), count)
        rest = np.setdiff1d(np.arange(len(images)), taken)
        others = rest[evenly_spaced(len(rest), held_out_count(count))]
        path = folder / f"{self.model.name}.npy"
        np.save(path, prepare(images[[*taken, *others]]))
        return SampleFile(path, Network(self.model.path).image_input.name, count)

    def _read(self, name: str) -> Array:
        try:
            with np.load(self.archive, allow_pickle=False) as file:
                found: Array = file[name]
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise SystemExit(
                f"--cifar {self.archive}: {error}; expected an .npz archive with train_x, train_y, test_x and test_y"
            ) from error
        return found

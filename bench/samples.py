"""Calibration images as one array on the disk, so that whoever calibrates on them decodes none.

The first `count` images, evenly spaced over the folder, are the ones to calibrate on. Ours judges its result on a few
more that it has not calibrated on; they follow, where the folder has them. The peer reads the first `count` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.networks import NamedModel
from quark.evaluate import Network
from quark.onnx.data.images import evenly_spaced, find_images, find_preprocessing, image_loader
from quark.onnx.data.samples import held_out_count


@dataclass(frozen=True)
class SampleFile:
    """An .npy file of images [n, ...] for the input of that name, `count` of them to calibrate on."""

    path: Path
    input_name: str
    count: int

    def first(self) -> np.ndarray:
        """One image, as a batch."""
        return np.array(np.load(self.path, mmap_mode="r")[:1])


def write_samples(model: NamedModel, calib: Path, count: int, folder: Path) -> SampleFile:
    """Decode the images for that model into a file of the folder."""
    if not calib.is_dir():
        raise SystemExit(f"--calib {calib}: there is no such folder; give one with images, in class folders or not")
    files = find_images(calib)
    if not 1 <= count <= len(files):
        raise SystemExit(f"--calib {calib} holds {len(files)} images: cannot calibrate on {count}; change --images")
    port = Network(model.path).image_input
    loader = image_loader(port, find_preprocessing(model.preprocessing))
    chosen = evenly_spaced(files, count)
    taken = set(chosen)
    rest = [each for each in files if each not in taken]
    path = folder / f"{model.name}.npy"
    np.save(path, np.stack([loader.load(each) for each in [*chosen, *evenly_spaced(rest, held_out_count(count))]]))
    return SampleFile(path, port.name, count)

"""Calibration images as one array on the disk, so that whoever calibrates on them decodes none.

The first `count` images, evenly spaced over the folder, are the ones to calibrate on. Ours judges its result on a few
more that it has not calibrated on; they follow, where the folder has them. The peer reads the first `count` alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.models import NamedModel
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


@dataclass(frozen=True)
class SampleFolder:
    """A folder with one .npz file per sample, an array for each input in it; the first `count` are calibrated on."""

    path: Path
    count: int

    def first(self) -> dict[str, np.ndarray]:
        """Return the first sample: arrays by input name."""
        with np.load(min(self.path.glob("*.npz"))) as arrays:
            return dict(arrays)

    def digest(self) -> str:
        """Return a hash of every value of the samples to calibrate on, the same wherever the folder is."""
        state = hashlib.sha256()
        for file in sorted(self.path.glob("*.npz"))[: self.count]:
            with np.load(file) as arrays:
                for name in sorted(arrays):
                    state.update(f"{name}:{arrays[name].dtype}:{arrays[name].shape};".encode())
                    state.update(arrays[name].tobytes())
        return state.hexdigest()


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
    rest = [file for file in files if file not in taken]
    path = folder / f"{model.name}.npy"
    np.save(path, np.stack([loader.load(each) for each in [*chosen, *evenly_spaced(rest, held_out_count(count))]]))
    return SampleFile(path, port.name, count)

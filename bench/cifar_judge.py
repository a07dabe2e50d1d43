"""A judge script for `--judge`: classifiers of CIFAR-10 images.

The folder of the networks has vit_cifar.onnx, as bench/train_vit.py trains it, and cifar10.npz. The network takes
images [n, 3, 32, 32] that are normalized as those of ImageNet. The archive has train_x, train_y, test_x and test_y, the
images as uint8 [n, 32, 32, 3]. The measures are `top1_percent` on the first 4,000 test images, and how often the best
class is that of the float network.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

IMAGES, CALIBRATION, BATCH = 4000, 256, 50
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)
Array = NDArray[Any]


class Cifar:
    """One classifier, whose file in the folder is called `name`."""

    name = "vit_cifar"

    def __init__(self, zoo: str | Path) -> None:
        self.model = Path(zoo, f"{self.name}.onnx")
        archive = Path(zoo, "cifar10.npz")
        if not archive.is_file():
            raise SystemExit(f"there is no '{archive}': expected an archive with train_x, train_y, test_x and test_y")
        with np.load(archive) as arrays:
            self.images, self.labels = arrays["test_x"][:IMAGES], arrays["test_y"][:IMAGES]
            training = arrays["train_x"]
            self.training = training[:: max(1, len(training) // CALIBRATION)][:CALIBRATION]

    def calibration(self) -> list[dict[str, Array]]:
        """Return training images, one each."""
        return [{"x": prepare(image[None])} for image in self.training]

    def evaluate(self, path: str | Path, library: str | Path | None = None) -> dict[str, float]:
        classes = self.classes(path, library)
        return {
            "top1_percent": round(100 * float((classes == self.labels).mean()), 2),
            "float_top1_percent": round(100 * float((self.expected == self.labels).mean()), 2),
            "same_class": round(float((classes == self.expected).mean()), 4),
        }

    @cached_property
    def expected(self) -> Array:
        return self.classes(self.model, None)

    def classes(self, path: str | Path, library: str | Path | None) -> Array:
        """Return the best class of each test image."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        if library is not None:
            options.register_custom_ops_library(str(library))
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        (name,) = (input_.name for input_ in session.get_inputs())
        batches = (prepare(self.images[i : i + BATCH]) for i in range(0, len(self.images), BATCH))
        return np.concatenate([session.run(None, {name: batch})[0].argmax(axis=1) for batch in batches])


def prepare(images: Array) -> Array:
    """Return images [n, 32, 32, 3] of bytes as the network reads them."""
    scaled = (images.astype(np.float32) / np.float32(255) - MEAN) / DEVIATION
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))


NETWORKS = {"vit_cifar": Cifar}

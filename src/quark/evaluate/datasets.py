"""Data on a disk, read batch by batch.

    a folder of class folders      labelled: sorted folder order is the number of the class
    a folder of images             unlabelled, or with a file of lines "NAME NUMBER" given
    an .npz archive                arrays [n, ...] named like the model's inputs (any name where there is one input);
                                   an integer array called `labels` is what it says

`limit` takes that many samples, evenly spaced over the sorted files. Images are decoded by a few threads, one batch
ahead of the one in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from quark.errors import InvalidValueError
from quark.evaluate.network import Network
from quark.evaluate.prepare import MOST_LABEL_BYTES, class_folders, images_in
from quark.files.foreign import read_text
from quark.onnx.data.array_files import read_array_file
from quark.onnx.data.images import find_preprocessing, image_loader

Array = NDArray[Any]
READERS = 2
LABELS = "labels"
MOST_LABEL_DIGITS = 9


@dataclass(frozen=True)
class Batch:
    """Inputs with the samples along the first axis, and their classes where known."""

    inputs: dict[str, Array]
    labels: NDArray[np.int64] | None

    @property
    def count(self) -> int:
        return len(next(iter(self.inputs.values())))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples that can be gone over again; `read` gives one sample by its number. `classes` is the number of class
    folders, None where the labels came from elsewhere."""

    source: str
    count: int
    labels: NDArray[np.int64] | None
    read: Callable[[int], dict[str, Array]]
    classes: int | None = None

    @property
    def has_labels(self) -> bool:
        return self.labels is not None

    def batches(self, size: int) -> Iterator[Batch]:
        """All samples in order, `size` at a time, the last batch with what is left."""
        with ThreadPoolExecutor(READERS) as pool:
            waiting = None
            for start in range(0, self.count, size):
                numbers = range(start, min(start + size, self.count))
                samples = [pool.submit(self.read, number) for number in numbers]
                if waiting is not None:
                    yield self._batch(*waiting)
                waiting = numbers, samples
            if waiting is not None:
                yield self._batch(*waiting)

    def _batch(self, numbers: range, futures: list[Future[dict[str, Array]]]) -> Batch:
        samples = [each.result() for each in futures]
        inputs = {name: np.stack([each[name] for each in samples]) for name in samples[0]}
        return Batch(inputs, None if self.labels is None else self.labels[numbers.start : numbers.stop])


def open_dataset(
    path: Path,
    network: Network,
    preprocess: str = "imagenet",
    limit: int | None = None,
    labels: Path | None = None,
) -> Dataset:
    """The data for that network. `preprocess` is a name or a file, as calibration has them; archives hold arrays that
    are prepared already."""
    if path.suffix.lower() == ".npz":
        if labels is not None:
            raise InvalidValueError(
                f"labels file '{labels}' is about a folder of images; data '{path}' has its own: an array '{LABELS}'"
            )
        return _open_archive(path, network, limit)
    check_data(path)
    return _open_folder(path, network, preprocess, limit, labels)


def check_data(path: Path) -> None:
    """That there is something that may be data: what can be known before a long run whose result it is for."""
    if not path.is_dir() and not (path.suffix.lower() == ".npz" and path.is_file()):
        what = "it is no .npz archive" if path.exists() else "there is no such folder or file"
        raise InvalidValueError(f"data '{path}': {what}; expected a folder of images, or an .npz archive")


def evenly_spaced(count: int, limit: int | None) -> list[int]:
    """`limit` numbers below `count`, evenly spaced from 0 on; all of them where there are no more.

    >>> evenly_spaced(10, 4)
    [0, 2, 5, 7]
    """
    if limit is None or limit >= count:
        return list(range(count))
    if limit < 1:
        raise InvalidValueError(f"{limit} samples: expected at least 1")
    return [number * count // limit for number in range(limit)]


def _open_folder(path: Path, network: Network, preprocess: str, limit: int | None, labels: Path | None) -> Dataset:
    port = network.image_input
    folders = class_folders(path)
    if folders and labels is None:
        found = [(image, number) for number, folder in enumerate(folders) for image in images_in(folder)]
    else:
        numbers = {} if labels is None else _read_numbers(labels)
        found = [(image, _number_of(image, numbers, labels)) for image in images_in(path)]
    if not found:
        raise InvalidValueError(f"folder '{path}' holds no images: expected .jpg, .png or the like")
    chosen = [found[number] for number in evenly_spaced(len(found), limit)]
    loader = image_loader(port, find_preprocessing(preprocess))
    has_labels = bool(folders) or labels is not None
    return Dataset(
        source=path.name or str(path),
        count=len(chosen),
        labels=np.array([number for _, number in chosen], np.int64) if has_labels else None,
        read=lambda number: {port.name: loader.load(chosen[number][0])},
        classes=len(folders) if folders and labels is None else None,
    )


def _read_numbers(labels: Path) -> dict[str, int]:
    """File name to class number, from lines "NAME NUMBER"."""
    text = read_text(labels, f"labels file '{labels}'", MOST_LABEL_BYTES)
    numbers = {}
    for line in text.splitlines():
        name, *rest = line.replace(",", " ").split() or [""]
        if not name:
            continue
        if not rest or not rest[0].isdecimal() or len(rest[0]) > MOST_LABEL_DIGITS:
            raise InvalidValueError(
                f"labels file '{labels}': expected lines of a file name and a number, such as 'one.png 3', got "
                f"{line[:60]!r}"
            )
        numbers[name] = int(rest[0])
    return numbers


def _number_of(image: Path, numbers: dict[str, int], labels: Path | None) -> int:
    if labels is None:
        return -1
    if image.name not in numbers:
        raise InvalidValueError(f"labels file '{labels}' says nothing of '{image.name}'")
    return numbers[image.name]


def _open_archive(path: Path, network: Network, limit: int | None) -> Dataset:
    arrays = read_array_file(path, f"data '{path}'")
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf" and array.dtype.type is not ml_dtypes.bfloat16:
            raise InvalidValueError(f"data '{path}': array '{name}' holds {array.dtype}; expected real numbers")
    labels = arrays.pop(LABELS, None)
    if labels is not None and (labels.dtype.kind not in "iu" or labels.ndim != 1):
        raise InvalidValueError(
            f"data '{path}': array '{LABELS}' holds {labels.dtype} of shape {list(labels.shape)}; expected a list of "
            "integers, the number of the class of each sample"
        )
    inputs = {each.name for each in network.inputs}
    if len(arrays) == 1 and len(inputs) == 1:
        arrays = dict(zip(inputs, arrays.values(), strict=True))
    if set(arrays) != inputs:
        raise InvalidValueError(
            f"data '{path}' has arrays {', '.join(sorted(arrays)) or 'none'}: expected one for each input of the "
            f"model: {', '.join(sorted(inputs))}"
        )
    counts = {len(each) for each in [*arrays.values(), *([] if labels is None else [labels])] if each.ndim}
    if len(counts) != 1 or 0 in counts:
        raise InvalidValueError(f"data '{path}': its arrays must have the same number of samples first, and at least 1")
    chosen = evenly_spaced(counts.pop(), limit)
    return Dataset(
        source=path.name,
        count=len(chosen),
        labels=None if labels is None else labels[chosen].astype(np.int64),
        read=lambda number: {name: array[chosen[number]] for name, array in arrays.items()},
    )

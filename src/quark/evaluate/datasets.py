"""Data on disk, read batch by batch.

    a folder of class folders      labelled: classes are numbered in the sorted order of the folders
    a folder of images             unlabelled, or with a file of lines "NAME NUMBER"
    an .npz archive                arrays [n, ...] named like the model's inputs (any name if there is one input);
                                   an integer array `labels` has the classes

`limit` is a number of samples, evenly spaced over the sorted files. Images are decoded by a few threads, one batch
ahead. `prepare_data` sorts an ImageNet download into class folders.
"""

from __future__ import annotations

import re
import shutil
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
from quark.files.foreign import read_text
from quark.onnx.data.array_files import read_array_file
from quark.onnx.data.images import SUFFIXES, find_files, find_preprocessing, image_loader
from quark.onnx.save import complete, writing

Array = NDArray[Any]
READERS = 2
LABELS = "labels"
MOST_LABEL_DIGITS = 9
MOST_LABEL_BYTES = 1 << 27  # ImageNet's largest list of labels has some 60 MB
LABEL_SUFFIXES = {".txt", ".csv"}
NAME_WITH_CLASS = re.compile(r"(?P<stem>.+)_(?P<label>n\d{8})$")
SYNSET = re.compile(r"n\d{8}")


@dataclass(frozen=True)
class Batch:
    """Inputs with the samples along the first axis, and their classes if known."""

    inputs: dict[str, Array]
    labels: NDArray[np.int64] | None

    @property
    def count(self) -> int:
        return len(next(iter(self.inputs.values())))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples that can be read repeatedly; `read` returns one sample by its number.

    `classes` is the number of class folders, None if the labels came from elsewhere.
    """

    source: str
    count: int
    labels: NDArray[np.int64] | None
    read: Callable[[int], dict[str, Array]]
    classes: int | None = None

    @property
    def has_labels(self) -> bool:
        return self.labels is not None

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all samples in order, `size` at a time; the last batch may be smaller."""
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
        samples = [future.result() for future in futures]
        inputs = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        return Batch(inputs, None if self.labels is None else self.labels[numbers.start : numbers.stop])


def open_dataset(
    path: Path, network: Network, preprocess: str = "auto", limit: int | None = None, labels: Path | None = None
) -> Dataset:
    """Open the data for a network. `preprocess` is a name or a file, as for calibration; arrays are used unchanged."""
    if path.suffix.lower() == ".npz":
        if labels is not None:
            raise InvalidValueError(
                f"labels file '{labels}' is about a folder of images; data '{path}' has its own: an array '{LABELS}'"
            )
        return _open_archive(path, network, limit)
    check_data(path)
    folders = class_folders(path)
    if folders and labels is None:
        labelled = [(image, number) for number, folder in enumerate(folders) for image in images_in(folder)]
    else:
        labelled = [(image, -1) for image in images_in(path)]
        if labels is not None:
            numbers = _read_numbers(labels)
            for image, _ in labelled:
                if image.name not in numbers:
                    raise InvalidValueError(f"labels file '{labels}' says nothing of '{image.name}'")
            labelled = [(image, numbers[image.name]) for image, _ in labelled]
    if not labelled:
        has_arrays = any(path.glob("*.npz"))
        advice = "; 'quark report --calib FOLDER' compares on .npz samples of any length" if has_arrays else ""
        raise InvalidValueError(f"folder '{path}' holds no images: expected .jpg, .png or the like{advice}")
    port = network.image_input
    chosen = [labelled[number] for number in evenly_spaced(len(labelled), limit)]
    loader = image_loader(port, find_preprocessing(preprocess))
    has_labels = bool(folders) or labels is not None
    return Dataset(
        source=path.name or str(path),
        count=len(chosen),
        labels=np.array([number for _, number in chosen], np.int64) if has_labels else None,
        read=lambda number: {port.name: loader.load(chosen[number][0])},
        classes=len(folders) if folders and labels is None else None,
    )


def check_data(path: Path) -> None:
    """Refuse a path that cannot be data, before a long run whose result needs it."""
    if not path.is_dir() and not (path.suffix.lower() == ".npz" and path.is_file()):
        what = "it is not an .npz archive" if path.exists() else "there is no such folder or file"
        raise InvalidValueError(f"data '{path}': {what}; expected a folder of images, or an .npz archive")


def evenly_spaced(count: int, limit: int | None) -> list[int]:
    """Return `limit` numbers below `count`, evenly spaced from 0; all of them if `limit` is larger.

    >>> evenly_spaced(10, 4)
    [0, 2, 5, 7]
    """
    if limit is None or limit >= count:
        return list(range(count))
    if limit < 1:
        raise InvalidValueError(f"{limit} samples: expected at least 1")
    return [number * count // limit for number in range(limit)]


def _read_numbers(labels: Path) -> dict[str, int]:
    """Read class numbers by file name, from lines "NAME NUMBER"."""
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
    inputs = {input_.name for input_ in network.inputs}
    if len(arrays) == 1 and len(inputs) == 1:
        arrays = dict(zip(inputs, arrays.values(), strict=True))
    if set(arrays) != inputs:
        raise InvalidValueError(
            f"data '{path}' has arrays {', '.join(sorted(arrays)) or 'none'}: expected one for each input of the "
            f"model: {', '.join(sorted(inputs))}"
        )
    counts = {len(array) for array in [*arrays.values(), *([] if labels is None else [labels])] if array.ndim}
    if len(counts) != 1 or 0 in counts:
        raise InvalidValueError(f"data '{path}': its arrays must have the same number of samples first, and at least 1")
    chosen = evenly_spaced(counts.pop(), limit)
    return Dataset(
        source=path.name,
        count=len(chosen),
        labels=None if labels is None else labels[chosen].astype(np.int64),
        read=lambda number: {name: array[chosen[number]] for name, array in arrays.items()},
    )


@dataclass(frozen=True)
class Preparation:
    """Result of a run: files moved into class folders, files copied for calibration, and the number of classes."""

    moved: int
    copied: int
    classes: int


def prepare_data(val_data: Path, calib_data: Path, labels: Path | None = None) -> Preparation:
    """Sort the images of an ImageNet download into class folders, and copy one of each class to `calib_data`.

    `val_data` contains one of

        flat files whose names end in the class     ILSVRC2012_val_00000293_n01440764.JPEG; the ending is removed
        flat files and a file of labels             lines "NAME n01440764", or "NAME 0" with the number of the class,
                                                    or only the class, one line per image; or LOC_val_solution.csv
        class folders                               which are left unchanged

    `labels` names the file of labels if it is not the only .txt or .csv file in `val_data`. Everything is checked
    before the first file moves, and a second run changes nothing.
    """
    if not val_data.is_dir():
        raise InvalidValueError(f"folder '{val_data}': there is no such folder; extract val_images.tar.gz there first")
    if calib_data.exists() and not calib_data.is_dir():
        raise InvalidValueError(f"calibration folder '{calib_data}' is a file")
    inner, outer = calib_data.resolve(), val_data.resolve()
    if inner == outer or outer in inner.parents:
        raise InvalidValueError(
            f"calibration folder '{calib_data}' is inside '{val_data}': it would become a class there"
        )
    moves, plain = [], []  # pairs of a flat file and its destination; files without a class in their name
    for path in images_in(val_data):
        match = NAME_WITH_CLASS.match(path.stem)
        if match:
            moves.append((path, val_data / match["label"] / f"{match['stem']}{path.suffix}"))
        else:
            plain.append(path)
    if plain:
        classes = _read_labels(_label_file(val_data, labels, plain), plain)
        moves += [(path, val_data / classes[path.name] / path.name) for path in plain]
    taken = [target for _, target in moves if target.exists()]
    if taken:
        raise InvalidValueError(f"file '{taken[0]}' is there already, beside the unsorted one: remove one of them")
    for source, target in moves:
        with writing(target):
            target.parent.mkdir(exist_ok=True)
            source.rename(target)
    folders = class_folders(val_data)
    if not folders:
        raise InvalidValueError(f"folder '{val_data}' holds no images: extract val_images.tar.gz there first")
    copied = 0
    for folder in folders:
        target = calib_data / folder.name
        with writing(target):
            target.mkdir(parents=True, exist_ok=True)
        if not images_in(target):
            image = images_in(folder)[0]
            with complete(target / image.name) as unfinished:
                shutil.copyfile(image, unfinished)
            copied += 1
    return Preparation(len(moves), copied, len(folders))


def class_folders(root: Path) -> list[Path]:
    """Return the folders with at least one image, sorted by name: their order numbers the classes."""
    return [folder for folder in sorted(root.iterdir()) if folder.is_dir() and images_in(folder)]


def images_in(folder: Path) -> list[Path]:
    """Return the images directly in a folder, sorted by name, without hidden files."""
    return [file for file in find_files(folder, SUFFIXES, is_deep=False) if not file.name.startswith(".")]


def _label_file(val_data: Path, labels: Path | None, plain: list[Path]) -> Path:
    if labels is not None:
        if not labels.is_file():
            raise InvalidValueError(f"labels file '{labels}': there is no such file")
        return labels
    files = [file for file in sorted(val_data.iterdir()) if file.is_file() and file.suffix.lower() in LABEL_SUFFIXES]
    if len(files) != 1:
        which = "no file of labels" if not files else f"{len(files)} files that may hold the labels"
        raise InvalidValueError(
            f"{len(plain)} images such as '{plain[0].name}' in '{val_data}' do not end in their class (_n01440764), "
            f"and there is {which}; name it with --labels"
        )
    return files[0]


def _read_labels(path: Path, images: list[Path]) -> dict[str, str]:
    """Return the class folder of every image, by file name."""
    text = read_text(path, f"labels file '{path}'", MOST_LABEL_BYTES)
    lines = [line.replace(",", " ").split() for line in text.splitlines()]
    rows = [line for line in lines if line and line[0] != "ImageId"]
    if rows and all(len(row) == 1 for row in rows):
        classes = [row[0] for row in rows]  # classes of the sorted images, which must be complete
        if len(classes) != len(images):
            raise InvalidValueError(
                f"labels file '{path}' has {len(classes)} lines for {len(images)} images: without names, one line each"
            )
        if not all(SYNSET.fullmatch(label) for label in classes):
            raise InvalidValueError(
                f"labels file '{path}' has bare numbers, whose order is unknown: expected lines such as n01440764, or "
                f"'NAME 0' with the number of the class"
            )
        return {image.name: name for image, name in zip(images, classes, strict=True)}
    by_stem = {Path(row[0]).stem: row[1] for row in rows if len(row) > 1}
    missing = [image.name for image in images if image.stem not in by_stem]
    if missing:
        raise InvalidValueError(f"labels file '{path}' says nothing of '{missing[0]}' ({len(missing)} images in all)")
    folders = {}
    for image in images:
        label = by_stem[image.stem]
        if label.isdecimal() and len(label) < 10 and int(label) < 100_000:
            label = f"{int(label):05d}"  # padded, so that folders sort in the order of the classes
        elif not SYNSET.fullmatch(label):
            raise InvalidValueError(
                f"labels file '{path}': label '{label}' is neither a synset (n01440764) nor a number"
            )
        folders[image.name] = label
    return folders

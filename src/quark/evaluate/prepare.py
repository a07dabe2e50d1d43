"""An ImageNet download as two folders: all images sorted into classes, and one image of each class for calibration.

    val_data/n01440764/ILSVRC2012_val_00000293.JPEG ...      calib_data/n01440764/ILSVRC2012_val_00000293.JPEG

What val_data holds to begin with may be

    flat files whose names end in the class     ILSVRC2012_val_00000293_n01440764.JPEG; that ending is dropped
    flat files and a file of labels             lines "NAME n01440764", or "NAME 0" with the number of the class, or
                                                the class alone, a line for each image; or LOC_val_solution.csv
    folders already                             left as they are

Everything is decided before the first file moves, and a second run finds nothing to do.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from quark.errors import InvalidValueError
from quark.files.foreign import read_text
from quark.onnx.data.images import SUFFIXES, find_files
from quark.onnx.save import complete, writing

MOST_LABEL_BYTES = 1 << 27  # ImageNet's largest list of labels has some 60 MB
LABEL_SUFFIXES = {".txt", ".csv"}
NAME_WITH_CLASS = re.compile(r"(?P<stem>.+)_(?P<label>n\d{8})$")
SYNSET = re.compile(r"n\d{8}")


@dataclass(frozen=True)
class Preparation:
    """What a run did: files moved into class folders, files copied for calibration, and the classes there are now."""

    moved: int
    copied: int
    classes: int


def prepare_data(val_data: Path, calib_data: Path, labels: Path | None = None) -> Preparation:
    """Sort `val_data` in place and fill `calib_data` from it. `labels` names the file of labels where it is not the
    only .txt or .csv file in `val_data`."""
    _check_folders(val_data, calib_data)
    moves = _moves(val_data, labels)
    for source, target in moves:
        with writing(target):
            target.parent.mkdir(exist_ok=True)
            source.rename(target)
    folders = class_folders(val_data)
    if not folders:
        raise InvalidValueError(f"folder '{val_data}' holds no images: extract val_images.tar.gz there first")
    copied = sum(_copy(images_in(folder)[0], calib_data / folder.name) for folder in folders)
    return Preparation(len(moves), copied, len(folders))


def class_folders(root: Path) -> list[Path]:
    """The folders with at least one image, sorted by name: their order is the number of the class."""
    return [folder for folder in sorted(root.iterdir()) if folder.is_dir() and images_in(folder)]


def images_in(folder: Path) -> list[Path]:
    """The images right in the folder, sorted by name; hidden files are none."""
    return [each for each in find_files(folder, SUFFIXES, is_deep=False) if not each.name.startswith(".")]


def _check_folders(val_data: Path, calib_data: Path) -> None:
    if not val_data.is_dir():
        raise InvalidValueError(f"folder '{val_data}': there is no such folder; extract val_images.tar.gz there first")
    if calib_data.exists() and not calib_data.is_dir():
        raise InvalidValueError(f"calibration folder '{calib_data}' is a file")
    inner, outer = calib_data.resolve(), val_data.resolve()
    if inner == outer or outer in inner.parents:
        raise InvalidValueError(
            f"calibration folder '{calib_data}' is inside '{val_data}': it would become a class there"
        )


def _moves(val_data: Path, labels: Path | None) -> list[tuple[Path, Path]]:
    """Where each flat file goes."""
    flat = images_in(val_data)
    moves, plain = [], []
    for each in flat:
        match = NAME_WITH_CLASS.match(each.stem)
        if match:
            moves.append((each, val_data / match["label"] / f"{match['stem']}{each.suffix}"))
        else:
            plain.append(each)
    if plain:
        classes = _read_labels(_label_file(val_data, labels, plain), plain)
        moves += [(each, val_data / classes[each.name] / each.name) for each in plain]
    taken = [target for _, target in moves if target.exists()]
    if taken:
        raise InvalidValueError(f"file '{taken[0]}' is there already, beside the unsorted one: remove one of them")
    return moves


def _label_file(val_data: Path, labels: Path | None, plain: list[Path]) -> Path:
    if labels is not None:
        if not labels.is_file():
            raise InvalidValueError(f"labels file '{labels}': there is no such file")
        return labels
    found = [each for each in sorted(val_data.iterdir()) if each.is_file() and each.suffix.lower() in LABEL_SUFFIXES]
    if len(found) != 1:
        which = "no file of labels" if not found else f"{len(found)} files that may hold the labels"
        raise InvalidValueError(
            f"{len(plain)} images such as '{plain[0].name}' in '{val_data}' do not end in their class (_n01440764), "
            f"and there is {which}; name it with --labels"
        )
    return found[0]


def _read_labels(path: Path, images: list[Path]) -> dict[str, str]:
    """File name to class folder, for all of the images."""
    text = read_text(path, f"labels file '{path}'", MOST_LABEL_BYTES)
    lines = [line.replace(",", " ").split() for line in text.splitlines()]
    rows = [line for line in lines if line and line[0] != "ImageId"]
    if rows and all(len(row) == 1 for row in rows):
        return _by_position(path, [row[0] for row in rows], images)
    by_stem = {Path(row[0]).stem: row[1] for row in rows if len(row) > 1}
    missing = [each.name for each in images if each.stem not in by_stem]
    if missing:
        raise InvalidValueError(f"labels file '{path}' says nothing of '{missing[0]}' ({len(missing)} images in all)")
    return {each.name: _folder_name(path, by_stem[each.stem]) for each in images}


def _by_position(path: Path, classes: list[str], images: list[Path]) -> dict[str, str]:
    """A class alone on each line, in the order of the file names: right only where all the images are there."""
    if len(classes) != len(images):
        raise InvalidValueError(
            f"labels file '{path}' has {len(classes)} lines for {len(images)} images: without names, one line each"
        )
    if not all(SYNSET.fullmatch(each) for each in classes):
        raise InvalidValueError(
            f"labels file '{path}' has bare numbers, whose order is unknown: expected lines such as n01440764, or "
            f"'NAME 0' with the number of the class"
        )
    return {image.name: name for image, name in zip(images, classes, strict=True)}


def _folder_name(path: Path, label: str) -> str:
    """A synset as it is; a number with zeros before it, so that the folders' order is the classes' order."""
    if SYNSET.fullmatch(label):
        return label
    if label.isdecimal() and len(label) < 10 and int(label) < 100_000:
        return f"{int(label):05d}"
    raise InvalidValueError(f"labels file '{path}': label '{label}' is neither a synset (n01440764) nor a number")


def _copy(image: Path, folder: Path) -> int:
    """Copy unless the folder has an image already; whole or not at all."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if images_in(folder):
        return 0
    with complete(folder / image.name) as unfinished:
        shutil.copyfile(image, unfinished)
    return 1

"""Where samples come from: an iterator over items for everything that a person may hand over.

None                      random data
a reader                  ONNX Runtime's protocol: get_next(), and rewind() where there is one
a path                    a folder of images or of .npy files, a .npz or .npy file
an array                  the first axis counts samples
any iterable              dicts, arrays, or tuples that begin with the inputs
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.onnx.data.array_files import ARRAY_SUFFIXES, read_array_file
from quark.onnx.data.check_sample import as_numpy
from quark.onnx.data.images import ImageLoader, Preprocessing, evenly_spaced, find_files, find_images, image_loader
from quark.onnx.data.input_info import InputInfo, list_inputs
from quark.onnx.data.samples import held_out_count

_DECODERS = 2
LABELS = "labels"  # an archive for evaluation has these beside the inputs


@dataclass(frozen=True)
class Source:
    """Items that are still to be checked, and where they come from. `spare` counts those at the end that are there to
    be held out; None: whatever comes beyond the number asked for."""

    items: Iterable[Any]
    description: str
    spare: int | None = None


def read_reader(reader: Any) -> Iterator[Any]:
    """What get_next gives until it gives nothing; a reader that was used before is rewound, and left rewound."""
    rewind = getattr(reader, "rewind", None)
    item = reader.get_next()
    if _is_nothing(item) and callable(rewind):
        rewind()
        item = reader.get_next()
    while not _is_nothing(item):
        yield item
        item = reader.get_next()
    if callable(rewind):
        rewind()


def _is_nothing(item: Any) -> bool:
    return item is None or (isinstance(item, (Mapping, tuple, list)) and not item)


def from_path(
    path: Path, inputs: Sequence[InputInfo], count: int | None, batch_size: int, preprocessing: Preprocessing
) -> Source:
    if not os.path.lexists(path):
        raise InvalidValueError(f"calibration data {path}: no such file or folder")
    if not path.is_dir():
        return Source(_named(path, split_arrays(read_arrays(path), inputs, batch_size)), str(path))
    images = find_images(path)
    if images:
        return _from_images(path, images, inputs, count, batch_size, preprocessing)
    arrays = find_files(path, ARRAY_SUFFIXES)
    if not arrays:
        raise InvalidValueError(f"calibration data {path}: no images in it, and no .npy or .npz files")
    return Source((_single_file(each) for each in arrays), f"{len(arrays)} files of {path}")


def _from_images(
    path: Path,
    images: list[Path],
    inputs: Sequence[InputInfo],
    count: int | None,
    batch_size: int,
    preprocessing: Preprocessing,
) -> Source:
    if len(inputs) != 1:
        raise InvalidValueError(f"a folder of images for {len(inputs)} inputs: {list_inputs(inputs)}; give a .npz file")
    loader = image_loader(inputs[0], preprocessing)
    wanted = min(count or len(images), len(images))
    chosen = evenly_spaced(images, wanted)
    used = set(chosen)
    batch = inputs[0].batch or batch_size
    spare_batches = held_out_count(-(-wanted // batch))
    spare = evenly_spaced([each for each in images if each not in used], spare_batches * batch)
    spare = spare[: len(spare) // batch * batch]
    _check_whole_batches(len(chosen), inputs[0].batch, path)
    items = _load_batches(loader, [*_batches(chosen, batch), *_batches(spare, batch)])
    return Source(items, f"{len(chosen)} images of {path}", spare=len(spare) // batch)


def _check_whole_batches(count: int, fixed: int | None, path: Path) -> None:
    if fixed and count % fixed:
        raise InvalidValueError(f"{count} images of {path} for a model of batches of {fixed}: choose a multiple of it")


def _batches(files: list[Path], batch: int) -> list[list[Path]]:
    return [files[i : i + batch] for i in range(0, len(files), batch)]


def _load_batches(loader: ImageLoader, batches: list[list[Path]]) -> Iterator[npt.NDArray[Any]]:
    """Decoding lets other threads run; a few batches ahead are in memory, not all."""

    def load(files: list[Path]) -> npt.NDArray[Any]:
        try:
            return np.stack([loader.load(each) for each in files])
        except MemoryError as error:
            raise InvalidValueError(
                f"{len(files)} images from {files[0]} on do not fit into memory together; choose smaller batches"
            ) from error

    with ThreadPoolExecutor(_DECODERS) as pool:
        for start in range(0, len(batches), _DECODERS):
            yield from pool.map(load, batches[start : start + _DECODERS])


def read_arrays(path: Path) -> Mapping[str, npt.NDArray[Any]]:
    """The arrays of a .npz file, or that of a .npy file under the name ''. Pickled objects are refused."""
    if path.suffix.lower() not in ARRAY_SUFFIXES:
        raise InvalidValueError(f"calibration data {path}: expected a folder, a .npz or a .npy file")
    return read_array_file(path, f"calibration data {path}")


def _named(path: Path, items: Iterator[Any]) -> Iterator[Any]:
    """The same; an error about the arrays names their file."""
    try:
        yield from items
    except InvalidValueError as error:
        raise InvalidValueError(f"calibration data {path}: {error}") from error


def _single_file(path: Path) -> Any:
    arrays = read_arrays(path)
    return arrays[""] if set(arrays) == {""} else arrays


def split_arrays(
    arrays: Mapping[str, npt.NDArray[Any]], inputs: Sequence[InputInfo], batch_size: int
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Samples of arrays whose first axis counts them: batches of the model's own size, or of `batch_size`."""
    arrays = {name: each for name, each in arrays.items() if name != LABELS or any(i.name == name for i in inputs)}
    named = {inputs[0].name: next(iter(arrays.values()))} if len(arrays) == len(inputs) == 1 else dict(arrays)
    expected = {each.name for each in inputs}
    if not named:
        raise InvalidValueError(f"no arrays: expected {list_inputs(inputs)}")
    if set(named) != expected:
        raise InvalidValueError(f"arrays named {', '.join(sorted(named))}: expected {list_inputs(inputs)}")
    pieces = {each.name: _pieces(named[each.name], each, batch_size) for each in inputs}
    lengths = {name: len(each) for name, each in pieces.items()}
    if len(set(lengths.values())) != 1:
        raise InvalidValueError(f"arrays of different numbers of samples: {lengths}")
    for i in range(next(iter(lengths.values()))):
        yield {name: each[i] for name, each in pieces.items()}


def _pieces(array: npt.NDArray[Any], info: InputInfo, batch_size: int) -> list[npt.NDArray[Any]]:
    rank = None if info.shape is None else len(info.shape)
    if rank is not None and array.ndim == rank + 1:
        return list(array)
    if (rank is not None and array.ndim < rank) or not array.ndim or not rank:
        return [array]
    step = info.batch or batch_size
    if info.batch and len(array) > step and len(array) % step:
        raise InvalidValueError(f"{len(array)} rows for {info} with batches of {step}: give a multiple of it")
    return [array[i : i + step] for i in range(0, len(array), step)]


def from_object(data: Any, inputs: Sequence[InputInfo], batch_size: int) -> Source:
    """Arrays, readers and iterables."""
    kind = type(data).__name__
    if callable(getattr(data, "get_next", None)):
        return Source(read_reader(data), f"reader {kind}")
    if isinstance(data, np.ndarray) or hasattr(data, "detach"):
        array = as_numpy(data, "calibration data")
        return Source(split_arrays({"": array}, inputs, batch_size), f"array of shape {array.shape}")
    if isinstance(data, Mapping):
        arrays = {str(name): as_numpy(each, f"calibration data, array '{name}'") for name, each in data.items()}
        return Source(split_arrays(arrays, inputs, batch_size), "a dict of arrays")
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, os.PathLike)):
        return Source(data, f"{kind} of samples")
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Source((data[i] for i in range(len(data))), f"{kind} of samples")
    raise UnsupportedTypeError(
        f"calibration data of type {kind}: expected a reader with get_next, an iterable of dicts or arrays, an array, "
        "a folder of images, a .npz or .npy file"
    )

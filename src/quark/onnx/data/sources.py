"""An iterator over samples for every kind of data that a user may pass.

None                      random data
a reader                  ONNX Runtime's protocol: get_next(), and optionally rewind()
a path                    a folder of images or of .npy files, a .npz or .npy file
an array                  the first axis counts samples
any iterable              dicts, arrays, or tuples that begin with the inputs
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quark.errors import InvalidValueError, UnsupportedTypeError, unknown_name
from quark.onnx.data.array_files import ARRAY_SUFFIXES, read_array_file
from quark.onnx.data.images import ImageLoader, Preprocessing, evenly_spaced, find_files, find_images, image_loader
from quark.onnx.data.samples import InputInfo, Sample, as_numpy, held_out_count, list_inputs

_DECODERS = 2
LABELS = "labels"  # an archive for evaluation has these in addition to the inputs
RANDOM_COUNT = 8
UNIFORM_SEED = 42
_USUAL_SIZES = {2: (1, 16), 4: (1, 3, 32, 32)}  # shapes of AMD Quark's random data, by rank; 1 in other ranks
MOST_RANDOM, MOST_RANDOM_BYTES = 100_000, 16 << 30
_IMAGE_SIDE = 224
_OTHER_SIZE = 16
_INDICES = 10


@dataclass(frozen=True)
class SampleSource:
    """Unchecked items, and a description of where they come from. `spare` is the number of items at the end to be held
    out; None: all beyond the number asked for. `images` is how images were read, if they were."""

    items: Iterable[Any]
    description: str
    spare: int | None = None
    images: ImageLoader | None = None


def read_reader(reader: Any) -> Iterator[Any]:
    """Items of get_next until it returns nothing. A used reader is rewound first, and every reader afterwards."""

    def is_nothing(item: Any) -> bool:
        return item is None or (isinstance(item, (Mapping, tuple, list)) and not item)

    rewind = getattr(reader, "rewind", None)
    item = reader.get_next()
    if is_nothing(item) and callable(rewind):
        rewind()
        item = reader.get_next()
    while not is_nothing(item):
        yield item
        item = reader.get_next()
    if callable(rewind):
        rewind()


def from_path(
    path: Path, inputs: Sequence[InputInfo], count: int | None, batch_size: int, preprocessing: Preprocessing | None
) -> SampleSource:
    """The samples of a folder of images or arrays, or of an array file."""
    if not os.path.lexists(path):
        raise InvalidValueError(f"calibration data {path}: no such file or folder")
    if not path.is_dir():
        return SampleSource(_named(path, split_arrays(read_arrays(path), inputs, batch_size)), str(path))
    images = find_images(path)
    if images:
        if len(inputs) != 1:
            raise InvalidValueError(
                f"a folder of images for {len(inputs)} inputs: {list_inputs(inputs)}; give a .npz file"
            )
        loader = image_loader(inputs[0], preprocessing)
        chosen = evenly_spaced(images, min(count or len(images), len(images)))
        used = set(chosen)
        fixed = inputs[0].batch
        batch = fixed or batch_size
        spare_batches = held_out_count(-(-len(chosen) // batch))
        spare = evenly_spaced([image for image in images if image not in used], spare_batches * batch)
        spare = spare[: len(spare) // batch * batch]
        if fixed and len(chosen) % fixed:
            raise InvalidValueError(
                f"{len(chosen)} images of {path} for a model of batches of {fixed}: choose a multiple of it"
            )
        batches = [files[i : i + batch] for files in (chosen, spare) for i in range(0, len(files), batch)]
        return SampleSource(
            _load_batches(loader, batches), f"{len(chosen)} images of {path}", spare=len(spare) // batch, images=loader
        )
    arrays = find_files(path, ARRAY_SUFFIXES)
    if not arrays:
        raise InvalidValueError(f"calibration data {path}: no images in it, and no .npy or .npz files")
    contents = (read_arrays(file) for file in arrays)
    items = (content[""] if set(content) == {""} else content for content in contents)
    return SampleSource(items, f"{len(arrays)} files of {path}")


def _load_batches(loader: ImageLoader, batches: list[list[Path]]) -> Iterator[npt.NDArray[Any]]:
    """Decode batches in threads, a few ahead of the one that is used."""

    def load(files: list[Path]) -> npt.NDArray[Any]:
        try:
            return np.stack([loader.load(file) for file in files])
        except MemoryError as error:
            raise InvalidValueError(
                f"{len(files)} images from {files[0]} on do not fit into memory together; choose smaller batches"
            ) from error

    with ThreadPoolExecutor(_DECODERS) as pool:
        for start in range(0, len(batches), _DECODERS):
            yield from pool.map(load, batches[start : start + _DECODERS])


def read_arrays(path: Path) -> Mapping[str, npt.NDArray[Any]]:
    """The arrays of a .npz file, or the one of a .npy file under the name ''. Pickled objects are refused."""
    if path.suffix.lower() not in ARRAY_SUFFIXES:
        raise InvalidValueError(f"calibration data {path}: expected a folder, a .npz or a .npy file")
    return read_array_file(path, f"calibration data {path}")


def _named(path: Path, items: Iterator[Any]) -> Iterator[Any]:
    """The items; errors about them name the file."""
    try:
        yield from items
    except InvalidValueError as error:
        raise InvalidValueError(f"calibration data {path}: {error}") from error


def split_arrays(
    arrays: Mapping[str, npt.NDArray[Any]], inputs: Sequence[InputInfo], batch_size: int
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Samples from arrays whose first axis counts them: batches of the model's own size, or of `batch_size`."""
    arrays = {name: array for name, array in arrays.items() if name != LABELS or any(i.name == name for i in inputs)}
    named = {inputs[0].name: next(iter(arrays.values()))} if len(arrays) == len(inputs) == 1 else dict(arrays)
    expected = {input_.name for input_ in inputs}
    if not named:
        raise InvalidValueError(f"no arrays: expected {list_inputs(inputs)}")
    if set(named) != expected:
        raise InvalidValueError(f"arrays named {', '.join(sorted(named))}: expected {list_inputs(inputs)}")
    pieces = {input_.name: _pieces(named[input_.name], input_, batch_size) for input_ in inputs}
    lengths = {name: len(piece) for name, piece in pieces.items()}
    if len(set(lengths.values())) != 1:
        raise InvalidValueError(f"arrays of different numbers of samples: {lengths}")
    for i in range(next(iter(lengths.values()))):
        yield {name: piece[i] for name, piece in pieces.items()}


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


def from_object(data: Any, inputs: Sequence[InputInfo], batch_size: int) -> SampleSource:
    """The samples of an array, a dict of arrays, a reader or an iterable."""
    kind = type(data).__name__
    if callable(getattr(data, "get_next", None)):
        return SampleSource(read_reader(data), f"reader {kind}")
    if isinstance(data, np.ndarray) or hasattr(data, "detach"):
        array = as_numpy(data, "calibration data")
        return SampleSource(split_arrays({"": array}, inputs, batch_size), f"array of shape {array.shape}")
    if isinstance(data, Mapping):
        arrays = {str(name): as_numpy(value, f"calibration data, array '{name}'") for name, value in data.items()}
        return SampleSource(split_arrays(arrays, inputs, batch_size), "a dict of arrays")
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, os.PathLike)):
        return SampleSource(data, f"{kind} of samples")
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return SampleSource((data[i] for i in range(len(data))), f"{kind} of samples")
    raise UnsupportedTypeError(
        f"calibration data of type {kind}: expected a reader with get_next, an iterable of dicts or arrays, an array, "
        "a folder of images, a .npz or .npy file"
    )


# ---- random samples ----


@dataclass(frozen=True)
class RandomForm:
    """Shapes and ranges of random data, as pairs of the name of an input and a shape, or (lowest, highest). Sizes that
    are not positive are free. `ranges` None: the usual numbers."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    ranges: tuple[tuple[str, tuple[float, float]], ...] | None = None

    def checked(
        self, inputs: Sequence[InputInfo]
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[float, float]] | None]:
        """Return both by input. Shapes and ranges are for all inputs or for none: raises InvalidValueError, naming
        the input, if one is missing, unknown, or has a shape that the model does not take."""
        shapes, ranges = dict(self.shapes), None if self.ranges is None else dict(self.ranges)
        for option, given in (("RandomDataReaderInputShape", shapes), ("RandomDataReaderInputDataRange", ranges)):
            _check_names(option, given, inputs)
        for info in inputs:
            if info.name in shapes:
                shapes[info.name] = _fitted_shape(info, shapes[info.name])
        return shapes, ranges


def _check_names(option: str, given: Mapping[str, Any] | None, inputs: Sequence[InputInfo]) -> None:
    names = [info.name for info in inputs]
    for name in given or ():
        if name not in names:
            raise unknown_name(f"input of the model ({option})", name, names)
    missing = [name for name in names if given is not None and name not in given]
    if missing and (given or option.endswith("Range")):
        raise InvalidValueError(
            f"option '{option}': nothing for input '{missing[0]}'; expected an entry for each of {list_inputs(inputs)}"
        )


def _fitted_shape(info: InputInfo, shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = tuple(size if size > 0 else 1 if axis == 0 else 0 for axis, size in enumerate(shape))
    known = info.shape if info.shape is not None else (None,) * len(sizes)
    is_fixed = [isinstance(dim, int) and dim != size for dim, size in zip(known, sizes, strict=False)]
    if len(known) != len(sizes) or any(is_fixed[1:]) or 0 in sizes:
        raise InvalidValueError(
            f"option 'RandomDataReaderInputShape': shape {list(shape)} for input {info}, which does not take it"
        )
    return sizes


def check_random_size(
    inputs: Sequence[InputInfo], count: int, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> None:
    """Raise InvalidValueError if the random samples that are asked for would fill the disk."""
    sizes = {input_.name: math.prod((shapes or {}).get(input_.name) or concrete_shape(input_)) for input_ in inputs}
    size = count * sum(sizes[input_.name] * input_.dtype.itemsize for input_ in inputs)
    if count > MOST_RANDOM or size > MOST_RANDOM_BYTES:
        raise InvalidValueError(
            f"{count:,} random samples of together {size:,} bytes: expected at most {MOST_RANDOM:,} and "
            f"{MOST_RANDOM_BYTES:,} bytes. Ask for fewer (CalibDataSize, --num-calib), or give calibration data"
        )


def random_samples(
    inputs: Sequence[InputInfo],
    count: int,
    seed: int,
    shapes: Mapping[str, Sequence[int]] | None = None,
    ranges: Mapping[str, Sequence[float]] | None = None,
) -> Iterator[Sample]:
    """Random samples, so that a run without data shows what it would do. Ranges found on them mean nothing.

    Floats are normally distributed. Integers are assumed to be indices, small and not negative; masks are zeros and
    ones. The same seed gives the same samples. `shapes` fixes shapes by input, `ranges` is (lowest, highest) by input.
    """
    generator = np.random.default_rng(seed)
    sizes = {info.name: tuple((shapes or {}).get(info.name) or concrete_shape(info)) for info in inputs}
    for _ in range(count):
        yield {info.name: _values(generator, info, sizes[info.name], (ranges or {}).get(info.name)) for info in inputs}


def uniform_samples(
    inputs: Sequence[InputInfo],
    shapes: Mapping[str, tuple[int, ...]],
    ranges: Mapping[str, tuple[float, float]] | None,
    count: int,
    seed: int,
) -> Iterator[Sample]:
    """Random samples as AMD Quark draws them: each input from its own generator, between 0 and 1 or within its range.
    Integers without a range are therefore zeros."""
    generators = {info.name: np.random.RandomState(seed) for info in inputs}  # not default_rng: others' numbers
    for _ in range(count):
        yield {
            info.name: _uniform(
                generators[info.name], info, shapes.get(info.name), None if ranges is None else ranges[info.name]
            )
            for info in inputs
        }


def _uniform(
    generator: np.random.RandomState,
    info: InputInfo,
    shape: tuple[int, ...] | None,
    limits: tuple[float, float] | None,
) -> npt.NDArray[Any]:
    if shape is None:
        known = info.shape or (1,)
        usual = _USUAL_SIZES.get(len(known), (1,) * len(known))
        dims = zip(known, usual, strict=True)
        shape = tuple(dim if isinstance(dim, int) and dim > 0 else size for dim, size in dims)
    if info.dtype.kind in "OUS":
        return np.full(shape, "", dtype=object)
    if limits is None:
        return generator.random_sample(shape).astype(info.dtype)
    if info.dtype.kind in "iu":
        return generator.randint(int(limits[0]), int(limits[1]) + 1, shape).astype(info.dtype)
    return generator.uniform(limits[0], limits[1], shape).astype(info.dtype)


def concrete_shape(info: InputInfo) -> tuple[int, ...]:
    """The shape with a size for every free dimension: batch 1, images of 224 by 224, 16 otherwise."""
    shape = info.shape or ()
    is_image = len(shape) == 4
    has_channels_last = is_image and shape[3] in (1, 3, 4) and shape[1] not in (1, 3, 4)
    channel_axis = 3 if has_channels_last else 1

    def size(axis: int, dim: int | str | None) -> int:
        if isinstance(dim, int):
            return dim
        if axis == 0:
            return 1
        if is_image:
            return 3 if axis == channel_axis else _IMAGE_SIDE
        return _OTHER_SIZE

    return tuple(size(axis, dim) for axis, dim in enumerate(shape))


def _values(
    generator: np.random.Generator, info: InputInfo, shape: tuple[int, ...], limits: Sequence[float] | None
) -> npt.NDArray[Any]:
    kind = info.dtype.kind
    if kind == "b":
        return np.asarray(generator.integers(0, 2, shape)).astype(bool)
    if kind in "iu":
        is_mask = any(word in info.name.lower() for word in ("mask", "type"))
        low, high = (int(limits[0]), int(limits[1]) + 1) if limits else (0, 2 if is_mask else _INDICES)
        return np.asarray(generator.integers(low, high, shape)).astype(info.dtype)
    if kind not in "fV":  # ml_dtypes' bfloat16 is of kind V
        raise UnsupportedTypeError(f"input {info}: no random data of this type; give calibration data")
    drawn = generator.uniform(limits[0], limits[1], shape) if limits else generator.standard_normal(shape)
    return np.asarray(drawn).astype(info.dtype)

"""Made-up samples, so that a run without data shows what it would do. Ranges found on them mean nothing.

Floats are normally distributed. Integers are taken for indices, small and not negative; masks are zeros and ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.onnx.data.check_sample import Sample
from quark.onnx.data.input_info import InputInfo

RANDOM_COUNT = 8
MOST_RANDOM, MOST_RANDOM_BYTES = 100_000, 16 << 30
_IMAGE_SIDE = 224
_OTHER_SIZE = 16
_INDICES = 10


def check_random_size(inputs: Sequence[InputInfo], count: int) -> None:
    """Raise InvalidValueError if so many random samples are asked for that writing them would fill the disk."""
    size = count * sum(math.prod(concrete_shape(each)) * each.dtype.itemsize for each in inputs)
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
    """The same for the same seed. `shapes` fix shapes by input, `ranges` give (lowest, highest) by input."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        yield {
            each.name: _values(
                generator,
                each,
                tuple((shapes or {}).get(each.name) or concrete_shape(each)),
                (ranges or {}).get(each.name),
            )
            for each in inputs
        }


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

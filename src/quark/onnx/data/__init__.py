"""Calibration data: whatever a person has, as samples that were checked against the model.

input_infos(model)         what the model wants
open_samples(data, ...)    the samples, and a few held out from calibration for the verdict
Preprocessing              how images become arrays
RandomDataReader ...       readers of ONNX Runtime's protocol, under the names that scripts use
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quark.errors import InvalidValueError, QuarkError
from quark.onnx.data.check_sample import Sample, as_sample
from quark.onnx.data.images import Preprocessing, find_preprocessing
from quark.onnx.data.input_info import InputInfo, input_infos
from quark.onnx.data.random_data import RANDOM_COUNT, check_random_size, random_samples
from quark.onnx.data.readers import CachedDataReader, PathDataReader, RandomDataReader
from quark.onnx.data.samples import Samples, held_out_count
from quark.onnx.data.sources import Source, from_object, from_path
from quark.onnx.data.store import SampleStore

VERDICT_COUNT = 8  # samples for the verdict, where few or none are for anything else

__all__ = [
    "CachedDataReader",
    "InputInfo",
    "PathDataReader",
    "Preprocessing",
    "RandomDataReader",
    "Sample",
    "Samples",
    "find_preprocessing",
    "input_infos",
    "open_samples",
]


def open_samples(
    data: Any,
    inputs: Sequence[InputInfo],
    *,
    count: int | None = None,
    batch_size: int = 1,
    preprocessing: str | Path | Preprocessing = "imagenet",
    seed: int = 0,
    use: int | None = None,
) -> Samples:
    """Read and check the data, once; see `sources` for what they can be. None: random data.

    `count` limits the samples: of a folder that many images, evenly spaced over the sorted files, of anything else the
    first. `batch_size` is how many images or rows of an array make a sample where the model leaves it open. Errors name
    the sample and what is wrong with it; no samples at all are an error too. More than
    `use` are not wanted, but for a few on top for the verdict.
    """
    if (count is not None and count < 1) or batch_size < 1:
        raise InvalidValueError(f"count {count}, batch_size {batch_size}: expected at least 1")
    if not inputs:
        raise InvalidValueError("the model has no inputs: there is nothing to calibrate on")
    limit = None
    if use is not None:
        wanted = use if count is None else min(count, use)
        limit = min(count or VERDICT_COUNT, VERDICT_COUNT) if use == 0 else wanted + VERDICT_COUNT
    source = _find_source(data, inputs, limit or count, batch_size, find_preprocessing(preprocessing), seed)
    if limit is None and source.spare is None and count is not None:
        limit = count + held_out_count(count)
    store = SampleStore()
    for sample in _checked(source, inputs, limit):
        store.append(sample)
    if not len(store):
        raise InvalidValueError(
            f"calibration data ({source.description}): no samples in it; give what the model will see, or leave the "
            "data out and ask for random numbers with --random (in Python: use_random_data=True)"
        )
    return Samples(store, source.description, spare=_spare(len(store), source, count, use), is_random=data is None)


def _spare(total: int, source: Source, count: int | None, use: int | None) -> int:
    """How many of the last samples are for the verdict alone."""
    if use is not None:
        wanted = use if count is None else min(count, use)
        return max(total - wanted, min(held_out_count(total), total - 1)) if use else total
    return max(0, total - count) if source.spare is None and count is not None else source.spare or 0


def _find_source(
    data: Any,
    inputs: Sequence[InputInfo],
    count: int | None,
    batch_size: int,
    preprocessing: Preprocessing,
    seed: int,
) -> Source:
    if data is None:
        wanted = count or RANDOM_COUNT
        spare = held_out_count(wanted)
        check_random_size(inputs, wanted + spare)
        return Source(random_samples(inputs, wanted + spare, seed), f"{wanted} random samples", spare)
    if isinstance(data, (str, os.PathLike)):
        return from_path(Path(data), inputs, count, batch_size, preprocessing)
    return from_object(data, inputs, batch_size)


def _checked(source: Source, inputs: Sequence[InputInfo], limit: int | None) -> Iterator[Sample]:
    items = iter(source.items)
    index = 0
    while limit is None or index < limit:
        try:
            item = next(items)
        except StopIteration:
            return
        except QuarkError:
            raise
        except MemoryError as error:
            raise InvalidValueError(
                f"calibration data ({source.description}): sample {index} does not fit into memory; give smaller "
                "samples, or smaller batches of them"
            ) from error
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise InvalidValueError(
                f"calibration data ({source.description}): reading sample {index} failed: {what}"
            ) from error
        yield as_sample(item, inputs, index)
        index += 1

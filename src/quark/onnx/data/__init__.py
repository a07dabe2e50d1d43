"""Calibration data: user data of any kind as samples that were checked against the model.

input_infos(model)         the inputs that the model expects
open_samples(data, ...)    the samples, and a few held out from calibration for the verdict
Preprocessing              how images become arrays
RandomDataReader ...       readers of ONNX Runtime's protocol, under the names that scripts use
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from quark.compare import batch_size_of
from quark.errors import InvalidValueError, QuarkError
from quark.onnx.data.images import AUTO, Preprocessing, find_preprocessing
from quark.onnx.data.samples import InputInfo, Sample, Samples, SampleStore, as_sample, held_out_count, input_infos
from quark.onnx.data.sources import (
    RANDOM_COUNT,
    UNIFORM_SEED,
    RandomForm,
    SampleSource,
    check_random_size,
    from_object,
    from_path,
    random_samples,
    read_reader,
    uniform_samples,
)
from quark.onnx.load.reading import read_proto

VERDICT_COUNT = 8  # samples for the verdict, if few or none are used for anything else

__all__ = [
    "CachedDataReader",
    "InputInfo",
    "PathDataReader",
    "Preprocessing",
    "RandomDataReader",
    "RandomForm",
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
    preprocessing: str | Path | Preprocessing = AUTO,
    seed: int = 0,
    use: int | None = None,
    random: RandomForm | None = None,
) -> Samples:
    """Read and check the data, once; see `sources` for its forms. None: random data, of the form `random`.

    `count` limits the samples: to that many images of a folder, evenly spaced over the sorted files, or to the first
    ones of anything else. An item may be a batch, and counts as the samples that it holds: the last batch is cut to
    size, unless the model fixes the size of batches. `batch_size` is the number of images or array rows in a batch, if
    the model does not fix it. Errors name the item and what is wrong with it; no samples at all are an error too. At
    most `use` samples are needed, and a few more for the verdict.
    """
    if (count is not None and count < 1) or batch_size < 1:
        raise InvalidValueError(f"count {count}, batch_size {batch_size}: expected at least 1")
    if not inputs:
        raise InvalidValueError("the model has no inputs: there is nothing to calibrate on")
    prepared = find_preprocessing(preprocessing)
    wanted, extra = count or 0, 0  # samples to calibrate on, and further ones for the verdict
    if use is not None:
        wanted = use if count is None else min(count, use)
        extra = VERDICT_COUNT if use else min(count or VERDICT_COUNT, VERDICT_COUNT)
    asked = wanted + extra or None
    fixed = inputs[0].batch or 1
    if data is None:
        random_count = RANDOM_COUNT if asked is None else -(-asked // fixed)
        spare = held_out_count(random_count)
        shapes, ranges = (random or RandomForm()).checked(inputs)
        check_random_size(inputs, random_count + spare, shapes)
        items = random_samples(inputs, random_count + spare, seed, shapes, ranges)
        source = SampleSource(items, f"{random_count} random samples", spare)
    elif isinstance(data, (str, os.PathLike)):
        source = from_path(Path(data), inputs, asked, batch_size, prepared)
    else:
        source = from_object(data, inputs, batch_size)
    if use is None and source.spare is None and count is not None:
        extra = held_out_count(count)
    store, sizes = SampleStore(), []
    wanted, extra = (-(-count // fixed) * fixed for count in (wanted, extra))
    ends = [end for end in (wanted, wanted + extra) if end] if extra else []
    for sample in _cut(_checked(source, inputs), inputs, ends) if ends else _checked(source, inputs):
        store.append(sample)
        sizes.append(batch_size_of(sample))
    total = len(store)
    if not total:
        raise InvalidValueError(
            f"calibration data ({source.description}): no samples in it; give what the model will see, or leave the "
            "data out and ask for random numbers with --random (in Python: use_random_data=True)"
        )
    spare = source.spare or 0  # samples of the last batches, which are for the verdict alone
    beyond = total - sum(start < wanted for start in itertools.accumulate([0, *sizes[:-1]]))
    if use is not None:
        spare = max(beyond, min(held_out_count(total), total - 1)) if use else total
    elif source.spare is None and count is not None:
        spare = beyond
    return Samples(store, source.description, spare=spare, is_random=data is None, images=source.images, sizes=sizes)


def _cut(batches: Iterator[Sample], inputs: Sequence[InputInfo], ends: Sequence[int]) -> Iterator[Sample]:
    """The first samples, up to the last of `ends`, as batches that end at each of them.

    A batch that cannot be cut counts to the part in which it begins: the model fixes its size, or an input has another
    first axis.
    """
    seen = 0
    for batch in batches:
        while batch:
            size = batch_size_of(batch)
            left = next(end for end in ends if end > seen) - seen
            first, batch = batch, {}
            can_cut = all(input_.batch is None and np.shape(first[input_.name])[:1] == (size,) for input_ in inputs)
            if size > left and can_cut:
                batch = {name: x[left:] for name, x in first.items()}
                first = {name: x[:left] for name, x in first.items()}
            yield first
            seen += batch_size_of(first)
            if seen >= ends[-1]:
                return


def _checked(source: SampleSource, inputs: Sequence[InputInfo]) -> Iterator[Sample]:
    items = iter(source.items)
    index = 0
    while True:
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


# ---- readers of ONNX Runtime's protocol, with the names and arguments that scripts use ----


class _StoredReader:
    """Returns the samples of a store one after the other, then None."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._store = SampleStore()
        for sample in samples:
            self._store.append(sample)
        self._next = 0

    def __len__(self) -> int:
        return len(self._store)

    def get_next(self) -> Sample | None:
        if self._next >= len(self._store):
            return None
        self._next += 1
        return self._store[self._next - 1]

    def rewind(self) -> None:
        self._next = 0

    reset_iter = rewind  # the name that CachedDataReader has elsewhere


class RandomDataReader(_StoredReader):
    """Random samples for a model, with the numbers that AMD Quark's reader has: one sample, uniform between 0 and 1.

    `input_shape` is a dict of shapes by input, for all inputs; also a single shape, or a list of them. Without it free
    sizes are 1 for the batch, images of 32 by 32 and sequences of 16. `input_data_range` is a dict of [lowest, highest]
    for all inputs; integers reach both ends. Strings are empty. `count` and `seed` are for more than one sample.
    """

    def __init__(
        self,
        model_input: str | Path | onnx.ModelProto,
        input_shape: Mapping[str, Sequence[int]] | Sequence[Any] | None = None,
        input_data_range: Mapping[str, Sequence[float]] | None = None,
        count: int = 1,
        seed: int = UNIFORM_SEED,
    ) -> None:
        inputs = _inputs_of(model_input)
        if isinstance(input_shape, Mapping) or not input_shape:
            given = dict(input_shape or {})
        else:
            listed = input_shape if isinstance(input_shape[0], (list, tuple)) else [input_shape] * len(inputs)
            given = {info.name: shape for info, shape in zip(inputs, listed, strict=False)}
        form = RandomForm(
            tuple((name, tuple(shape)) for name, shape in given.items()),
            None if input_data_range is None else tuple((k, (v[0], v[1])) for k, v in input_data_range.items()),
        )
        super().__init__(uniform_samples(inputs, *form.checked(inputs), count, seed))


class PathDataReader(_StoredReader):
    """The samples of a folder (images, .npy or .npz files) or of one such file."""

    def __init__(
        self,
        model_input: str | Path | onnx.ModelProto,
        data_path: str | Path,
        input_shape: Mapping[str, Sequence[int]] | Sequence[Any] | None = None,
        preprocessing: str | Path = AUTO,
    ) -> None:
        inputs = _with_shapes(_inputs_of(model_input), input_shape)
        source = from_path(Path(data_path), inputs, None, 1, find_preprocessing(preprocessing))
        super().__init__(as_sample(item, inputs, index) for index, item in enumerate(source.items))


class CachedDataReader(_StoredReader):
    """All samples of another reader, or the first `data_size`, kept so that they can be read again."""

    def __init__(
        self, dr: Any, data_size: int | None = None, convert_nchw_to_nhwc: bool = False, quantize_fp16: bool = False
    ) -> None:
        def samples() -> Iterator[Sample]:
            for index, item in enumerate(read_reader(dr)):
                if data_size is not None and index >= data_size:
                    return
                sample = {name: np.asarray(value) for name, value in item.items()}
                if convert_nchw_to_nhwc:
                    sample = {name: x.transpose(0, 2, 3, 1) if x.ndim == 4 else x for name, x in sample.items()}
                if quantize_fp16:
                    sample = {name: x.astype(np.float16) if x.dtype == np.float32 else x for name, x in sample.items()}
                yield sample

        super().__init__(samples())
        if not len(self):
            raise InvalidValueError(f"reader {type(dr).__name__}: no samples in it")


def _inputs_of(model: str | Path | onnx.ModelProto) -> tuple[InputInfo, ...]:
    if isinstance(model, (str, os.PathLike)):
        return input_infos(ir.from_proto(read_proto(Path(model))))
    return input_infos(ir.from_proto(model))


def _with_shapes(
    inputs: tuple[InputInfo, ...], shapes: Mapping[str, Sequence[int]] | Sequence[Any] | None
) -> tuple[InputInfo, ...]:
    if not shapes:
        return inputs
    if isinstance(shapes, Mapping):
        given = dict(shapes)
    elif isinstance(shapes[0], (list, tuple)):
        given = {input_.name: shape for input_, shape in zip(inputs, shapes, strict=False)}
    else:
        given = {input_.name: shapes for input_ in inputs}
    result = []
    for input_ in inputs:
        shape = given.get(input_.name)
        sizes = (dim if isinstance(dim, int) and dim > 0 else None for dim in shape or ())
        result.append(InputInfo(input_.name, input_.dtype, input_.shape if shape is None else tuple(sizes)))
    return tuple(result)

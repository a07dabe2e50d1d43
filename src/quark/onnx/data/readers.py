"""Readers of ONNX Runtime's protocol (get_next, rewind) under the names and with the arguments that scripts use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from quark.errors import InvalidValueError
from quark.onnx.data.check_sample import Sample, as_sample
from quark.onnx.data.images import find_preprocessing
from quark.onnx.data.input_info import InputInfo, input_infos
from quark.onnx.data.random_data import RANDOM_COUNT, concrete_shape, random_samples
from quark.onnx.data.sources import from_path, read_reader
from quark.onnx.data.store import SampleStore
from quark.onnx.load.outline import read_proto


class _StoredReader:
    """Gives the samples of a store one after the other, then None."""

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
    """Random samples for a model. `input_shape`: a shape, a list of them, or a dict by input name, for what the model
    leaves open. `input_data_range`: (lowest, highest) by input name."""

    def __init__(
        self,
        model_input: str | Path | onnx.ModelProto,
        input_shape: Mapping[str, Sequence[int]] | Sequence[Any] | None = None,
        input_data_range: Mapping[str, Sequence[float]] | None = None,
        count: int = RANDOM_COUNT,
        seed: int = 0,
    ) -> None:
        inputs = _inputs_of(model_input)
        shapes = {each.name: concrete_shape(each) for each in _with_shapes(inputs, input_shape)}
        super().__init__(random_samples(inputs, count, seed, shapes, input_data_range))


class PathDataReader(_StoredReader):
    """The samples of a folder (images, .npy or .npz files) or of one such file."""

    def __init__(
        self,
        model_input: str | Path | onnx.ModelProto,
        data_path: str | Path,
        input_shape: Mapping[str, Sequence[int]] | Sequence[Any] | None = None,
        preprocessing: str | Path = "imagenet",
    ) -> None:
        inputs = _with_shapes(_inputs_of(model_input), input_shape)
        source = from_path(Path(data_path), inputs, None, 1, find_preprocessing(preprocessing))
        super().__init__(as_sample(item, inputs, index) for index, item in enumerate(source.items))


class CachedDataReader(_StoredReader):
    """All samples of another reader, or the first `data_size`, kept so that they can be read again."""

    def __init__(
        self, dr: Any, data_size: int | None = None, convert_nchw_to_nhwc: bool = False, quantize_fp16: bool = False
    ) -> None:
        samples = (_convert(item, convert_nchw_to_nhwc, quantize_fp16) for item in _first(dr, data_size))
        super().__init__(samples)
        if not len(self):
            raise InvalidValueError(f"reader {type(dr).__name__}: no samples in it")


def _first(reader: Any, limit: int | None) -> Iterable[Sample]:
    for index, item in enumerate(read_reader(reader)):
        if limit is not None and index >= limit:
            return
        yield {name: np.asarray(value) for name, value in item.items()}


def _convert(sample: Sample, to_nhwc: bool, to_float16: bool) -> Sample:
    if to_nhwc:
        sample = {name: x.transpose(0, 2, 3, 1) if x.ndim == 4 else x for name, x in sample.items()}
    if to_float16:
        sample = {name: x.astype(np.float16) if x.dtype == np.float32 else x for name, x in sample.items()}
    return sample


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
        given = {each.name: shape for each, shape in zip(inputs, shapes, strict=False)}
    else:
        given = {each.name: shapes for each in inputs}
    return tuple(InputInfo(each.name, each.dtype, _positive(given.get(each.name), each)) for each in inputs)


def _positive(shape: Sequence[Any] | None, info: InputInfo) -> tuple[int | str | None, ...] | None:
    if shape is None:
        return info.shape
    return tuple(dim if isinstance(dim, int) and dim > 0 else None for dim in shape)

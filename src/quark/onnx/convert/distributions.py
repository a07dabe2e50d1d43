"""Pictures of how the weights and activations of a model are distributed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from quark.compare import batch_size_of
from quark.errors import ModelError
from quark.files.output import writing
from quark.formats.spec import IntFormat
from quark.onnx.calibrate import CalibrationOptions, FloatRunner, Wanted, calibrate
from quark.onnx.data import CachedDataReader, Sample, input_infos, open_samples
from quark.onnx.data.samples import held_out_count
from quark.onnx.file_graph import read_graph
from quark.onnx.graph import is_float
from quark.ranges.histogram_methods import Percentile
from quark.report.histogram_picture import histogram_of, picture_names, write_histogram, write_ranges

WEIGHT_BINS = 128


def draw_activations(model: str | Path | onnx.ModelProto, reader: Any, folder: Path) -> None:
    """Write a histogram of every floating-point tensor that the model reads or computes, as PNG files.

    `reader` returns samples by `get_next()`. A tensor whose values are all the same has no histogram, nor has one of
    bfloat16, which ONNX Runtime does not hand out.
    """
    graph = read_graph(model)
    computed = [value for node in graph.graph for value in node.outputs]
    names = [str(value.name) for value in (*graph.graph.inputs, *computed) if value.name and _is_drawn(value)]
    inputs = input_infos(graph)
    names = [name for name in names if name not in graph.graph.initializers]
    if not names:
        raise ModelError("the model has no floating-point activations")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    cached = CachedDataReader(reader)
    count = sum(batch_size_of(sample) for sample in iter(cached.get_next, None))
    cached.rewind()
    samples = open_samples(_with_spare(cached), inputs, count=count)
    wanted = {name: Wanted(Percentile(), IntFormat("uint8", 8, signed=False), is_symmetric=False) for name in names}
    with FloatRunner(graph, names) as runner:
        calibrate(runner, wanted, samples, CalibrationOptions(histogram_folder=folder))


def _is_drawn(value: ir.Value) -> bool:
    return is_float(value) and value.dtype is not ir.DataType.BFLOAT16


def _with_spare(cached: CachedDataReader) -> Iterator[Sample]:
    """All samples, and a few once more for those that `open_samples` holds out."""
    yield from iter(cached.get_next, None)
    cached.rewind()
    for _ in range(held_out_count(len(cached))):
        sample = cached.get_next()
        if sample is not None:
            yield sample


def draw_weights(model: onnx.ModelProto, folder: Path, *, is_per_channel: bool = False) -> int:
    """Write a histogram of every initializer as a PNG file, and return their number.

    With `is_per_channel`, an initializer of two dimensions or more gets the lowest and highest value of each entry of
    its first axis instead. Text and empty tensors have no picture.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    arrays = {tensor.name: tensor for tensor in model.graph.initializer if tensor.data_type != onnx.TensorProto.STRING}
    files = picture_names(arrays, suffix="")
    count = 0
    for name, tensor in arrays.items():
        array = numpy_helper.to_array(tensor)
        if not array.size or array.dtype.kind == "c":
            continue
        count += 1
        values = array.astype(np.float64)
        if is_per_channel and values.ndim >= 2:
            rows = values.reshape(len(values), -1)
            rows = np.where(np.isfinite(rows), rows, 0.0)
            path = folder / f"{files[name]}_per_channel.png"
            write_ranges(path, rows.min(axis=1), rows.max(axis=1), f"{name}, per channel", ("Channel", "Value"))
        else:
            write_histogram(folder / f"{files[name]}.png", *histogram_of(values, WEIGHT_BINS), name)
    return count

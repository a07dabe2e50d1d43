"""Write what a quantized model computes to files, for comparison with what hardware computes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.files.output import complete, writing
from quark.onnx.data import InputInfo, RandomDataReader, input_infos
from quark.onnx.data.samples import as_sample
from quark.onnx.file_graph import read_graph
from quark.onnx.graph import input_value
from quark.onnx.plan_reader import is_dequantize, stored_tensor
from quark.onnx.session import open_session, running
from quark.text import get_logger

__all__ = ["dump_model"]

_LOG = get_logger(__name__)
_MOST_NAME = 200  # characters; file systems allow 255 bytes
_NOT_IN_NAMES = re.compile(r"[/\\\0]")


def dump_model(
    model_input: str | os.PathLike[str] | onnx.ModelProto,
    dump_data_reader: Any = None,
    random_data_reader_input_shape: Mapping[str, Sequence[int]] | None = None,
    dump_float: bool = False,
    output_dir: str | os.PathLike[str] = "./dump_results",
) -> None:
    """Run a quantized model on one sample, and write what it computes into the folder `output_dir`.

    The sample is the first of `dump_data_reader`, else random numbers, for which `random_data_reader_input_shape` fixes
    the sizes that the model leaves open. Every tensor that is dequantized, weight or activation, is written as codes:
    NAME.bin has them in their own integer type and NAME.txt one a line, NAME being the output of the DequantizeLinear,
    with '_' for '/'. `dump_float` adds NAME_float.bin and NAME_float.txt for the outputs of all nodes.
    """
    model = read_graph(_source(model_input))
    codes = {
        str(node.outputs[0].name): source
        for node in model.graph
        if is_dequantize(node) and (source := input_value(node, 0)) is not None
    }
    if not codes and not dump_float:
        raise InvalidValueError(
            "model: it has no DequantizeLinear, so that there are no codes to write; set dump_float=True for the float "
            "outputs of its nodes"
        )
    sample = _first_sample(dump_data_reader, model, random_data_reader_input_shape)
    floats = [str(value.name) for node in model.graph for value in node.outputs if value.name] if dump_float else []
    computed = [str(value.name) for value in codes.values() if value.producer() is not None]
    inputs = {str(value.name) for value in model.graph.inputs}
    wanted = list(dict.fromkeys(name for name in (*computed, *floats) if name not in inputs))
    # without fusion, which would round differently
    session = open_session(model, extra_outputs=wanted, has_optimizations=False, has_integer_kernels=False)
    with running("the model"):
        results = dict(zip(wanted, session.run(wanted, dict(sample)), strict=True)) | dict(sample)
    folder = Path(output_dir)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files = _Files(folder)
    for name, source in codes.items():
        tensor = stored_tensor(source)
        files.write(name, "", results[str(source.name)] if tensor is None else np.asarray(tensor.numpy()))
    for name in floats:
        files.write(name, "_float", results[name])
    _LOG.info("%s: codes of %d tensors, and %d outputs of nodes", folder, len(codes), len(floats))


def _source(model: str | os.PathLike[str] | onnx.ModelProto) -> str | os.PathLike[str] | onnx.ModelProto:
    if not isinstance(model, (str, os.PathLike, onnx.ModelProto)):
        raise UnsupportedTypeError(f"model: expected a path or a ModelProto, got {type(model).__name__}")
    return model


def _first_sample(reader: Any, model: ir.Model, shapes: Mapping[str, Sequence[int]] | None) -> Mapping[str, Any]:
    inputs: Sequence[InputInfo] = input_infos(model)
    if reader is None:
        reader = RandomDataReader(ir.to_proto(model), shapes or None, count=1)
    if not hasattr(reader, "get_next"):
        raise UnsupportedTypeError(
            f"dump_data_reader: expected a CalibrationDataReader, with a method get_next, got {type(reader).__name__}"
        )
    sample = reader.get_next()
    if not sample:
        raise InvalidValueError(
            "dump_data_reader has no sample: get_next returned nothing; rewind it, or create a new one"
        )
    return as_sample(sample, inputs, 0)


class _Files:
    """The files of a dump; tensors whose names differ only in characters that file names cannot have get a number."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, str] = {}  # name of the tensor, by the name of its file

    def write(self, tensor: str, suffix: str, values: NDArray[Any]) -> None:
        """Write an array as .bin and .txt."""
        flat = np.ascontiguousarray(values).reshape(-1)
        stem = self._stem(tensor)
        with complete(self._folder / f"{stem}{suffix}.bin") as unfinished:
            unfinished.write_bytes(flat.tobytes())
        with complete(self._folder / f"{stem}{suffix}.txt") as unfinished:
            unfinished.write_text("".join(f"{value!s}\n" for value in flat), encoding="utf-8")

    def _stem(self, tensor: str) -> str:
        stem = first = _NOT_IN_NAMES.sub("_", tensor)[:_MOST_NAME]
        number = 1
        while self._tensors.setdefault(stem, tensor) != tensor:
            number += 1
            stem = f"{first}_{number}"
        return stem

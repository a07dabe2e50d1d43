"""Weights in pieces: all of them, in order, cut where it is allowed, and with nothing left mapped behind."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from quark.onnx import large_tensors
from quark.onnx.graph import add_copy, add_initializer, constant, is_constant, set_constant
from quark.onnx.input_files import MappedFile
from quark.onnx.large_tensors import ComputedTensor, MappedTensor, byte_pieces, is_large_model, pieces

TYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.int32, np.float64, ml_dtypes.int4, ml_dtypes.uint4)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_tensors, "PIECE_BYTES", 256)


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_tensors, "LARGE_MODEL_BYTES", 0)
    monkeypatch.setattr(large_tensors, "LARGE_TENSOR_BYTES", 64)


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).integers(-7, 8, shape).astype(dtype)


def mapped(path: Path, array: np.ndarray, offset: int = 0) -> MappedTensor:
    path.write_bytes(b"\1" * offset + array.tobytes())
    dtype = ir.DataType.from_numpy(array.dtype)
    return MappedTensor(MappedFile.open(path), offset, dtype, ir.Shape(array.shape), "w")


def model_of(array: np.ndarray) -> ir.Model:
    """y = x * w"""
    x, w = ir.Value(name="x"), ir.Value(name="w", const_value=ir.Tensor(array, name="w"))
    node = ir.node("Mul", [x, w])
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[w], opset_imports={"": 21}, name="g")
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("multiple", [1, 3, 32])
@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1])
@pytest.mark.parametrize("shape", [(5, 7, 9), (64, 3, 1), (1, 200, 2), (2, 1, 300), (1, 1, 1)])
@pytest.mark.usefixtures("small_pieces")
def test_pieces_are_all_of_it_in_order_and_cut_at_multiples(shape, axis, multiple):
    array = numbers(*shape)
    found = list(pieces(ir.Tensor(array), axis, multiple))
    np.testing.assert_array_equal(np.concatenate([each.array.ravel() for each in found]), array.ravel())
    length = array.size if axis is None else shape[axis]
    assert all(each.along.start % multiple == 0 for each in found)
    assert all(each.along.stop % multiple == 0 or each.along.stop == length for each in found)
    for before, after in pairwise(found):
        assert (after.outer.start, after.along.start) in (
            (before.outer.stop, 0),
            (before.outer.start, before.along.stop),
        )


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_what_is_tiny_or_empty_has_pieces_too(shape):
    array = np.ones(shape, np.float32)
    found = [piece.array for piece in pieces(ir.Tensor(array), axis=0 if shape else None, multiple=32)]
    assert sum(each.size for each in found) == array.size
    assert b"".join(byte_pieces(ir.Tensor(array))) == array.tobytes()


@pytest.mark.parametrize("dtype", TYPES, ids=lambda each: np.dtype(each).name)
@pytest.mark.usefixtures("small_pieces")
def test_bytes_are_those_of_onnx_ir(dtype):
    whole = ir.Tensor(numbers(31, 9, dtype=dtype))
    rows = ComputedTensor(lambda: iter(np.array_split(whole.numpy(), 4)), whole.dtype, ir.Shape(whole.shape.numpy()))
    for tensor in (whole, rows):
        assert b"".join(byte_pieces(tensor)) == whole.tobytes() == tensor.tobytes()
        assert tensor.nbytes == len(whole.tobytes())
    np.testing.assert_array_equal(rows.numpy(), whole.numpy())


@pytest.mark.parametrize("offset", [0, 1, 4, 4099])
@pytest.mark.usefixtures("small_pieces")
def test_a_mapped_tensor_reads_the_same_before_and_after_it_is_released(tmp_path, offset):
    array = numbers(64, 33)
    tensor = mapped(tmp_path / "w", array, offset)
    for _ in range(2):
        np.testing.assert_array_equal(np.concatenate([piece.array.ravel() for piece in pieces(tensor)]), array.ravel())
        assert all(piece.array.flags.aligned for piece in pieces(tensor))
        np.testing.assert_array_equal(tensor.numpy(), array)
        tensor.release()
    assert tensor.named("other").name == "other"
    np.testing.assert_array_equal(tensor.named("other").numpy(), array)


def mapped_megabytes(path: Path) -> float:
    """Of a file, in this process's memory."""
    entries = Path("/proc/self/smaps").read_text().split("VmFlags")
    found = [entry for entry in entries if str(path) in entry]
    return sum(int(re.findall(r"Rss:\s+(\d+) kB", entry)[0]) for entry in found) / 1000


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells what is mapped")
def test_what_was_read_does_not_stay_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr("quark.onnx.input_files._RECENT_BYTES", 1 << 20)
    array = np.zeros((64, 1 << 18), np.float32)  # 67 MB
    path = tmp_path / "w"
    tensor = mapped(path, array)
    assert sum(piece.array.any() for piece in pieces(tensor)) == 0
    assert all(not any(piece[:9]) for piece in byte_pieces(tensor))
    assert mapped_megabytes(path) < 8
    rows = [MappedTensor(tensor.file, i << 20, tensor.dtype, ir.Shape([1 << 18]), str(i)) for i in range(64)]
    for row in rows:
        value = ir.Value(name=row.name, const_value=row)
        ir.Graph([], [], nodes=[], initializers=[value])
        assert not constant(value).any()
    assert 0 < mapped_megabytes(path) < 16


def test_asking_whether_it_is_constant_reads_nothing():
    def fail():
        raise AssertionError("it was read")

    value = ir.Value(name="w", const_value=ComputedTensor(fail, ir.DataType.FLOAT, ir.Shape([4])))
    ir.Graph([], [], nodes=[], initializers=[value])
    assert is_constant(value)
    with pytest.raises(AssertionError, match="it was read"):
        constant(value)


@pytest.mark.usefixtures("all_large")
def test_new_weights_of_a_large_model_go_to_a_file():
    array = numbers(40, 10)
    model = model_of(array)
    added = add_initializer(model, "new", array)
    (node,) = model.graph
    changed = set_constant(model, node, 1, array * 2)
    for value, expected in ((added, array), (changed, array * 2)):
        assert isinstance(value.const_value, MappedTensor)
        np.testing.assert_array_equal(constant(value), expected)
    shared = add_copy(model, changed)
    assert shared.const_value.file is changed.const_value.file
    assert shared.const_value.name == shared.name != changed.name
    small = add_initializer(model, "small", np.ones(2, np.float32))
    assert not isinstance(small.const_value, MappedTensor)


def test_those_of_a_small_model_stay_in_memory():
    model = model_of(numbers(4, 4))
    assert not is_large_model(model)
    assert not isinstance(add_initializer(model, "new", np.ones(1 << 20, np.float32)).const_value, MappedTensor)


@pytest.mark.usefixtures("all_large")
def test_without_room_for_a_file_they_stay_in_memory_too(monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    model = model_of(numbers(40, 10))
    value = add_initializer(model, "new", numbers(40, 10))
    np.testing.assert_array_equal(constant(value), numbers(40, 10))


def test_a_model_is_large_for_good(monkeypatch):
    model = model_of(numbers(40, 10))
    assert not is_large_model(model)
    monkeypatch.setattr(large_tensors, "LARGE_MODEL_BYTES", 0)
    assert not is_large_model(model)

"""A model is written piece by piece: the bytes are those of protobuf, and a failure leaves what was there."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from quark.onnx import large_tensors
from quark.onnx.large_tensors import ComputedTensor, Message, split
from quark.onnx.save import SaveOptions, finish, to_proto, write_model

BESIDE = SaveOptions(has_external_data=True)


def graph(weights: dict[str, ir.TensorProtocol]) -> ir.Model:
    """y = x, with these constants beside it."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1]))
    node = ir.node("Identity", [x], outputs=[ir.Value(name="y", type=x.type, shape=x.shape)])
    values = [
        ir.Value(name=name, type=ir.TensorType(weight.dtype), shape=weight.shape, const_value=weight)
        for name, weight in weights.items()
    ]
    for name, weight in weights.items():
        weight.name = name
    body = ir.Graph([x], node.outputs, nodes=[node], initializers=values, opset_imports={"": 21}, name="g")
    return ir.Model(body, ir_version=10)


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "large": rng.standard_normal((300, 70)).astype(np.float32),
        "scalar": np.array(3.0, np.float32),
        "bfloat16": rng.standard_normal((60, 41)).astype(ml_dtypes.bfloat16),
        "int4": rng.integers(-8, 8, (51, 61)).astype(ml_dtypes.int4),
        "row": np.arange(256, dtype=np.int64),
        "empty": np.zeros((0, 4), np.float32),
    }


def eager() -> ir.Model:
    return graph({name: ir.Tensor(array) for name, array in arrays().items()})


def lazy() -> ir.Model:
    """The same, where the large ones are computed in parts."""

    def computed(array: np.ndarray) -> ComputedTensor:
        dtype = ir.DataType.from_numpy(array.dtype)
        return ComputedTensor(lambda: iter(np.array_split(array, 3)), dtype, ir.Shape(array.shape))

    return graph({name: computed(array) if array.ndim == 2 else ir.Tensor(array) for name, array in arrays().items()})


def content(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


@pytest.mark.parametrize("make", [eager, lazy])
def test_a_single_file_is_what_protobuf_would_write(make, tmp_path, monkeypatch):
    monkeypatch.setattr(large_tensors, "PIECE_BYTES", 1000)
    facts = write_model(finish(make(), {"k": "v"}, SaveOptions()), tmp_path / "m.onnx", SaveOptions())
    written = (tmp_path / "m.onnx").read_bytes()
    assert written == to_proto(eager(), {"k": "v"}, SaveOptions()).SerializeToString(deterministic=True)
    assert (facts.bytes, facts.sha256) == (len(written), hashlib.sha256(written).hexdigest())
    model = onnx.load_model_from_string(written)
    for tensor in model.graph.initializer:
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), arrays()[tensor.name])


@pytest.mark.parametrize("make", [eager, lazy])
def test_two_files_are_the_same_however_the_weights_came(make, tmp_path):
    for folder, model in (("a", make()), ("b", eager())):
        (tmp_path / folder).mkdir()
        write_model(finish(model, {}, SaveOptions()), tmp_path / folder / "m.onnx", BESIDE)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert len(content(tmp_path / "a")) == 2
    loaded = onnx.load(tmp_path / "a" / "m.onnx")
    for tensor in loaded.graph.initializer:
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), arrays()[tensor.name])


def test_the_hash_of_two_files_is_that_of_what_lies_there(tmp_path):
    facts = write_model(finish(lazy(), {}, SaveOptions()), tmp_path / "m.onnx", BESIDE)
    (data,) = tmp_path.glob("*.data")
    weights = hashlib.sha256(data.read_bytes())
    expected = hashlib.sha256((tmp_path / "m.onnx").read_bytes() + weights.digest())
    assert (facts.sha256, facts.bytes) == (expected.hexdigest(), sum(map(len, content(tmp_path).values())))
    assert data.name == f"m-{weights.hexdigest()[:12]}.data"


def test_a_message_can_be_saved_twice_and_then_become_a_proto(tmp_path):
    message = finish(lazy(), {}, SaveOptions())
    write_model(message, tmp_path / "one.onnx", BESIDE)
    write_model(message, tmp_path / "two.onnx", SaveOptions())
    proto = message.filled()
    write_model(proto, tmp_path / "three.onnx", SaveOptions())
    before = proto.SerializeToString(deterministic=True)
    write_model(proto, tmp_path / "four.onnx", BESIDE)
    assert (tmp_path / "two.onnx").read_bytes() == (tmp_path / "three.onnx").read_bytes() == before
    assert proto.SerializeToString(deterministic=True) == before
    (one,), (four,) = tmp_path.glob("one-*.data"), tmp_path.glob("four-*.data")
    assert one.read_bytes() == four.read_bytes()
    assert one.name.partition("-")[2] == four.name.partition("-")[2]


def test_splitting_leaves_the_model_as_it_was():
    model = lazy()
    before = {name: value.const_value for name, value in model.graph.initializers.items()}
    message = split(model)
    assert {name: value.const_value for name, value in model.graph.initializers.items()} == before
    assert set(message.weights) == {"large", "bfloat16", "int4", "row"}
    again = message.to_graph()
    for name, array in arrays().items():
        np.testing.assert_array_equal(again.graph.initializers[name].const_value.numpy(), array)


def test_other_weights_have_another_file(tmp_path):
    changed = arrays()["large"]
    changed[7, 7] = np.nextafter(changed[7, 7], np.float32(9))
    for array in (arrays()["large"], changed):
        write_model(finish(graph({"w": ir.Tensor(array)}), {}, SaveOptions()), tmp_path / "m.onnx", BESIDE)
        (data,) = tmp_path.glob("*.data")  # that of the run before is gone
        assert data.name in (tmp_path / "m.onnx").read_bytes().decode("latin1")
        np.testing.assert_array_equal(numpy_helper.to_array(onnx.load(tmp_path / "m.onnx").graph.initializer[0]), array)


@pytest.mark.parametrize("options", [SaveOptions(), BESIDE], ids=["one file", "two files"])
def test_a_weight_that_cannot_be_computed_leaves_what_was_there(options, tmp_path):
    def breaks() -> Iterator[np.ndarray]:
        yield np.zeros(5000, np.float32)
        raise MemoryError("no more")

    write_model(finish(eager(), {}, SaveOptions()), tmp_path / "m.onnx", options)
    before = content(tmp_path)
    bad = finish(graph({"w": ComputedTensor(breaks, ir.DataType.FLOAT, ir.Shape([9000]))}), {}, SaveOptions())
    with pytest.raises(MemoryError):
        write_model(bad, tmp_path / "m.onnx", options)
    assert content(tmp_path) == before


@pytest.mark.skipif(os.name != "posix", reason="processes are killed otherwise there")
@pytest.mark.parametrize("options", [SaveOptions(), BESIDE], ids=["one file", "two files"])
def test_a_killed_process_leaves_what_was_there_and_a_hidden_file(options, tmp_path):
    write_model(finish(eager(), {}, SaveOptions()), tmp_path / "m.onnx", options)
    before = content(tmp_path)
    program = f"""
        import os, signal, numpy as np, onnx_ir as ir
        from pathlib import Path
        from quark.onnx.large_tensors import ComputedTensor
        from quark.onnx.large_tensors import Message
        from quark.onnx.save import SaveOptions, write_model
        import onnx

        def killed():
            yield np.zeros(1 << 20, np.float32)
            os.kill(os.getpid(), signal.SIGKILL)

        proto = onnx.ModelProto()
        proto.graph.initializer.add(name="w", dims=[1 << 21], data_type=1, raw_data=b"")
        message = Message(proto, {{"w": ComputedTensor(killed, ir.DataType.FLOAT, ir.Shape([1 << 21]))}})
        write_model(message, Path({str(tmp_path / "m.onnx")!r}), {options!r})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    after = content(tmp_path)
    assert {name: after[name] for name in before} == before
    assert all(name.startswith(".quark-") for name in set(after) - set(before))


def test_a_message_knows_what_it_weighs():
    message = split(eager())
    assert isinstance(message, Message)
    assert message.weight_bytes == sum(ir.Tensor(arrays()[name]).nbytes for name in message.weights)

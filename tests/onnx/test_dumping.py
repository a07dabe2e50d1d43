"""The codes and floats that `dump_model` writes are what the quantized model stores and computes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_models import conv_bn_relu, random_feed

from quark.errors import InvalidValueError, ModelError, UnsupportedTypeError
from quark.onnx import RandomDataReader, dump_model, quantize
from quark.onnx.session import open_session


class Reader:
    """One sample."""

    def __init__(self, sample):
        self._left = [sample]

    def get_next(self):
        return self._left.pop() if self._left else None


@pytest.fixture(scope="module")
def quantized():
    model = conv_bn_relu()
    return model, quantize(model, [random_feed(model, seed) for seed in range(3)], "A8W8").model


def test_codes_of_weights_and_activations(quantized, tmp_path):
    model, result = quantized
    feed = random_feed(model)
    dump_model(result, Reader(feed), output_dir=tmp_path / "dump")
    pairs = [node for node in result.graph.node if node.op_type == "DequantizeLinear"]
    stored = {each.name: onnx.numpy_helper.to_array(each) for each in result.graph.initializer}
    activations = [node.input[0] for node in pairs if node.input[0] not in stored]
    session = open_session(result, extra_outputs=activations, has_optimizations=False)
    computed = dict(zip(activations, session.run(activations, feed), strict=True))
    assert {each.name for each in (tmp_path / "dump").iterdir()} == {
        f"{node.output[0].replace('/', '_')}{suffix}" for node in pairs for suffix in (".bin", ".txt")
    }
    assert activations
    for node in pairs:
        expected = stored[node.input[0]] if node.input[0] in stored else computed[node.input[0]]
        stem = node.output[0].replace("/", "_")
        codes = np.frombuffer((tmp_path / "dump" / f"{stem}.bin").read_bytes(), expected.dtype)
        np.testing.assert_array_equal(codes, expected.reshape(-1))
        np.testing.assert_array_equal(np.loadtxt(tmp_path / "dump" / f"{stem}.txt"), expected.reshape(-1))


def test_floats_of_all_nodes_of_a_float_model_on_random_numbers(tmp_path):
    model = conv_bn_relu(batch="n")
    with pytest.raises(InvalidValueError, match="no DequantizeLinear.*dump_float=True"):
        dump_model(model, output_dir=tmp_path)
    shape = {
        model.graph.input[0].name: [
            2,
            *(each.dim_value for each in model.graph.input[0].type.tensor_type.shape.dim[1:]),
        ]
    }
    dump_model(model, None, shape, True, tmp_path)
    sample = RandomDataReader(model, shape, count=1).get_next()
    names = [node.output[0] for node in model.graph.node]
    session = open_session(model, extra_outputs=names, has_optimizations=False)
    for name, expected in zip(names, session.run(names, sample), strict=True):
        written = np.fromfile(tmp_path / f"{name}_float.bin", np.float32)
        np.testing.assert_array_equal(written, expected.reshape(-1))
        np.testing.assert_allclose(np.loadtxt(tmp_path / f"{name}_float.txt"), expected.reshape(-1), rtol=1e-6)


def test_names_that_meet_and_names_that_are_paths(tmp_path):
    helper, tensor = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [helper.make_node("Relu", ["x"], ["../a"]), helper.make_node("Neg", ["../a"], [".._a"])]
    ends = [helper.make_tensor_value_info(name, tensor, [2]) for name in ("x", ".._a")]
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:]), opset_imports=opset, ir_version=8)
    dump_model(model, Reader({"x": np.array([-1, 2], np.float32)}), dump_float=True, output_dir=tmp_path / "in")
    assert sorted(each.name for each in tmp_path.rglob("*.txt")) == [".._a_2_float.txt", ".._a_float.txt"]
    assert not list(tmp_path.glob("*.txt"))


def test_bad_arguments(quantized, tmp_path):
    model, result = quantized
    reader = Reader(random_feed(model))
    reader.get_next()
    with pytest.raises(InvalidValueError, match="dump_data_reader has no sample"):
        dump_model(result, reader, output_dir=tmp_path)
    with pytest.raises(UnsupportedTypeError, match="dump_data_reader: expected a CalibrationDataReader"):
        dump_model(result, [1, 2], output_dir=tmp_path)
    with pytest.raises(UnsupportedTypeError, match="model: expected a path or a ModelProto, got int"):
        dump_model(3)
    with pytest.raises(ModelError, match="nowhere.onnx"):
        dump_model(tmp_path / "nowhere.onnx")

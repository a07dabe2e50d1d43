"""What an ONNX file holds, told from the file alone."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tiny_models import brightness_model, save_brightness_model

from quark.demo import network_path
from quark.errors import ModelError
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import BLOCK_FORMATS
from quark.inspect.inspection import inspect_model, inspection_table, model_bytes
from quark.onnx.load.reading import read_proto
from quark.ops.onnx_nodes import CONSTANT_DOMAIN, make_block_node, make_extended_quantize_node


def save(path, nodes, constants, output="y", shape=("N", 8)):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    opsets = [
        helper.make_opsetid("", 21),
        helper.make_opsetid("com.amd.quark", 1),
        helper.make_opsetid("com.microsoft", 1),
    ]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def test_a_float_model(tmp_path):
    inspection = inspect_model(save_brightness_model(tmp_path / "m.onnx"), read_proto)
    assert inspection.opsets == {"ai.onnx": 17}
    assert [str(input_) for input_ in inspection.inputs] == ["input: float32 [N, 3, 16, 16]"]
    assert inspection.outputs[0].shape == ("N", 2)
    assert inspection.nodes == {"Conv": 1, "Relu": 1, "GlobalAveragePool": 1, "Flatten": 1, "Gemm": 1}
    count = sum(numpy_helper.to_array(each).size for each in brightness_model().graph.initializer)
    assert [(parameter.type, parameter.count, parameter.bytes) for parameter in inspection.parameters] == [
        ("float32", count, 4 * count)
    ]
    assert not inspection.is_quantized
    assert inspection.bytes == (tmp_path / "m.onnx").stat().st_size


def test_pairs_count_once_by_role_type_and_granularity(tmp_path):
    node = helper.make_node
    nodes = [
        node("QuantizeLinear", ["x", "s", "zu"], ["xq"]),
        node("DequantizeLinear", ["xq", "s", "zu"], ["xd"]),
        node("DequantizeLinear", ["w", "sw", "zw"], ["wd"], axis=1),
        node("DequantizeLinear", ["b", "s"], ["bd"]),
        node("Gemm", ["xd", "wd", "bd"], ["y"]),
    ]
    constants = {
        "s": np.float32(0.1),
        "zu": np.uint8(128),
        "w": np.ones((8, 4), np.int8),
        "sw": np.ones(4, np.float32),
        "zw": np.zeros(4, np.int8),
        "b": np.ones(4, np.int32),
    }
    inspection = inspect_model(save(tmp_path / "m.onnx", nodes, constants), read_proto)
    assert inspection.quantized == {
        "activations": {"uint8": 1},
        "weights": {"int8 per channel": 1},
        "biases": {"int32": 1},
    }


def test_a_bias_is_known_by_its_reader_not_its_type(tmp_path):
    node = helper.make_node
    nodes = [
        node("QuantizeLinear", ["bf", "s", "z"], ["bq"]),
        node("DequantizeLinear", ["bq", "s", "z"], ["bd"]),
        node("DequantizeLinear", ["b", "s", "z"], ["be"]),
        node("Gemm", ["x", "w", "bd"], ["h"]),
        node("Gemm", ["x", "w", "be"], ["y"]),
    ]
    constants = {
        "s": np.float32(0.1),
        "z": np.int8(0),
        "b": np.ones(4, np.int8),
        "bf": np.ones(4, np.float32),
        "w": np.ones((8, 4), np.float32),
    }
    assert inspect_model(save(tmp_path / "m.onnx", nodes, constants), read_proto).quantized == {"biases": {"int8": 2}}


def test_weights_that_were_rounded_before(tmp_path):
    mark = make_block_node(BlockQuantizer(BLOCK_FORMATS[0]), 0, "w", "wd")
    mark.domain = CONSTANT_DOMAIN
    nodes = [mark, helper.make_node("MatMul", ["x", "wd"], ["y"])]
    inspection = inspect_model(save(tmp_path / "m.onnx", nodes, {"w": np.ones((8, 4), np.float32)}), read_proto)
    assert inspection.quantized == {"weights": {str(BLOCK_FORMATS[0]): 1}}


@pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=str)
def test_block_formats_by_name(tmp_path, fmt):
    nodes = [
        make_block_node(BlockQuantizer(fmt), 1, "x", "xd"),
        make_block_node(BlockQuantizer(fmt), 0, "w", "wd"),
        helper.make_node("MatMul", ["xd", "wd"], ["y"]),
    ]
    inspection = inspect_model(save(tmp_path / "m.onnx", nodes, {"w": np.ones((8, 4), np.float32)}), read_proto)
    assert inspection.quantized == {"activations": {str(fmt): 1}, "weights": {str(fmt): 1}}


def test_extended_integer_and_weight_only_operators(tmp_path):
    node = helper.make_node
    nodes = [
        make_extended_quantize_node("x", "s", "z", "xq"),
        node("MatMulNBits", ["x", "w", "s"], ["n"], domain="com.microsoft", K=8, N=4, bits=4, block_size=32),
        node("MatMulInteger", ["a", "a"], ["y"]),
    ]
    constants = {
        "s": np.float32(1),
        "z": np.int32(0),
        "w": np.ones((4, 1, 16), np.uint8),
        "a": np.ones((2, 2), np.int8),
    }
    inspection = inspect_model(save(tmp_path / "m.onnx", nodes, constants), read_proto)
    assert inspection.quantized == {
        "activations": {"int32": 1},
        "weights": {"int4 per group of 32": 1},
        "operators": {"MatMulInteger": 1},
    }


def test_attributes_that_no_format_has_are_told_not_raised(tmp_path):
    node = helper.make_node("MXQuantizeDequantize", ["x"], ["y"], domain="com.amd.quark", element_dtype="fp3")
    assert "MXQuantizeDequantize" in next(
        iter(inspect_model(save(tmp_path / "m.onnx", [node], {}), read_proto).quantized["activations"])
    )


def test_external_data_counts(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(brightness_model(), path, save_as_external_data=True, location="m.data", size_threshold=0)
    assert model_bytes(path, read_proto) == path.stat().st_size + (tmp_path / "m.data").stat().st_size


def test_values_of_weights_need_not_be_read():
    path = network_path()
    assert inspect_model(path, read_proto) == inspect_model(path, onnx.load) == inspect_model(path)
    held = [len(tensor.raw_data) for tensor in read_proto(path).graph.initializer]
    whole = [len(tensor.raw_data) for tensor in onnx.load(path).graph.initializer]
    assert max(held) < 1024 < max(whole)


@pytest.mark.parametrize("content", [b"not a model at all", b"", b"\xff" * 100])
def test_what_is_no_model(tmp_path, content):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="m.onnx"):
        inspect_model(path, read_proto)


def test_no_file_and_a_folder(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        inspect_model(tmp_path / "absent.onnx", read_proto)
    with pytest.raises(ModelError, match="folder"):
        inspect_model(tmp_path, read_proto)


def test_table_cuts_long_metadata(tmp_path):
    from rich.console import Console

    model = brightness_model()
    helper.set_model_props(model, {f"key{i}": "long " * 100 for i in range(20)})
    onnx.save(model, tmp_path / "m.onnx")
    console = Console(width=80, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(inspection_table(inspect_model(tmp_path / "m.onnx", read_proto)))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("12 more" in line for line in lines)


def test_a_sparse_constant_beside_quantizers_is_no_damage(tmp_path):
    values = numpy_helper.from_array(np.array([2.0], np.float32), "values")
    indices = numpy_helper.from_array(np.array([1], np.int64), "indices")
    sparse = helper.make_sparse_tensor(values, indices, [3])
    nodes = [
        helper.make_node("Constant", [], ["c"], "sparse", sparse_value=sparse),
        helper.make_node("QuantizeLinear", ["x", "scale"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale"], ["d"]),
        helper.make_node("Add", ["d", "c"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in ("x", "y")]
    scale = numpy_helper.from_array(np.array(0.5, np.float32), "scale")
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], [scale])
    path = tmp_path / "sparse.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    assert inspect_model(path).quantized == {"activations": {"uint8": 1}}

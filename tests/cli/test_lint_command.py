"""`quark lint` as a user meets it."""

import json

import onnx
import pytest
from commands import assert_one_line_error, run
from npu_models import npu_file
from tiny_models import save_brightness_model

from quark.onnx import quantize


@pytest.fixture
def save(tmp_path):
    def saved(model):
        onnx.save(model, tmp_path / "model.onnx")
        return tmp_path / "model.onnx"

    return saved


def free_batch(**positions):
    model = npu_file(**positions)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    return model


def test_a_clean_file(save):
    result = run("lint", save(npu_file()), "--strict")
    assert result.exit_code == 0
    assert "no findings" in result.stdout


def test_errors(save):
    result = run("lint", save(npu_file(w=17)))
    assert result.exit_code == 3
    for part in ("error", "AdjustShiftCut", "conv", "expected 0 to 16", "NPULimitationCheck", "1 error"):
        assert part in result.stdout
    assert result.stderr == ""


def test_warnings_count_when_asked_for(save):
    path = save(free_batch())
    result = run("lint", path)
    assert result.exit_code == 0
    assert "1 warning" in result.stdout
    assert "FixShapes" in result.stdout
    assert run("lint", path, "--strict").exit_code == 3


def test_json(save):
    result = run("lint", save(free_batch(w=17)), "--json")
    assert result.exit_code == 3
    content = json.loads(result.stdout)
    assert content["summary"] == {"error": 1, "warning": 1}
    assert [each["rule"] for each in content["findings"]] == ["Batch", "AdjustShiftCut"]
    assert set(content["findings"][0]) == {"rule", "node", "tensor", "level", "message", "fix"}
    clean = json.loads(run("lint", save(npu_file()), "--json").stdout)
    assert clean["findings"] == []
    assert {each["where"] for each in clean["nodes"]} == {"NPU"}


def test_a_float_model_is_one_finding(tmp_path):
    result = run("lint", save_brightness_model(tmp_path / "float.onnx"))
    assert result.exit_code == 3
    assert "not quantized" in result.stdout
    assert "1 error" in result.stdout


def test_a_rule_that_is_broken_everywhere_is_shown_a_few_times(tmp_path, save):
    from quark.demo import network_path

    path = save(quantize(network_path(), None, "A8W8", use_random_data=True).model)
    text = run("lint", path, "--all").stdout
    assert "--json has all" in text
    assert text.count("PerTensor") == 6
    assert len(json.loads(run("lint", path, "--json").stdout)["findings"]) > 50


def test_bad_files(tmp_path):
    (tmp_path / "text.onnx").write_text("this is no model")
    for name in ("absent.onnx", "text.onnx"):
        assert_one_line_error(run("lint", tmp_path / name), name)
    assert_one_line_error(run("lint", tmp_path), "folder")
    assert run("lint").exit_code == 2


def test_a_file_for_something_else_gets_one_sentence(tmp_path):
    save_brightness_model(tmp_path / "float.onnx")
    quantize(tmp_path / "float.onnx", config="A8W8", use_random_data=True).save(tmp_path / "a8w8.onnx")
    result = run("lint", tmp_path / "a8w8.onnx")
    assert result.exit_code == 3
    assert result.stdout.count("\n") == 1
    assert "was not made for AMD's NPU" in result.stdout
    assert "--target npu" in result.stdout
    listed = run("lint", tmp_path / "a8w8.onnx", "--all")
    assert listed.exit_code == 3
    assert "PowerOfTwoScale" in listed.stdout
    quantize(tmp_path / "float.onnx", config="BF16", use_random_data=True).save(tmp_path / "bf16.onnx")
    of_bfloat16 = run("lint", tmp_path / "bf16.onnx", "--nodes")
    assert of_bfloat16.exit_code == 3
    assert "BF16QDQToCast: true" in of_bfloat16.stdout
    assert "'config_file': JSON" in of_bfloat16.stdout
    assert "nodes by these rules:" in of_bfloat16.stdout


def test_a_file_for_the_npu_is_told_where_its_nodes_run_and_how(save):
    result = run("lint", save(npu_file()))
    assert "nodes by these rules: " in result.stdout
    assert "on the NPU" in result.stdout
    assert "VitisAIExecutionProvider" in result.stdout


@pytest.mark.parametrize(("size", "has_finding"), [(8, False), (9, True)])
def test_ceil_mode_is_found_where_it_matters(save, size, has_finding):
    nodes = [
        onnx.helper.make_node("DequantizeLinear", ["x", "s", "z"], ["d"], name="dequantize"),
        onnx.helper.make_node("MaxPool", ["d"], ["m"], name="pool", kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
        onnx.helper.make_node("QuantizeLinear", ["m", "s", "z"], ["y"], name="quantize"),
    ]
    numbers = [
        onnx.helper.make_tensor("s", onnx.TensorProto.FLOAT, [], [0.25]),
        onnx.helper.make_tensor("z", onnx.TensorProto.INT8, [], [0]),
    ]
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.INT8, [1, 3, size, size])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.INT8, None)
    graph = onnx.helper.make_graph(nodes, "pooling", [x], [y], numbers)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    rules = [each["rule"] for each in json.loads(run("lint", save(model), "--json").stdout)["findings"]]
    assert ("CeilMode" in rules) == has_finding

"""`quark convert` as a user meets it."""

import onnx
import pytest
from commands import assert_one_line_error, run
from onnx import TensorProto, helper

from quark.cli.convert_command import NAMES


@pytest.fixture
def model(tmp_path):
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 3, 8, 8]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", infos[:1], infos[1:])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_all_tools_are_listed_with_a_summary():
    result = run("convert")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(NAMES) == 38
    for name in NAMES:
        row = next(line.split(maxsplit=1) for line in lines if line.startswith(f"{name} "))
        assert len(row[1]) > 20
    purposes = ["number types", "quantizers", "shapes and layout", "files", "inspection"]
    assert [line.strip() for line in lines if line.strip() in purposes] == purposes


def test_help():
    result = run("convert", "--help")
    assert result.exit_code == 0
    assert "fp32-to-bf16, fp16-to-bf16" in result.stdout
    result = run("convert", "fp32-to-bf16", "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith("usage: quark convert fp32-to-bf16 ")
    assert "--format" in result.stdout


@pytest.mark.parametrize("name", ["dynamic-to-fixed", "convert_dynamic_to_fixed", "convert-dynamic-to-fixed"])
def test_a_tool_by_any_of_its_names(name, model, tmp_path):
    result = run("convert", name, "--fix_shapes", "x:[2,3,8,8]", model, tmp_path / "o.onnx")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "o.onnx" in result.stdout
    dims = onnx.load(tmp_path / "o.onnx").graph.output[0].type.tensor_type.shape.dim
    assert [dim.dim_value for dim in dims] == [2, 3, 8, 8]


def test_warnings_are_shown(model, tmp_path):
    loaded = onnx.load(model)
    loaded.graph.output[0].type.tensor_type.shape.dim.pop()
    onnx.save(loaded, model)
    result = run("convert", "nchw-to-nhwc", model, tmp_path / "o.onnx")
    assert result.exit_code == 0
    assert "'y' of shape" in result.stderr


def test_an_unknown_name_suggests_the_nearest():
    assert_one_line_error(run("convert", "fp32-to-bf17"), "no tool 'fp32-to-bf17'. Did you mean fp32-to-bf16")


def test_errors_are_one_line_and_leave_no_file(model, tmp_path):
    before = model.read_bytes()
    assert_one_line_error(run("convert", "nchw-to-nhwc", model, model), "is the input model")
    assert_one_line_error(run("convert", "nchw-to-nhwc", tmp_path / "none.onnx", tmp_path / "o.onnx"), "no such file")
    (tmp_path / "bad.onnx").write_bytes(b"hello")
    assert_one_line_error(run("convert", "opset-version", tmp_path / "bad.onnx", 18, tmp_path / "o.onnx"), "bad.onnx")
    assert_one_line_error(run("convert", "opset-version", model, 12, tmp_path / "o.onnx"), "m.onnx", "opset 17", "12")
    assert model.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.onnx", "m.onnx"]


def test_wrong_arguments(model):
    result = run("convert", "nchw-to-nhwc", model)
    assert result.exit_code == 2
    assert "output" in result.stderr
    result = run("convert", "nchw-to-nhwc", "--debug", model, model)
    assert result.exit_code == 1
    assert "Traceback" in result.stderr

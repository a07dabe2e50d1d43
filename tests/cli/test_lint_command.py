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
    assert json.loads(run("lint", save(npu_file()), "--json").stdout)["findings"] == []


def test_a_float_model_is_one_finding(tmp_path):
    result = run("lint", save_brightness_model(tmp_path / "float.onnx"))
    assert result.exit_code == 3
    assert "not quantized" in result.stdout
    assert "1 error" in result.stdout


def test_a_rule_that_is_broken_everywhere_is_shown_a_few_times(tmp_path, save):
    from quark.demo import network_path

    path = save(quantize(network_path(), None, "A8W8", use_random_data=True).model)
    text = run("lint", path).stdout
    assert "--json has all" in text
    assert text.count("PerTensor") == 6
    assert len(json.loads(run("lint", path, "--json").stdout)["findings"]) > 50


def test_bad_files(tmp_path):
    (tmp_path / "text.onnx").write_text("this is no model")
    for name in ("absent.onnx", "text.onnx"):
        assert_one_line_error(run("lint", tmp_path / name), name)
    assert_one_line_error(run("lint", tmp_path), "folder")
    assert run("lint").exit_code == 2

"""pack and unpack as a user meets them, and what the other commands make of a packed file."""

import json

import onnx
import pytest
from commands import assert_one_line_error, run
from packed_models import marked_model
from tiny_models import save_brightness_model

from quark.onnx import add_portable_functions

needs_block_types = pytest.mark.skipif(onnx.defs.onnx_opset_version() < 24, reason="onnx has opset 24 from 1.19 on")


@pytest.fixture
def model(tmp_path):
    onnx.save(marked_model("mxfp4_e2m1"), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_there_and_back(model, tmp_path):
    packed, back = tmp_path / "packed.onnx", tmp_path / "back.onnx"
    result = run("pack", model, packed)
    assert result.exit_code == 0, result.output
    assert "mxfp4_e2m1" in result.stdout
    assert "bits per packed weight" in result.stdout
    result = run("unpack", packed, back)
    assert "6 weights unpacked" in result.stdout
    assert back.read_bytes() == model.read_bytes()


def test_json_has_everything(model, tmp_path):
    content = json.loads(run("pack", model, tmp_path / "packed.onnx", "--profile", "custom", "--json").stdout)
    assert content["profile"] == "custom"
    assert content["bytes_after"] == (tmp_path / "packed.onnx").stat().st_size
    assert {"name", "format", "bits", "bytes_before", "bytes_after"} <= set(content["packed"][0])
    content = json.loads(run("unpack", tmp_path / "packed.onnx", tmp_path / "back.onnx", "--json").stdout)
    assert content["weights"] == [f"w{index}" for index in range(6)]


@needs_block_types
def test_native_says_who_does_not_run_it(model, tmp_path):
    assert "ONNX Runtime" in run("pack", model, tmp_path / "packed.onnx", "--profile", "native").stdout


def test_errors_are_one_line(model, tmp_path):
    assert_one_line_error(run("pack", model, model), "is the input model")
    assert_one_line_error(run("pack", tmp_path / "none.onnx", tmp_path / "o.onnx"), "no such file")
    assert_one_line_error(run("unpack", model, tmp_path / "o.onnx"), "is not packed")
    float_model = save_brightness_model(tmp_path / "float.onnx")
    assert_one_line_error(run("pack", float_model, tmp_path / "o.onnx"), "no weight is in a block format")


@pytest.mark.parametrize("profile", ["portable", "custom", pytest.param("native", marks=needs_block_types)])
def test_inspect_names_packed_weights_by_their_format(model, tmp_path, profile):
    packed = tmp_path / "packed.onnx"
    assert run("pack", model, packed, "--profile", profile).exit_code == 0
    found = json.loads(run("inspect", packed, "--json").stdout)
    assert found["quantized"] == {"weights": {"mxfp4_e2m1 packed": 6}}


def test_a_packed_file_with_functions_added(tmp_path, model):
    packed = tmp_path / "packed.onnx"
    run("pack", model, packed)
    changed = add_portable_functions(onnx.load(packed))
    assert changed.SerializeToString(deterministic=True) == onnx.load(packed).SerializeToString(deterministic=True)

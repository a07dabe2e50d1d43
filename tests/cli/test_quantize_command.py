"""`quark quantize` as a user meets it: what it writes, what it says, and what it refuses."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from commands import assert_one_line_error, run
from tiny_models import SIZE, image, save_brightness_model, save_images

from quark.cli.options import read_config
from quark.cli.quantize_command import device_changes
from quark.evaluate.comparison import Drop
from quark.onnx import get_library_path
from quark.onnx.quantization.config.algorithm import (
    AdaQuantConfig,
    AdaRoundConfig,
    CLEConfig,
    DistillationConfig,
    SmoothQuantConfig,
)
from quark.onnx.quantization.config.config import QConfig

QUARK = Path(sys.executable).with_name("quark")


@pytest.fixture
def model(tmp_path):
    return save_brightness_model(tmp_path / "float.onnx")


@pytest.fixture
def calib(tmp_path):
    return save_images(tmp_path / "calib")


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "small.onnx"


def outputs_of(path, x):
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(get_library_path())
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, {"input": x})[0]


@pytest.mark.parametrize("config", ["XINT8", "A8W8", "INT8_CNN_DEFAULT", "MXINT8", "BF16"])
def test_writes_a_model_that_runs_and_a_report(model, calib, out, config):
    result = run("quantize", model, out, "--config", config, "--calib", calib)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.parent.iterdir()) == ["small.json", "small.onnx"]
    x = np.random.default_rng(0).normal(0, 1, (2, 3, SIZE, SIZE)).astype(np.float32)
    assert outputs_of(out, x).shape == (2, 2)
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["verdict"] in ("ok", "degraded", "collapsed")
    assert report["verdict"].upper() in result.stdout
    assert config in result.stdout
    assert report["config_name"] == config
    assert report["result"]["bytes"] == out.stat().st_size
    assert "\x1b" not in result.output
    assert result.stderr == ""


def test_the_earlier_name_of_the_cpu_is_accepted(model, calib, out):
    assert run("quantize", model, out, "--calib", calib, "--target", "onnxruntime").exit_code == 0
    assert json.loads(out.with_suffix(".json").read_text())["config_name"] == "INT8_CNN_DEFAULT"


def test_the_target_chooses_the_config_and_the_cpu_is_the_default(model, calib, out):
    result = run("quantize", model, out, "--calib", calib)
    assert result.exit_code == 0
    assert json.loads(out.with_suffix(".json").read_text())["config_name"] == "INT8_CNN_DEFAULT"
    assert "the default for cpu" in result.output
    assert run("quantize", model, out, "--calib", calib, "--target", "npu").exit_code == 0
    assert json.loads(out.with_suffix(".json").read_text())["config_name"] == "XINT8"
    result = run("quantize", model, out, "--calib", calib, "--target", "npu", "--config", "XINT8")
    assert result.exit_code == 2
    assert "give one of them, or --config auto" in result.output


def test_changes_are_made_to_what_the_target_chooses(model, calib, out):
    result = run("quantize", model, out, "--calib", calib, "--target", "gpu", "--set", "QuantizeBias=false")
    assert result.exit_code == 0, result.output
    options = json.loads(out.with_suffix(".json").read_text())["config"]["extra_options"]
    assert options["WeightsOnly"] is True
    assert options["QuantizeBias"] is False
    assert "get_default_config('FP16')" in result.output
    assert "config.extra_options['WeightsOnly'] = True" in result.output


def test_the_summary_says_how_images_were_prepared(model, calib, out):
    result = run("quantize", model, out, "--calib", calib)
    assert "assumed, because --preprocess was not given" in " ".join(result.output.split())
    result = run("quantize", model, out, "--calib", calib, "--preprocess", "unit")
    assert "unit: short side" in " ".join(result.output.split())
    assert json.loads(out.with_suffix(".json").read_text())["card"]["data"]["preprocessing"]["divisor"] == 255


def test_json_is_the_report(model, calib, out):
    result = run("quantize", model, out, "--config", "A8W8", "--calib", calib, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads(out.with_suffix(".json").read_text())


def test_number_of_samples_and_batches(model, calib, out):
    arguments = ("--config", "A8W8", "--num-calib", 6, "--batch-size", 2)
    assert run("quantize", model, out, "--calib", calib, *arguments).exit_code == 0
    facts = json.loads(out.with_suffix(".json").read_text())["calibration"]
    assert (facts["samples"], facts["batches"], facts["held_out"]) == (6, 3, 2)


def test_printed_python_does_the_same(model, calib, out):
    changes = (
        "--set",
        "per_channel=true",
        "--set",
        "ActivationSymmetric=false",
        "--set",
        "weight_type=QuantType.QUInt8",
    )
    result = run("quantize", model, out, "--config", "A8W8", "--calib", calib, "--num-calib", 8, *changes)
    assert result.exit_code == 0, result.output
    _, _, program = result.stdout.partition("the same in Python:\n")
    before = out.read_bytes()
    out.unlink()
    exec(compile("\n".join(line.strip() for line in program.splitlines()), "printed", "exec"), {})
    assert out.read_bytes() == before


def test_archive_of_arrays(model, tmp_path, out):
    np.savez(tmp_path / "x.npz", input=np.random.default_rng(0).normal(0, 1, (16, 3, SIZE, SIZE)).astype(np.float32))
    result = run("quantize", model, out, "--config", "A8W8", "--calib", tmp_path / "x.npz", "--num-calib", 8)
    assert result.exit_code == 0, result.output
    assert json.loads(out.with_suffix(".json").read_text())["calibration"]["samples"] == 8


def test_random_numbers_are_used_if_asked_for_and_admitted(model, calib, out):
    assert_one_line_error(run("quantize", model, out, "--config", "A8W8"), "A8W8", "--calib", "--random")
    assert not out.exists()
    result = run("quantize", model, out, "--config", "A8W8", "--random")
    assert result.exit_code == 0, result.output
    assert "RANDOM" in result.stdout
    assert "use_random_data=True" in result.stdout
    assert json.loads(out.with_suffix(".json").read_text())["card"]["command"].endswith("--config A8W8 --random")
    assert run("quantize", model, out, "--config", "A8W8", "--random", "--calib", calib).exit_code == 2
    assert run("quantize", model, out, "--config", "MXINT8", "--report", out.with_suffix(".html")).exit_code == 2


def test_set_reaches_the_model(model, calib, out):
    result = run("quantize", model, out, "--config", "INT8_CNN_DEFAULT", "--calib", calib, "--set", "per_channel=true")
    assert result.exit_code == 0, result.output
    assert "int8 per channel" in result.stdout


def test_config_from_a_file(model, calib, out, tmp_path):
    (tmp_path / "c.yaml").write_text("preset: A8W8\nper_channel: true\n")
    result = run("quantize", model, out, "--config", tmp_path / "c.yaml", "--calib", calib)
    assert result.exit_code == 0, result.output
    assert "int8 per channel" in result.stdout


def test_max_drop_not_exceeded(model, calib, out):
    arguments = ("--config", "A8W8", "--calib", calib)
    assert run("quantize", model, out, *arguments, "--max-drop", 100).exit_code == 0


def test_max_drop_of_equal_predictions(monkeypatch, model, calib, out):
    monkeypatch.setattr("quark.cli.quantize_command.measured_drop", lambda *_: Drop(12.5, "equal predictions of 'y'"))
    result = run("quantize", model, out, "--config", "A8W8", "--calib", calib, "--max-drop", 12)
    assert result.exit_code == 3
    assert result.stderr == "Error: 12.50 points of equal predictions of 'y' lost, more than --max-drop 12\n"
    assert "the same in Python" in result.stdout
    assert out.exists()


def test_max_drop_exceeded_is_status_3(model, out, tmp_path):
    """Ranges from tiny numbers make every real input saturate: the predictions on real data cannot survive."""
    np.savez(
        tmp_path / "tiny.npz", input=np.random.default_rng(0).normal(0, 1e-3, (16, 3, SIZE, SIZE)).astype(np.float32)
    )
    data = save_images(tmp_path / "val")
    arguments = ("--config", "A8W8", "--calib", tmp_path / "tiny.npz", "--data", data)
    result = run("quantize", model, out, *arguments, "--max-drop", 1)
    assert result.exit_code == 3, result.output
    assert "top-1" in result.stderr
    assert out.exists()
    assert run("quantize", model, out, *arguments, "--max-drop", 100).exit_code == 0


def test_data_without_a_limit_is_a_usage_error(model, calib, out):
    assert run("quantize", model, out, "--calib", calib, "--data", calib).exit_code == 2


@pytest.mark.parametrize("arguments", [[], ["a.onnx"], ["a", "b", "--nonsense"], ["a", "b", "--set", "x"]])
def test_usage_errors_are_status_2(arguments):
    assert run("quantize", *arguments).exit_code == 2


def files_below(folder):
    return {
        path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def save_array(path, array, name="input"):
    np.savez(path, **{name: array})
    return path


GOOD = np.zeros((4, 3, SIZE, SIZE), np.float32)
BAD_MODELS = {
    "missing": (lambda folder: folder / "absent.onnx", "absent.onnx"),
    "folder": (lambda folder: folder, "folder"),
    "text": (lambda folder: write(folder / "text.onnx", b"this is no model\n" * 20), "text.onnx"),
    "empty": (lambda folder: write(folder / "empty.onnx", b""), "empty.onnx"),
}
BAD_DATA = {
    "missing": (lambda folder: folder / "absent", "absent"),
    "empty folder": (lambda folder: write(folder / "empty" / "x.txt", b"").parent, "empty"),
    "no image": (lambda folder: write(folder / "images" / "broken.png", b"not an image").parent, "broken.png"),
    "truncated image": (lambda folder: truncated(folder / "images" / "short.png").parent, "short.png"),
    "no archive": (lambda folder: write(folder / "bad.npz", b"not an archive"), "bad.npz"),
    "wrong name": (lambda folder: two_arrays(folder / "names.npz"), "input"),
    "wrong shape": (lambda folder: save_array(folder / "shape.npz", GOOD[:, :2]), "input"),
    "NaN": (lambda folder: save_array(folder / "nan.npz", np.full_like(GOOD, np.nan)), "NaN"),
    "Inf": (lambda folder: save_array(folder / "inf.npz", np.full_like(GOOD, np.inf)), "Inf"),
}
BAD_OPTIONS = {
    "preset": (["--config", "XINT9"], "XINT8"),
    "config file": (["--config", "absent.yaml"], "absent.yaml"),
    "option": (["--set", "Percentil=99"], "Percentile"),
    "field": (["--set", "per_chanel=true"], "per_channel"),
    "value": (["--set", "per_channel=[1]"], "per_channel"),
    "preprocessing": (["--preprocess", "imagnet"], "imagenet"),
    "preprocessing file": (["--preprocess", "absent.yaml"], "absent.yaml"),
    "algorithm that is not there": (["--set", "include_rotation=true"], "rotation"),
}


def truncated(path):
    path.parent.mkdir()
    image(100).save(path)
    path.write_bytes(path.read_bytes()[:300])
    return path


def two_arrays(path):
    np.savez(path, a=GOOD, b=GOOD)
    return path


def assert_refused_without_a_trace(folder, fragment, *arguments):
    before = files_below(folder)
    assert_one_line_error(run("quantize", *arguments), fragment)
    assert files_below(folder) == before


@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_model(tmp_path, calib, out, case):
    make, fragment = BAD_MODELS[case]
    assert_refused_without_a_trace(tmp_path, fragment, make(tmp_path), out, "--calib", calib)


@pytest.mark.parametrize("config", ["A8W8", "MXINT8"])
@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data(tmp_path, model, out, case, config):
    make, fragment = BAD_DATA[case]
    assert_refused_without_a_trace(tmp_path, fragment, model, out, "--config", config, "--calib", make(tmp_path))


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options(tmp_path, model, calib, out, case):
    arguments, fragment = BAD_OPTIONS[case]
    assert_refused_without_a_trace(tmp_path, fragment, model, out, "--calib", calib, *arguments)


def test_bad_output_is_found_before_the_work(tmp_path, model):
    absent = tmp_path / "absent" / "x.onnx"
    for output, fragment in ((absent, "absent"), (tmp_path, "folder"), (model, "input model")):
        # the data is bad, too: the error about the output comes first
        assert_refused_without_a_trace(tmp_path, fragment, model, output, "--calib", tmp_path / "nowhere")


def test_the_report_overwrites_nothing_that_was_given(tmp_path, model, calib, out):
    config = out.with_suffix(".json")
    config.write_text('{"preset": "A8W8"}')
    assert_refused_without_a_trace(tmp_path, "small.json", model, out, "--calib", calib, "--config", config)
    assert_refused_without_a_trace(tmp_path, "x.json", model, tmp_path / "x.json", "--calib", calib)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_output_folder_without_permission(tmp_path, model, calib, out):
    out.parent.chmod(0o500)
    assert_refused_without_a_trace(tmp_path, "small.onnx", model, out, "--calib", calib)


def test_debug_after_the_command_shows_the_error_itself(model, out):
    result = run("quantize", model, out, "--config", "XINT9", "--debug")
    assert "Traceback" in result.stderr
    assert "UnknownNameError: no " in result.stderr


def test_installed_command_in_a_pipe(model, calib, out):
    arguments = [QUARK, "quantize", model, out, "--config", "A8W8", "--calib", calib]
    done = subprocess.run(arguments, capture_output=True, timeout=120, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0
    assert done.stderr == b""
    assert b"\x1b" not in done.stdout
    assert max(map(len, done.stdout.decode().partition("written:")[0].splitlines())) <= 80
    failed = subprocess.run([*arguments[:4], "--config", "XINT9"], capture_output=True, timeout=120, check=False)
    assert failed.returncode == 1
    assert failed.stderr.startswith(b"Error: no preset 'XINT9'")
    assert b"Traceback" not in failed.stderr


def test_a_path_behind_pack_is_no_profile(model, out):
    result = run("quantize", "--pack", str(model), str(out))
    assert result.exit_code == 2
    for word in (model.name, "portable", "after IN and OUT"):
        assert word in result.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("config", "changes", "trained"),
    [
        ("A8W8", (), {}),
        (None, (), {}),
        ("A8W8_ADAROUND", (), {"FastFinetune.OptimDevice": "cuda:1"}),
        ("XINT8_DISTILL", (), {"DistillationDevice": "cuda:1"}),
        ("XINT8", (("Distillation", True),), {"DistillationDevice": "cuda:1"}),
        (None, (("include_fast_ft", True),), {"FastFinetune.OptimDevice": "cuda:1"}),
        ("XINT8_DISTILL", (("DistillationDevice", "cpu"),), {}),
        ("A8W8_ADAROUND", (("FastFinetune.OptimDevice", "cpu"),), {}),
    ],
)
def test_the_device_is_also_where_networks_are_trained(config, changes, trained):
    assert dict(device_changes(config, changes, "cuda:1")) == {"InferDevice": "cuda:1", **trained}
    assert device_changes(config, changes, "cpu") == ()


@pytest.mark.parametrize(
    ("entry", "field", "device"),
    [
        (AdaRoundConfig(), "optim_device", "cuda:1"),
        (AdaQuantConfig(), "optim_device", "cuda:1"),
        (DistillationConfig(steps=3), "device", "cuda:1"),
        (AdaRoundConfig(optim_device="cuda:0"), "optim_device", None),
        (CLEConfig(), "", None),
    ],
)
def test_the_device_is_also_that_of_the_entries_of_a_config_file(tmp_path, entry, field, device):
    path = QConfig(algo_config=[SmoothQuantConfig(), entry]).save(tmp_path / "config.yaml")
    changes = device_changes(str(path), (), "cuda:1")
    assert ("InferDevice", "cuda:1") in changes
    assert [key for key, _ in changes[1:]] == (["algo_config"] if device else [])
    configs = read_config(str(path), changes).algo_config
    expected = replace(entry, **{field: device}) if device else entry
    assert configs == [SmoothQuantConfig(), expected]


def test_a_device_that_does_not_exist_is_named_as_it_was_given(model, out):
    result = run("quantize", model, out, "--config", "A8W8_ADAROUND", "--device", "foo")
    assert result.exit_code == 1
    assert "no device 'foo'" in result.output

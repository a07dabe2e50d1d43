"""The example scripts, run as the documents run them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_models import image, save_brightness_model, save_images

from quark.cli.example_scripts import PRESETS, advanced_quantize
from quark.onnx.quantization.presets import PRESETS as ALL_PRESETS

ROOT = Path(__file__).parents[2] / "examples" / "onnx"
MX = ROOT / "accuracy_improvement" / "MX"
PREPARE = ROOT / "accuracy_improvement" / "utils" / "prepare_data.py"
ADVANCED = ROOT / "quark_quantization" / "advanced_quark_quantize.py"


def script(path, *arguments, folder):
    return subprocess.run(
        [sys.executable, path, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=120,
        check=False,
    )


def assert_refused(done, *fragments, code=1):
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    for fragment in fragments:
        assert fragment in done.stderr


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "models").mkdir()
    save_brightness_model(tmp_path / "models" / "net.onnx")
    save_images(tmp_path / "calib_data")
    return tmp_path


def quantize_arguments(config):
    paths = ["--input_model_path", "models/net.onnx", "--output_model_path", "models/small.onnx"]
    return [*paths, "--calibration_dataset_path", "calib_data", "--config", config]


def test_quantize_then_validate(folder):
    done = script(MX / "quantize_model.py", *quantize_arguments("MXINT8"), folder=folder)
    assert done.returncode == 0, done.stderr
    assert "MXINT8" in done.stdout
    assert (folder / "models" / "small.onnx").is_file()
    for name in ("net", "small"):
        arguments = ["calib_data", "--batch-size", 1, "--onnx-input", f"models/{name}.onnx"]
        done = script(MX / "onnx_validate.py", *arguments, folder=folder)
        assert done.returncode == 0, done.stderr
        assert re.search(r"top1 100\.000 %, top5 100\.000 %", done.stdout)


def test_numbers_and_device(folder):
    more = ["--num_calib_data", 4, "--batch_size", 2, "--device", "cpu"]
    done = script(MX / "quantize_model.py", *quantize_arguments("A8W8"), *more, folder=folder)
    assert done.returncode == 0, done.stderr


def test_errors_of_the_scripts_are_lines(folder):
    assert_refused(script(MX / "quantize_model.py", folder=folder), "--input_model_path", code=2)
    unknown = script(MX / "quantize_model.py", *quantize_arguments("MXINT9"), folder=folder)
    assert_refused(unknown, "MXINT8")
    gpu = script(MX / "onnx_validate.py", "calib_data", "--onnx-input", "models/net.onnx", "--gpu", folder=folder)
    assert gpu.returncode == 0 or "onnxruntime-gpu" in gpu.stderr
    assert "Traceback" not in gpu.stderr
    assert not (folder / "models" / "small.onnx").exists()


def test_prepare_data(tmp_path):
    (tmp_path / "val_data").mkdir()
    for number, label in ((1, "n01440764"), (2, "n01443537"), (3, "n01440764")):
        image(10).save(tmp_path / "val_data" / f"ILSVRC2012_val_{number:08d}_{label}.JPEG")
    done = script(PREPARE, "val_data", "calib_data", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "val_data").glob("n*/*.JPEG"))) == 3
    assert len(list((tmp_path / "calib_data").glob("n*/*.JPEG"))) == 2
    assert_refused(script(PREPARE, "nowhere", "calib_data", folder=tmp_path), "nowhere")


def test_advanced_prints_sizes_and_accuracies_before_and_after(folder):
    paths = ["--model_input", "models/net.onnx", "--model_output", "models/small.onnx"]
    done = script(ADVANCED, *paths, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "12 images of calib_data" in done.stdout
    assert "calibration images themselves" in done.stdout
    save_images(folder / "val_data", count=3)
    done = script(ADVANCED, *paths, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "6 images of val_data" in done.stdout
    assert done.stdout.count("100.00 %") >= 2
    assert "MB" in done.stdout


def advanced(folder, flag):
    """In this process, as the script's only line does it: four more interpreters would tell nothing new."""
    paths = ["--model_input", folder / "models/net.onnx", "--model_output", folder / "models/small.onnx"]
    return CliRunner().invoke(
        advanced_quantize, [str(path) for path in [*paths, "--calib_data", folder / "calib_data", flag]]
    )


def test_cross_layer_equalization_runs(folder):
    done = advanced(folder, "--cross_layer_equalization")
    assert done.exit_code == 0, done.output
    assert "cross-layer equalization" in done.stdout
    report = json.loads((folder / "models" / "small.json").read_text())
    assert report["config"]["include_cle"]
    assert "cross-layer equalization" in [each["name"] for each in report["algorithms"]]


@pytest.mark.parametrize("flag", ["--fast_finetune", "--adaround", "--adaquant"])
def test_finetuning_runs(folder, flag, monkeypatch):
    preset = PRESETS[flag.removeprefix("--")]
    settings = ALL_PRESETS[preset].options["FastFinetune"]
    monkeypatch.setitem(settings, "NumIterations", 20)
    monkeypatch.setitem(settings, "CacheDir", str(folder / "layers"))
    done = advanced(folder, flag)
    assert done.exit_code == 0, done.output
    report = json.loads((folder / "models" / "small.json").read_text())
    assert report["config_name"] == preset
    name = "AdaQuant" if flag == "--adaquant" else "AdaRound"
    assert name in [each["name"] for each in report["algorithms"]]
    assert "top-1" in done.stdout


@pytest.mark.parametrize("flag", ["--fast_finetune", "--adaround", "--adaquant"])
def test_without_torch_it_is_an_error_before_any_work(folder, flag, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    done = advanced(folder, flag)
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: ")
    assert "pip install torch" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (folder / "models" / "small.onnx").exists()

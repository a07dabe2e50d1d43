"""evaluate, compare, inspect, presets, doctor and prepare-data as a user meets them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np
import onnx
import pytest
import yaml
from commands import assert_one_line_error, run
from tiny_models import image, save_brightness_model, save_images

import quark
import quark.cli.main as main_module
from quark.cli.main import main
from quark.onnx.quantization.config.config import QuantizationConfig, get_default_config
from quark.onnx.quantization.presets import PRESETS

COMMANDS = (
    *("quantize", "evaluate", "compare", "report", "debug", "search", "reproduce", "pack", "unpack"),
    *("convert", "inspect", "lint", "presets", "formats"),
    *("prepare-data", "advanced-quantize", "doctor", "demo"),
)


@pytest.fixture
def model(tmp_path):
    return save_brightness_model(tmp_path / "float.onnx")


@pytest.fixture
def data(tmp_path):
    return save_images(tmp_path / "val")


def content_of(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(("typed", "meant"), [("quantise", "quantize"), ("diagnose", "report"), ("eval", "evaluate")])
def test_a_misspelt_command_gets_a_suggestion(typed, meant):
    result = run(typed, "model.onnx")
    assert result.exit_code == 2
    assert f"No such command '{typed}'. Did you mean '{meant}'?" in result.stderr


def test_python_m_quark_is_the_command():
    done = subprocess.run([sys.executable, "-m", "quark", "quantize"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: quark quantize [OPTIONS] IN OUT")


def test_a_command_like_no_other_gets_none():
    result = run("xyzzy")
    assert result.exit_code == 2
    assert "No such command 'xyzzy'." in result.stderr
    assert "Did you mean" not in result.stderr


def test_evaluate(model, data):
    content = content_of("evaluate", model, "--data", data, "--threads", 1)
    assert content["samples"] == 12
    assert content["top1_percent"] == 100
    assert content["ms_per_sample"] > 0
    text = run("evaluate", model, "--data", data, "--limit", 4).stdout
    assert "4 samples" in text
    assert "top-1 100.00 %" in text
    assert "ms/sample" in text


def test_evaluate_a_model_of_batch_1(tmp_path, data):
    fixed = save_brightness_model(tmp_path / "fixed.onnx", batch=1)
    assert content_of("evaluate", fixed, "--data", data, "--batch-size", 5)["top1_percent"] == 100


def test_compare(model, data):
    content = content_of("compare", model, model, "--data", data)
    assert content["agreement_percent"] == 100
    assert content["accuracy"]["top1_difference"] == 0
    assert content["outputs"][0]["sqnr_db"] == "inf"
    text = run("compare", model, model, "--data", data).stdout
    assert "+0.00 +- 0.00" in text
    assert "exact" in text


def test_compare_on_images_without_labels(tmp_path, model):
    (tmp_path / "flat").mkdir()
    image(100).save(tmp_path / "flat" / "x.png")
    assert content_of("compare", model, model, "--data", tmp_path / "flat")["accuracy"] is None
    assert_one_line_error(run("evaluate", model, "--data", tmp_path / "flat"), "no labels", "quark compare")


@pytest.mark.parametrize("command", ["evaluate", "inspect"])
def test_bad_models(tmp_path, data, command):
    (tmp_path / "text.onnx").write_text("this is no model")
    more = ("--data", data) if command == "evaluate" else ()
    for name in ("absent.onnx", "text.onnx"):
        assert_one_line_error(run(command, tmp_path / name, *more), name)
    assert_one_line_error(run(command, tmp_path, *more), "folder")


def test_bad_data(tmp_path, model):
    assert_one_line_error(run("evaluate", model, "--data", tmp_path / "absent"), "absent")
    assert run("evaluate", model).exit_code == 2
    assert run("evaluate", model, "--data", tmp_path, "--limit", 0).exit_code == 2


def test_inspect(model):
    content = content_of("inspect", model)
    assert content["nodes"]["Conv"] == 1
    assert content["is_quantized"] is False
    text = run("inspect", model).stdout
    assert "input: float32 [N, 3, 16, 16]" in text
    assert "nothing" in text


def test_presets_lists_all_with_a_description():
    listed = content_of("presets")["presets"]
    assert list(listed) == list(PRESETS)
    assert all(listed.values())
    text = run("presets").stdout
    assert all(name in text for name in PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_yaml_is_that_preset(name):
    for arguments in ((), ("--all",)):
        result = run("presets", name, *arguments)
        assert result.exit_code == 0
        assert QuantizationConfig.from_dict(yaml.safe_load(result.stdout)) == get_default_config(name)


def test_unknown_preset():
    assert_one_line_error(run("presets", "MXINT9"), "MXINT8")


def test_doctor():
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "custom operator" in result.stdout
    assert content_of("doctor")["healthy"] is True


def test_doctor_of_a_broken_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    result = run("doctor")
    assert result.exit_code == 1
    assert "BROKEN   onnx-ir" in result.stdout
    assert "leads to: nothing can be quantized" in result.stdout
    assert "force-reinstall" in result.stdout


def test_doctor_of_an_installation_without_the_library(monkeypatch):
    monkeypatch.setattr("quark.formats.native.library_file", lambda: None)
    result = run("doctor")
    assert result.exit_code == 0
    assert "WARNING" in result.stdout
    assert "portable operators, slower" in result.stdout


def test_doctors_json_names_no_place_on_this_machine_unless_asked_to():
    assert str(Path(quark.__file__).parent) not in json.dumps(content_of("doctor"))
    assert str(Path(quark.__file__).parent) in run("doctor", "--json", "--paths").stdout


def test_prepare_data(tmp_path):
    val = tmp_path / "val_data"
    val.mkdir()
    image(10).save(val / "ILSVRC2012_val_00000001_n01440764.JPEG")
    result = run("prepare-data", val, tmp_path / "calib_data")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "calib_data" / "n01440764" / "ILSVRC2012_val_00000001.JPEG").is_file()
    assert_one_line_error(run("prepare-data", tmp_path / "absent", tmp_path / "calib"), "absent")


def test_an_unexpected_error_is_one_line_too(monkeypatch, model):
    def explode(path, read):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("quark.cli.file_commands.inspect_model", explode)
    assert_one_line_error(run("inspect", model), "RuntimeError: two lines", "--debug")
    for line in (("inspect", model, "--debug"), ("--debug", "inspect", model)):
        result = run(*line)
        assert result.exit_code == 1
        assert "Traceback" in result.stderr
        assert "RuntimeError: two\nlines" in result.stderr


def test_help_is_quick_and_lists_every_command():
    program = (
        "import sys; from quark.cli.main import main; main(['--help'], standalone_mode=False); "
        "print(sorted({'torch', 'onnxruntime', 'onnx', 'onnx_ir', 'rich', 'numpy'} & set(sys.modules)))"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert time.perf_counter() - start < 10
    assert done.stdout.splitlines()[-1] == "[]"
    for command in COMMANDS:
        assert f"\n  {command} " in done.stdout
        assert run(command, "--help").exit_code == 0


def test_the_table_of_commands_has_their_first_lines():
    context = click.Context(main)
    for name, (_, text) in main_module.COMMANDS.items():
        command = main.get_command(context, name)
        assert command is not None
        assert (command.name, (command.help or "").splitlines()[0]) == (name, text)


def test_every_command_is_described_in_a_sentence_that_fits():
    for name, (_, text) in main_module.COMMANDS.items():
        assert len(text) <= 60, name
        assert text.endswith("."), name
    assert max(map(len, run("--help").output.splitlines())) <= 80


def test_options_that_people_guess_lead_to_the_right_ones():
    result = run("quantize", "in.onnx", "out.onnx", "--preset", "XINT8")
    assert result.exit_code == 2
    assert "--config" in result.output


def test_models_with_other_inputs_cannot_be_compared(tmp_path):
    for name in ("x", "images"):
        ports = [onnx.helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, ["N", 4]) for value in (name, "y")]
        graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", [name], ["y"])], "g", ports[:1], ports[1:])
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
        onnx.save(model, tmp_path / f"{name}.onnx")
    np.savez(tmp_path / "data.npz", x=np.ones((2, 4), np.float32))
    result = run("compare", tmp_path / "x.onnx", tmp_path / "images.onnx", "--data", tmp_path / "data.npz")
    assert_one_line_error(result, "have the inputs x and images", "two forms of one network")


def test_the_shell_completes_commands_and_options():
    program = "from quark.cli.main import main; main(prog_name='quark')"

    def completed(words: str, count: int) -> str:
        environment = {**os.environ, "_QUARK_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(count)}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert done.stderr == ""
        return done.stdout

    assert completed("quark qu", 1).split() == ["plain,quantize", "plain,quantize-torch", "plain,quantize-llm"]
    assert "plain,--target" in completed("quark quantize --ta", 2)

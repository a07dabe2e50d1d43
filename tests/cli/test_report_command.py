"""`quark report` as a user meets it; what the layers say is tested with the diagnosis itself."""

import json
import os
import re
import shlex
import shutil

import ml_dtypes
import numpy as np
import onnx
import pytest
from commands import assert_one_line_error, run
from made_diagnosis import made_diagnosis
from onnx_models import conv_bn_relu
from tiny_models import image, save_brightness_model, save_images

from quark.account import FileFacts
from quark.cli.options import Calibration
from quark.cli.report_command import diagnose_and_write, making_of, suggested_command
from quark.cli.report_facts import LabelledData, lint_remarks, measured_accuracy, measured_speed
from quark.diagnosis import Step
from quark.onnx import get_default_config, quantize
from quark.text import setting, shell_command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def data(folder):
    return save_images(folder / "val", count=4)


@pytest.fixture(scope="module")
def model(folder):
    return save_brightness_model(folder / "float.onnx")


@pytest.fixture(scope="module")
def quantized(folder, model, data):
    return quantize(model, data, "XINT8").save(folder / "small.onnx")


@pytest.fixture(scope="module")
def in_blocks(folder, model, data):
    return quantize(model, data, "MXINT8").save(folder / "blocks.onnx")


@pytest.fixture
def without_layers(monkeypatch):
    """The command without its minute of work; the arguments of each call are kept."""
    calls = []

    def fake(float_model, model, source, **options):
        calls.append((float_model, model, source, options))
        return made_diagnosis(5, making={}, accuracy=None, speed=None, lint=None)

    monkeypatch.setattr("quark.cli.report_command.diagnose", fake)
    return calls


def facts_of(path):
    return FileFacts(
        path.name, path.stat().st_size, json.loads(path.with_suffix(".json").read_text())["result"]["sha256"]
    )


def content_of_page(path):
    text = path.read_text(encoding="utf-8")
    return json.loads(text.split('id="diagnosis">')[1].split("</script>")[0])


def test_the_page_and_its_json_say_the_same(tmp_path, model, quantized, data):
    page = tmp_path / "page.html"
    result = run("report", quantized, "--float", model, "--calib", data, "--data", data, "-o", page, "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content == content_of_page(page)
    assert {each["op_type"] for each in content["layers"]} >= {"Conv"}
    assert content["accuracy"]["float_top1"] == 1
    assert content["speed"]["quantized_ms"] > 0
    assert content["making"]["config_name"] == "XINT8"
    assert content["result"]["sha256"] == facts_of(quantized).sha256


def test_the_summary_and_the_default_name(tmp_path, model, quantized, data, without_layers):
    copy = tmp_path / "copy.onnx"
    copy.write_bytes(quantized.read_bytes())
    result = run("report", copy, "--float", model, "--calib", data, "--preprocess", "lite", "--num-calib", 3)
    assert result.exit_code == 0, result.output
    assert "DEGRADED" in result.stdout
    assert result.stdout.strip().endswith(f"written: {tmp_path / 'copy.html'}")
    assert content_of_page(tmp_path / "copy.html")["making"]["config_name"] == "XINT8"
    options = {"num_samples": 3, "preprocessing": "lite", "use_random_data": False}
    assert without_layers == [(model, copy, str(data), options)]


def test_suggestions_are_tried_unless_told_not_to(tmp_path, model, quantized, data, without_layers):
    arguments = ("report", quantized, "--float", model, "--calib", data, "-o", tmp_path / "page.html")
    tried = run(*arguments)
    assert tried.exit_code == 0, tried.output
    assert "suggestions were tried" in tried.stdout
    content = content_of_page(tmp_path / "page.html")
    assert {each["outcome"] for each in content["suggestions"]} & {"helped", "no gain"}
    assert all(each["result"] for each in content["suggestions"])
    assert any(re.search(r"judged on \d+ samples? not calibrated on", each) for each in content["remarks"])
    untried = run(*arguments, "--no-try")
    assert untried.exit_code == 0, untried.output
    assert "suggestions were tried" not in untried.stdout
    assert content_of_page(tmp_path / "page.html")["suggestions"] == []


def test_the_function_behind_it_looks_at_64_samples_unless_told(tmp_path, model, quantized, data, without_layers):
    diagnosis = diagnose_and_write(
        model, quantized, Calibration(data), tmp_path / "p.html", LabelledData(data, limit=4)
    )
    assert without_layers[0][3]["num_samples"] == 64
    assert diagnosis.accuracy.samples == 4
    assert content_of_page(tmp_path / "p.html") == diagnosis.to_dict()


def test_a_suggestion_is_a_command_that_runs(tmp_path, model, quantized, data, without_layers):
    path = shutil.copy(quantized, tmp_path / "it's.onnx")
    step = Step("leave it in float", shell_command(["--set", setting("nodes_to_exclude", ["conv"])]))
    command = suggested_command(step, model, path, Calibration(data))
    arguments = shlex.split(command)
    assert arguments[:2] == ["quark", "quantize"]
    assert run(*arguments[1:]).exit_code == 0
    made, before = (
        json.loads(value.read_text()) for value in (tmp_path / "it's_changed.json", quantized.with_suffix(".json"))
    )
    assert made["config"] == before["config"] | {"nodes_to_exclude": ["conv"]}
    wider = suggested_command(Step("", "--config A16W8"), model, path, Calibration(data))
    assert shlex.split(wider)[4:] == ["--calib", str(data), "--config", "A16W8"]


def test_a_suggestion_about_a_file_from_elsewhere_is_the_option_alone(tmp_path, model, without_layers):
    step = Step("leave it in float", "--set per_channel=true")
    assert suggested_command(step, model, model, Calibration()) == ""


def test_mistakes_are_found_before_the_work(tmp_path, model, quantized, data, without_layers):
    def fails(*arguments, model=model, quantized=quantized):
        return run("report", quantized, "--float", model, *arguments)

    page = tmp_path / "page.html"
    (tmp_path / "flat").mkdir()
    image(100).save(tmp_path / "flat" / "x.png")
    assert_one_line_error(fails("-o", tmp_path / "page.onnx"), "page.onnx", ".html")
    assert_one_line_error(fails("-o", tmp_path / "absent" / "page.html"), "absent", "create it")
    assert_one_line_error(fails("-o", page, quantized=tmp_path / "no.onnx"), "no.onnx", "no such file")
    assert_one_line_error(fails("-o", page, model=tmp_path / "no.onnx"), "no.onnx", "no such file")
    assert_one_line_error(fails("-o", page, "--data", tmp_path / "gone"), "gone")
    assert_one_line_error(fails("-o", page, "--data", tmp_path / "flat"), "no labels", "leave it out")
    assert_one_line_error(fails("-o", page), "--calib", "--random")
    assert fails("-o", page, "--limit", 3).exit_code == 2
    assert fails("-o", page, "--calib", data, "--random").exit_code == 2
    assert run("report", quantized).exit_code == 2
    assert without_layers == []
    assert not page.exists()


def test_a_failure_leaves_the_old_page(tmp_path, model, quantized, monkeypatch):
    page = tmp_path / "page.html"
    page.write_text("old")
    monkeypatch.setattr("quark.cli.report_command.diagnose", lambda *_, **__: 1 / 0)
    assert_one_line_error(run("report", quantized, "--float", model, "-o", page, "--random"), "ZeroDivisionError")
    assert page.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_accuracy_is_of_both_models_on_the_same_samples(model, quantized, data):
    found = measured_accuracy(model, quantized, LabelledData(data), "imagenet")
    assert (found.samples, found.float_top1, found.float_top5) == (8, 1.0, 1.0)
    assert 0 <= found.quantized_top1 <= 1
    assert found.data == "val"


@pytest.mark.parametrize("batch", ["N", 4])
def test_speed_is_of_one_sample_or_of_the_only_batch(tmp_path, batch):
    path = save_brightness_model(tmp_path / "m.onnx", batch=batch)
    found = measured_speed(path, path, Calibration())
    assert found.batch_size == (1 if batch == "N" else 4)
    assert 0.2 < found.float_ms / found.quantized_ms < 5


@pytest.mark.parametrize(("load", "threads"), [(0.5, None), (99.0, 1)])
def test_a_busy_computer_times_one_thread(tmp_path, monkeypatch, load, threads):
    """Threads that wait made MobileNet-V2 look nine times as fast as float, where it is twice as fast."""
    monkeypatch.setattr(os, "getloadavg", lambda: (load * os.cpu_count(), 0.0, 0.0))
    path = save_brightness_model(tmp_path / "m.onnx")
    assert measured_speed(path, path, Calibration()).threads == threads


def test_the_npu_is_asked_about_its_own_numbers_alone(model, quantized, in_blocks):
    assert {remark.rule for remark in lint_remarks(quantized)} == {"Batch"}
    assert lint_remarks(in_blocks) is None
    assert lint_remarks(model) is None


@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16], ids=["float64", "bfloat16"])
def test_models_that_onnx_runtime_refuses_are_measured_as_they_are_quantized(tmp_path, dtype):
    source, data = tmp_path / "float.onnx", tmp_path / "data.npz"
    onnx.save(conv_bn_relu(dtype=dtype, batch="n"), source)
    given = np.float64 if dtype is np.float64 else np.float32
    np.savez(data, x=np.random.default_rng(0).normal(size=(8, 3, 8, 8)).astype(given))
    path = quantize(source, data).save(tmp_path / "small.onnx")
    diagnosis = diagnose_and_write(source, path, Calibration(data), tmp_path / "page.html", is_trying=True)
    assert diagnosis.verdict.value == "ok"
    assert diagnosis.speed is not None
    assert diagnosis.suggestions
    compared = run("compare", source, path, "--data", data)
    assert compared.stderr.startswith("note: 'float.onnx' is run in float32, because ONNX Runtime refuses its layers")


def test_making_comes_from_the_file_and_the_report_beside_it(model, quantized, data):
    made = making_of(quantized, facts_of(quantized), model, Calibration(data, 7), LabelledData(data, 5))
    assert made["config_name"] == "XINT8"
    assert made["config_changes"] == []
    assert made["config"]["enable_npu_cnn"] is True
    assert made["calibration"]["samples"] > 0
    assert set(made["hashes"]) == {"config", "plan"}
    assert "quark" in made["versions"]
    assert (
        made["report_command"]
        == "quark report small.onnx --float float.onnx --calib val --num-calib 7 --data val --limit 5"
    )
    json.dumps(made, allow_nan=False)


def test_making_names_what_was_changed(tmp_path, model, data):
    config = get_default_config("A8W8")
    config.extra_options["Percentile"] = 99.5
    path = quantize(model, data, config).save(tmp_path / "changed.onnx")
    made = making_of(path, facts_of(path), model, Calibration(data))
    assert {"option": "extra_options.Percentile", "preset": None, "here": 99.5} in made["config_changes"]
    assert "A8W8" in (made["config_name"], made.get("nearest_preset"))


def test_a_report_of_another_file_does_not_count(tmp_path, model, quantized):
    path = tmp_path / "moved.onnx"
    path.write_bytes(quantized.read_bytes())
    for text in (
        '{"result": {"sha256": "other"}, "config_name": "MX9"}',
        "no json",
        "[1]",
        "[" * 100_000,
        '{"config":' + "[" * 300 + "]" * 300 + "}",
        "\udcff",
    ):
        path.with_suffix(".json").write_bytes(text.encode("utf-8", "surrogateescape"))
        made = making_of(path, FileFacts("moved.onnx", 1, "a" * 64), model, Calibration())
        assert made["config_name"] == "XINT8"  # the metadata of the file still says so
        assert any("is not the report of this file" in note for note in made["notes"])
        assert "calibration" not in made or made["calibration"].get("kind")  # at most what the card inside says


def test_a_file_from_elsewhere_says_nothing(tmp_path, model):
    made = making_of(model, FileFacts("float.onnx", 1, "a" * 64), model, Calibration())
    assert set(made) <= {"report_command", "notes", "config_changes"}
    assert "command" not in made


def test_the_card_gives_the_command(tmp_path, model):
    proto = onnx.load(model)
    onnx.helper.set_model_props(proto, {"quark.card": json.dumps({"command": "quark quantize", "seeds": {"data": 3}})})
    path = tmp_path / "odd name.onnx"
    onnx.save(proto, path)
    made = making_of(path, FileFacts(path.name, 1, "a" * 64), model, Calibration())
    assert made["command"] == "quark reproduce 'odd name.onnx'"
    assert made["seeds"] == {"data": 3}
    assert "notes" not in made
    beside = {"result": {"sha256": "a" * 64}, "card": {"seeds": {"data": 4}}}
    path.with_suffix(".json").write_text(json.dumps(beside))
    made = making_of(path, FileFacts(path.name, 1, "a" * 64), model, Calibration())
    assert made["command"] == "quark reproduce 'odd name.json'"


def test_arrays_serve_as_data(tmp_path, model, quantized, without_layers):
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "x.npz", input=rng.normal(size=(4, 3, 16, 16)).astype(np.float32), labels=np.array([0, 1, 0, 1])
    )
    result = run(
        *("report", quantized, "--float", model, "--calib", tmp_path / "x.npz", "--data", tmp_path / "x.npz"),
        *("-o", tmp_path / "p.html"),
    )
    assert result.exit_code == 0, result.output
    assert content_of_page(tmp_path / "p.html")["accuracy"]["samples"] == 4

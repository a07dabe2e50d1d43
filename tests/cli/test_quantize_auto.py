"""`quark quantize --config auto` as a user meets it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from commands import assert_one_line_error, run

from quark.card import CARD_KEY
from quark.demo import network_path

QUARK = Path(sys.executable).with_name("quark")
METRIC = f"""
def metric(session):
    return 0.5 if "{CARD_KEY}" in session.get_modelmeta().custom_metadata_map else 1.0
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "digits.onnx"
    path.write_bytes(Path(network_path()).read_bytes())
    return path


@pytest.fixture
def calib(tmp_path):
    path = tmp_path / "calib.npz"
    np.savez(path, input=np.random.default_rng(0).random((24, 1, 8, 8), dtype=np.float32))
    return path


def test_prints_what_was_tried_and_writes_the_best(model, calib, tmp_path):
    out = tmp_path / "out.onnx"
    options = ("--config", "auto", "--target", "size", "--calib", calib)
    result = run("quantize", model, out, *options, "--max-drop", 100)
    assert result.exit_code == 0, result.output
    report = json.loads(out.with_suffix(".json").read_text())
    taken = report["auto"]["taken"]
    lines = [line.split() for line in result.stdout.splitlines()]
    rows = [line for line in lines if line and line[-1] in ("taken", "passed", "rejected")]
    assert [row[0] for row in rows if row[-1] == "taken"] == [taken]
    assert f"taken: {taken}: the smallest of those that passed" in result.stdout
    assert "not tried: its file would take" in result.stdout
    assert f"trying {rows[0][0]}, 1 of at most" in result.stderr
    assert "s left" in result.stderr
    assert "quark.onnx.auto_quantize(" in result.stdout
    assert run("reproduce", out.with_suffix(".json")).exit_code == 0


def test_json_is_the_report(model, calib, tmp_path):
    out = tmp_path / "out.onnx"
    options = ("--config", "auto", "--target", "npu", "--calib", calib, "--metric", "top1", "--json")
    result = run("quantize", model, out, *options)
    assert json.loads(result.stdout) == json.loads(out.with_suffix(".json").read_text())
    assert json.loads(result.stdout)["measure"]["name"] == "top1"


def test_exits_with_3_and_writes_nothing_where_nothing_passes(model, calib, tmp_path):
    (tmp_path / "metric.py").write_text(METRIC)
    out = tmp_path / "out.onnx"
    options = ("--config", "auto", "--target", "npu", "--calib", calib, "--metric", f"{tmp_path / 'metric.py'}:metric")
    result = run("quantize", model, out, *options)
    assert result.exit_code == 3
    assert "keep the float file" in result.stdout
    assert result.stdout.count("rejected: metric.py:metric lost 50.00, more than 1") == 4
    assert not out.exists()
    assert not out.with_suffix(".json").exists()
    content = json.loads(run("quantize", model, out, *options, "--json").stdout)
    assert content["auto"]["taken"] is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--config", "XINT8", "--target", "npu"), "--target chooses the preset"),
        (("--config", "auto", "--set", "Percentile=99.9"), "leave --set out"),
        (("--config", "auto", "--pack"), "leave --pack out"),
        (("--config", "auto", "--target", "tpu"), "is not one of 'cpu', 'npu', 'gpu', 'size'."),
        (("--config", "auto", "--metric", "top1", "--data", "."), "give one of them"),
    ],
)
def test_mistakes_in_the_command_line(model, calib, tmp_path, options, said):
    result = run("quantize", model, tmp_path / "out.onnx", "--calib", calib, *options)
    assert result.exit_code == 2
    assert said in result.stderr


def test_needs_data(model, tmp_path):
    result = run("quantize", model, tmp_path / "out.onnx", "--config", "auto")
    assert result.exit_code == 2
    assert "needs data" in result.stderr
    assert "--calib" in result.stderr


def test_refuses_a_folder_of_somebody_else(model, calib, tmp_path):
    (tmp_path / "out.onnx.auto").mkdir()
    (tmp_path / "out.onnx.auto" / "mine.txt").write_text("")
    result = run("quantize", model, tmp_path / "out.onnx", "--config", "auto", "--calib", calib)
    assert result.exit_code == 1
    assert "holds other things than a search: choose another OUT" in result.stderr
    missing = run("quantize", tmp_path / "no.onnx", tmp_path / "out.onnx", "--config", "auto", "--calib", calib)
    assert_one_line_error(missing, "no.onnx")


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_ctrl_c_says_how_to_go_on(model, calib, tmp_path):
    out = tmp_path / "out.onnx"
    trial = tmp_path / "out.onnx.auto" / "trials" / "MX4+WEIGHTS.json"  # the first
    measure = tmp_path / "waits.py"  # for the signal, as soon as there is a trial
    measure.write_text(
        f"import pathlib, time\ndef measure(session):\n"
        f"    time.sleep(60 * pathlib.Path({str(trial)!r}).is_file())\n    return 1.0\n"
    )
    options = ("--config", "auto", "--target", "size", "--calib", calib, "--metric", f"{measure}:measure")
    command = [QUARK, "quantize", model, out, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not trial.is_file() and time.monotonic() < end and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in said
    assert "interrupted after" in said
    assert f"the same command resumes from '{out}.auto'" in said
    assert not out.exists()
    assert trial.is_file()

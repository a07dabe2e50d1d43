"""`quark search` as a user meets it."""

import json
import sys

import pytest
from commands import assert_one_line_error, run
from tiny_models import save_brightness_model, save_images


@pytest.fixture
def model(tmp_path):
    return save_brightness_model(tmp_path / "net.onnx")


@pytest.fixture
def images(tmp_path):
    return save_images(tmp_path / "images")


def test_prints_a_ranked_table_and_the_command_of_the_best(model, images, tmp_path):
    options = ("--calib", images, "--data", images, "--limit", 8, "--presets", "MXINT8,BF16", "--num-calib", 4)
    result = run("search", model, *options, "--budget", "drop=5", "--out", tmp_path / "found")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    rows = [line.split()[0] for line in lines if line.startswith(("MXINT8 ", "BF16 "))]
    assert sorted(rows) == ["BF16", "MXINT8"]
    best = next(line for line in lines if line.startswith("best:"))
    assert f"quark quantize {model} net_{rows[0]}.onnx --config {rows[0]} --calib {images} --num-calib 4" in best
    assert "top-1 100.00 %" in result.stdout
    assert "8 samples of images" in result.stdout
    assert (tmp_path / "found" / "search.html").is_file()
    assert "\x1b" not in result.output
    again = run("search", model, *options, "--budget", "drop=5", "--out", tmp_path / "found", "--json")
    content = json.loads(again.stdout)
    assert content["best"] == rows[0]
    assert content["limits"]["drop"] == 5.0


def test_says_why_most_were_not_tried(model, images, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    options = ("--calib", images, "--num-calib", 4, "--formats", "mxfp4_e2m1,mxint8", "--budget", "drop=100")
    result = run("search", model, *options, "--out", tmp_path / "found")
    assert result.exit_code == 0, result.output
    skipped = json.loads((tmp_path / "found" / "search.json").read_text())["skipped"]
    untrained = [node for node in skipped if "torch, which is not installed" in node["reason"]]
    assert len(untrained) > 1
    assert f"{len(skipped)} not tried; search.json has the reasons" in result.stdout
    assert f"{len(untrained)} of them: finetuning needs torch" in result.stdout
    assert "float net.onnx: 836 B, " in result.stdout
    assert "judged on 1 held-out sample of" in result.stdout


def test_exits_with_3_where_nothing_fits(model, images, tmp_path):
    options = ("--calib", images, "--presets", "MXINT8", "--budget", "latency=0.0000001ms")
    result = run("search", model, *options)
    assert result.exit_code == 3
    assert "nothing is within the budgets; MXINT8 is nearest" in result.stdout
    assert (tmp_path / "net_search" / "search.json").is_file()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--budget", "size=ten"), "size=ten"),
        (("--budget", "sise=1MB"), "Did you mean size"),
        (("--presets", "XINT9"), "XINT8"),
        (("--formats", "int9"), "int8"),
        (("--presets", "XINT8", "--formats", "int8"), "one of them"),
        (("--data", "nowhere"), "nowhere"),
    ],
)
def test_refuses_what_cannot_be(model, images, options, said):
    assert_one_line_error(run("search", model, "--calib", images, *options), said)


def test_limit_is_about_data(model, images):
    result = run("search", model, "--calib", images, "--limit", 3)
    assert result.exit_code == 2
    assert "--data" in result.stderr
    assert run("search", model).exit_code == 2

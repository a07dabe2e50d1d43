"""A measure through every command, in Python, and in mixed precision, on the demo network."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
from commands import assert_one_line_error, run

import quark.demo
from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.measures import MeasureResult
from quark.onnx import QuantType, get_default_config, quantize
from quark.report.summary import summary_text
from quark.search import Budget, Wanted, search

FILE = '''
import numpy as np

SAMPLES = np.load("{samples}")["input"]

def accuracy(session):
    """1 for the float network, and less for others."""
    scores = session.run(None, {{session.get_inputs()[0].name: SAMPLES}})[0]
    return 1.0 - 0.1 * float(np.abs(scores - np.load("{expected}")).mean())

def wrong(session):
    raise RuntimeError("no labels here")
'''


@pytest.fixture(scope="module")
def model():
    return quark.demo.network_path()


@pytest.fixture(scope="module")
def inputs():
    return np.random.default_rng(2).normal(size=(32, 1, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model, inputs):
    from quark.onnx.session import open_session

    folder = tmp_path_factory.mktemp("measures")
    np.savez(folder / "data.npz", input=inputs)
    np.save(folder / "expected.npy", open_session(model).run(None, {"input": inputs})[0])
    text = FILE.format(samples=(folder / "data.npz").as_posix(), expected=(folder / "expected.npy").as_posix())
    (folder / "mine.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def data(folder):
    return folder / "data.npz"


@pytest.fixture(scope="module")
def mine(folder):
    before = list(sys.path)
    yield f"{folder / 'mine.py'}:accuracy"
    sys.path[:] = before


@pytest.fixture(scope="module")
def quantized(folder, model, data):
    return quantize(model, str(data), "XINT8").save(folder / "small.onnx")


def test_quantize_reports_a_built_in_measure(model, data, tmp_path):
    out = tmp_path / "out.onnx"
    result = run("quantize", model, out, "--calib", data, "--config", "XINT8", "--metric", "cosine")
    assert result.exit_code == 0, result.output
    measured = json.loads(out.with_suffix(".json").read_text())["measure"]
    assert measured["name"] == "cosine"
    assert measured["float_value"] == 1.0
    assert 0.9 < measured["value"] < 1.0
    assert measured["drop"] == pytest.approx(1 - measured["value"])
    row = next(line for line in result.stdout.splitlines() if line.startswith("measure "))
    assert "cosine 1 -> 0.9" in row
    assert "metric='cosine'" in result.stdout
    without = run("quantize", model, out, "--calib", data, "--config", "XINT8", "--json")
    assert json.loads(without.stdout)["measure"] is None


def test_quantize_by_a_function(model, data, mine, tmp_path):
    out = tmp_path / "out.onnx"
    result = run("quantize", model, out, "--calib", data, "--config", "XINT8", "--metric", mine, "--json")
    measured = json.loads(result.stdout)["measure"]
    assert measured["name"] == "mine.py:accuracy"
    assert measured["float_value"] == pytest.approx(1.0, abs=1e-5)
    assert measured["value"] < 1.0


def test_max_drop_is_of_the_measure(model, data, mine, tmp_path):
    common = ("quantize", model, tmp_path / "out.onnx", "--calib", data, "--config", "XINT8", "--metric", mine)
    strict = run(*common, "--max-drop", "0.001")
    assert strict.exit_code == 3
    assert "% of mine.py:accuracy lost, more than --max-drop 0.001" in strict.stderr
    assert (tmp_path / "out.onnx").is_file()
    assert run(*common, "--max-drop", "90").exit_code == 0


def test_quantize_refuses_bad_measures_before_the_work(model, data, mine, tmp_path):
    out = tmp_path / "out.onnx"
    common = ("quantize", model, out, "--calib", data, "--metric")
    assert_one_line_error(run(*common, "cosin"), "Did you mean cosine")
    assert_one_line_error(run(*common, "box_f1"), "box_f1")
    assert_one_line_error(run(*common, mine.replace("accuracy", "wrong")), "mine.py:wrong", "no labels here")
    assert_one_line_error(
        run("quantize", model, out, "--calib", data, "--num-calib", 4, "--metric", "rank"), "at least 3"
    )
    assert not out.exists()
    both = run(*common, "cosine", "--data", data, "--max-drop", "1")
    assert both.exit_code == 2
    assert "give one of them" in both.stderr


def test_the_page_of_quantize_has_the_measure(model, data, tmp_path, monkeypatch):
    import quark.cli.report_command as command

    seen: list[Any] = []

    def stop(*given):
        seen.extend(given)
        sys.exit(7)

    monkeypatch.setattr(command, "_diagnosed", stop)
    page = tmp_path / "page.html"
    out = tmp_path / "out.onnx"
    run("quantize", model, out, "--calib", data, "--config", "XINT8", "--metric", "cosine", "--report", page)
    assert [each.name for each in seen if isinstance(each, MeasureResult)] == ["cosine"]


def test_in_python_a_function_or_a_name(model, data, inputs):
    seen = []

    def evaluate(session):
        seen.append(session.get_outputs()[0].name)
        return 10.0 - len(seen)

    report = quantize(model, str(data), "XINT8", metric=evaluate).report
    assert report.measure == MeasureResult("evaluate", 9.0, 8.0, True)
    assert seen == ["logits", "logits"]
    assert "measure " in summary_text(report)
    assert "evaluate 9 -> 8, 11.11 % lost" in summary_text(report)
    exact = quantize(model, inputs, "BF16", metric="top1").report.measure
    assert exact.value == 1.0
    with pytest.raises(UnsupportedTypeError, match="expected a name"):
        quantize(model, inputs, "BF16", metric=3)


def test_compare_prints_the_measure_of_both(model, quantized, data, mine):
    result = run("compare", model, quantized, "--data", data, "--metric", "rank")
    assert result.exit_code == 0, result.output
    assert any(line.startswith("measure: rank 1 -> 0.9") for line in result.stdout.splitlines())
    content = json.loads(run("compare", model, quantized, "--data", data, "--metric", mine, "--json").stdout)
    assert content["measure"]["name"] == "mine.py:accuracy"
    assert content["measure"]["float_value"] > content["measure"]["value"]
    assert json.loads(run("compare", model, quantized, "--data", data, "--json").stdout)["measure"] is None
    assert_one_line_error(
        run("compare", model, quantized, "--data", data, "--metric", "cosine?axis=1"), "axis", "Known: pool, output"
    )


def test_compare_counts_samples_not_batches(model, quantized, data, inputs):
    from quark.onnx.session import open_session

    shown = json.loads(run("compare", model, quantized, "--data", data, "--metric", "cosine", "--json").stdout)[
        "measure"
    ]
    first, second = (open_session(value).run(None, {"input": inputs})[0] for value in (model, quantized))
    cosines = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    assert shown["value"] == pytest.approx(cosines.mean(), abs=1e-5)


def test_report_prints_the_measure(model, quantized, data, tmp_path):
    page = tmp_path / "page.html"
    common = ("report", quantized, "--float", model, "--calib", data, "--num-calib", 16, "-o", page)
    result = run(*common, "--metric", "cosine")
    assert result.exit_code == 0, result.output
    assert any(line.startswith("measure: cosine 1 -> 0.9") for line in result.stdout.splitlines())
    assert '"measure"' in page.read_text()
    page.unlink()
    assert_one_line_error(run(*common, "--metric", "wer"), "separator=ID")
    assert not page.exists()


def test_search_ranks_by_the_measure(model, data, mine, tmp_path):
    # for the target size, because what a file gains in speed is a matter of the machine
    common = ("--calib", data, "--presets", "XINT8,BF16", "--num-calib", 16)
    options = (*common, "--target", "size", "--out", tmp_path / "found")
    result = run("search", model, *options, "--metric", mine, "--json")
    content = json.loads(result.stdout)
    assert content["float"]["metric"] == "mine.py:accuracy"
    assert content["float"]["value"] == pytest.approx(1.0, abs=1e-5)
    trials = {each["name"]: each["measured"] for each in content["trials"]}
    for trial in trials.values():
        assert trial["measure"] == "mine.py:accuracy"
        assert trial["drop"] == pytest.approx(100 * (1 - trial["value"] / content["float"]["value"]), abs=1e-6)
    assert trials["BF16"]["drop"] < trials["XINT8"]["drop"]
    assert result.exit_code == 0
    assert content["best"] == "BF16"
    assert f"--metric {mine}" in content["command"]
    shown = run("search", model, *options, "--metric", mine, "--budget", "drop=90")
    assert "2 trials of an earlier search" in shown.stdout
    assert "mine.py:accuracy 1" in shown.stdout
    other = run("search", model, *options, "--metric", "cosine", "--budget", "drop=0")
    assert "the metric has changed" in other.stdout
    assert other.exit_code == 3
    assert_one_line_error(run("search", model, *options, "--metric", "psnrr"), "Did you mean psnr")


def test_search_in_python_with_a_built_in_measure(model, inputs, tmp_path):
    wanted = Wanted(Budget(drop=1.0), presets=("BF16",))
    result = search(model, inputs, wanted, folder=tmp_path / "found", metric="psnr")
    figures = result.trials[0].measured
    assert result.source.value == np.inf
    assert figures is not None
    assert figures.value is not None
    assert figures.drop == pytest.approx(100 * 10 ** (-figures.value / 20))
    assert json.loads((tmp_path / "found" / "search.json").read_text())["float"]["value"] == "inf"


def mixed(**settings):
    config = get_default_config("S16S16_MIXED_S8S8")
    config.print_summary = False
    config.extra_options["AutoMixprecision"] = {
        "ActTargetQuantType": QuantType.QInt8,
        "WeightTargetQuantType": QuantType.QInt8,
        **settings,
    }
    return config


@pytest.mark.parametrize("target", [0.0001, 0.5])
def test_mixed_precision_goes_by_a_built_in_measure(model, inputs, target):
    report = quantize(model, inputs, mixed(Metric="cosine", MetricTarget=target)).report
    figure = report.mixed.figures[0]
    assert figure.metric.value == "drop of the measure"
    assert figure.limit == target
    assert figure.is_met
    assert bool(report.mixed.lowered)
    assert (len(report.mixed.lowered) == len(report.mixed.layers)) == (target == 0.5)
    assert "drop of the measure" in summary_text(report, columns=400)


def test_mixed_precision_goes_by_a_function(model, inputs):
    calls = []

    def score(session):
        calls.append(session.run(None, {"input": inputs[:1]})[0].shape)
        return 1.0 if len(calls) != 2 else 0.9  # all layers lowered are too many

    report = quantize(model, inputs, mixed(Metric=score, MetricTarget=0.05)).report
    assert len(calls) > 2
    assert 0 < len(report.mixed.lowered) < len(report.mixed.layers)
    assert report.card["functions"] == ["Metric"]


def test_mixed_precision_settings(model, inputs):
    report = quantize(model, inputs, mixed(Metric="top1")).report
    assert report.mixed.figures[0].limit == 0.01
    assert any("Metric without MetricTarget" in remark for remark in report.remarks)
    with pytest.raises(InvalidValueError, match="MetricTarget without Metric"):
        quantize(model, inputs, mixed(MetricTarget=0.1))
    with pytest.raises(UnsupportedTypeError, match=r"AutoMixprecision\.Metric"):
        quantize(model, inputs, mixed(Metric=3))
    with pytest.raises(InvalidValueError, match="Did you mean cosine"):
        quantize(model, inputs, mixed(Metric="cosin"))

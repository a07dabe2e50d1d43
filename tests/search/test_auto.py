"""`auto_quantize` on the network that comes with the package: what it takes, rejects, resumes and refuses."""

import json
import shutil
from dataclasses import replace

import numpy as np
import onnx
import pytest

import quark.onnx
from quark.card import CARD_KEY
from quark.demo import network_path
from quark.errors import InvalidValueError, UnknownNameError
from quark.onnx.quantization.reproduction import reproduce
from quark.search import Bound, Measurement, Target, attempt, auto, auto_quantize
from quark.search.attempt import Bench
from quark.search.candidates import ladder_for, named
from quark.search.judging import Judge

FIRST = "INT8_CNN_DEFAULT"


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """A search ends with its candidates here, not with its time: a busy machine is no reason to fail."""
    monkeypatch.setattr(auto, "TIME_FACTOR", 1e6)


@pytest.fixture
def model(tmp_path):
    return shutil.copy(network_path(), tmp_path / "digits.onnx")


@pytest.fixture
def calib(tmp_path):
    path = tmp_path / "calib.npz"
    np.savez(path, input=np.random.default_rng(0).random((24, 1, 8, 8), dtype=np.float32))
    return path


@pytest.fixture
def attempts(monkeypatch):
    """The names of the candidates that were really run."""
    names = []
    original = Bench.attempt

    def counted(self, candidate, folder):
        names.append(candidate.name)
        return original(self, candidate, folder)

    monkeypatch.setattr(Bench, "attempt", counted)
    return names


@pytest.fixture
def latencies(monkeypatch):
    """Shares of float's latency by the name of the candidate, in the place of what is measured; 0.5 for the rest."""
    shares: dict[str, float] = {}
    monkeypatch.setattr(Judge, "_latency", lambda self, net: self.latency_ms * shares.get(net.path.stem, 0.5))
    monkeypatch.setattr(
        Judge, "compared_latencies", lambda self, models: [shares.get(model.stem, 0.5) for model in models]
    )
    return shares


def metric_of(values):
    """A metric that is 1 for the float network, and then what is given, 0.5 after the last."""
    left = iter([1.0, *values])
    return lambda session: next(left, 0.5)


def outcomes(result):
    return {row.name: row.outcome for row in result.rows}


def test_writes_the_best_with_a_report_of_what_was_tried(model, calib, tmp_path, latencies):
    out = tmp_path / "out.onnx"
    result = auto_quantize(model, calib, out)
    assert result.taken.name == FIRST
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calib.npz", "digits.onnx", "out.json", "out.onnx"]
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["auto"]["taken"] == FIRST
    assert report["auto"]["target"] == "cpu"
    rows = {each["name"]: each for each in report["auto"]["candidates"]}
    assert rows[FIRST]["verdict"] == "ok"
    assert rows[FIRST]["latency_ratio"] == 0.5
    assert rows[FIRST]["bytes"] == out.stat().st_size
    assert rows["MXINT8+WEIGHTS"]["outcome"] == "not tried"
    assert "speed of float" in rows["MXINT8+WEIGHTS"]["reason"]
    assert onnx.load(out) == quark.onnx.quantize(model, str(calib), FIRST).model


def test_the_written_file_can_be_reproduced(model, calib, tmp_path, latencies):
    latencies[FIRST] = 1.5
    out = tmp_path / "out.onnx"
    assert auto_quantize(model, calib, out).taken.name == "MXINT8+WEIGHTS"
    again = tmp_path / "again.onnx"
    reproduce(out.with_suffix(".json"), output=again)
    assert again.read_bytes() == out.read_bytes()


@pytest.mark.parametrize(("share", "is_smallest_taken"), [(1.05, True), (1.02, True), (0.98, True), (0.9, False)])
def test_the_fastest_is_taken_and_of_equally_fast_ones_the_smallest(model, calib, share, is_smallest_taken, latencies):
    latencies.update({FIRST: share, "MXINT8+WEIGHTS": 1.0})
    result = auto_quantize(model, calib)
    sizes = {row.name: row.figures.size_bytes for row in result.rows if row.figures}
    assert len(sizes) == (2 if share > 0.97 else 1)  # one with the speed of float is not tried where there is a faster
    assert result.taken.name == ("MXINT8+WEIGHTS" if is_smallest_taken else FIRST)
    assert sizes.get("MXINT8+WEIGHTS", 0) < sizes[FIRST]


def test_says_where_the_best_is_slower_than_float(model, calib, latencies):
    latencies.update({FIRST: 1.5, "MXINT8+WEIGHTS": 1.4})
    assert "slower than float on this machine" in auto_quantize(model, calib).statement


def test_a_metric_rejects_what_loses_more_than_one_percent(model, calib, tmp_path):
    out = tmp_path / "out.onnx"
    result = auto_quantize(model, calib, out, metric=metric_of([0.98, 0.98, 0.995]))
    tried = [row for row in result.rows if row.figures]
    assert [row.outcome for row in tried] == ["rejected", "rejected", "taken"]
    assert tried[0].name == FIRST
    assert "lost 2.00" in tried[0].reason
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["measure"]["value"] == 0.995
    assert report["auto"]["bound"] == "verdict ok and at most 1 % of the measure lost"


def test_a_stated_bound_takes_the_place_of_the_usual_one(model, calib):
    result = auto_quantize(model, calib, metric=metric_of([0.96]), max_drop=5)
    assert result.taken.name == FIRST
    figures = {"size_bytes": 1, "latency_ms": 1.0, "measure": "m", "worst": "output 'y'"}
    degraded = Measurement(drop=0.5, verdict="degraded", **figures)
    assert Bound(has_measure=True).reason_against(degraded) == "degraded: output 'y'"
    assert Bound(has_measure=True, max_drop=1.0).reason_against(degraded) == ""
    assert Bound(has_measure=True, max_drop=0.4).reason_against(degraded) == "m lost 0.50, more than 0.4"
    nan = Measurement(drop=float("nan"), verdict="ok", **figures)
    assert Bound(has_measure=True).reason_against(nan)
    assert not Bound(has_measure=False).reason_against(nan)


def test_says_where_samples_are_too_few_for_the_bound(model, calib, latencies):
    (note,) = auto_quantize(model, calib, max_drop=3).notes
    assert note.startswith("3 samples cannot show a loss of 3 points: one changed prediction")
    assert auto_quantize(model, calib, max_drop=40).notes == ()


def test_labelled_data_are_a_measure(model, calib, tmp_path):
    import onnxruntime

    images = np.random.default_rng(1).random((30, 1, 8, 8), dtype=np.float32)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    labels = session.run(None, {"input": images})[0].argmax(1)
    np.savez(tmp_path / "labelled.npz", input=images, labels=labels)
    result = auto_quantize(model, calib, labelled=tmp_path / "labelled.npz", max_drop=100)
    assert result.taken.figures.measure == "top-1 accuracy"
    assert result.float_value == 1.0


def test_where_nothing_passes_nothing_is_written_and_the_trials_stay(
    model, calib, tmp_path, attempts, latencies, monkeypatch
):
    out = tmp_path / "out.onnx"
    monkeypatch.setattr(auto, "ladder_for", lambda *_: ladder_for(Target.CPU, False, False, False)[:2])
    result = auto_quantize(model, calib, out, metric=_by_nodes)
    assert result.model is None
    assert "keep the float file" in result.statement
    assert f"{FIRST} is nearest: _by_nodes lost 50.00" in result.statement
    assert not out.exists()
    assert not out.with_suffix(".json").exists()
    assert (tmp_path / "out.onnx.auto" / "trials" / f"{FIRST}.json").is_file()
    done = len(attempts)
    again = auto_quantize(model, calib, out, metric=_by_nodes, max_drop=60)
    assert len(attempts) == done
    assert again.taken.name == FIRST
    assert out.exists()
    assert not (tmp_path / "out.onnx.auto").exists()


def _by_nodes(session):
    """1 for the float network, 0.5 for one that was quantized: those say by what."""
    return 0.5 if CARD_KEY in session.get_modelmeta().custom_metadata_map else 1.0


def slow_down_float(monkeypatch, factor):
    original = Judge.__init__

    def slowed(self, *args, **options):
        original(self, *args, **options)
        self.latency_ms *= factor

    monkeypatch.setattr(Judge, "__init__", slowed)


def test_goes_on_where_it_was_interrupted(model, calib, tmp_path, attempts, latencies, monkeypatch):
    latencies[FIRST] = 1.2
    out = tmp_path / "out.onnx"

    def interrupt(text):
        if text.startswith("trying MXINT8"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        auto_quantize(model, str(calib), out, on_progress=interrupt)
    said = str(caught.value)
    assert f"best so far: {FIRST}" in said
    assert f"quark quantize {model} {out} --config {FIRST} --calib {calib}" in said
    assert str(tmp_path / "out.onnx.auto") in said
    assert not out.exists()
    assert attempts == [FIRST]
    slow_down_float(monkeypatch, 3)  # a busier machine must not turn the slower candidate into a faster one
    result = auto_quantize(model, str(calib), out)
    assert attempts == [FIRST, "MXINT8+WEIGHTS"]
    assert outcomes(result)[FIRST] == "passed"
    assert result.taken.name == "MXINT8+WEIGHTS"
    assert not (tmp_path / "out.onnx.auto").exists()


def test_a_winner_of_an_earlier_call_is_made_again(model, calib, tmp_path, attempts, latencies):
    latencies.update({FIRST: 1.2, "MXINT8+WEIGHTS": 1.25})
    out = tmp_path / "out.onnx"

    def interrupt(text):
        if text.startswith("measuring"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        auto_quantize(model, calib, out, on_progress=interrupt)
    done = list(attempts)
    assert auto_quantize(model, calib, out).taken is not None
    assert attempts == done
    assert out.exists()


def test_other_data_starts_from_the_beginning(model, calib, tmp_path, attempts):
    out = tmp_path / "out.onnx"

    def interrupt(text):
        if text.startswith(f"  {FIRST}"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        auto_quantize(model, calib, out, on_progress=interrupt)
    np.savez(calib, input=np.random.default_rng(5).random((24, 1, 8, 8), dtype=np.float32))
    result = auto_quantize(model, calib, out)
    assert attempts.count(FIRST) == 2
    assert any("calibration data" in note for note in result.notes)


def test_stops_when_the_time_is_spent(model, calib, monkeypatch):
    monkeypatch.setattr(auto, "TIME_FACTOR", 0.01)
    result = auto_quantize(model, calib, metric=metric_of([0.5]))
    assert result.model is None
    assert [row.name for row in result.rows if row.figures] == [FIRST]
    assert any("it would take about" in row.reason for row in result.rows)


def test_time_is_kept_for_a_format_that_loses_next_to_nothing(model, calib, monkeypatch):
    """Of the time that is left after the first trial, the slow candidates leave enough for a light one."""
    original = Bench.attempt

    def attempt_with(self, candidate, folder):
        trial, path = original(self, candidate, folder)
        return replace(trial, seconds=100.0, quantizing_seconds=100.0), path

    monkeypatch.setattr(Bench, "attempt", attempt_with)
    monkeypatch.setattr(auto, "TIME_FACTOR", 1.5)  # there is time for one more trial
    monkeypatch.setattr(auto, "ladder_for", lambda *_: named([FIRST, "A8W8", "BF16"]))
    result = auto_quantize(model, calib, metric=metric_of([0.5, 1.0]))
    assert outcomes(result) == {FIRST: "rejected", "A8W8": "not tried", "BF16": "taken"}


def test_more_layers_in_float_are_not_tried_where_the_verdict_is_ok_already(model, calib, monkeypatch):
    """Protection depends on the verdict: what a measure rejects would come out the same."""
    original = Bench.attempt

    def attempt_with(self, candidate, folder):
        trial, path = original(self, candidate, folder)
        assert trial.measured is not None
        return replace(trial, measured=replace(trial.measured, float_mac_share=0.1)), path

    monkeypatch.setattr(Bench, "attempt", attempt_with)
    result = auto_quantize(model, calib, metric=metric_of([0.5, 1.0]))
    reasons = {row.name: row.reason for row in result.rows if row.outcome == "not tried"}
    assert reasons[f"{FIRST}+BUDGET30"] == f"protection depends on the verdict, which is already ok for {FIRST}"


def test_the_smallest_file_for_size(model, calib, tmp_path):
    out = tmp_path / "out.onnx"
    result = auto_quantize(model, calib, out, target="size", max_drop=100)
    sizes = {row.name: row.figures.size_bytes for row in result.rows if row.figures}
    assert result.taken.figures.size_bytes == min(sizes.values()) == out.stat().st_size
    assert result.taken.figures.is_packed
    skipped = [row for row in result.rows if row.outcome == "not tried"]
    assert skipped
    assert all("its file would take" in row.reason for row in skipped)


def test_files_that_the_npu_refuses_are_rejected(model, calib, monkeypatch):
    asked = []

    def refused(path):
        asked.append(path.stem)
        return "2 lint errors (Int8)"

    monkeypatch.setattr(attempt, "_refused", refused)
    result = auto_quantize(model, calib, target="npu")
    assert asked == ["XINT8"]  # the linter knows the rules of no other
    assert result.rows[0].reason == "2 lint errors (Int8)"
    assert result.taken.name == "A8W8"
    assert result.taken.latency is None


def test_lint_errors_of_the_network_itself_reject_nothing(model, calib, tmp_path):
    from quark.onnx.lint import Finding, Level

    def finding(rule, level=Level.ERROR):
        return Finding(rule, "", "", level, "", "")

    findings = (finding("Operator"), finding("Int8"), finding("Int8"), finding("FloatTensor", Level.WARNING))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempt, "lint", lambda path: findings)
        assert attempt._refused(tmp_path) == "2 lint errors (Int8)"
        patch.setattr(attempt, "lint", lambda path: findings[:1])
        assert attempt._refused(tmp_path) == ""


def test_the_kind_of_network_decides_what_comes_first():
    def names(*arguments):
        return [candidate.name for candidate in ladder_for(*arguments)]

    assert names(Target.CPU, False, False, False)[:2] == [FIRST, "INT8_TRANSFORMER_DEFAULT"]
    assert names(Target.CPU, True, True, True)[:4] == [
        *("INT8_TRANSFORMER_DEFAULT", "INT8_TRANSFORMER_DEFAULT+UNPROTECTED", FIRST, "UINT8_DYNAMIC_QUANT")
    ]
    bits = [candidate.bits for candidate in ladder_for(Target.SIZE, False, True, False)]
    assert bits == sorted(bits)
    for target in Target:
        for is_transformer in (False, True):
            candidates = ladder_for(target, is_transformer, True, True)
            assert len({candidate.name for candidate in candidates}) == len(candidates)
            for candidate in candidates:
                candidate.config()  # every change is an option


def test_quantize_takes_auto_as_a_config(model, latencies):
    images = np.random.default_rng(0).random((24, 1, 8, 8), dtype=np.float32)
    result = quark.onnx.quantize(model, ({"input": image[None]} for image in images), "auto")
    assert result.report.config_name == FIRST
    assert result.report.auto["taken"] == FIRST
    with pytest.raises(InvalidValueError, match="config 'auto': no configuration keeps to the bound"):
        quark.onnx.quantize(model, images, "auto", metric=_by_nodes)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"data": None}, InvalidValueError, "needs data"),
        ({"target": "tpu"}, UnknownNameError, "npu"),
        ({"max_drop": -1}, InvalidValueError, "max_drop -1"),
        ({"metric": "top1", "labelled": "x"}, InvalidValueError, "one of them"),
        ({"model": onnx.ModelProto()}, InvalidValueError, "as a file"),
    ],
)
def test_refuses_what_cannot_be(model, calib, options, error, said):
    with pytest.raises(error, match=said):
        auto_quantize(**{"model": model, "data": calib, **options})

"""A search on the network that comes with the package: what it finds, keeps, resumes and survives."""

import hashlib
import json
import shutil
import sys
from typing import Any

import numpy as np
import onnx
import pytest

from quark.compare.measures import divergence
from quark.demo import network_path
from quark.errors import InvalidValueError
from quark.onnx import quantize
from quark.onnx.pack import pack_model
from quark.onnx.pack.editing import is_packed
from quark.search import Budget, Keep, Wanted, attempt, pareto_front, search
from quark.search.attempt import Bench

PRESETS = ("MXINT8", "MXFP4E2M1", "BF16")


def arrays(count, seed):
    return np.random.default_rng(seed).random((count, 1, 8, 8), dtype=np.float32)


@pytest.fixture(autouse=True)
def packer(monkeypatch):
    """Files are not packed here but where a test says so: it takes longer than all else with so small a network."""

    def refuse(*_):
        raise InvalidValueError("not here")

    monkeypatch.setattr(attempt, "pack_model", refuse)


@pytest.fixture
def model(tmp_path):
    return shutil.copy(network_path(), tmp_path / "digits.onnx")


@pytest.fixture
def calib(tmp_path):
    path = tmp_path / "calib.npz"
    np.savez(path, input=arrays(16, 0))
    return path


@pytest.fixture
def labelled(tmp_path, model):
    """What the float network says is right, but for every eighth sample."""
    import onnxruntime

    images = arrays(40, 1)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    labels = session.run(None, {"input": images})[0].argmax(1)
    labels[::8] = (labels[::8] + 1) % 10
    path = tmp_path / "labelled.npz"
    np.savez(path, input=images, labels=labels)
    return path


class KilledError(Exception):
    """In the place of a kill."""


def stop_after(count):
    seen = []

    def on_trial(trial):
        seen.append(trial.name)
        if len(seen) == count:
            raise KilledError

    return on_trial


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


def test_without_torch_the_rest_is_searched(model, calib, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    result = search(model, calib, Wanted(formats=("mxint8",)))
    assert result.best is not None
    reasons = dict(result.skipped)
    assert "torch, which is not installed" in reasons["MXINT8_ADAQUANT"]


def test_ranks_what_it_tried_and_keeps_it(model, calib, labelled, tmp_path, monkeypatch):
    monkeypatch.setattr(attempt, "pack_model", pack_model)
    wanted = Wanted(Budget.parse(["drop=50"]), PRESETS)
    result = search(model, calib, wanted, data=labelled)
    assert {trial.name for trial in result.trials} == set(PRESETS)
    assert result.folder == tmp_path / "digits_search"
    assert result.source.top1 == 35 / 40
    for trial in result.trials:
        figures = trial.measured
        assert figures is not None
        assert figures.measure == "top-1 accuracy"
        assert figures.top1 is not None
        assert figures.drop == pytest.approx(100 * (35 / 40 - figures.top1))
        assert figures.kl is not None
        assert figures.kl >= 0
        assert figures.latency_ms > 0
        assert figures.error is not None
        assert trial.seconds >= trial.quantizing_seconds > 0
    by_name: dict[str, Any] = {trial.name: trial.measured for trial in result.trials}
    assert by_name["MXFP4E2M1"].size_bytes < by_name["MXINT8"].size_bytes < by_name["BF16"].size_bytes
    assert by_name["MXINT8"].kl < by_name["MXFP4E2M1"].kl
    assert result.best == result.trials[0]
    assert result.best in result.front
    assert sorted(each.name for each in (result.folder / "trials").iterdir()) == sorted(f"{n}.json" for n in PRESETS)
    front = {trial.name for trial in pareto_front(result.trials)}
    assert {each.stem for each in (result.folder / "models").glob("*.onnx")} == front
    content = json.loads((result.folder / "search.json").read_text())
    assert content["best"] == result.best.name
    assert set(content["front"]) == front
    assert not list(result.folder.glob(".trial-*"))


def test_the_recommended_command_makes_the_file_that_was_tried(model, calib):
    result = search(model, calib, Wanted(presets=("MXFP4E2M1",), keep=Keep.ALL))
    parts = result.command.split()
    assert parts == [
        *("quark", "quantize", str(model), "digits_MXFP4E2M1.onnx", "--config", "MXFP4E2M1", "--calib", str(calib))
    ]
    kept = onnx.load(result.folder / "models" / "MXFP4E2M1.onnx")
    assert kept == quantize(model, str(calib), "MXFP4E2M1").model


def test_files_are_packed_where_that_makes_them_smaller(model, calib, monkeypatch):
    monkeypatch.setattr(attempt, "pack_model", pack_model)
    result = search(model, calib, Wanted(presets=("MXFP4E2M1", "A8W8"), keep=Keep.ALL))
    packed = {trial.name: trial.measured.is_packed for trial in result.trials}
    assert packed == {"MXFP4E2M1": True, "A8W8": False}
    for trial in result.trials:
        file = result.folder / "models" / f"{trial.name}.onnx"
        assert trial.measured.size_bytes == file.stat().st_size
        assert is_packed(onnx.load(file)) == packed[trial.name]
        report = json.loads(file.with_suffix(".json").read_text())
        assert report["result"]["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
        assert report["card"]["packing"] == ("portable" if packed[trial.name] else "")
    assert result.command.endswith(" --pack") == packed[result.best.name]


def test_goes_on_where_it_was_interrupted(model, calib, attempts):
    wanted = Wanted(presets=PRESETS)
    with pytest.raises(KilledError):
        search(model, calib, wanted, on_trial=stop_after(2))
    assert len(attempts) == 2
    partial = json.loads((model.parent / "digits_search" / "search.json").read_text())
    assert len(partial["trials"]) == 2
    result = search(model, calib, wanted)
    assert sorted(attempts) == sorted(PRESETS)
    assert result.reused == 2
    assert not any("starting over" in note for note in result.notes)
    again = search(model, calib, wanted)
    assert again.reused == 3
    assert again.trials == result.trials


def test_an_interruption_from_the_keyboard_says_how_to_go_on(model, calib, monkeypatch):
    def interrupt(self, candidate, folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "attempt", interrupt)
    with pytest.raises(KeyboardInterrupt, match="resumes"):
        search(model, calib, Wanted(presets=PRESETS))


@pytest.mark.parametrize("content", ["{", '{"name": "MXINT8"}'])
def test_a_damaged_trial_is_tried_again_and_said(model, calib, attempts, content):
    wanted = Wanted(presets=("MXINT8", "BF16"))
    result = search(model, calib, wanted)
    attempts.clear()
    (result.folder / "trials" / "MXINT8.json").write_text(content)
    again = search(model, calib, wanted)
    assert attempts == ["MXINT8"]
    assert any("MXINT8.json is damaged" in note for note in again.notes)


def test_another_model_starts_anew_and_says_so(model, calib, attempts):
    wanted = Wanted(presets=("MXINT8",))
    search(model, calib, wanted)
    changed = onnx.load(model)
    changed.doc_string = "changed"
    onnx.save(changed, model)
    again = search(model, calib, wanted)
    assert attempts == ["MXINT8", "MXINT8"]
    assert any("starting over: the model has changed" in note for note in again.notes)


def test_other_data_start_anew(model, calib, attempts):
    wanted = Wanted(presets=("MXINT8",))
    search(model, calib, wanted)
    np.savez(calib, input=arrays(16, 5))
    again = search(model, calib, wanted)
    assert len(attempts) == 2
    assert any("the calibration data has changed" in note for note in again.notes)


def test_what_fails_is_a_row_with_its_reason(model, calib, monkeypatch):
    original = Bench.quantized

    def failing(self, candidate):
        if candidate.name == "BF16":
            raise MemoryError("too large")
        if candidate.name == "A8W8":
            raise OSError(28, "No space left on device")
        if candidate.name == "MXINT8":
            raise InvalidValueError("node 'x': cannot be done")
        return original(self, candidate)

    with monkeypatch.context() as patch:
        patch.setattr(Bench, "quantized", failing)
        result = search(model, calib, Wanted(presets=(*PRESETS, "A8W8")))
    reasons = {trial.name: trial.failure for trial in result.trials if trial.failure}
    assert reasons == {
        "BF16": "not enough memory: too large",
        "A8W8": "trouble with files: [Errno 28] No space left on device",
        "MXINT8": "node 'x': cannot be done",
    }
    assert result.best.name == "MXFP4E2M1"
    assert "cannot be done" in (result.folder / "search.html").read_text()
    again = search(model, calib, Wanted(presets=(*PRESETS, "A8W8")))  # memory and space may be there now
    assert {trial.name for trial in again.trials if trial.failure} == {"MXINT8"}


def test_says_what_is_nearest_where_nothing_fits(model, calib):
    result = search(model, calib, Wanted(Budget.parse(["size=100B", "time=1m"]), presets=("MXINT8",)))
    assert result.best is None
    assert result.nearest is None
    assert result.skipped[0][0] == "MXINT8"
    assert "more than the size budget" in result.skipped[0][1]
    result = search(model, calib, Wanted(Budget.parse(["latency=0.000001ms"]), presets=("MXINT8",)))
    assert result.best is None
    assert result.nearest.name == "MXINT8"
    assert "MXINT8 is nearest" in result.recommendation()


def test_without_time_nothing_is_begun(model, calib):
    result = search(model, calib, Wanted(Budget.parse(["time=0.0001s"]), presets=PRESETS))
    assert result.trials == ()
    assert {reason for _, reason in result.skipped} == {"the time is up"}


@pytest.mark.parametrize("keep", Keep)
def test_files_are_kept_as_asked_for(model, calib, keep):
    result = search(model, calib, Wanted(presets=("MXINT8", "BF16"), keep=keep))
    files = {each.stem for each in (result.folder / "models").glob("*.onnx")}
    front = {trial.name for trial in result.front}
    assert files == {Keep.ALL: {"MXINT8", "BF16"}, Keep.NONE: set(), Keep.BEST: front}[keep]
    assert {trial.name for trial in result.trials if trial.model} == files


def test_presets_and_formats_exclude_each_other():
    with pytest.raises(InvalidValueError, match="one of them"):
        Wanted(presets=("MXINT8",), formats=("int8",))


def test_a_file_in_the_place_of_the_folder_is_an_error(model, calib):
    with pytest.raises(InvalidValueError, match="cannot be made"):
        search(model, calib, Wanted(presets=("MXINT8",)), folder=calib)


def test_one_search_at_a_time_in_a_folder(model, calib, tmp_path):
    def at_once(_):
        with pytest.raises(InvalidValueError, match="another search is at work"):
            search(model, calib, Wanted(presets=("BF16",)), folder=tmp_path / "out")

    search(model, calib, Wanted(presets=("MXINT8",)), folder=tmp_path / "out", on_trial=at_once)
    search(model, calib, Wanted(presets=("BF16",)), folder=tmp_path / "out")


def test_a_folder_of_something_else_is_left_alone(model, calib, tmp_path):
    mine = tmp_path / "work" / "models" / "MXINT8.onnx"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(InvalidValueError, match="holds other things"):
        search(model, calib, Wanted(presets=("MXINT8",)), folder=tmp_path / "work")
    assert mine.read_text() == "mine"
    assert [each.name for each in (tmp_path / "work").iterdir()] == ["models"]


def test_a_float_network_without_answers_is_an_error(calib, tmp_path):
    graph = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[n, 1, 8, 8] input) => (float[n, 1, 8, 8] y) '
        "{ one = Sub (input, input)  y = Div (one, one) }"
    )
    onnx.save(graph, tmp_path / "nan.onnx")
    with pytest.raises(InvalidValueError, match="output 'y' has NaN"):
        search(tmp_path / "nan.onnx", calib, Wanted(presets=("MXINT8",)))


def test_what_quantizes_nothing_is_no_result(calib, tmp_path):
    graph = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[n, 1, 8, 8] input) => (float[n, 1, 8, 8] y) '
        "{ y = Exp (input) }"
    )
    onnx.save(graph, tmp_path / "exp.onnx")
    result = search(tmp_path / "exp.onnx", calib, Wanted(presets=("MXINT8",)))
    assert result.best is None
    assert "nothing is quantized" in result.trials[0].failure


def test_divergence_is_that_of_probabilities():
    logits, other = np.array([[1.0, 2.0, 0.0]]), np.array([[0.0, 2.0, 1.0]])
    p, q = (np.exp(value) / np.exp(value).sum() for value in (logits, other))
    expected = float((p * np.log(p / q)).sum())
    assert divergence(logits, other) == pytest.approx(expected)
    assert divergence(p, q) == pytest.approx(expected)
    assert divergence(logits, logits + 3.0) == pytest.approx(0.0, abs=1e-12)
    assert divergence(logits, np.array([[np.nan, 0, 0]])) == np.inf

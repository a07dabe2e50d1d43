"""The user's own function: how it is found, called, and what is said of its mistakes; and the judge."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import quark.demo
from quark.errors import InvalidValueError, ModelError, UnsupportedTypeError
from quark.measures import FunctionMeasure, Judge, Measure, samples_of_batch
from quark.onnx.session import open_session

FILE = """
import numpy as np
import helper_of_the_measure

LIMIT = 3

def mean(session):
    name = session.get_inputs()[0].name
    return session.run(None, {name: np.ones((1, 1, 8, 8), np.float32)})[0].mean() + helper_of_the_measure.ZERO

def errors(session):
    return 0.25

errors.lower_is_better = True

class Many:
    @staticmethod
    def inside(session):
        return 1
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "evaluate.py").write_text(FILE)
    (tmp_path / "helper_of_the_measure.py").write_text("ZERO = 0.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("helper_of_the_measure", None)
    sys.modules.pop("evaluate", None)


@pytest.fixture(scope="module")
def session():
    return open_session(quark.demo.network_path())


@pytest.fixture(scope="module")
def samples():
    random = np.random.default_rng(0)
    return [{"input": random.normal(size=(2, 1, 8, 8)).astype(np.float32)} for _ in range(4)]


class Broken:
    """A session whose outputs are those of another one and some noise."""

    def __init__(self, session, noise):
        self._session, self._noise = session, noise

    def run(self, names, feeds, run_options=None):
        return [
            each + self._noise * (1 + np.arange(each.size)).reshape(each.shape)
            for each in self._session.run(names, feeds)
        ]

    def get_inputs(self):
        return self._session.get_inputs()

    def get_outputs(self):
        return self._session.get_outputs()


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("evaluate.py:mean", "evaluate.py:mean"),
        ("./evaluate.py:mean", "evaluate.py:mean"),
        ("evaluate:mean", "evaluate:mean"),
        ("{folder}/evaluate.py:mean", "evaluate.py:mean"),
    ],
)
def test_a_function_of_a_file_or_module_gets_a_session(folder, session, spec, name):
    measure = Measure.of(spec.format(folder=folder))
    assert measure.name == name
    assert measure.is_higher_better
    expected = session.run(None, {"input": np.ones((1, 1, 8, 8), np.float32)})[0].mean()
    result = measure.judge(session, Broken(session, 1.0), [])
    assert result.float_value == pytest.approx(expected)
    assert result.value == pytest.approx(expected + 5.5)


def test_a_file_shadows_no_module(folder):
    (folder / "json.py").write_text("def score(session): return 1.0\n")
    measure = Measure.of("json.py:score")
    import json

    assert isinstance(measure, FunctionMeasure)
    assert measure.value(None) == 1.0
    assert hasattr(json, "dumps")


def test_lower_is_better_in_three_ways(folder):
    assert not Measure.of("-evaluate.py:mean").is_higher_better
    assert Measure.of("-evaluate.py:mean").name == "evaluate.py:mean"
    assert not Measure.of("evaluate.py:errors").is_higher_better
    assert not Measure.of(lambda session: 1.0, lower_is_better=True).is_higher_better
    assert Measure.of("evaluate.py:errors", lower_is_better=False).is_higher_better


def test_a_method_is_found(folder):
    measure = Measure.of("evaluate.py:Many.inside")
    assert isinstance(measure, FunctionMeasure)
    assert measure.value(None) == 1.0


@pytest.mark.parametrize(
    ("spec", "error", "said"),
    [
        ("nowhere.py:mean", InvalidValueError, "no file 'nowhere.py'"),
        ("evaluate.py:meen", InvalidValueError, "Did you mean mean"),
        ("evaluate.py:LIMIT", UnsupportedTypeError, "'LIMIT' is of type int: expected a function"),
        ("evaluate.py:", InvalidValueError, "FILE.py:FUNCTION"),
        ("no.such.module:f", InvalidValueError, "importing 'no.such.module' failed: ModuleNotFoundError"),
        ("no/module:f", InvalidValueError, "FILE.py:FUNCTION"),
        ("wrong.py:f", InvalidValueError, "loading .*wrong.py' failed: ZeroDivisionError: division by zero"),
        (3, UnsupportedTypeError, "expected a name"),
    ],
)
def test_what_cannot_be_loaded(folder, spec, error, said):
    (folder / "wrong.py").write_text("1 / 0\n")
    with pytest.raises(error, match=said):
        Measure.of(spec)


def fails(session):
    raise KeyError("labels")


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        (fails, InvalidValueError, "measure 'fails' failed on the float network: KeyError: 'labels'"),
        (lambda session: "good", UnsupportedTypeError, "returned 'good' of type str for the float network"),
        (lambda session: None, UnsupportedTypeError, "of type NoneType"),
        (lambda session: True, UnsupportedTypeError, "of type bool"),
        (lambda session: np.ones(2), UnsupportedTypeError, "of type ndarray"),
        (lambda session: float("nan"), InvalidValueError, "returned nan for the float network"),
        (lambda session: np.float32("inf"), InvalidValueError, "returned inf"),
    ],
)
def test_mistakes_of_a_function_are_errors_that_name_it(function, error, said):
    with pytest.raises(error, match=said) as caught:
        Judge(Measure.of(function), object())
    if function is fails:
        assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("value", [1, np.float32(0.5), np.array([2.0]), np.int64(3)])
def test_numbers_of_all_kinds(value):
    measure = Measure.of(lambda session: value)
    assert isinstance(measure, FunctionMeasure)
    assert measure.value(None) == float(np.asarray(value).item())


def test_the_float_side_is_measured_once(session, samples):
    calls = []

    def count(each):
        calls.append(each)
        return 2.0

    judge = Judge(Measure.of(count), session)
    other = Broken(session, 1.0)
    assert [judge.judge(other).drop for _ in range(2)] == [0.0, 0.0]
    assert calls == [session, other, other]


def test_built_in_measures_see_each_sample_of_a_batch(session, samples):
    judge = Judge(Measure.of("top1"), session, samples)
    assert judge.float_value == 1.0
    assert judge.judge(session).value == 1.0
    inputs = np.concatenate([sample["input"] for sample in samples])
    outputs = session.run(None, {"input": inputs})[0]
    other = Broken(session, 0.3)
    same = [
        (other.run(None, sample)[0].argmax(1) == session.run(None, sample)[0].argmax(1)).tolist() for sample in samples
    ]
    assert len(outputs) == len(np.ravel(same)) == 8
    assert judge.judge(other).value == pytest.approx(np.mean(same))
    rank = Judge(Measure.of("rank"), session, samples[:2])  # four samples in two batches are enough
    assert rank.judge(session).drop == 0.0


def test_known_outputs_spare_the_float_session(session, samples):
    expected = [{"logits": session.run(None, sample)[0]} for sample in samples]
    judge = Judge(Measure.of("cosine"), None, samples, expected)
    other = Broken(session, 0.1)
    assert judge.judge(other) == Judge(Measure.of("cosine"), session, samples).judge(other)
    assert judge.judge_outputs(iter(expected)).value == 1.0


def test_a_generator_of_samples_can_be_judged_often(session, samples):
    judge = Judge(Measure.of("cosine"), session, iter(samples))
    assert [judge.judge(session).value for _ in range(2)] == [1.0, 1.0]


def test_a_network_that_cannot_run_is_named(session, samples):
    with pytest.raises(ModelError, match="measure 'cosine': the float network cannot be run"):
        Judge(Measure.of("cosine"), session, [{"wrong": samples[0]["input"]}])


def test_outputs_without_a_batch_stay_whole():
    outputs = {"y": np.zeros((2, 3)), "rows": np.zeros((7, 6))}
    assert samples_of_batch(outputs, 2) == [outputs]


def test_fingerprints_change_with_the_file(folder):
    before = Measure.of("evaluate.py:mean")
    (folder / "evaluate.py").write_text(FILE + "\n# another\n")
    assert Measure.of("evaluate.py:mean").fingerprint != before.fingerprint
    assert Measure.of("cosine").fingerprint != Measure.of("cosine?output=y").fingerprint
    assert isinstance(before, FunctionMeasure)

"""Suggestions are tried before they are shown: only what is measured to help is advice."""

from __future__ import annotations

import json
import shlex

import numpy as np
import onnx
import pytest

from quark.compare import Verdict
from quark.diagnosis import Outcome, Step
from quark.inspect.diagnose import diagnose
from quark.onnx import get_default_config, quantize
from quark.onnx.load import load
from quark.onnx.quantization import suggestions
from quark.onnx.quantization.suggestions import Candidate, Making, suggest, try_all

WIDTH, SAMPLES = 32, 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A network that 8 bits break: coordinates in the hundreds and scores up to 1 go through one Concat."""
    place = tmp_path_factory.mktemp("suggestions")
    generator = np.random.default_rng(0)
    text = (
        f'<ir_version: 8, opset_import: ["": 17]> g (float[1, 12, {WIDTH}] x) => (float[1, 12, 40] y) '
        "{ t = MatMul (x, a)  h = Relu (t)  u = MatMul (h, b)  boxes = Mul (u, scale)"
        "  v = MatMul (h, c)  w = Add (v, shift)  scores = Sigmoid (w)  y = Concat <axis = 2> (boxes, scores) }"
    )
    model = onnx.parser.parse_model(text)
    weights = {
        "a": generator.normal(0, 0.2, (WIDTH, WIDTH)),
        "b": generator.normal(0, 0.2, (WIDTH, 8)),
        "c": generator.normal(0, 2.0, (WIDTH, WIDTH)),
        "scale": np.array(400.0),
        "shift": np.array(-9.0),
    }
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    for node in model.graph.node:
        node.name = f"head's/{node.op_type}_{node.output[0]}" if node.output[0] == "y" else f"body/{node.output[0]}"
    onnx.save(model, place / "float.onnx")
    data = generator.normal(0, 1, (SAMPLES, 12, WIDTH)).astype(np.float32)
    np.savez(place / "data.npz", x=data)
    config = get_default_config("INT8_CNN_DEFAULT")
    config.extra_options["Protect"] = "none"
    quantize(place / "float.onnx", data, config).save(place / "broken.onnx")
    return place


@pytest.fixture(scope="module")
def diagnosis(folder):
    return diagnose(folder / "float.onnx", folder / "broken.onnx", folder / "data.npz", num_samples=SAMPLES)


@pytest.fixture(scope="module")
def tried(folder, diagnosis):
    return try_all(diagnosis, folder / "float.onnx", folder / "broken.onnx", folder / "data.npz", seconds=60)


def test_what_breaks_the_network_is_ranked_first(diagnosis):
    assert diagnosis.verdict is not Verdict.OK
    assert diagnosis.ranked[0].op_type == "Concat"


def test_only_what_helps_is_advice_the_best_first(tried):
    helped = [suggestion for suggestion in tried.suggestions if suggestion.outcome is Outcome.HELPED]
    assert helped
    assert all(each.severity_after < each.severity_before for each in helped)
    assert [each.distance_after for each in helped[:2]] == sorted(each.distance_after for each in helped[:2])
    assert tried.steps == tuple(each.step for each in helped)
    assert helped[0].verdict_after is Verdict.OK
    assert f"{helped[0].verdict_before.value} -> ok" in tried.steps[0].line()
    assert tried.suggestions[: len(helped)] == tuple(helped)


def test_following_the_first_suggestion_gives_what_it_says(folder, tried):
    from quark.cli.options import parse_changes, read_config

    exclusion = next(suggestion for suggestion in tried.suggestions if "nodes_to_exclude" in suggestion.arguments)
    arguments = shlex.split(exclusion.arguments)
    assert arguments[0] == "--set"
    assert "head's/Concat_y" in arguments[1]  # a quote in a name goes through the shell unharmed
    changes = parse_changes(None, None, ("Protect=none", *arguments[1::2]))
    result = quantize(folder / "float.onnx", folder / "data.npz", read_config("INT8_CNN_DEFAULT", changes))
    assert exclusion.outcome is Outcome.HELPED
    assert result.report.verdict is exclusion.verdict_after


def test_what_is_in_place_is_not_suggested(folder, diagnosis):
    making = Making.of(folder / "broken.onnx")
    model = load(folder / "float.onnx", making.settings.load).model
    keys = {key for candidate in suggest(diagnosis, making, model) for key, _ in candidate.changes}
    assert {"Protect", "nodes_to_exclude", "op_types_to_quantize"} <= keys
    assert "BiasCorrection" not in keys  # the preset has it
    config = get_default_config("INT8_CNN_DEFAULT")
    config.nodes_to_exclude = ["head.*"]
    config.include_cle = config.include_sq = True
    path = quantize(folder / "float.onnx", folder / "data.npz", config).save(folder / "better.onnx")
    found = diagnose(folder / "float.onnx", path, folder / "data.npz", num_samples=4)
    changes = [change for candidate in suggest(found, Making.of(path), model) for change in candidate.changes]
    assert {"Protect", "include_cle", "include_sq"}.isdisjoint(key for key, _ in changes)
    assert all(value[0] == "head.*" for key, value in changes if key == "nodes_to_exclude")  # what is there is kept
    assert not any("head's" in json.dumps(value) for _, value in changes)


def test_a_wider_preset_is_tried_where_nothing_else_is_enough(folder, diagnosis, monkeypatch):
    monkeypatch.setattr(suggestions, "_own_changes", lambda *_: [])
    found = try_all(diagnosis, folder / "float.onnx", folder / "broken.onnx", folder / "data.npz", seconds=60)
    assert found.suggestions[0].arguments == "--config A16W8"
    assert found.suggestions[0].outcome is Outcome.HELPED
    assert found.suggestions[1].reason == "another preset works"


def test_time_is_bounded_and_what_was_left_out_is_told(folder, diagnosis, monkeypatch):
    monkeypatch.setattr(suggestions, "LEAST_SECONDS", 0.0)
    said = []
    found = try_all(
        diagnosis,
        folder / "float.onnx",
        folder / "broken.onnx",
        folder / "data.npz",
        seconds=0.0,
        say=lambda *progress: said.append(progress),
    )
    done = [suggestion for suggestion in found.suggestions if suggestion.outcome is not Outcome.UNTRIED]
    assert len(done) == 1
    assert {suggestion.reason for suggestion in found.suggestions[1:]} == {"there was no time"}
    assert f"1 of {len(found.suggestions)} were tried" in found.note
    assert [each[0] for each in said] == [0, 1]


def test_changes_that_do_not_help_or_fail_are_no_advice(folder, diagnosis, monkeypatch):
    useless = [
        Candidate("useless", (("print_summary", False),)),
        Candidate("wrong", (("nodes_to_exclude", ["nowhere"]),)),
    ]
    monkeypatch.setattr(suggestions, "suggest", lambda *_: useless)
    found = try_all(diagnosis, folder / "float.onnx", folder / "broken.onnx", folder / "data.npz", seconds=60)
    assert [suggestion.outcome for suggestion in found.suggestions] == [Outcome.NO_GAIN, Outcome.FAILED]
    assert "nowhere" in found.suggestions[1].reason
    assert found.steps == (Step("none of the 1 changes that were tried helped"),)


def test_the_best_two_are_combined(folder, diagnosis, monkeypatch):
    weak = [
        Candidate("one", (("op_types_to_quantize", ["MatMul"]),)),
        Candidate("two", (("nodes_to_exclude", ["head.*"]),)),
    ]
    monkeypatch.setattr(suggestions, "suggest", lambda *_: weak)
    found = try_all(diagnosis, folder / "float.onnx", folder / "broken.onnx", folder / "data.npz", seconds=60)
    outcomes = {suggestion.text: suggestion.outcome for suggestion in found.suggestions}
    assert (outcomes["one"], outcomes["two"]) == (Outcome.HELPED, Outcome.HELPED)
    (both,) = [suggestion for suggestion in found.suggestions if " and " in suggestion.text]
    assert both.arguments.count("--set") == 2
    others = [suggestion.distance_after for suggestion in found.suggestions if suggestion is not both]
    best = min(distance for distance in others if distance is not None)
    assert None not in others
    assert both.distance_after is not None
    assert (both.outcome is Outcome.HELPED) == (both.distance_after < 0.9 * best)


def test_files_that_do_not_say_how_they_were_made_are_not_tried(folder, diagnosis):
    model = onnx.load(folder / "broken.onnx")
    kept = [prop for prop in model.metadata_props if not prop.key.startswith("quark.")]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    onnx.save(model, folder / "foreign.onnx")
    found = try_all(diagnosis, folder / "float.onnx", folder / "foreign.onnx", folder / "data.npz", seconds=60)
    assert found.suggestions
    assert {suggestion.outcome for suggestion in found.suggestions} == {Outcome.UNTRIED}
    assert all("not tried: the file does not say how to rebuild it" in step.text for step in found.steps)

"""Presets that train beside their bases: which base it is, what a row says, and a whole run on a small network."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from bench.child import OURS, blank
from bench.layered_network import Shape, build
from bench.models import named_presets
from bench.record import Record
from bench.side_by_side import Score
from bench.tuned import HEADER, Gain, base_of, kept_of, main, resume, settle, standard_errors

from quark.onnx.quantization.presets import PRESETS


def test_every_trained_preset_has_a_base_that_does_not_train() -> None:
    for name in named_presets(["finetuned"]):
        assert not PRESETS[base_of(name)].is_trained


@pytest.mark.parametrize("name", ["XINT8", "MX6_ADAROUND", "config.yaml"])
def test_other_presets_are_refused(name: str) -> None:
    with pytest.raises(SystemExit, match="expected presets that train"):
        base_of(name)


def test_a_fall_counts_in_standard_errors_of_the_pairs() -> None:
    random = np.random.default_rng(0)
    images = 10 * random.random(400)  # differ far more than the networks do
    worse = images + 0.1 + 0.2 * random.standard_normal(400)
    assert standard_errors(worse, images) > 5
    assert standard_errors(images, worse) == pytest.approx(-standard_errors(worse, images))
    assert standard_errors(images, images) == 0


def test_only_what_trains_counts_as_kept(tmp_path: Path) -> None:
    corrected = {"name": "bias correction", "changed": ["a"], "left": []}
    trained = {"name": "AdaRound", "changed": ["a: better", "b: better"], "left": [{"node": "c"}]}
    report = tmp_path / "quantized.json"
    report.write_text(json.dumps({"algorithms": [corrected, trained]}))
    assert kept_of(report) == (2, 1)


def test_a_result_takes_the_place_of_an_earlier_failure(tmp_path: Path) -> None:
    arguments = Namespace(output=tmp_path, label="")
    first = Record.begin("tuned", arguments, HEADER)
    for preset in ("XINT8", "MX6_ADAQUANT", "A8W8"):
        settle(first, "net", blank(OURS, "net", preset, "no memory"))
    second = Record.begin("tuned", arguments, HEADER)
    assert resume(second) == set()
    same = Score(70.0, 85.0, 0.0, 1.0, 88.0, 0, 0)
    gain = Gain("net", "XINT8_ADAROUND", "XINT8", 10, 80.0, same, same, same, (0.2, 0.1), 2.0, (3, 1), 5.0)
    settle(second, "net", gain)
    settle(second, "net", blank(OURS, "net", "MX6_ADAQUANT", "too slow"))
    found = Record.read(second.path)
    assert [row[1] for row in found.rows] == ["XINT8_ADAROUND"]
    assert [(blank.what, blank.reason) for blank in found.blanks] == [
        ("net A8W8", "no memory"),
        ("net MX6_ADAQUANT", "too slow"),
    ]


@pytest.mark.slow
def test_a_run_leaves_a_row_for_each_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = build(tmp_path / "net.onnx", Shape(2, 4, 28))
    random = np.random.default_rng(0)
    arrays = {f"{part}_x": random.integers(0, 256, (24, 28, 28, 3), np.uint8) for part in ("train", "test")}
    np.savez(tmp_path / "cifar.npz", **arrays, train_y=np.arange(24) % 10, test_y=np.arange(24) % 10)
    places = ["--cifar", str(tmp_path / "cifar.npz"), "--cifar-model", str(network), "--output", str(tmp_path / "out")]
    small = ["--images", "16", "--iterations", "3", "--threads", "1", "--presets", "XINT8_ADAROUND", "MX6_ADAQUANT"]
    monkeypatch.setattr(sys, "argv", ["tuned", *places, *small])
    main()
    (path,) = (tmp_path / "out").glob("tuned-*.json")
    figures = Record.read(path).figures
    pairs = [(figure["preset"], figure["base"]) for figure in figures]
    assert pairs == [("XINT8_ADAROUND", "XINT8"), ("MX6_ADAQUANT", "MX6")]
    for figure in figures:
        assert figure["images"] == 24
        assert figure["divergence"][0] > 0
        assert sum(figure["kept"]) > 0
        gained = figure["tuned_score"]["top1"] - figure["base_score"]["top1"]
        assert figure["gain"]["difference"] == pytest.approx(gained)

"""From runs to cells: spread, ratios, tables, paired scores."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from bench.accuracy import groups_of, score
from bench.child import OURS, ChildError, Interpreters, Outcome
from bench.quantize import HEADER, Figure, Runs
from bench.results import markdown, times, with_spread, write_json
from bench.timing import Timing


def test_the_best_turn_counts_and_the_median_is_the_spread() -> None:
    timing = Timing.of([3.0, 2.0, 2.5])
    assert (timing.best, timing.median, timing.turns, timing.spread) == (2.0, 2.5, 3, 0.25)
    assert with_spread(timing, 1000, 0) == "2000 +25 %"


def test_what_was_not_measured_is_a_blank_cell() -> None:
    floor = Runs([Outcome(0.5, 90.0)])
    ours = Runs([Outcome(2.0, 200.0, 3.0), Outcome(1.0, 210.0, 3.0)])
    cells = dict(zip(enumerate(HEADER), Figure("net", "XINT8", floor, ours, Runs(error="no")).cells(), strict=True))
    assert [text for (_, name), text in cells.items() if name.startswith("peer")] == [""] * 5
    assert cells[4, "ours / floor"] == "2.0 x"
    assert cells[7, "ours peak MB"] == "200"
    assert times(1.0, None) == ""


def test_a_row_of_another_length_is_no_table() -> None:
    with pytest.raises(ValueError, match="expected 2 cells"):
        markdown(["a", "b"], [["1"]])


def test_a_score_is_paired() -> None:
    labels = np.array([0, 1, 2, 3])
    reference = np.array([[0, 9], [1, 9], [9, 2], [9, 8]])
    ranks = np.array([[0, 9], [9, 1], [2, 9], [7, 8]])
    found = score(reference, ranks, labels)
    assert (found.gained, found.lost, found.top1, found.top5) == (1, 1, 50.0, 75.0)
    assert found.agreement == 25.0
    assert found.difference == 0.0
    assert found.standard_error == pytest.approx(100 * np.std([0, -1, 1, 0]) / 2)


def test_groups_hold_every_file_once_and_in_order() -> None:
    files = {(str(i), OURS): Path(str(i)) for i in range(7)}
    groups = list(groups_of(files, 3))
    assert [len(group) for group in groups] == [3, 3, 1]
    assert [key for group in groups for key in group] == list(files)


def test_json_has_the_settings_and_no_places(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    write_json(Namespace(json=target, calib=Path("elsewhere/images"), images=4), "a machine", [{"x": 1}])
    written = target.read_text()
    assert json.loads(written) == {"setting": "a machine", "arguments": {"images": 4}, "figures": [{"x": 1}]}


def test_a_failing_script_leaves_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import sys; print('first'); sys.exit('the reason')")
    monkeypatch.setattr("bench.child.__file__", str(tmp_path / "child.py"))
    with pytest.raises(ChildError, match="^the reason$"):
        Interpreters().run(OURS, "fails.py", {})


def test_a_script_sees_nothing_of_the_folder_that_the_benchmark_runs_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong one')")
    script = "import json, sys, numpy, pathlib; j = json.loads(sys.argv[1])\n"
    script += "pathlib.Path(j['result']).write_text(json.dumps({'python': sys.prefix}))"
    (tmp_path / "imports.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bench.child.__file__", str(tmp_path / "child.py"))
    assert Interpreters().run(OURS, "imports.py", {}) == {"python": sys.prefix}


def test_a_peer_that_is_not_there_is_found_at_once() -> None:
    with pytest.raises(SystemExit, match="--peer.*environment"):
        Interpreters("no/such/python")

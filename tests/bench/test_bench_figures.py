"""From runs to cells: spread, ratios, tables, paired scores."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from bench.cells import markdown, times, with_spread
from bench.child import NO_EQUIVALENT, OURS, ChildError, Interpreters, Outcome, blank
from bench.quantize import Figure, header
from bench.runs import Runs, blanks
from bench.side_by_side import score
from bench.timing import Timing


def test_the_best_turn_counts_and_the_median_is_the_spread() -> None:
    timing = Timing.of([3.0, 2.0, 2.5])
    assert (timing.best, timing.median, timing.turns, timing.spread) == (2.0, 2.5, 3, 0.25)
    assert with_spread(timing, 1000, 0) == "2000 +25 %"


def test_what_was_not_measured_is_a_blank_cell_with_its_reason() -> None:
    floor = Runs([Outcome(0.5, 90.0)])
    ours = Runs([Outcome(2.0, 200.0, 3.0), Outcome(1.0, 210.0, 3.0)])
    runs = {OURS: ours, "amd-quark": Runs([Outcome(4.0, 400.0, 3.5)]), "nncf": Runs(error="it broke")}
    cells = Figure("net", "XINT8", floor, runs).cells()
    found = list(zip(header(["AMD Quark", "NNCF"]), cells, strict=True))
    assert [text for name, text in found if name.startswith("NNCF")] == [""] * 3
    assert dict(found)["ours / floor"] == "2.0 x"
    assert dict(found)["ours peak MB"] == "200"
    assert [text for name, text in found if name == "of ours"] == ["4.0 x", "", "2.00 x", ""]
    assert [(blank.who, blank.what, blank.reason) for blank in blanks(runs, "net", "XINT8")] == [
        ("nncf", "net XINT8", "it broke")
    ]
    assert times(1.0, None) == ""


def test_what_a_peer_cannot_do_at_all_has_nothing_to_do_with_the_model() -> None:
    assert blank("nncf", "net", "MX6", NO_EQUIVALENT).what == "MX6"
    assert blank("nncf", "net", "MX6", "it broke").what == "net MX6"


def test_a_candidate_that_failed_is_not_run_again() -> None:
    calls = []

    def fail() -> Outcome:
        calls.append(1)
        raise ChildError("no")

    runs = Runs()
    assert [runs.run(fail), runs.run(fail)] == ["no", "no"]
    assert len(calls) == 1


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


def test_a_script_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr("bench.child.__file__", str(tmp_path / "child.py"))
    with pytest.raises(ChildError, match="longer than 0 s"):
        Interpreters().with_timeout(0.3).run(OURS, "sleeps.py", {})

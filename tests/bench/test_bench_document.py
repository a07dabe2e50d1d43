"""docs/benchmarks.md is what the records in bench/results give."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
from bench.document import BENCHES, DOCUMENT, benchmarks_document, docstring_of, main, newest_records
from bench.record import Blank, Record

ROOT = Path(__file__).resolve().parents[2]


def write_record(folder: Path, bench: str, date: str, cell: str, label: str = "") -> None:
    record = Record.begin(bench, Namespace(output=folder, label=label), ["model", "s"], ["Best of 3."])
    record.date = date
    record.add([["net", cell]], {}, [Blank("nncf", "net", "it broke")])


def test_the_page_in_the_repository_is_up_to_date() -> None:
    assert main(["--check", "--root", str(ROOT)]) == 0


def test_a_page_that_is_not_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / DOCUMENT).write_text(benchmarks_document() + "more\n")
    assert main(["--check", "--root", str(tmp_path)]) == 1
    assert "python -m bench.document" in capsys.readouterr().err


def test_the_newest_record_of_each_label_is_shown(tmp_path: Path) -> None:
    write_record(tmp_path, "ops", "2026-01-02", "newer")
    write_record(tmp_path, "ops", "2026-01-01", "older")
    write_record(tmp_path, "ops", "2026-01-01", "special", "cuda")
    write_record(tmp_path, "accuracy", "2025-01-01", "first")
    assert [record.rows[0][1] for record in newest_records(tmp_path)] == ["first", "newer", "special"]
    page = benchmarks_document(tmp_path)
    assert "| net | newer |" in page
    assert "| net | older |" not in page
    assert page.index("## Accuracy") < page.index("| net | first |") < page.index("## Time and memory")
    assert page.index("## Operators") < page.index("### cuda") < page.index("| net | special |")
    assert "- nncf: it broke (net)" in page
    assert "python -m bench.accuracy" in page


def test_every_benchmark_is_on_the_page_with_its_command() -> None:
    programs = {path.stem for path in (ROOT / "bench").glob("*.py") if "Record.begin(" in path.read_text()}
    assert programs - {"record"} == set(BENCHES)
    for bench in BENCHES:
        assert f"    python -m bench.{bench}" in docstring_of(bench)


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    write_record(tmp_path, "cooking", "2026-01-01", "1")
    with pytest.raises(ValueError, match="cooking-2026-01-01.json.*no benchmark"):
        benchmarks_document(tmp_path)

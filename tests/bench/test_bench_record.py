"""A record is what was measured, in two files that say the same, and names no place."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench.record import Blank, Record, blank_lines, command_line, without_places


def begin(output: Path, **given: object) -> Record:
    arguments = Namespace(output=output, label=str(given.pop("label", "")), images=4, calib=Path("/pictures/images"))
    vars(arguments).update(given)
    return Record.begin("quantize", arguments, ["model", "s"], ["Best of 3."], {"nncf": "nncf 3.4.0"})


@dataclass
class Measured:
    seconds: float
    log: str


def test_both_files_are_there_after_every_row_and_have_it(tmp_path: Path) -> None:
    record = begin(tmp_path / "new" / "folder")
    for number in range(1, 4):
        record.add([[f"net{number}", "1.50 +4 %"]], Measured(1.5, "see /scratch/quark-bench-x/log.txt"))
        content = json.loads(record.path.read_text())
        assert len(content["rows"]) == len(content["figures"]) == number
        assert content["rows"][-1] == [f"net{number}", "1.50 +4 %"]
        assert f"| net{number} | 1.50 +4 % |" in record.path.with_suffix(".md").read_text()
    assert content["figures"][0] == {"seconds": 1.5, "log": "see log.txt"}
    assert content["machine"]
    assert content["versions"]["Python"]
    assert {path.name for path in record.folder.iterdir()} == {f"{record.name}.json", f"{record.name}.md"}


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    record = begin(tmp_path, label="small")
    record.add([["net", "1"]], {"x": [1, 2]}, [Blank("nncf", "net", "no")])
    assert record.path.name == f"quantize-small-{record.date}.json"
    assert Record.read(record.path) == record


def test_arguments_have_no_places(tmp_path: Path) -> None:
    given = {"peers": ["amd-quark=/envs/peer/bin/python", "nncf"], "model": ["mine=/data/mine.onnx"], "resume": True}
    record = begin(tmp_path, presets=["A8W8", "/data/mine.yaml"], **given)
    assert record.arguments == {
        "images": 4,
        "peers": ["amd-quark", "nncf"],
        "model": ["mine"],
        "presets": ["A8W8", "mine.yaml"],
    }
    record.write()
    for path in tmp_path.iterdir():
        assert "/pictures" not in path.read_text()
        assert str(tmp_path) not in path.read_text()


def test_the_command_says_what_was_measured_and_not_where(tmp_path: Path) -> None:
    given = ["--calib", str(tmp_path), "--output", "x", "--environments=y", "--resume", "--presets", "A8W8"]
    assert command_line("accuracy", given) == "python -m bench.accuracy --calib PATH --presets A8W8"
    remark = "longer than the name of any file, " * 20
    assert command_line("accuracy", ["--note", remark]) == f"python -m bench.accuracy --note {remark}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[Errno 2] No such file: '/data/a/c.onnx'", "[Errno 2] No such file: 'c.onnx'"),
        ("/usr/lib/python3/x.py:3: error", "x.py:3: error"),
        ("C:\\nets\\me\\b.onnx is gone", "b.onnx is gone"),
        ("12 GB/s, 3 / 4, and/or", "12 GB/s, 3 / 4, and/or"),
        ("a/b", "a/b"),
    ],
)
def test_paths_are_cut_and_nothing_else(text: str, expected: str) -> None:
    assert without_places(text) == expected


def test_blank_cells_with_one_reason_are_one_line() -> None:
    found = [Blank("nncf", "A", "no"), Blank("nncf", "B", "no"), Blank("nncf", "A", "no"), Blank("ort", "A", "no")]
    assert blank_lines(found) == ["- nncf: no (A, B)", "- ort: no (A)"]


def test_a_bad_label_or_folder_ends_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--label a/b"):
        begin(tmp_path, label="a/b")
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"--output.*file"):
        begin(tmp_path / "file" / "folder")


def test_what_is_no_record_is_named(tmp_path: Path) -> None:
    for name, text in (("a.json", "{"), ("b.json", "[]"), ("c.json", '{"bench": "x", "blanks": []}')):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(ValueError, match=f"{name}.*no record"):
            Record.read(path)

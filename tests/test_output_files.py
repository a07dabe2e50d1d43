"""Files that are there whole or not at all, alone and together."""

from __future__ import annotations

import os
import time
from pathlib import Path

import onnx
import pytest
from onnx_models import conv_bn_relu

from quark.errors import OutputError, QuarkError
from quark.files.output import PREFIX, temporary
from quark.onnx.save import SaveOptions, complete, together, write_model, write_text, writing


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_what_the_system_refuses_names_the_file_and_keeps_the_cause(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"gone.*model\.onnx' cannot be written: No such file") as caught:
        write_text("{}", tmp_path / "gone" / "model.onnx")
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_errors_of_ours_pass_as_they_are(tmp_path: Path) -> None:
    mine = QuarkError("of another kind")
    with pytest.raises(QuarkError) as caught, writing(tmp_path):
        raise mine
    assert caught.value is mine


def test_a_block_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")

    def fail() -> None:
        with complete(path) as unfinished:
            unfinished.write_text("half")
            raise KeyError("interrupted")

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["out.json"]


def test_a_result_has_the_rights_of_an_ordinary_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text("{}", tmp_path / "out.json")
    finally:
        os.umask(before)
    assert (tmp_path / "out.json").stat().st_mode & 0o777 == 0o640


def test_a_file_that_somebody_still_writes_is_left_alone(tmp_path: Path) -> None:
    """It is old, as it is when a large model takes long, and its writer holds the lock."""
    with temporary(tmp_path / "large.onnx") as unfinished:
        os.utime(unfinished, (time.time() - 1000,) * 2)
        write_text("{}", tmp_path / "other.json")
        assert unfinished.exists()
    assert names(tmp_path) == ["other.json"]


def test_what_nobody_writes_any_more_is_removed_when_it_is_old(tmp_path: Path) -> None:
    fresh, old = tmp_path / f"{PREFIX}fresh.onnx", tmp_path / f"{PREFIX}old.onnx"
    for each in (fresh, old):
        each.write_bytes(b"half of a model")
    os.utime(old, (time.time() - 1000,) * 2)
    (tmp_path / f"{PREFIX}link").symlink_to(old)
    write_text("{}", tmp_path / "other.json")
    assert names(tmp_path) == sorted([fresh.name, f"{PREFIX}link", "other.json"])


def _write_both(folder: Path, *, report: Path) -> None:
    before = [name for name in names(folder) if name.startswith("out")]
    with together():
        write_model(conv_bn_relu(), folder / "out.onnx", SaveOptions(has_external_data=True))
        assert [name for name in names(folder) if name.startswith("out")] == before
        write_text("{}", report)


def test_files_that_belong_together_come_together(tmp_path: Path) -> None:
    _write_both(tmp_path, report=tmp_path / "out.json")
    found = names(tmp_path)
    assert [name.partition("-")[0] for name in found] == ["out", "out.json", "out.onnx"]
    assert onnx.load(tmp_path / "out.onnx").graph.initializer


def test_where_one_cannot_be_written_none_changes(tmp_path: Path) -> None:
    """Not even the weights of the model that was there, which a new one would make superfluous."""
    old = {"out.onnx": "old", "out-0123456789ab.data": "old weights"}
    for name, text in old.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(OutputError, match="nowhere"):
        _write_both(tmp_path, report=tmp_path / "nowhere" / "out.json")
    assert {name: (tmp_path / name).read_text() for name in names(tmp_path)} == old


def test_one_block_within_another_waits_for_it(tmp_path: Path) -> None:
    with together():
        with together():
            write_text("{}", tmp_path / "a.json")
        assert not (tmp_path / "a.json").exists()
    assert names(tmp_path) == ["a.json"]

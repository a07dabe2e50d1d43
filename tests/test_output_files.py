"""Files that are there whole or not at all, alone and together."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import onnx
import pytest

from quark.demo import network_path
from quark.errors import OutputError, QuarkError
from quark.files.output import scratch_folder, temporary
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
    with temporary(tmp_path / "large.onnx") as unfinished:
        write_text("{}", tmp_path / "other.json")
        assert unfinished.exists()
    assert names(tmp_path) == ["other.json"]


def test_a_file_that_waits_for_others_keeps_its_lock(tmp_path: Path) -> None:
    """Another process that writes into the folder must not take it for abandoned."""
    program = "import sys; from pathlib import Path; from quark.onnx.save import write_text; "
    program += "write_text('{}', Path(sys.argv[1]))"
    with together(tmp_path / "a.onnx"):
        write_text("{}", tmp_path / "a.json")
        subprocess.run([sys.executable, "-c", program, str(tmp_path / "b.json")], check=True)
        assert (tmp_path / "b.json").exists()
    assert names(tmp_path) == ["a.json", "b.json"]


def test_only_what_quark_itself_left_is_removed(tmp_path: Path) -> None:
    """A temporary file and a lock without an owner are; files of the user's with similar names stay."""
    ours = [".quark-0123456789abcdef.tmp.onnx", ".quark-0123456789abcdef.tmp", ".quark-0123456789abcdef.lock"]
    own = [".quark-notes", ".quark-0123456789abcdef", ".quark-0123456789abcdef.tmp.tar.gz", ".quark-settings.json"]
    for name in (*ours, *own):
        (tmp_path / name).write_bytes(b"half of a model")
        os.utime(tmp_path / name, (1e9, 1e9))
    (tmp_path / ".quark-00000000000000ff.tmp").symlink_to(tmp_path / ".quark-notes")
    os.mkfifo(tmp_path / ".quark-00000000000000fe.tmp")
    write_text("{}", tmp_path / "other.json")
    kept = [*own, ".quark-00000000000000ff.tmp", ".quark-00000000000000fe.tmp", "other.json"]
    assert names(tmp_path) == sorted(kept)


def test_a_scratch_folder_of_a_dead_process_is_removed_by_the_next(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    program = "import os, signal; from quark.files.output import Scratch; folder = Scratch(); "
    program += "(folder.path / 'weights').write_bytes(b'x' * 100); os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", program], check=False)
    (left,) = tmp_path.iterdir()
    assert (left / "files" / "weights").stat().st_size == 100
    (tmp_path / "quark-mine").mkdir()
    with scratch_folder() as folder:
        assert not left.exists()
        assert list(folder.iterdir()) == []
        with scratch_folder() as other:
            assert folder.exists()
            assert other != folder
    assert names(tmp_path) == ["quark-mine"]


def _write_both(folder: Path, *, report: Path) -> None:
    before = [name for name in names(folder) if name.startswith("out")]
    with together(folder / "out.onnx"):
        write_model(onnx.load(network_path()), folder / "out.onnx", SaveOptions(has_external_data=True))
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

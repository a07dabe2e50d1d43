"""A short run of the fuzzer of documents, in a process of its own, and that it would notice a surprise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("fuzz_documents.py")


@pytest.mark.parametrize(
    ("count", "seed", "options"),
    [(150, 1, []), pytest.param(5000, 77, ["--torch"], marks=pytest.mark.slow)],
    ids=["quick", "slow"],
)
def test_hostile_documents_give_a_result_or_an_error_of_ours(
    count: int, seed: int, options: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, PROGRAM, "--save", tmp_path, "--count", str(count), "--seed", str(seed), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{count} cases" in result.stdout
    assert '"refused"' in result.stdout
    assert not list(tmp_path.iterdir())


SURPRISING = """
import sys
sys.argv = ["fuzz_documents.py", "--count", "9", "--seed", "5", "--door", "preprocessing", "--save", "."]
sys.path[:0] = [{folder!r}]
import fuzz_documents
door = next(door for door in fuzz_documents.DOORS if door.name == "preprocessing")
object.__setattr__(door, "enter", {does})
fuzz_documents.MOST_SECONDS = 1
fuzz_documents.main()
"""


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("lambda path: 1 / 0", "ZeroDivisionError"),
        ("lambda path: __import__('time').sleep(60)", "TimeoutError"),
        ("lambda path: bytearray(1 << 36)", "MemoryError"),
    ],
)
@pytest.mark.slow
def test_every_kind_of_surprise_is_noticed_and_its_document_saved(does: str, told: str, tmp_path: Path) -> None:
    program = SURPRISING.format(folder=str(PROGRAM.parent), does=does)
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120)
    assert result.returncode == 1, result.stdout + result.stderr
    assert told in result.stdout
    assert [each.name for each in tmp_path.iterdir()] == ["document-5-0.yaml"]

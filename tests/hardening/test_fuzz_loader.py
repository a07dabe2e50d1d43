"""A short run of the fuzzer of everything that reads files, in a process of its own, and that it would notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("fuzz_loader.py")


def run_fuzzer(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PROGRAM, "--save", folder, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


@pytest.mark.parametrize(
    ("seconds", "seed"), [(5, 1), pytest.param(120, 77, marks=pytest.mark.slow)], ids=["quick", "slow"]
)
def test_broken_files_give_a_result_or_an_error_of_ours(seconds: int, seed: int, tmp_path: Path) -> None:
    result = run_fuzzer(tmp_path, "--seconds", seconds, "--seed", seed)
    assert result.returncode == 0, result.stdout + result.stderr
    assert '"surprises"' not in result.stdout
    assert '"refused"' in result.stdout
    assert not list(tmp_path.iterdir())


SURPRISING = """
import sys
sys.argv = ["fuzz_loader.py", "--seconds", "30", "--seed", "5", "--door", "card", "--save", "."]
sys.path[:0] = [{folder!r}]
import fuzz_loader, loader_doors
object.__setattr__(next(door for door in loader_doors.DOORS if door.name == "card"), "enter", {does})
fuzz_loader.MOST_SECONDS = 1
fuzz_loader.main()
"""


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("lambda path: 1 / 0", "ZeroDivisionError"),
        ("lambda path: __import__('os').abort()", "the process ended with status -6"),
        ("lambda path: __import__('time').sleep(60)", "longer than its limit"),
        ("lambda path: bytearray(1 << 36)", "MemoryError"),
    ],
)
@pytest.mark.slow
def test_every_kind_of_surprise_is_noticed_and_its_input_saved(does: str, told: str, tmp_path: Path) -> None:
    program = SURPRISING.format(folder=str(PROGRAM.parent), does=does)
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120)
    assert result.returncode == 1, result.stdout + result.stderr
    assert told in result.stdout
    assert [each.name for each in tmp_path.iterdir()] == ["fuzz-5-0-card.json"]

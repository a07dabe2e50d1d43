"""Runs that are killed (SIGKILL) at random moments: the output is the old file, a new one or none, and always whole.

The work is in `killed_runs.py`, a process of its own for each kind of run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killed_runs.py")

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs fork and SIGKILL")


def kill_runs(work: str, folder: Path, kills: int, *options: str) -> str:
    command = [sys.executable, PROGRAM, work, folder, "--kills", str(kills), "--seed", "3", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_files_are_whole_whenever_a_run_is_killed(tmp_path: Path) -> None:
    assert "3 kills" in kill_runs("save two files", tmp_path, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "kills"), [("quantize", 30), ("save", 60), ("save two files", 60), ("pack", 40), ("finetune", 10)]
)
def test_files_are_whole_however_often_runs_are_killed(work: str, kills: int, tmp_path: Path) -> None:
    assert f"{kills} kills" in kill_runs(work, tmp_path, kills)


@pytest.mark.slow
@pytest.mark.parametrize("work", ["quantize", "save", "save two files", "pack"])
def test_files_are_whole_by_whatever_signal_a_run_is_ended(work: str, tmp_path: Path) -> None:
    assert "69 kills" in kill_runs(work, tmp_path, 69, "--all-signals")

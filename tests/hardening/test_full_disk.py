"""Disks that are full and folders that cannot be written to: an error that names the file and says why, nothing left
behind, and the old files as they were. The work is in `full_disks.py`, a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("full_disks.py")


def run_works(folder: Path, where: str, *works: str, prefix: tuple[str, ...] = ()) -> str:
    command = [*prefix, sys.executable, str(PROGRAM), str(folder), where, *works]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr
    return result.stdout


def mounting() -> tuple[str, ...]:
    """What a command is put behind so that it can mount a disk of its own; the test is skipped where that is not
    allowed."""
    prefix = ("unshare", "-m") if os.geteuid() == 0 else ("unshare", "-Urm")
    if shutil.which("unshare") is None:
        pytest.skip("there is no 'unshare' here to mount a disk with")
    trial = ["sh", "-c", "mount -t tmpfs none /mnt"]
    tried = subprocess.run([*prefix, *trial], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no disk can be mounted here: {tried.stderr.strip()}")
    return prefix


@pytest.mark.skipif(os.name == "nt", reason="needs RLIMIT_FSIZE")
def test_no_file_may_grow(tmp_path: Path) -> None:
    assert "2 works" in run_works(tmp_path, "limit", "quantize to two files", "pack")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["limit", "full", "readonly"])
def test_all_that_write(where: str, tmp_path: Path) -> None:
    works = ["quantize", "quantize to two files", "pack", "unpack", "config", "report", "search", "prepare-data"]
    works += ["export"] if where != "limit" else []  # torch itself writes temporary files
    said = run_works(tmp_path, where, *works, prefix=() if where == "limit" else mounting())
    assert f"{len(works)} works" in said

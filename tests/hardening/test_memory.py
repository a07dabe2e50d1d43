"""Memory does not grow from run to run in one process.

Each kind of work is done twenty times in a process of its own; what it holds after the last is compared with what it
held after the fifth. By then allocators, caches and thread pools have what they need.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNS, SETTLED = 20, 5
MAY_GROW_MB = 5.0
KINDS = ("quantize A8W8", "quantize MXFP4E2M1", "pack", "evaluate", "torch")
QUICK = "quantize A8W8"
WORK = Path(__file__).with_name("memory_process.py")


def held_mb(kind: str, folder: Path) -> list[float]:
    """What the process held after each run."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORK), kind, str(RUNS), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [float(line) for line in done.stdout.split()]


def check(kind: str, folder: Path) -> None:
    held = held_mb(kind, folder)
    assert len(held) == RUNS
    assert held[-1] - held[SETTLED - 1] < MAY_GROW_MB, held


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_quantizing_again_and_again_takes_no_more_memory(tmp_path):
    check(QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != QUICK])
def test_doing_it_again_and_again_takes_no_more_memory(kind, tmp_path):
    check(kind, tmp_path)

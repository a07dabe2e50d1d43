"""A short run of the fuzzer, in a process of its own: a crash must not take the other tests with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FUZZER = Path(__file__).with_name("fuzz_operators.py")


def test_nothing_surprising_happens() -> None:
    result = subprocess.run(
        [sys.executable, FUZZER, "--seconds", "5", "--seed", "1"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " nodes of which " in result.stdout

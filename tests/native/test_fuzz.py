"""A short run of the fuzzers, each in a process of its own: a crash must not take the other tests with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("fuzzer", "seconds", "told"),
    [
        ("fuzz_operators", 2, " nodes of which "),
        ("fuzz_statistics", 1, " statistics of "),
        ("fuzz_fake_quantize", 1, " quantizers of "),
    ],
)
def test_nothing_surprising_happens(fuzzer: str, seconds: int, told: str) -> None:
    program = Path(__file__).with_name(f"{fuzzer}.py")
    result = subprocess.run(
        [sys.executable, program, "--seconds", str(seconds), "--seed", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert told in result.stdout

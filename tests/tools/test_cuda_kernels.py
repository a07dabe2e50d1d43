"""The PTX that is checked in is what the sources were compiled to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import cuda_kernels


def test_the_archive_belongs_to_the_sources() -> None:
    assert cuda_kernels.find_problem() is None


def test_a_changed_source_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_kernels, "OPTIONS", (*cuda_kernels.OPTIONS, "-fmad=true"))
    assert "options" in str(cuda_kernels.find_problem())
    monkeypatch.undo()
    archive = tmp_path / cuda_kernels.ARCHIVE.name
    archive.write_bytes(cuda_kernels.pack("another program"))
    monkeypatch.setattr(cuda_kernels, "ARCHIVE", archive)
    monkeypatch.setattr(cuda_kernels, "ROOT", tmp_path)
    monkeypatch.setattr(cuda_kernels, "expected_record", dict)
    assert archive.name in str(cuda_kernels.find_problem())


def test_every_included_file_is_a_source() -> None:
    folder = cuda_kernels.ROOT / "csrc"
    found, waiting = set(), [folder / "cuda" / "kernels.cu"]
    while waiting:
        file = waiting.pop().resolve()
        if file not in found:
            found.add(file)
            waiting += [file.parent / name for name in re.findall(r'#include "(.+?)"', file.read_text())]
    assert {str(file.relative_to(folder)) for file in found} == set(cuda_kernels.SOURCES)


def test_an_old_driver_can_read_it() -> None:
    ptx = cuda_kernels.unpack(cuda_kernels.ARCHIVE.read_bytes()).decode()
    assert ptx.startswith(f".version {cuda_kernels.PTX_VERSION}\n.target sm_{cuda_kernels.ARCHITECTURE}\n")
    # a kernel is loaded with what stands before the first, and nothing else: no functions, no variables
    head, *kernels = ptx.split(".visible .entry ")
    assert head.count("\n") == 3
    assert not [kernel.split("(")[0] for kernel in kernels if re.search(r"^(\.global|\.const|\.func)", kernel, re.M)]

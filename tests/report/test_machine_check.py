"""Little room, memory, time or letters: containers and shells as they come."""

import os
import shutil
import sys
import tempfile
import types

import pytest

from quark.report import environment
from quark.report.installation import Health


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """Control groups of our own: `groups(memory_max='1000', ...)` writes files; names are paths."""
    root = tmp_path / "cgroup"
    root.mkdir()
    own = tmp_path / "own"
    monkeypatch.setattr(environment, "CGROUPS", root)
    monkeypatch.setattr(environment, "OWN_CGROUPS", own)

    def write(own_lines, files):
        own.write_text(own_lines)
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)

    return write


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/\n", {"memory.max": "512000000\n"}),
        ("0::/a/b\n", {"a/memory.max": "512000000\n", "a/b/memory.max": "max\n"}),
        ("4:memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": "512000000\n"}),
        ("4:memory:/not-mounted\n", {"memory/memory.limit_in_bytes": "512000000\n"}),
    ],
)
def test_little_memory_in_a_container(groups, own, files):
    groups(own, files)
    (finding,) = environment.memory()
    assert finding.health is Health.WARNING
    assert "the container allows 512.0 MB" in finding.detail
    assert "CalibWorkerNum" in finding.remedy


@pytest.mark.parametrize("content", ["max\n", "9223372036854771712\n"])
def test_no_limit_of_memory(groups, content):
    groups("0::/\n", {"memory.max": content})
    (finding,) = environment.memory()
    assert "container" not in finding.detail


def test_a_limit_of_ulimit(groups, monkeypatch):
    groups("0::/\n", {})
    monkeypatch.setattr(environment, "_address_space_bytes", lambda: 1_500_000_000)
    (finding,) = environment.memory()
    assert finding.health is Health.WARNING
    assert "ulimit" in finding.detail


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}),
        ("0::/a\n", {"cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}),
        ("1:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "150000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}),
    ],
)
def test_a_share_of_the_processors(groups, monkeypatch, own, files):
    groups(own, files)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    (finding,) = environment.processors()
    assert finding.health is Health.WARNING
    assert "64 are seen" in finding.detail
    assert "1.5" in finding.detail
    assert "taskset -c 0-1" in finding.remedy


@pytest.mark.parametrize("files", [{}, {"cpu.max": "max 100000\n"}, {"cpu/cpu.cfs_quota_us": "-1\n"}])
def test_all_processors(groups, files):
    groups("0::/\n", files)
    (finding,) = environment.processors()
    assert finding.health is Health.OK


def test_a_temporary_folder_that_cannot_be_written(monkeypatch):
    def refuse():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    (finding,) = environment.temporary_folder()
    assert finding.health is Health.BROKEN
    assert "TMPDIR" in finding.remedy


def test_a_temporary_folder_that_is_nearly_full(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=20_000_000))
    (finding,) = environment.temporary_folder()
    assert finding.health is Health.WARNING
    assert "20.0 MB" in finding.detail


def test_text_without_most_letters(monkeypatch):
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    (finding,) = environment.text()
    assert finding.health is Health.WARNING
    assert "ascii" in finding.detail
    assert "PYTHONUTF8" in finding.remedy

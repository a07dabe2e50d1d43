"""`quark doctor`'s checks, on this environment and on broken ones."""

import importlib.metadata
from pathlib import Path

import pytest

from quark.report import environment
from quark.report.environment import Health, examine, foreign_files, is_healthy


def by_name(findings):
    return {each.check: each for each in findings}


def test_this_environment_is_healthy():
    findings = examine()
    assert is_healthy(findings), [each for each in findings if each.health is Health.BROKEN]
    assert {"python", "quark", "numpy", "onnx", "onnxruntime", "native library", "custom operator"} <= set(
        by_name(findings)
    )
    assert "CPUExecutionProvider" in by_name(findings)["onnxruntime"].detail


class FakeDistribution:
    def __init__(self, name, files=(), root=Path(".")):
        self.metadata = {"Name": name}
        self.version = "9.9"
        self.files = [importlib.metadata.PackagePath(each) for each in files]
        self.root = root

    def locate_file(self, path):
        return self.root / path


@pytest.mark.parametrize("name", ["amd-quark", "AMD_Quark"])
def test_amd_quark_is_found_with_a_remedy(monkeypatch, name):
    real = list(importlib.metadata.distributions())
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [*real, FakeDistribution(name)])
    findings = examine()
    assert not is_healthy(findings)
    found = by_name(findings)["amd-quark"]
    assert "9.9" in found.detail
    assert "pip uninstall" in found.remedy
    assert "virtual environments" in found.remedy


def test_two_runtimes_overwrite_each_other(monkeypatch):
    real = list(importlib.metadata.distributions())
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [*real, FakeDistribution("onnxruntime-gpu")])
    broken = [each for each in examine() if each.health is Health.BROKEN]
    assert [each.check for each in broken] == ["onnxruntime"]
    assert "onnxruntime-gpu" in broken[0].remedy


def test_foreign_files_beside_ours(tmp_path):
    package = tmp_path / "quark"
    (package / "onnx").mkdir(parents=True)
    for name in ("__init__.py", "onnx/__init__.py", "onnx/theirs.py", "shapeshifter.py"):
        (package / name).write_text("")
    ours = FakeDistribution("quark-quantizer", ["quark/__init__.py", "quark/onnx/__init__.py"], tmp_path)
    assert foreign_files(package, ours) == ["onnx/theirs.py", "shapeshifter.py"]


def test_foreign_files_beside_an_editable_install(tmp_path):
    (tmp_path / "quark").mkdir()
    (tmp_path / "quark" / "__init__.py").write_text("")
    editable = FakeDistribution("quark-quantizer", ["_editable.pth", "quark/native/lib.so"], tmp_path)
    assert foreign_files(tmp_path / "elsewhere", editable) == ["__init__.py"]


def test_a_check_that_raises_is_a_finding_and_hides_no_other(monkeypatch):
    def explode():
        raise OSError("cannot load")
        yield

    checks = (("first", explode), *environment.CHECKS[:1])
    monkeypatch.setattr(environment, "CHECKS", checks)
    findings = examine()
    assert findings[0].health is Health.BROKEN
    assert "cannot load" in findings[0].detail
    assert len(findings) > 1


def test_missing_library(monkeypatch):
    monkeypatch.setattr("quark.formats.native.library_file", lambda: None)
    found = by_name(examine())["native library"]
    assert found.health is Health.BROKEN
    assert "force-reinstall" in found.remedy

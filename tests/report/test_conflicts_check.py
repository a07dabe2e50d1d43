"""AMD's package in the same environment, or what it left there."""

import pytest
from distributions import FakeDistribution, install

from quark.report.installation import Health, amd_quark, foreign_files


@pytest.mark.parametrize("name", ["amd-quark", "AMD_Quark"])
def test_amd_quark_is_found_with_a_remedy(monkeypatch, name):
    install(monkeypatch, name)
    (finding,) = amd_quark()
    assert finding.health is Health.BROKEN
    assert "9.9" in finding.detail
    assert "pip uninstall" in finding.remedy
    assert "virtual environments" in finding.remedy


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

"""Packages that are missing, too old, broken or not the ones that were meant."""

import importlib
import importlib.util
import sys

import pytest
from distributions import set_version

from quark.report import installation
from quark.report.installation import OURS, Health, core_packages, parse, requirements, shadowing_file

CORE = [requirement.name for requirement in requirements()]


def found(name):
    return next(package for package in core_packages() if package.check == name)


def test_the_core_is_what_pyproject_says():
    assert {"numpy", "onnx", "onnx-ir", "ml-dtypes", "click", "rich", "pillow", "pyyaml"} == set(CORE)
    assert [requirement.name for requirement in requirements("cpu")] == ["onnxruntime"]


@pytest.mark.parametrize("name", CORE)
def test_missing(monkeypatch, name):
    set_version(monkeypatch, name, None)
    finding = found(name)
    assert finding.health is Health.BROKEN
    assert finding.consequence
    assert finding.remedy.startswith(f"pip install '{name}>=")


@pytest.mark.parametrize(("name", "version"), [(name, "0.0.1") for name in CORE] + [("onnx-ir", "2.0")])
def test_version_out_of_bounds(monkeypatch, name, version):
    set_version(monkeypatch, name, version)
    finding = found(name)
    assert finding.health is Health.BROKEN
    assert version in finding.detail
    assert "pip install --upgrade" in finding.remedy


@pytest.mark.parametrize(
    ("error", "cause", "remedy"),
    [
        (TypeError("Descriptors cannot be created directly."), "protobuf is another version", "onnx protobuf"),
        (RuntimeError("Detected incompatible Protobuf Gencode/Runtime: gencode 7"), "protobuf", "onnx protobuf"),
        (ImportError("numpy.core.multiarray failed to import"), "another version of numpy", "--force-reinstall"),
        (AttributeError("_ARRAY_API not found"), "another version of numpy", "--force-reinstall"),
        (ImportError("libc.so.6: version `GLIBC_2.38' not found"), "newer system", "--only-binary"),
        (ImportError("libz.so.1: cannot open shared object file"), "library that it needs is missing", "message names"),
        (ImportError("x.so: wrong ELF class: ELFCLASS32"), "another processor", "--force-reinstall"),
        (ImportError("x.so: failed to map segment from shared object"), "noexec", "another folder"),
        (ZeroDivisionError("what nobody expects"), "what nobody expects", "--force-reinstall"),
    ],
)
def test_an_import_that_fails_is_explained(monkeypatch, error, cause, remedy):
    real = importlib.import_module

    def failing(name, *rest):
        if name == "onnx":
            raise error
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", failing)
    finding = found("onnx")
    assert finding.health is Health.BROKEN
    assert cause in finding.detail
    assert str(error) in finding.detail
    assert remedy in finding.remedy


def test_a_folder_of_that_name_where_python_was_started(monkeypatch, tmp_path):
    (tmp_path / "yaml").mkdir()
    (tmp_path / "yaml" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "yaml", raising=False)
    finding = found("pyyaml")
    assert finding.health is Health.BROKEN
    assert "another module of that name" in finding.detail
    assert "cd" in finding.remedy


def test_python_started_inside_our_sources(monkeypatch):
    package = installation.PACKAGE_FOLDER
    real = importlib.util.find_spec
    spec = importlib.util.spec_from_file_location("onnx", package / "onnx" / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: spec if name == "onnx" else real(name, *rest))
    assert shadowing_file("onnx") == package / "onnx" / "__init__.py"
    assert found("onnx").health is Health.BROKEN


def test_sources_that_were_never_installed(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    (finding,) = core_packages()
    assert finding.health is Health.WARNING
    assert OURS in finding.detail


@pytest.mark.parametrize("version", ["1.20", "1.20.0", "1.20.1+cu12", "1.21.0rc1", "2.0"])
def test_versions_that_meet_a_bound(version):
    assert parse("onnxruntime>=1.20").is_met_by(version)
    assert not parse("onnxruntime>=1.20").is_met_by("1.19.9")
    assert not parse("onnxruntime>=1.20").is_met_by("1.3")


def test_a_requirement_without_a_bound_is_our_mistake():
    with pytest.raises(ValueError, match="no lower bound"):
        parse("numpy")

"""The compiled library: missing, switched off, for another machine; and the operator that is tried."""

import ctypes

import pytest

from quark.formats import native
from quark.report import installation
from quark.report.installation import Health, custom_operator, native_library


@pytest.fixture(autouse=True)
def _load_anew():
    native.load_library.cache_clear()
    yield
    native.load_library.cache_clear()


@pytest.fixture
def some_library(monkeypatch, tmp_path):
    """A file in the library's place, also where the package of Python alone is installed."""
    (tmp_path / native.FILE_NAME).write_bytes(b"never loaded")
    monkeypatch.setattr(native, "library_file", lambda: tmp_path / native.FILE_NAME)


def test_missing_is_a_warning_and_the_operator_runs_as_portable_functions(monkeypatch):
    monkeypatch.setattr(native, "library_file", lambda: None)
    (finding,) = native_library()
    assert finding.health is Health.WARNING
    assert "no native library" in finding.detail
    assert "portable operators, slower" in finding.detail
    assert "force-reinstall" in finding.remedy
    (operator,) = custom_operator()
    assert operator.health is Health.OK
    assert "portable functions" in operator.detail


@pytest.mark.parametrize(
    ("content", "cause"),
    [(b"\x7fELF\x01" + bytes(200), "another processor"), (b"not a library", "another processor")],
)
def test_a_library_for_another_machine(monkeypatch, tmp_path, content, cause):
    file = tmp_path / native.FILE_NAME
    file.write_bytes(content)
    monkeypatch.setattr(native, "library_file", lambda: file)
    (finding,) = native_library()
    assert finding.health is Health.BROKEN
    assert cause in finding.detail
    assert "QUARK_PURE_PYTHON=1" in finding.remedy


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("libstdc++.so.6: cannot open shared object file: No such file or directory", "C++ library"),
        ("libc.so.6: version `GLIBC_2.38' not found", "newer system"),
        ("failed to map segment from shared object", "noexec"),
    ],
)
@pytest.mark.usefixtures("some_library")
def test_a_library_that_does_not_load(monkeypatch, message, cause):
    def refuse(path):
        raise OSError(message)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    (finding,) = native_library()
    assert finding.health is Health.BROKEN
    assert cause in finding.detail


@pytest.mark.usefixtures("some_library")
def test_switched_off(monkeypatch):
    monkeypatch.setenv("QUARK_NO_NATIVE", "1")
    (finding,) = native_library()
    assert finding.health is Health.INFO
    assert "unset QUARK_NO_NATIVE" in finding.remedy


def test_an_operator_that_computes_something_else(monkeypatch):
    monkeypatch.setattr("quark.formats.quantize_dequantize", lambda x, name: x + 1)
    (finding,) = custom_operator()
    assert finding.health is Health.BROKEN
    assert "wrong" in finding.consequence


def test_the_model_that_is_tried_has_one_operator_of_ours():
    assert [node.op_type for node in installation._model_of_one_operator().graph.node] == ["MXQuantizeDequantize"]

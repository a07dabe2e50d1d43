"""What a row of the release's matrix installs, and what it calls a failure; nothing is installed here."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
METADATA = """Metadata-Version: 2.4
Name: quark-quantizer
Requires-Dist: numpy>=1.26
Requires-Dist: onnx>=1.17
Requires-Dist: onnx-ir<2,>=1.1
Requires-Dist: onnxruntime>=1.20; extra == "cpu"
Requires-Dist: torch>=2.6; extra == "torch"
"""


@pytest.fixture(scope="module")
def matrix():
    spec = importlib.util.spec_from_file_location("release_matrix", ROOT / "release" / "test_matrix.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def dist(tmp_path):
    for tag in ("py3-none-manylinux_2_24_x86_64", "py3-none-any"):
        with zipfile.ZipFile(tmp_path / f"quark_quantizer-1.0.0-{tag}.whl", "w") as opened:
            opened.writestr("quark_quantizer-1.0.0.dist-info/METADATA", METADATA)
    return tmp_path


@pytest.fixture
def doctored(matrix, monkeypatch):
    """Rows that create nothing, whose tests end with a status and words of the test's choice."""

    def set_end(status, words):
        monkeypatch.setattr(matrix, "find_python", lambda version: sys.executable)
        monkeypatch.setattr(matrix.subprocess, "run", lambda *arguments, **named: None)
        monkeypatch.setattr(matrix, "versions", lambda python: "numpy 2")
        done = subprocess.CompletedProcess([], status, words)
        install = subprocess.CompletedProcess([], 0, "")
        monkeypatch.setattr(matrix, "run_logged", lambda command, log: done if "pytest" in command[2:4] else install)

    return set_end


def test_the_oldest_are_the_lower_bounds_of_the_wheel_itself(matrix, dist):
    command = matrix.install_command(matrix.Row("3.10", "oldest"), "python", matrix.wheel(dist, is_pure=False))
    assert {"numpy==1.26.*", "onnx==1.17.*", "onnx-ir==1.1.*", "onnxruntime==1.20.*"} <= set(command)
    assert not [each for each in command if each.startswith("torch")]


def test_where_a_python_has_no_binary_the_first_that_has(matrix, dist):
    command = matrix.install_command(matrix.Row("3.13", "oldest"), "python", matrix.wheel(dist, is_pure=False))
    assert {"numpy==2.1.*", "onnx==1.18.*", "onnxruntime==1.20.*"} <= set(command)


def test_the_newest_have_no_pins_but_torch(matrix, dist):
    row = matrix.Row("3.11", "newest", has_torch=True)
    command = matrix.install_command(row, "python", matrix.wheel(dist, is_pure=False))
    assert [each.partition("==")[0] for each in command if "==" in each] == ["torch"]


def test_a_pure_row_takes_the_wheel_without_operators_and_no_test_of_them(matrix, dist):
    row = matrix.Row("3.11", "newest", is_pure=True)
    assert matrix.wheel(dist, row.is_pure).name.endswith("-none-any.whl")
    assert not {*row.tests} & {*matrix.NATIVE_TESTS}


def test_no_wheel_says_how_to_make_one(matrix, tmp_path):
    with pytest.raises(SystemExit, match="no pure wheel in .*make wheels"):
        matrix.wheel(tmp_path, is_pure=True)


@pytest.mark.parametrize(("status", "words"), [(0, "9 passed"), (1, "1 failed"), (-11, "Fatal Python error"), (5, "")])
def test_only_status_0_is_good(matrix, doctored, dist, tmp_path, status, words):
    doctored(status, words)
    found = matrix.outcome(matrix.Row("3.12", "newest"), dist, tmp_path / "into")
    assert found.has_failed == (status != 0)
    assert found.line == f"| 3.12-newest | numpy 2 | {words} |"


def test_every_test_of_a_row_is_there(matrix):
    assert not [path for row in matrix.ROWS for path in row.tests if not (ROOT / path).exists()]


def test_a_row_that_is_not_there_is_an_error(matrix, dist, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["test_matrix.py", "--only", "2.7", "--dist", str(dist)])
    with pytest.raises(SystemExit, match="no row is called so; there are 3.10-oldest"):
        matrix.main()

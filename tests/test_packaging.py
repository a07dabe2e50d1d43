"""What a user gets from `pip install`, and what the repository may hold."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WITHOUT_ONNXRUNTIME = "import sys; sys.modules['onnxruntime'] = None; "


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_importing_quark_onnx_does_not_import_torch():
    done = run_python("import quark.onnx, sys; print('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


def test_importing_quark_onnx_is_quick():
    """The processor's time, best of five: a clock would measure what else the machine was doing."""

    def seconds():
        done = run_python("import quark.onnx, time; print(time.process_time())")
        return float(done.stdout)

    assert min(seconds() for _ in range(5)) < 1.0


def test_importing_quark_alone_loads_nothing_heavy():
    done = run_python("import quark, sys; print({'numpy', 'onnx', 'torch', 'onnxruntime'} & set(sys.modules))")
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("module", ["quark.onnx", "quark.onnx.operators.custom_ops"])
def test_missing_onnxruntime_is_explained(module):
    done = run_python(f"{WITHOUT_ONNXRUNTIME}import {module}")
    assert done.returncode == 1
    assert "MissingDependencyError" in done.stderr
    for choice in ("quark-quantizer[cpu]", "onnxruntime-gpu", "onnxruntime-rocm", "onnxruntime-directml"):
        assert choice in done.stderr


def test_formats_and_command_work_without_onnxruntime():
    done = run_python(f"{WITHOUT_ONNXRUNTIME}from quark.cli.main import main; main(['formats', 'mxint8'])")
    assert done.returncode == 0, done.stderr
    assert "mxint8" in done.stdout


def test_library_path_is_where_existing_scripts_import_it_from():
    from quark.onnx import get_library_path as front
    from quark.onnx.operators.custom_ops import get_library_path

    assert get_library_path is front
    assert Path(get_library_path()).is_file()


@pytest.mark.parametrize("module", ["quark", "quark.formats", "quark.onnx", "quark.demo"])
def test_every_public_name_exists_once(module):
    imported = __import__(module, fromlist=["__all__"])
    assert len(set(imported.__all__)) == len(imported.__all__)
    for name in imported.__all__:
        assert getattr(imported, name) is not None


def test_version_is_the_distributions():
    import quark

    assert quark.__version__ == importlib.metadata.version("quark-quantizer")


def test_constraints_pin_the_torch_that_needs_no_cuda():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in lines
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r'[a-z0-9-]+==[^;\s]+(; python_version (<|>=) "3\.\d+")?', line) for line in pins)


def repository_files():
    """What git tracks, or would after `git add .`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_is_over_a_megabyte():
    assert [path.name for path in repository_files() if path.stat().st_size > 1_000_000] == []


def test_no_text_names_a_place_on_somebodys_machine():
    # spelled so that this file does not find itself
    folders = "|".join(["root", "home", "tmp", "opt", "mnt", "work", "Users"])
    pattern = re.compile(rf"(?<![.\w])/({folders})/[A-Za-z]|index[-]url|https?://[\w.]*pypi".encode())
    found = []
    for path in repository_files():
        content = path.read_bytes()
        if b"\0" not in content:
            found += [f"{path.relative_to(ROOT)}: {match.group().decode()}" for match in pattern.finditer(content)]
    assert found == []

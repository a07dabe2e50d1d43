"""What is released: built, installed outside the source tree, and used. Needs the environment of `make wheels`."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv-release" / "bin" / "python"
USER_PROGRAM = """
from quark.onnx import QuantizedModel, get_default_config, get_library_path, quantize

result: QuantizedModel = quantize("a.onnx", None, get_default_config("XINT8"), use_random_data=True)
wrong: int = get_library_path()
"""
QUANTIZE_AND_RUN = """
import numpy as np, onnxruntime, quark.demo
from quark.onnx import quantize
images = np.random.default_rng(0).random((4, 1, 8, 8), dtype=np.float32)
for preset in ("XINT8", "A8W8", "BF16", "BFP16", "MXFP4E2M1"):
    path = quantize(quark.demo.network_path(), images, preset).save(preset + ".onnx")
    session = onnxruntime.InferenceSession(str(path))
    assert np.isfinite(session.run(None, {session.get_inputs()[0].name: images})[0]).all()
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    if not TOOLS.is_file():
        pytest.skip("no .venv-release: `make wheels` sets it up")
    folder = tmp_path_factory.mktemp("dist")
    command = [str(TOOLS), str(ROOT / "release" / "build_wheels.py"), "--into", str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "SOURCE_DATE_EPOCH": "1735689600"})
    return folder


def only(folder, pattern):
    (found,) = folder.glob(pattern)
    return found


def installed(wheel, folder):
    """A Python with the wheel, and what it needs from the environment that runs the tests."""
    venv.create(folder)
    python = folder / "bin" / "python"
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


def run(python, folder, *arguments):
    command = [str(python), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)


def command(python, folder, *arguments):
    return run(python, folder, "-c", "from quark.cli.main import main; main()", *arguments)


def test_tags_and_contents(dist):
    compiled = only(dist, "*manylinux*.whl")
    pure = only(dist, "*-py3-none-any.whl")
    with zipfile.ZipFile(compiled) as one, zipfile.ZipFile(pure) as other:
        assert "quark/native/libquark_ops.so" in one.namelist()
        assert "quark/native/libquark_ops.so" not in other.namelist()
        for opened in (one, other):
            names = opened.namelist()
            assert "quark/py.typed" in names
            licenses = {name.rpartition("/")[2] for name in names if "/licenses/" in name}
            assert licenses >= {"LICENSE", "NOTICE"}
            assert not [name for name in names if name.startswith(("tests", "bench", "csrc"))]


def test_the_pure_wheel_quantizes_and_says_what_it_is(dist, tmp_path):
    python = installed(only(dist, "*-py3-none-any.whl"), tmp_path / "pure")
    done = command(python, tmp_path, "doctor")
    assert done.returncode == 0, done.stdout
    assert "portable operators, slower" in done.stdout
    done = run(python, tmp_path, "-c", QUANTIZE_AND_RUN)
    assert done.returncode == 0, done.stderr


def test_the_wheel_with_operators_has_them(dist, tmp_path):
    python = installed(only(dist, "*manylinux*.whl"), tmp_path / "compiled")
    done = command(python, tmp_path, "doctor")
    assert done.returncode == 0, done.stdout
    assert "libquark_ops.so loads" in done.stdout


def test_a_users_program_is_checked_against_our_types(dist, tmp_path):
    python = installed(only(dist, "*-py3-none-any.whl"), tmp_path / "typed")
    (tmp_path / "program.py").write_text(USER_PROGRAM)
    done = run(sys.executable, tmp_path, "-m", "mypy", "--strict", "--python-executable", python, "program.py")
    assert "program.py:5: error: Incompatible types" in done.stdout
    assert "Found 1 error" in done.stdout


def test_the_same_sources_give_the_same_bytes(dist, tmp_path):
    command = [str(TOOLS), str(ROOT / "release" / "build_wheels.py"), "--into", str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, "SOURCE_DATE_EPOCH": "1735689600"})
    for path in dist.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name

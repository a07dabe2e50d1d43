"""Try the released wheels with every Python that is found, and the oldest and newest packages that are allowed.

    python release/test_matrix.py [--only 3.12] [--dist dist] [--into build/matrix]

A row is a virtual environment with a wheel of `dist` (`make wheels`) and a short part of the tests, run from this
source tree against the installed package. The oldest packages are the lower bounds in the wheel's own metadata, at
their last patch; where a Python has no binary of one, the first that has (FIRST_FOR). `pure` has the wheel without the
operators, and leaves out the tests of the library itself. What the oldest packages cannot do is written in the tests,
as skips that name the version. Prints a table; exit status 1 when a row failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from quark.report.installation import Requirement, parse

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
FIRST_FOR = {"3.13": {"numpy": "2.1", "onnx": "1.18", "pillow": "11"}}
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis", "gfloat")
NATIVE_TESTS = (  # those that register the library by themselves
    "tests/native",
    "tests/onnx/pack/test_pack_native.py",
    "tests/onnx/pack/test_pack_other_files.py",
    "tests/onnx/quantization/test_quantize.py",
    "tests/cli/test_quantize_command.py",
)
TESTS = (
    "tests/ops/test_portable_models.py",
    "tests/hardening/test_odd_presets.py",
    "tests/onnx/quantization/test_config_files.py",
    "tests/onnx/pack/test_pack_and_unpack.py",
    "tests/onnx/quantization/test_without_library.py",
    "tests/cli/test_pack_command.py",
    "tests/cli/test_report_command.py",
    *(f"tests/report/test_{check}_check.py" for check in ("conflicts", "machine", "operators", "packages", "runtimes")),
    "tests/report/test_finding.py",
    "tests/demo",
)
TORCH_TESTS = (
    "tests/formats/test_packing.py",
    "tests/formats/test_power_of_two.py",
    "tests/ops/test_fake_quantize.py",
    "tests/torch/export/test_export_onnx.py",
    "tests/torch/quantization/test_quantized_networks.py",
)
REPORTED = ("numpy", "onnx", "onnx-ir", "onnxruntime", "torch")


@dataclass(frozen=True)
class Row:
    python: str
    ages: str  # oldest or newest
    is_pure: bool = False
    has_torch: bool = False

    @property
    def name(self) -> str:
        return f"{self.python}-{self.ages}" + ("-pure" if self.is_pure else "") + ("-torch" if self.has_torch else "")

    @property
    def tests(self) -> tuple[str, ...]:
        return TESTS + (() if self.is_pure else NATIVE_TESTS) + (TORCH_TESTS if self.has_torch else ())


@dataclass(frozen=True)
class Outcome:
    """The versions that were installed and how the tests went, in pytest's words; a missing Python is no failure."""

    row: Row
    versions: str
    words: str
    has_failed: bool

    @property
    def line(self) -> str:
        return f"| {self.row.name} | {self.versions} | {self.words} |"


ROWS = (
    *(Row(python, ages) for python in PYTHONS for ages in ("oldest", "newest")),
    Row("3.11", "newest", is_pure=True),
    Row("3.11", "newest", has_torch=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "matrix")
    parser.add_argument("--tests", nargs="+", help="these in the place of the row's own")
    options = parser.parse_args()
    outcomes = []
    for row in ROWS:
        if options.only in row.name:
            outcomes.append(outcome(row, options.dist.resolve(), options.into.resolve(), options.tests))
            print(outcomes[-1].line, flush=True)
    print("\n" + "\n".join(["| row | versions | outcome |", "|---|---|---|", *(outcome.line for outcome in outcomes)]))
    if not outcomes:
        sys.exit(f"--only {options.only}: no row is called so; there are {', '.join(row.name for row in ROWS)}")
    sys.exit(any(outcome.has_failed for outcome in outcomes))


def outcome(row: Row, dist: Path, into: Path, tests: list[str] | None = None) -> Outcome:
    interpreter = find_python(row.python)
    if interpreter is None:
        return Outcome(row, "", f"python{row.python} not found", has_failed=False)
    environment = into / row.name
    into.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(environment, ignore_errors=True)
    subprocess.run([interpreter, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    installed = run_logged(install_command(row, python, wheel(dist, row.is_pure)), into / f"{row.name}.install.log")
    if installed.returncode:
        return Outcome(row, "", f"install failed: {last_line(installed.stdout)}", has_failed=True)
    command = [str(python), "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", "-m", "not slow and not browser"]
    tested = run_logged([*command, *(tests or row.tests)], into / f"{row.name}.log")
    return Outcome(row, versions(python), last_line(tested.stdout), has_failed=tested.returncode != 0)


def run_logged(command: list[str], log: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(
        *(command,), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    log.write_text(done.stdout)
    return done


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "").strip("= ")


def find_python(version: str) -> str | None:
    """That Python, on PATH or among pyenv's."""
    kept = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    return str(kept[-1]) if kept else shutil.which(f"python{version}")


def wheel(dist: Path, is_pure: bool) -> Path:
    wheels = [wheel for wheel in sorted(dist.glob("*.whl")) if wheel.name.endswith("-none-any.whl") == is_pure]
    if not wheels:
        sys.exit(f"no {'pure ' if is_pure else ''}wheel in {dist}: run `make wheels` first")
    return wheels[-1]


def install_command(row: Row, python: Path, file: Path) -> list[str]:
    pins = [oldest(requirement, row.python) for requirement in requirements(file) if requirement.extra in ("", "cpu")]
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--prefer-binary"]
    wanted = pins if row.ages == "oldest" else []
    torch = [pin("torch"), "onnxscript", "safetensors"] if row.has_torch else []
    return [*pip, f"{file}[cpu]", *wanted, *torch, *TEST_TOOLS]


def requirements(file: Path) -> list[Requirement]:
    with zipfile.ZipFile(file) as opened:
        name = next(file for file in opened.namelist() if file.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(opened.read(name).decode())
    return [parse(line) for line in metadata.get_all("Requires-Dist", []) if ">=" in line]


def oldest(requirement: Requirement, python: str) -> str:
    return f"{requirement.name}=={FIRST_FOR.get(python, {}).get(requirement.name, requirement.least)}.*"


def pin(name: str) -> str:
    """The line of constraints.txt: torch at its pinned version, since an open one brings gigabytes along."""
    match = re.search(rf"^{name}==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return match.group() if match else name


def versions(python: Path) -> str:
    """The versions of what matters, as `onnx 1.17.0, ...`."""
    code = (
        "import importlib.metadata as m\n"
        f"for name in {REPORTED!r}:\n"
        "    try: print(name, m.version(name))\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return ", ".join(done.stdout.splitlines())


if __name__ == "__main__":
    main()

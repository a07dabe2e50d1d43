"""Compile csrc/cuda/kernels.cu to the PTX that the library carries.

    python -m tools.cuda_kernels            compile, and write csrc/cuda/kernels.ptx.tar.xz and kernels.json beside it
    python -m tools.cuda_kernels --check    fail if what is checked in does not belong to the sources; needs no compiler

The PTX is checked in, and a build uses that: what is released does not depend on whether a machine happens to have
nvcc, or which one. A build with -DQUARK_COMPILE_PTX=ON compiles it anew (--output) for those who change the kernels.
kernels.json records what the PTX was made from: the hash of every source and the compiler's options.

The PTX is for the oldest architecture that the compiler knows, so that a driver can compile it for every later one, and
says that it needs PTX 7.0 (CUDA 11.0), where nvcc would name its own version and older drivers would refuse it. ptxas
checks that this is true. Kernels are separate texts: the library gives the driver only those that a model uses.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "csrc" / "cuda"
ARCHIVE = FOLDER / "kernels.ptx.tar.xz"
RECORD = FOLDER / "kernels.json"
NAME = "kernels.ptx"  # in the archive

# What kernels.cu is made of: itself and all it includes.
SOURCES = (
    "cuda/kernels.cu",
    "cuda/arguments.h",
    "cuda/scalar_lanes.h",
    "formats/block_parameters.h",
    "formats/lane_math.h",
    "formats/linear.h",
)
ARCHITECTURE = "75"
PTX_VERSION = "7.0"
# No contraction, no flushing of subnormals, divisions rounded correctly: the processor's arithmetic.
OPTIONS = (
    "-ptx",
    f"-arch=compute_{ARCHITECTURE}",
    "-std=c++17",
    "-O3",
    "-fmad=false",
    "-ftz=false",
    "-prec-div=true",
    "--expt-relaxed-constexpr",
)


def main() -> None:
    """Compile, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the PTX there and nothing else")
    arguments = parser.parse_args()
    if arguments.check:
        problem = find_problem()
        if problem:
            sys.exit(f"{problem}. Run python -m tools.cuda_kernels on a machine with nvcc")
        return
    ptx = compile_kernels()
    if arguments.output:
        arguments.output.write_text(ptx)
        return
    ARCHIVE.write_bytes(pack(ptx))
    RECORD.write_text(json.dumps({**expected_record(), "nvcc": nvcc_version(), "ptx": digest(ptx.encode())}, indent=2))
    with RECORD.open("a") as file:
        file.write("\n")


def find_problem() -> str | None:
    """Why the archive is not what the sources would give; None if it is."""
    record: dict[str, Any] = json.loads(RECORD.read_text())
    for key, expected in expected_record().items():
        if record.get(key) != expected:
            return f"{RECORD.relative_to(ROOT)}: {key} is not what {ARCHIVE.name} was compiled from"
    if record["ptx"] != digest(unpack(ARCHIVE.read_bytes())):
        return f"{ARCHIVE.relative_to(ROOT)} is not the file that {RECORD.name} speaks of"
    return None


def expected_record() -> dict[str, Any]:
    """What the record says of the sources and options as they are now."""
    sources = {name: digest((ROOT / "csrc" / name).read_bytes()) for name in SOURCES}
    return {"options": " ".join(OPTIONS), "ptx_version": PTX_VERSION, "sources": sources}


def compile_kernels() -> str:
    """The PTX of kernels.cu, checked by ptxas."""
    if shutil.which("nvcc") is None:
        sys.exit("nvcc was not found; it is in NVIDIA's CUDA toolkit, and in the package nvidia-cuda-nvcc")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, NAME)
        subprocess.run(["nvcc", *OPTIONS, str(FOLDER / "kernels.cu"), "-o", str(output)], check=True)
        ptx = shortened(output.read_text())
        output.write_text(ptx)
        assembled = ["ptxas", f"-arch=sm_{ARCHITECTURE}", str(output), "-o", str(output.with_suffix(".cubin"))]
        subprocess.run(assembled, check=True)
    return ptx


def shortened(ptx: str) -> str:
    """The same program for older drivers: without comments, indentation, and hints that are newer than PTX_VERSION."""
    lines = (line.split("//")[0].strip().replace("\t", " ") for line in ptx.splitlines())
    kept = [line for line in lines if line and not line.startswith(".pragma")]
    return re.sub(r"\.version \S+", f".version {PTX_VERSION}", "\n".join(kept), count=1) + "\n"


def pack(ptx: str) -> bytes:
    """An archive that CMake unpacks, of the same bytes for the same text."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        entry = tarfile.TarInfo(NAME)
        entry.size = len(ptx.encode())
        archive.addfile(entry, io.BytesIO(ptx.encode()))
    return lzma.compress(plain.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def unpack(data: bytes) -> bytes:
    """The text in an archive."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:xz") as archive:
        file = archive.extractfile(NAME)
        assert file is not None
        return file.read()


def nvcc_version() -> str:
    """Such as 13.0.88."""
    text = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout
    return text.split(" V")[-1].split()[0]


def digest(data: bytes) -> str:
    """As kernels.json has it."""
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    main()

"""The checks of `quark doctor`: the installation, and the resources of the machine or container.

An exception in a check is itself a finding, so one broken package does not hide the others. Limits of a container are
read from the files of control groups, versions 1 and 2; without such files there is no limit to report.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import quark
from quark.report import installation
from quark.report.installation import OURS_AGAIN, PACKAGE_FOLDER, Finding, Health, explain
from quark.report.quantities import size_text

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
LEAST_TEMPORARY_BYTES = 1_000_000_000
LEAST_MEMORY_BYTES = 2_000_000_000
_NO_LIMIT = 1 << 60  # version 1 writes a number near 2**63 for no limit


def examine() -> list[Finding]:
    """Run all checks, in order."""
    return [finding for name, check in CHECKS for finding in _outcome(name, check)]


def _outcome(name: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:  # noqa: BLE001 - anything that a broken package raises
        cause, remedy = explain(error, OURS_AGAIN)
        return [Finding(name, Health.BROKEN, cause, "see the lines above that are broken too", remedy)]


def is_healthy(findings: list[Finding]) -> bool:
    """True if nothing is broken."""
    return all(finding.health is not Health.BROKEN for finding in findings)


def python() -> Iterator[Finding]:
    """Report the versions of Python and quark."""
    in_environment = "" if sys.prefix != sys.base_prefix else ", not in a virtual environment"
    yield Finding(
        "python", Health.OK, f"{platform.python_version()} on {platform.platform(terse=True)}{in_environment}"
    )
    yield Finding("quark", Health.OK, f"{quark.__version__} in {PACKAGE_FOLDER}")


def temporary_folder() -> Iterator[Finding]:
    """Check the space for large weights and samples, which are stored in files during quantization."""
    elsewhere = "free some space, or set TMPDIR to a folder with more"
    try:
        folder = tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
    except OSError as error:
        detail = f"cannot be written: {error}"
        yield Finding("temporary folder", Health.BROKEN, detail, "large models cannot be quantized", elsewhere)
        return
    free = shutil.disk_usage(folder).free
    detail = f"{folder} has {size_text(free)} left"
    if free < LEAST_TEMPORARY_BYTES:
        consequence = "larger models cannot be quantized"
        yield Finding("temporary folder", Health.WARNING, detail, consequence, elsewhere)
    else:
        yield Finding("temporary folder", Health.OK, detail)


def memory() -> Iterator[Finding]:
    """Check the smallest memory limit: of the machine, of the control group, or of ulimit."""
    limits = {"this machine has": _physical_bytes(), "the container allows": _cgroup_memory_bytes()}
    limits["ulimit -v allows"] = _address_space_bytes()
    known = {words: size for words, size in limits.items() if size is not None}
    if not known:
        yield Finding("memory", Health.INFO, "the amount is unknown on this system")
        return
    words = min(known, key=lambda limit: known[limit])
    detail = f"{words} {size_text(known[words])}"
    if known[words] < LEAST_MEMORY_BYTES:
        consequence = "the process may be killed while it calibrates or finetunes"
        remedy = "give it more memory, or use fewer and smaller samples and CalibWorkerNum 1"
        yield Finding("memory", Health.WARNING, detail, consequence, remedy)
    else:
        yield Finding("memory", Health.OK, detail)


def processors() -> Iterator[Finding]:
    """Check for a container's limit: ONNX Runtime starts a thread for each visible processor, whatever the limit."""
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = _cgroup_processors()
    if share is not None and share < seen:
        detail = f"{seen} are seen, and the container may use the time of {share:g}"
        consequence = "threads wait for each other, which is slower than fewer threads"
        count = max(1, round(share))
        remedy = f"taskset -c 0-{count - 1} quark ..., or start the container with --cpuset-cpus 0-{count - 1}"
        yield Finding("processors", Health.WARNING, detail, consequence, remedy)
        return
    threads = os.environ.get("OMP_NUM_THREADS")
    yield Finding("processors", Health.OK, f"{seen}" + (f"; OMP_NUM_THREADS={threads}" if threads else ""))


def text() -> Iterator[Finding]:
    """Check that names with any characters can be opened and printed."""
    encodings = {"file names": sys.getfilesystemencoding(), "output": getattr(sys.stdout, "encoding", None) or "utf-8"}
    narrow = {what: name for what, name in encodings.items() if name.lower().replace("-", "") != "utf8"}
    if narrow:
        detail = ", ".join(f"{what}: {name}" for what, name in narrow.items())
        consequence = "names with other characters cannot be opened or shown"
        yield Finding("text", Health.WARNING, detail, consequence, "export PYTHONUTF8=1 (on Linux also LANG=C.UTF-8)")
    else:
        yield Finding("text", Health.OK, "utf-8")


def _physical_bytes() -> int | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _address_space_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _cgroup_memory_bytes() -> int | None:
    """Return the smallest limit of the process's control group and its parents."""
    files = [group / name for name in ("memory.max", "memory.limit_in_bytes") for group in _own_groups("memory")]
    limits = [int(words[0]) for words in map(_words, files) if words and words[0].isdigit()]
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _cgroup_processors() -> float | None:
    """Return the smallest share of processor time of the control group and its parents: 1.5 is one and a half."""
    shares = []
    for group in _own_groups("cpu"):
        quota, period = [*_words(group / "cpu.max"), "", ""][:2]  # version 2: 'max 100000' or '150000 100000'
        if not quota:
            quota, period = ("".join(_words(group / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit():
            shares.append(int(quota) / int(period))
    return min(shares, default=None)


def _own_groups(controller: str) -> list[Path]:
    """Return the existing folders of the process's control group and its parents, of both versions."""
    groups = [CGROUPS, CGROUPS / controller]
    for line in _lines(OWN_CGROUPS):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        root = CGROUPS if not controllers else CGROUPS / controller
        if not controllers or controller in controllers.split(","):
            own = root / path.strip("/")
            groups += [parent for parent in (own, *own.parents) if parent.is_relative_to(root)]
    return [group for group in dict.fromkeys(groups) if group.is_dir()]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no such controller, or not readable: no known limit
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


CHECKS: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("python", python),
    ("packages", installation.core_packages),
    ("onnxruntime", installation.onnxruntime),
    ("torch", installation.torch),
    ("native library", installation.native_library),
    ("custom operator", installation.custom_operator),
    ("GPU", installation.gpu),
    (installation.THEIRS, installation.amd_quark),
    ("temporary folder", temporary_folder),
    ("memory", memory),
    ("processors", processors),
    ("text", text),
)

"""What the machine, or the container on it, leaves to this process: room for temporary files, memory, processors, text.

Limits of a container are read from the files of control groups, versions 1 and 2; where there are none, as outside
Linux, there is no limit to report.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quark.report.checks.finding import Finding, Health
from quark.report.quantities import size_text

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
LEAST_TEMPORARY_BYTES = 1_000_000_000
LEAST_MEMORY_BYTES = 2_000_000_000
_NO_LIMIT = 1 << 60  # version 1 writes a number near 2**63 where there is none


def temporary_folder() -> Iterator[Finding]:
    """Large weights and samples are kept in files while a network is quantized."""
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
        consequence = "models of more than that cannot be quantized"
        yield Finding("temporary folder", Health.WARNING, detail, consequence, elsewhere)
    else:
        yield Finding("temporary folder", Health.OK, detail)


def memory() -> Iterator[Finding]:
    """The least of what the machine has, what the control group allows, and what ulimit allows."""
    limits = {"this machine has": _physical_bytes(), "the container allows": _cgroup_memory_bytes()}
    limits["ulimit -v allows"] = _address_space_bytes()
    known = {words: size for words, size in limits.items() if size is not None}
    if not known:
        yield Finding("memory", Health.INFO, "how much there is cannot be told on this system")
        return
    words = min(known, key=lambda each: known[each])
    detail = f"{words} {size_text(known[words])}"
    if known[words] < LEAST_MEMORY_BYTES:
        consequence = "the process may be killed while it calibrates or finetunes"
        remedy = "give it more memory, or use fewer and smaller samples and CalibWorkerNum 1"
        yield Finding("memory", Health.WARNING, detail, consequence, remedy)
    else:
        yield Finding("memory", Health.OK, detail)


def processors() -> Iterator[Finding]:
    """ONNX Runtime starts a thread for each processor that it sees, whatever share of them the container may use."""
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = _cgroup_processors()
    if share is not None and share < seen:
        detail = f"{seen} are seen, and the container may use the time of {share:g}"
        consequence = "threads wait for each other: slower than with fewer of them"
        count = max(1, round(share))
        remedy = f"taskset -c 0-{count - 1} quark ..., or start the container with --cpuset-cpus 0-{count - 1}"
        yield Finding("processors", Health.WARNING, detail, consequence, remedy)
        return
    threads = os.environ.get("OMP_NUM_THREADS")
    yield Finding("processors", Health.OK, f"{seen}" + (f"; OMP_NUM_THREADS={threads}" if threads else ""))


def text() -> Iterator[Finding]:
    """Names in models and of files may have any letters."""
    encodings = {"file names": sys.getfilesystemencoding(), "output": getattr(sys.stdout, "encoding", None) or "utf-8"}
    narrow = {what: name for what, name in encodings.items() if name.lower().replace("-", "") != "utf8"}
    if narrow:
        detail = ", ".join(f"{what}: {name}" for what, name in narrow.items())
        consequence = "names with other letters cannot be opened or shown"
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
    """The least limit on the way from the process's group to the root."""
    found = [_number(each / name) for name in ("memory.max", "memory.limit_in_bytes") for each in _own_groups("memory")]
    return min((each for each in found if each is not None and each < _NO_LIMIT), default=None)


def _cgroup_processors() -> float | None:
    """The least share of processors' time on the way from the process's group to the root; 1.5 is one and a half."""
    shares = []
    for group in _own_groups("cpu"):
        quota, period = [*_words(group / "cpu.max"), "", ""][:2]  # version 2: 'max 100000' or '150000 100000'
        if not quota:
            quota, period = ("".join(_words(group / f"cpu.cfs_{each}_us")) for each in ("quota", "period"))
        if quota.isdigit() and period.isdigit():
            shares.append(int(quota) / int(period))
    return min(shares, default=None)


def _own_groups(controller: str) -> list[Path]:
    """The folders of the process's group and of those around it, of both versions, that exist."""
    found = [CGROUPS, CGROUPS / controller]
    for line in _lines(OWN_CGROUPS):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        root = CGROUPS if not controllers else CGROUPS / controller
        if not controllers or controller in controllers.split(","):
            own = root / path.strip("/")
            found += [each for each in (own, *own.parents) if each.is_relative_to(root)]
    return [each for each in dict.fromkeys(found) if each.is_dir()]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no such controller here, or not ours to read: no limit that we know of
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if words and words[0].isdigit() else None

"""Whether the files of this package are ours: AMD's package has the same import name and writes to the same folder."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

from quark.report.checks.finding import Finding, Health
from quark.report.checks.requirements import OURS, OURS_AGAIN
from quark.report.checks.runtimes import canonical_name

THEIRS = "amd-quark"
_MIXED = "imports find files of one package or of the other"


def amd_quark() -> Iterator[Finding]:
    installed = {canonical_name(each): each for each in importlib.metadata.distributions()}
    if THEIRS in installed:
        detail = f"{THEIRS} {installed[THEIRS].version} is installed here, and also imports as 'quark'"
        remedy = f"pip uninstall --yes {THEIRS} {OURS}, install the one you want; both: separate virtual environments"
        yield Finding(THEIRS, Health.BROKEN, detail, _MIXED, remedy)
        return
    foreign = foreign_files(_package_folder(), installed.get(OURS))
    if foreign:
        shown = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        detail = f"files that are not ours lie in {_package_folder()}: {shown}"
        remedy = f"delete that folder, then pip install --force-reinstall {OURS_AGAIN}"
        yield Finding(THEIRS, Health.BROKEN, detail, _MIXED, remedy)
        return
    yield Finding(THEIRS, Health.OK, "not installed here")


def foreign_files(folder: Path, distribution: importlib.metadata.Distribution | None) -> list[str]:
    """Python files under site-packages/quark that our distribution did not install, by their paths in that folder.

    None where quark is an editable install, whose files are its sources' own."""
    record = [Path(str(each)) for each in (distribution.files or [])] if distribution is not None else []
    ours = {each.as_posix() for each in record if each.parts[:1] == ("quark",) and each.suffix == ".py"}
    if not ours:
        folder = Path(str(distribution.locate_file("quark"))) if distribution is not None else folder
        return sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*.py")) if _is_apart(folder) else []
    found = {each.relative_to(folder.parent).as_posix() for each in folder.rglob("*.py")}
    return sorted(each.removeprefix("quark/") for each in found - ours)


def _is_apart(folder: Path) -> bool:
    """That the folder is another one than the sources that run now."""
    return folder.is_dir() and folder.resolve() != _package_folder().resolve()


def _package_folder() -> Path:
    return Path(__file__).resolve().parents[2]

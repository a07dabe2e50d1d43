"""Whether this installation works: what `quark doctor` looks at, one check after the other.

A check gives Findings. A check that raises is itself a finding, so that one broken package cannot hide the others; and
no check needs a package before an earlier one has looked at it, so that this works where numpy or onnx do not import.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import quark
from quark.report.checks import conflicts, machine, operators, packages, runtimes
from quark.report.checks.finding import Finding, Health
from quark.report.checks.loading import explain
from quark.report.checks.requirements import OURS_AGAIN


def examine() -> list[Finding]:
    """All checks, in their order."""
    return [finding for name, check in CHECKS for finding in _outcome(name, check)]


def _outcome(name: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:  # whatever a broken package raises is what the user came to hear
        cause, remedy = explain(error, OURS_AGAIN)
        return [Finding(name, Health.BROKEN, cause, "see the lines above that are broken too", remedy)]


def is_healthy(findings: list[Finding]) -> bool:
    return all(each.health is not Health.BROKEN for each in findings)


def _python() -> Iterator[Finding]:
    in_environment = "" if sys.prefix != sys.base_prefix else ", not in a virtual environment"
    yield Finding(
        "python", Health.OK, f"{platform.python_version()} on {platform.platform(terse=True)}{in_environment}"
    )
    yield Finding("quark", Health.OK, f"{quark.__version__} in {Path(__file__).resolve().parents[1]}")


CHECKS: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("python", _python),
    ("packages", packages.core_packages),
    ("onnxruntime", runtimes.onnxruntime),
    ("torch", runtimes.torch),
    ("native library", operators.native_library),
    ("custom operator", operators.custom_operator),
    (conflicts.THEIRS, conflicts.amd_quark),
    ("temporary folder", machine.temporary_folder),
    ("memory", machine.memory),
    ("processors", machine.processors),
    ("text", machine.text),
)

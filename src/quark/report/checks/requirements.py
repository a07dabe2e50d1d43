"""What our own metadata says we need: the bounds of pyproject.toml, as they were installed.

Read here, without the package `packaging`, because that one may be missing too. Only what stands in our pyproject.toml
is understood: `name>=1.2,<2; extra == "cpu"`.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

OURS = "quark-quantizer"
OURS_AGAIN = "PATH, with the wheel or checkout of quark as PATH"  # for pip: it is on no package index


@dataclass(frozen=True)
class Requirement:
    """A distribution and the versions of it that will do: `least` and above, below `below` where that is not empty."""

    name: str
    least: str
    below: str = ""
    extra: str = ""

    def __str__(self) -> str:
        return f"{self.name}>={self.least}" + (f",<{self.below}" if self.below else "")

    def is_met_by(self, version: str) -> bool:
        """
        >>> [Requirement("onnx-ir", "1.1", "2").is_met_by(each) for each in ("1.0.9", "1.1.0", "1.10rc1", "2.0")]
        [False, True, True, False]
        """
        found = _numbers(version)
        return _numbers(self.least) <= found and (not self.below or found < _numbers(self.below))


def requirements(extra: str = "") -> list[Requirement]:
    """Those of the core, or of one extra. Empty where quark runs from sources that were never installed."""
    try:
        lines = importlib.metadata.requires(OURS) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    parsed = [parse(line) for line in lines if ">=" in line]
    return [each for each in parsed if each.extra == extra]


def parse(line: str) -> Requirement:
    """
    >>> parse('onnxruntime>=1.20; extra == "cpu"')
    Requirement(name='onnxruntime', least='1.20', below='', extra='cpu')
    """
    specifier, _, marker = line.partition(";")
    name = re.match(r"[\w.-]+", specifier)
    least = re.search(r">=\s*([\w.]+)", specifier)
    below = re.search(r"<\s*([\w.]+)", specifier)
    extra = re.search(r"extra == [\"'](\w+)", marker)
    if name is None or least is None:
        raise ValueError(f"requirement {line!r} of {OURS} has no lower bound")
    return Requirement(
        name.group().lower().replace("_", "-"),
        least.group(1),
        below.group(1) if below else "",
        extra.group(1) if extra else "",
    )


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: what comes behind (rc1, +cpu) is taken for the version itself."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(each) for each in match.group().split(".")] if match else [0]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)

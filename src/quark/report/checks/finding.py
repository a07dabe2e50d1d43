"""What one check found."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import PurePosixPath, PureWindowsPath

# two folders or more from a root: what a person's machine looks like inside
_PATH = re.compile(r"(?<![\w:/.\\<])(?:[A-Za-z]:)?(?:[/\\][^\s/\\:'\",;()]+){2,}")


class Health(str, Enum):
    """`ok` and `info` are fine; `warning` works with limits; `broken` makes something that a user needs fail."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """What is so; where that is not well, also what it leads to and the command or step that mends it."""

    check: str
    health: Health
    detail: str
    consequence: str = ""
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        return {**asdict(self), "health": self.health.value}

    def without_paths(self) -> Finding:
        """The same with every absolute path cut down to its last name, for a report that others will read.

        >>> Finding("quark", Health.OK, "1.0 in /srv/ann/env/quark").without_paths().detail
        '1.0 in <...>/quark'
        """
        texts = (self.detail, self.consequence, self.remedy)
        detail, consequence, remedy = (_PATH.sub(_last_name, each) for each in texts)
        return replace(self, detail=detail, consequence=consequence, remedy=remedy)


def _last_name(match: re.Match[str]) -> str:
    text = match.group()
    name = PureWindowsPath(text).name if "\\" in text else PurePosixPath(text).name
    return f"<...>/{name}"

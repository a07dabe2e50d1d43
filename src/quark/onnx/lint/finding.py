"""One thing about a file that an NPU would not take, or would take otherwise than meant."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """How bad a finding is."""

    ERROR = "error"  # the NPU's compiler refuses it, or gives the work to the CPU
    WARNING = "warning"  # it can be compiled, and something may be other than expected


@dataclass(frozen=True)
class Finding:
    """`message` says what is there and what was expected, `fix` what to do. `node` or `tensor` is empty where the
    finding is about something else."""

    rule: str
    node: str
    tensor: str
    level: Level
    message: str
    fix: str

    def __str__(self) -> str:
        where = " ".join(f"'{each}'" for each in (self.node, self.tensor) if each)
        return f"{self.level.value}: {self.rule}{': ' if where else ''}{where}: {self.message}; {self.fix}"

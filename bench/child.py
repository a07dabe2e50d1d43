"""Run one of the scripts beside this one in a process of its own, by our interpreter or a peer's.

AMD Quark is imported as `quark`, as we are. Python's isolated mode keeps either from finding the other: it looks
neither into PYTHONPATH nor into the working folder, which is an empty one besides, since peers leave files there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.models import NamedModel
from bench.record import Blank
from bench.samples import SampleFile, SampleFolder

if TYPE_CHECKING:
    from bench.peers import Peer

OURS, PASS = "ours", "pass"
NO_EQUIVALENT = "no equivalent of the preset"


class ChildError(Exception):
    """The script came to no result; the message is the last thing it said."""


@dataclass(frozen=True)
class Outcome:
    """One run in one process: seconds of the call alone, on the clock and of all processors together, and the most
    memory that the process had, imports and all."""

    seconds: float
    peak_mb: float
    file_mb: float | None = None
    processor_seconds: float | None = None


@dataclass(frozen=True)
class Interpreters:
    """Who runs what: peers that are there with their interpreters, and the others with the reason.

    `titles` are what tables call all that were asked for, in order; `described` the versions of those that are there.
    A run that takes longer than `timeout_seconds` fails.
    """

    titles: Mapping[str, str] = field(default_factory=dict)

    present: Mapping[str, tuple[Peer, str]] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    described: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: float | None = None

    @property
    def quantizers(self) -> tuple[str, ...]:
        """Ours, and all peers that were asked for, in the order of the tables."""
        return (OURS, *self.titles)

    @property
    def facts(self) -> dict[str, str]:
        """A line on each peer, for the record."""
        return {**self.described, **{name: f"not measured: {reason}" for name, reason in self.missing.items()}}

    def with_timeout(self, seconds: float | None) -> Interpreters:
        return replace(self, timeout_seconds=seconds)

    def run(self, who: str, script: str, job: dict[str, Any]) -> dict[str, Any]:
        """What the script wrote as its result."""
        return run_script(self._python(who), script, job, self.timeout_seconds)

    def _python(self, who: str) -> str:
        if who in self.missing:
            raise ChildError(self.missing[who])
        if who in (OURS, PASS):
            return sys.executable
        found = shutil.which(self.present[who][1])
        if found is None:
            raise ChildError(f"the interpreter of {self.titles[who]} is gone")
        return found

    def quantize(
        self,
        who: str,
        model: NamedModel,
        samples: SampleFile | SampleFolder,
        preset: str,
        output: Path,
        finetune: dict[str, Any] | None = None,
        *,
        settings: dict[str, Any] | None = None,
        extra_options: dict[str, Any] | None = None,
    ) -> Outcome:
        """Write the quantized model to `output`, alone in its folder but for what belongs to it. `finetune` are
        settings that go before the preset's own. ChildError, too, where a peer has no equivalent of the preset.

        `settings` are what a peer is asked for in place of that equivalent; ours adds `extra_options` to the preset.
        """
        if settings is None:
            settings = self.present[who][0].settings(preset) if who in self.present else {}
        job = _job(who, model, samples) | {"preset": preset, "settings": settings, "extra_options": extra_options}
        found = self.run(who, "one_quantization.py", job | {"output": str(output.absolute()), "finetune": finetune})
        written = [each.stat().st_size for each in output.parent.glob(f"{output.stem}*") if each.suffix != ".json"]
        if not output.is_file():
            raise ChildError("no file was written, and no error raised")
        return Outcome(found["seconds"], found["peak_mb"], sum(written) / 1e6, found["processor_seconds"])

    def run_float(self, model: NamedModel, samples: SampleFile) -> Outcome:
        """The float model once over the images to calibrate on: the least that calibration can take."""
        return Outcome(**self.run(PASS, "one_quantization.py", _job(PASS, model, samples)))


def run_script(python: str, script: str, job: dict[str, Any], timeout_seconds: float | None = None) -> dict[str, Any]:
    """Run a script of this folder by the interpreter `python` and return what it wrote as its result."""
    with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        # not resolved: the interpreter of a virtual environment is a link, and knows its environment by that
        command = [str(Path(python).absolute()), "-I", str(Path(__file__).resolve().with_name(script))]
        command.append(json.dumps({**job, "result": str(result)}))
        with log.open("wb") as stream:
            try:
                done = subprocess.run(
                    command, cwd=folder, stdout=stream, stderr=stream, check=False, timeout=timeout_seconds
                )
            except subprocess.TimeoutExpired as error:
                raise ChildError(f"took longer than {timeout_seconds:.0f} s") from error
        if done.returncode or not result.is_file():
            raise ChildError(last_words(log.read_text(encoding="utf-8", errors="replace"), done.returncode))
        content: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return content


def blank(who: str, model: str, preset: str, reason: str) -> Blank:
    """The cell of a quantizer that came to no result; what it has no equivalent of has nothing to do with the model."""
    return Blank(who, preset if reason == NO_EQUIVALENT else f"{model} {preset}", reason)


def last_words(log: str, status: int) -> str:
    """The last line of a log, or what ended the process where it said nothing.

    >>> last_words("Traceback\\nValueError: no\\n\\n", 1)
    'ValueError: no'
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if status < 0:
        return f"ended by signal {-status}" + (f" after: {lines[-1]}" if lines else "")
    return lines[-1] if lines else f"ended with status {status} and without a word"


def _job(who: str, model: NamedModel, samples: SampleFile | SampleFolder) -> dict[str, Any]:
    return {
        "who": who,
        "model": str(model.path.absolute()),
        "samples": str(samples.path.absolute()),
        "input_name": samples.input_name if isinstance(samples, SampleFile) else None,
        "count": samples.count,
    }

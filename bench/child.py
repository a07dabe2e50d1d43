"""Run one of the scripts beside this one in a process of its own, by our interpreter or the peer's.

The peer is imported as `quark`, as we are. Python's isolated mode keeps either from finding the other: it looks neither
into PYTHONPATH nor into the working folder, which is an empty one besides, since the peer leaves files there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.networks import NamedModel
from bench.samples import SampleFile

OURS, PEER, PASS = "ours", "peer", "pass"


class ChildError(Exception):
    """The script came to no result; the message is the last thing it said."""


@dataclass(frozen=True)
class Outcome:
    """One run in one process: seconds of the call alone, and the most memory that the process had, imports and all."""

    seconds: float
    peak_mb: float
    file_mb: float | None = None


@dataclass(frozen=True)
class Interpreters:
    """Who runs what. Without a peer, its runs fail with that as the reason."""

    peer: str | None = None

    def __post_init__(self) -> None:
        if self.peer is not None and shutil.which(self.peer) is None:
            raise SystemExit(f"--peer {self.peer}: no such program; give the python of the peer's environment")

    def describe_peer(self) -> str:
        """Its versions, as its environment has them."""
        if self.peer is None:
            return "no peer"
        names = {"amd-quark": "AMD Quark", "onnxruntime": "ONNX Runtime"}
        code = f"from importlib.metadata import version as v; print(*map(v, {list(names)}), sep='|')"
        done = subprocess.run([self.peer, "-I", "-c", code], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"--peer {self.peer}: {last_words(done.stderr, done.returncode)}; is AMD Quark in it?")
        found = zip(names.values(), done.stdout.strip().split("|"), strict=True)
        return "peer " + " with ".join(f"{name} {version}" for name, version in found)

    @property
    def quantizers(self) -> tuple[str, ...]:
        return (OURS,) if self.peer is None else (OURS, PEER)

    def run(self, who: str, script: str, job: dict[str, Any]) -> dict[str, Any]:
        """What the script wrote as its result."""
        python = sys.executable if who != PEER else shutil.which(self.peer or "")
        if python is None:
            raise ChildError("no --peer")
        with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
            result, log = Path(folder, "result.json"), Path(folder, "log")
            # not resolved: the interpreter of a virtual environment is a link, and knows its environment by that
            command = [str(Path(python).absolute()), "-I", str(Path(__file__).resolve().with_name(script))]
            command.append(json.dumps({**job, "result": str(result)}))
            with log.open("wb") as stream:
                status = subprocess.run(command, cwd=folder, stdout=stream, stderr=stream, check=False).returncode
            if status or not result.is_file():
                raise ChildError(last_words(log.read_text(encoding="utf-8", errors="replace"), status))
            content: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            return content

    def quantize(
        self,
        who: str,
        model: NamedModel,
        samples: SampleFile,
        preset: str,
        output: Path,
        finetune: dict[str, Any] | None = None,
    ) -> Outcome:
        """Write the quantized model to `output`, alone in its folder but for what belongs to it. `finetune` are
        settings that go before the preset's own."""
        job = _job(who, model, samples) | {"preset": preset, "output": str(output.absolute()), "finetune": finetune}
        found = self.run(who, "one_quantization.py", job)
        written = [each.stat().st_size for each in output.parent.glob(f"{output.stem}*") if each.suffix != ".json"]
        if not output.is_file():
            raise ChildError("no file was written, and no error raised")
        return Outcome(found["seconds"], found["peak_mb"], sum(written) / 1e6)

    def run_float(self, model: NamedModel, samples: SampleFile) -> Outcome:
        """The float model once over the images to calibrate on: the least that calibration can take."""
        return Outcome(**self.run(PASS, "one_quantization.py", _job(PASS, model, samples)))


def last_words(log: str, status: int) -> str:
    """The last line of a log, or what ended the process where it said nothing.

    >>> last_words("Traceback\\nValueError: no\\n\\n", 1)
    'ValueError: no'
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if status < 0:
        return f"ended by signal {-status}" + (f" after: {lines[-1]}" if lines else "")
    return lines[-1] if lines else f"ended with status {status} and without a word"


def _job(who: str, model: NamedModel, samples: SampleFile) -> dict[str, Any]:
    return {
        "who": who,
        "model": str(model.path.absolute()),
        "samples": str(samples.path.absolute()),
        "input_name": samples.input_name,
        "count": samples.count,
    }

"""One trial: quantize, pack, compare with float. An exception is a result of the trial and does not end the search."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from os import PathLike
from pathlib import Path

from quark.account import FileFacts
from quark.errors import InvalidValueError, OutputError, QuarkError
from quark.files.foreign import read_text
from quark.inspect.lint import Level, lint
from quark.onnx.pack import pack_model
from quark.onnx.quantization.data import Data
from quark.onnx.quantization.making import packed_report, set_arguments
from quark.onnx.quantization.quantizer import QuantizedModel, quantize
from quark.onnx.quantization.reproduction import file_hash
from quark.onnx.save import write_text
from quark.onnx.session import release_memory
from quark.search.candidates import Candidate
from quark.search.journal import FILE_TROUBLE, OUT_OF_MEMORY
from quark.search.judging import Judge
from quark.search.trial import Measurement, Trial
from quark.text import shell_command


@dataclass(frozen=True, eq=False)
class Bench:
    """The state shared by all trials. `is_packing` is True if files are packed; files of the presets `linted` are
    checked against the rules of the NPU; `on_quantized` is called with every quantized model that was judged."""

    model: Path
    data: Data
    judge: Judge
    is_packing: bool = True
    linted: tuple[str, ...] = ()
    on_quantized: Callable[[Candidate, QuantizedModel], None] = lambda candidate, model: None

    def attempt(self, candidate: Candidate, folder: Path) -> tuple[Trial, Path | None]:
        """Try a candidate in that folder. Returns the trial, and the file if there is one."""
        start = time.perf_counter()
        trial = partial(Trial, candidate.name, candidate.preset, candidate.stage, candidate.changes)
        try:
            with _quiet():
                result = self.quantized(candidate)
                path = result.save(folder / f"{candidate.name}.onnx")
                quantizing_seconds = time.perf_counter() - start
                remarks = list(result.report.remarks)
                protection = result.report.protection
                size, is_packed = stored_bytes(path), False
                if self.is_packing:
                    size, is_packed = _pack(path, remarks)
                judgement = self.judge.judge(path)
                findings = _refused(path) if candidate.preset in self.linted else ""
                self.on_quantized(candidate, result)
        except Exception as error:  # noqa: BLE001 - an operator, the memory, the runtime: a row of the table
            seconds = time.perf_counter() - start
            return trial(failure=_reason(error), seconds=seconds), None
        finally:
            release_memory()
        measured = Measurement(
            size_bytes=size,
            is_packed=is_packed,
            **asdict(judgement),
            float_mac_share=None if protection is None else protection.float_mac_share,
            lint=findings,
        )
        done = trial(
            measured=measured,
            seconds=time.perf_counter() - start,
            quantizing_seconds=quantizing_seconds,
            remarks=tuple(remarks),
        )
        return done, path

    def command(self, trial: Trial, output: str | PathLike[str], metric: str | None) -> str:
        """Return the `quark quantize` command that makes the model of a trial. `metric` is the value of --metric."""
        data = self.data
        parts: list[str | PathLike[str]] = ["quark", "quantize", self.model, output, "--config", trial.preset]
        parts += set_arguments(trial.changes)
        parts += ["--calib", data.source] if isinstance(data.source, str) else []
        parts += [] if data.count is None else ["--num-calib", str(data.count)]
        parts += [] if data.batch_size == 1 else ["--batch-size", str(data.batch_size)]
        parts += [] if data.preprocessing == "auto" else ["--preprocess", str(data.preprocessing)]
        parts += [] if metric is None else ["--metric", metric]
        parts += ["--pack"] if trial.measured is not None and trial.measured.is_packed else []
        return shell_command(parts)

    def quantized(self, candidate: Candidate) -> QuantizedModel:
        """Quantize with a candidate, without writing anything."""
        data = self.data
        # by name if nothing is changed, as the command does
        config = candidate.config() if candidate.changes else candidate.preset
        result = quantize(
            self.model,
            data.source,
            config,
            num_samples=data.count,
            batch_size=data.batch_size,
            preprocessing=data.preprocessing,
        )
        if not result.plan.tensors:  # it would lose nothing, and win
            raise InvalidValueError("nothing is quantized by it: no node of the model fits")
        return result


# Findings about the network rather than about how it was quantized: every configuration has them.
_OF_THE_NETWORK = ("Operator", "CustomDomain", "Opset", "FixedShape", "Batch")


def _refused(path: Path) -> str:
    """Return what an NPU would refuse about the way a file is quantized; empty if nothing."""
    errors = [finding for finding in lint(path) if finding.level is Level.ERROR and finding.rule not in _OF_THE_NETWORK]
    rules = ", ".join(dict.fromkeys(error.rule for error in errors))
    return f"{len(errors)} lint errors ({rules})" if errors else ""


def _pack(path: Path, remarks: list[str]) -> tuple[int, bool]:
    """Pack a file in place if that makes it smaller. Returns its size, and whether it is packed."""
    target = path.parent / "packed" / path.name
    target.parent.mkdir()
    try:
        pack_model(path, target, PROFILE)
    except OutputError:
        raise
    except QuarkError as error:  # nothing can be packed
        remarks.append(f"not packed: {' '.join(str(error).split())}")
        return stored_bytes(path), False
    if stored_bytes(target) >= stored_bytes(path):
        return stored_bytes(path), False
    report = path.with_suffix(".json")
    for file in path.parent.glob(f"{path.stem}*"):
        if file != report:
            file.unlink()
    for file in target.parent.iterdir():
        file.replace(path.parent / file.name)
    facts = FileFacts(path.name, stored_bytes(path), file_hash(path))
    write_text(packed_report(read_text(report, f"report '{report}'"), PROFILE, facts), report)
    return facts.bytes, True


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or "bad_alloc" in text or "Failed to allocate" in text:
        return f"{OUT_OF_MEMORY}{': ' if text else ''}{text}"
    if isinstance(error, OSError):
        return f"{FILE_TROUBLE}: {text}"
    return text if isinstance(error, QuarkError) and text else f"{type(error).__name__}: {text}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of the quantizer, which the table repeats."""
    logger = logging.getLogger("quark")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


PROFILE = "portable"


def stored_bytes(path: Path) -> int:
    """Return the size of a model with the weights beside it."""
    beside = path.parent.glob(f"{path.stem}-????????????.data")
    return path.stat().st_size + sum(file.stat().st_size for file in beside)

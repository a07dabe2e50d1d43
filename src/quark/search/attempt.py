"""One trial: quantize, pack, weigh, judge. Whatever goes wrong is its result, not the end of the search."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from quark.account import FileFacts
from quark.errors import InvalidValueError, OutputError, QuarkError
from quark.onnx.pack import pack_model
from quark.onnx.quantization.data import Data
from quark.onnx.quantization.file_differences import file_hash
from quark.onnx.quantization.making import packed_report
from quark.onnx.quantization.quantizer import quantize
from quark.onnx.save import write_text
from quark.onnx.session import release_memory
from quark.search.candidates import Candidate
from quark.search.journal import FILE_TROUBLE, OUT_OF_MEMORY
from quark.search.judging import Judge
from quark.search.sizes import PROFILE, stored_bytes
from quark.search.trial import Measurement, Trial


@dataclass(frozen=True, eq=False)
class Bench:
    """What all trials share."""

    model: Path
    data: Data
    judge: Judge

    def attempt(self, candidate: Candidate, folder: Path) -> tuple[Trial, Path | None]:
        """Try it, in that folder: the trial, and the file where there is one."""
        start = time.perf_counter()
        trial = partial(Trial, candidate.name, candidate.preset, candidate.stage, candidate.changes)
        try:
            with _quiet():
                path, remarks = self._quantized(candidate, folder)
                quantizing_seconds = time.perf_counter() - start
                path, size, is_packed = _weighed(path, remarks)
                judgement = self.judge.judge(path)
        except Exception as error:  # an operator, the memory, the runtime: each is a row of the table
            seconds = time.perf_counter() - start
            return trial(failure=_reason(error), seconds=seconds), None
        finally:
            release_memory()
        measured = Measurement(size_bytes=size, is_packed=is_packed, **asdict(judgement))
        done = trial(
            measured=measured,
            seconds=time.perf_counter() - start,
            quantizing_seconds=quantizing_seconds,
            remarks=tuple(remarks),
        )
        return done, path

    def _quantized(self, candidate: Candidate, folder: Path) -> tuple[Path, list[str]]:
        data = self.data
        # by its name where nothing is changed, as the command does it
        config = candidate.config() if candidate.changes else candidate.preset
        result = quantize(
            self.model,
            data.source,
            config,
            num_samples=data.count,
            batch_size=data.batch_size,
            preprocessing=data.preprocessing,
        )
        if not result.plan.tensors:  # it would lose nothing, and be the best
            raise InvalidValueError("nothing is quantized by it: no node of the model fits")
        return result.save(folder / f"{candidate.name}.onnx"), list(result.report.remarks)


def _weighed(path: Path, remarks: list[str]) -> tuple[Path, int, bool]:
    """The file to go on with, its true size, and whether it is packed."""
    target = path.parent / "packed" / path.name
    target.parent.mkdir()
    try:
        pack_model(path, target, PROFILE)
    except OutputError:
        raise
    except QuarkError as error:  # nothing in it to pack, or something that cannot be
        remarks.append(f"not packed: {' '.join(str(error).split())}")
        return path, stored_bytes(path), False
    if stored_bytes(target) >= stored_bytes(path):
        return path, stored_bytes(path), False
    report = path.with_suffix(".json")
    for file in path.parent.glob(f"{path.stem}*"):
        if file != report:
            file.unlink()
    for file in target.parent.iterdir():
        file.replace(path.parent / file.name)
    facts = FileFacts(path.name, stored_bytes(path), file_hash(path))
    write_text(packed_report(report.read_text(encoding="utf-8"), PROFILE, facts), report)
    return path, facts.bytes, True


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or "bad_alloc" in text or "Failed to allocate" in text:
        return f"{OUT_OF_MEMORY}{': ' if text else ''}{text}"
    if isinstance(error, OSError):
        return f"{FILE_TROUBLE}: {text}"
    return text if isinstance(error, QuarkError) and text else f"{type(error).__name__}: {text}"


@contextmanager
def _quiet() -> Iterator[None]:
    """A quantizer warns about what the table says anyway."""
    logger = logging.getLogger("quark")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)

"""One trial: quantize, pack, weigh, judge. Whatever goes wrong is its result, not the end of the search."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from quark.account import FileFacts
from quark.errors import InvalidValueError, OutputError, QuarkError
from quark.files.foreign import read_text
from quark.onnx.lint import Level, lint
from quark.onnx.pack import pack_model
from quark.onnx.quantization.data import Data
from quark.onnx.quantization.file_differences import file_hash
from quark.onnx.quantization.making import packed_report
from quark.onnx.quantization.quantizer import QuantizedModel, quantize
from quark.onnx.save import write_text
from quark.onnx.session import release_memory
from quark.search.candidates import Candidate
from quark.search.journal import FILE_TROUBLE, OUT_OF_MEMORY
from quark.search.judging import Judge
from quark.search.sizes import PROFILE, stored_bytes
from quark.search.trial import Measurement, Trial


@dataclass(frozen=True, eq=False)
class Bench:
    """What all trials share. `is_packing` is False if files are left as they are; files of the presets `linted` are
    checked for what an NPU takes; `on_quantized` is called with every quantized model that was judged."""

    model: Path
    data: Data
    judge: Judge
    is_packing: bool = True
    linted: tuple[str, ...] = ()
    on_quantized: Callable[[Candidate, QuantizedModel], None] = lambda candidate, model: None

    def attempt(self, candidate: Candidate, folder: Path) -> tuple[Trial, Path | None]:
        """Try it, in that folder: the trial, and the file where there is one."""
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
                    path, size, is_packed = _weighed(path, remarks)
                judgement = self.judge.judge(path)
                findings = _refused(path) if candidate.preset in self.linted else ""
                self.on_quantized(candidate, result)
        except Exception as error:  # an operator, the memory, the runtime: each is a row of the table
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

    def quantized(self, candidate: Candidate) -> QuantizedModel:
        """Quantize by a candidate; nothing is written."""
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
        return result


# Findings about the network rather than about how it was quantized: no other configuration would be without them.
_OF_THE_NETWORK = ("Operator", "CustomDomain", "Opset", "FixedShape", "Batch")


def _refused(path: Path) -> str:
    """What an NPU would refuse of the way a file is quantized; empty if nothing."""
    errors = [each for each in lint(path) if each.level is Level.ERROR and each.rule not in _OF_THE_NETWORK]
    rules = ", ".join(dict.fromkeys(each.rule for each in errors))
    return f"{len(errors)} lint errors ({rules})" if errors else ""


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
    write_text(packed_report(read_text(report, f"report '{report}'"), PROFILE, facts), report)
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

"""Run a quantized network on samples and compare its outputs with those of the float network.

judge_outputs    runs a network beside known outputs, and judges every output by `quark.compare`
compare_outputs  the same for a message that is about to be written: the verdict
compare_executions  the same, and whether the runtime computes something else without its optimizations
output_errors    the errors by which a refinement is kept or rolled back
open_judge       the user's measure of the float model, and with `judged` of the quantized one
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quark.compare import (
    ExecutionGap,
    OutputFidelity,
    OutputsMeter,
    batch_size_of,
    execution_gap,
    outputs_without_numbers,
)
from quark.compare.improvement import OutputErrors
from quark.compare.kinds import ClassesMeter
from quark.compare.outputs import samples_of_batch
from quark.compare.parts import find_parts
from quark.errors import ModelError
from quark.measures import FunctionMeasure, Judge, Measure, MeasureResult
from quark.measures.measure import check_count
from quark.onnx.calibrate import FloatRunner
from quark.onnx.data import Samples
from quark.onnx.large_tensors import Message
from quark.onnx.session import open_session, release_memory, running

PLAIN_SAMPLES = 1  # that also run without optimizations

Array = NDArray[Any]
Sample = Mapping[str, Any]
Run = Callable[[Sample, list[str]], Mapping[str, Array]]  # the outputs of these names for a sample
Item = TypeVar("Item")
Result = TypeVar("Result")


class Outputs(Protocol):
    """Outputs of all samples by number: a list, or a store on the disk."""

    def __getitem__(self, index: int, /) -> Mapping[str, Array]: ...


def one_by_one(function: Callable[[int, Item], Result], items: Iterable[Item], see: Callable[[Result], None]) -> None:
    """Compute for all items and hand on each result."""
    for index, item in enumerate(items):
        see(function(index, item))


def session_run(session: Any, what: str = "the quantized model") -> Run:
    """A session as a function from a sample to outputs; `what` is how errors call the model."""

    def run(sample: Sample, names: list[str]) -> dict[str, Array]:
        with running(what):
            return dict(zip(names, session.run(names, dict(sample)), strict=True))

    return run


def judge_outputs(
    run: Run,
    samples: Iterable[Sample],
    expected: Outputs,
    left_out: Collection[str] = (),
    in_order: Callable[..., None] = one_by_one,
) -> tuple[OutputFidelity, ...]:
    """Run a network on the samples and judge its outputs, in the order of the expected ones, without `left_out`.

    `in_order` is `one_by_one` or a function like it that computes several samples at a time.
    """
    meter = OutputsMeter()

    def compute(index: int, sample: Sample) -> tuple[Sample, Sample, int]:
        reference = expected[index]
        actual = run(sample, list(reference))
        wanted = {name: array for name, array in reference.items() if name not in left_out}
        return wanted, {name: actual[name] for name in wanted}, batch_size_of(sample)

    in_order(compute, samples, lambda outputs: meter.add(*outputs))
    return meter.result()


def compare_outputs(
    message: Message, samples: Sequence[Sample], expected: Sequence[Sample], providers: Sequence[str]
) -> tuple[OutputFidelity, ...]:
    """Judge every output over all samples; outputs without numbers to compare with are left out."""
    if not samples:
        return ()
    session = open_session(message, providers=tuple(providers))
    outputs = judge_outputs(session_run(session), samples, expected, outputs_without_numbers(expected))
    del session
    release_memory()
    return outputs


@dataclass(frozen=True)
class Comparison:
    """The outputs of a quantized network beside the float network's, and a remark if ONNX Runtime computes something
    else without its optimizations; `outputs` are then those of the execution that is further from float."""

    outputs: tuple[OutputFidelity, ...] = ()
    remark: str | None = None


def compare_executions(
    message: Message, samples: Sequence[Sample], expected: Sequence[Sample], providers: Sequence[str]
) -> Comparison:
    """Judge every output over all samples, as ONNX Runtime usually computes them, and check on a few samples that it
    computes the same node by node, without its optimizations.

    That takes several times as long, so all samples are only used if `PLAIN_SAMPLES` show a difference.
    """
    if not samples:
        return Comparison()
    left_out, few = outputs_without_numbers(expected), samples[:PLAIN_SAMPLES]
    run = session_run(open_session(message, providers=tuple(providers)))
    outputs = judge_outputs(run, samples, expected, left_out)
    usual = judge_outputs(run, few, expected, left_out) if len(few) < len(samples) else outputs
    del run
    release_memory()
    try:
        session = open_session(message, providers=tuple(providers), has_optimizations=False)
        run = session_run(session, "the quantized model without optimizations")
        plain = judge_outputs(run, few, expected, left_out)
        gap = execution_gap(usual, plain)
        if gap is not None and len(few) < len(samples):
            plain = judge_outputs(run, samples, expected, left_out)
            gap = execution_gap(outputs, plain)
        del run, session
    except ModelError as error:
        return Comparison(outputs, f"ONNX Runtime runs this file only with its optimizations: {error}")
    release_memory()
    if gap is None:
        return Comparison(outputs)
    is_plain_worse = gap.plain_sqnr_db < gap.optimized_sqnr_db
    return Comparison(plain if is_plain_worse else outputs, gap_remark(gap))


def gap_remark(gap: ExecutionGap) -> str:
    """The remark about a file whose result depends on how ONNX Runtime computes it."""
    return (
        f"the result depends on ONNX Runtime's optimizations: {gap}. The verdict is about the worse of the two. Leave "
        "the layers that 'quark diagnose' shows out of quantization (nodes_to_exclude), or use another preset"
    )


def float_outputs(model: ir.Model, samples: Samples, providers: Sequence[str]) -> list[dict[str, Any]]:
    """Run the model as it is now on the held-out samples."""
    with FloatRunner(model, providers=tuple(providers)) as runner:
        return [runner.outputs(sample) for sample in samples.held_out]


def output_errors(
    model: ir.Model | Message,
    samples: Sequence[Sample],
    expected: Sequence[Mapping[str, Array]],
    outputs: Sequence[str] | None = None,
    *,
    providers: Sequence[str],
    has_integer_kernels: bool = True,
) -> OutputErrors:
    """How far outputs are from float on each sample; the rows of a batch count as samples. `outputs` are the names of
    those that count; None: all."""
    counts = [batch_size_of(sample) for sample in samples]
    known = [
        row
        for count, each in zip(counts, expected, strict=True)
        for row in samples_of_batch({name: np.atleast_1d(array) for name, array in each.items()}, count)
    ]
    parts = find_parts(known, known) if known else []
    classes = frozenset(each.place.output for each in parts if isinstance(each, ClassesMeter))
    session = open_session(model, providers=tuple(providers), has_integer_kernels=has_integer_kernels)
    names = [each.name for each in session.get_outputs()] if outputs is None else list(outputs)
    run, errors = session_run(session), OutputErrors()
    for sample, count, wanted in zip(samples, counts, expected, strict=True):
        actual = run(sample, names)
        exact, found = (samples_of_batch({name: each[name] for name in names}, count) for each in (wanted, actual))
        for row, other in zip(exact, found, strict=True):
            errors.add(row, other, classes)
    return errors


def open_judge(measure: Measure, model: ir.Model, samples: Samples, providers: Sequence[str]) -> Judge | None:
    """Take the user's measure of the float model, before anything is done to it.

    Returns None if the measure needs samples and none are held out, because both models would not fit into memory.
    """
    if not samples.held_out and not isinstance(measure, FunctionMeasure):
        return None
    check_count(measure, sum(len(next(iter(sample.values()))) for sample in samples.held_out))
    judge = Judge(measure, open_session(model, providers=tuple(providers)), samples.held_out)
    release_memory()
    return judge


def judged(judge: Judge, message: Message, providers: Sequence[str]) -> MeasureResult:
    """Take the user's measure of the quantized model."""
    result = judge.judge(open_session(message, providers=tuple(providers)))
    release_memory()
    return result


def unmeasured_remark(measure: Measure) -> str:
    """The remark about a measure that `open_judge` could not take."""
    return f"measure '{measure.name}' was not taken: it needs held-out samples, and there are none"

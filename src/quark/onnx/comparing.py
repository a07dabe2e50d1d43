"""Run a quantized network on samples and compare its outputs with those of the float network.

judge_outputs    runs a network beside known outputs, and judges every output by `quark.compare`
compare_outputs  the same for a message that is about to be written: the verdict
compare_held_out    the verdict: on the held-out samples, and on more where those are few
output_errors    the errors by which a refinement is kept or rolled back
open_judge       the user's measure of the float model, and with `judged` of the quantized one
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

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
    overall_verdict,
)
from quark.compare.improvement import OutputErrors
from quark.compare.kinds import ClassesMeter
from quark.compare.outputs import samples_of_batch
from quark.compare.parts import find_parts
from quark.errors import ModelError
from quark.measures import FunctionMeasure, Judge, Measure, MeasureResult
from quark.measures.measure import check_count
from quark.onnx.calibrate import FloatRunner
from quark.onnx.calibrate.runner import THREADS, each_in_order
from quark.onnx.data import Samples
from quark.onnx.large_tensors import Message
from quark.onnx.session import open_session, release_memory, running

PLAIN_SAMPLES = 1  # samples that also run without optimizations
RANDOM_TYPES = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Dropout"}
)

Array = NDArray[Any]
Sample = Mapping[str, Any]
Run = Callable[[Sample, list[str]], Mapping[str, Array]]  # the outputs of these names for a sample


class Outputs(Protocol):
    """Outputs of all samples by number: a list, or a store on the disk."""

    def __getitem__(self, index: int, /) -> Mapping[str, Array]: ...


def threads_for(samples: Sequence[Sample]) -> int | None:
    """The threads of a session that runs on these samples two at a time, which is faster than one with all of them:
    half of the processors, or all for a single one."""
    return THREADS if len(samples) > 1 else None


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
) -> tuple[OutputFidelity, ...]:
    """Run a network on the samples, two at a time, and judge its outputs, in the order of the expected ones, without
    `left_out`."""
    meter = OutputsMeter()
    _run_beside(run, samples, expected, left_out, lambda _, *outputs: meter.add(*outputs))
    return meter.result()


def _run_beside(
    run: Run,
    samples: Iterable[Sample],
    expected: Outputs,
    left_out: Collection[str],
    see: Callable[[int, Sample, Sample, int], None],
) -> None:
    """Run a network on the samples, and call `see` with the index, both outputs, and the rows of each."""

    def compute(index: int, sample: Sample) -> tuple[int, Sample, Sample, int]:
        reference = expected[index]
        actual = run(sample, list(reference))
        wanted = {name: array for name, array in reference.items() if name not in left_out}
        return index, wanted, {name: actual[name] for name in wanted}, batch_size_of(sample)

    each_in_order(compute, samples, lambda outputs: see(*outputs))


def compare_outputs(
    message: Message, samples: Sequence[Sample], expected: Sequence[Sample], providers: Sequence[str]
) -> tuple[OutputFidelity, ...]:
    """Judge every output over all samples; outputs without numbers to compare with are left out."""
    if not samples:
        return ()
    session = open_session(message, providers=tuple(providers), threads=threads_for(samples))
    outputs = judge_outputs(session_run(session), samples, expected, outputs_without_numbers(expected))
    del session
    release_memory()
    return outputs


@dataclass(frozen=True)
class Comparison:
    """The outputs of a quantized network beside the float network's.

    held_out   on the held-out samples
    judged     on all samples of the verdict: those and `joined` calibration samples
    remark     if ONNX Runtime computes something else without its optimizations; the outputs are then those of the
               execution that is further from float
    """

    held_out: tuple[OutputFidelity, ...] = ()
    judged: tuple[OutputFidelity, ...] = ()
    joined: int = 0
    remark: str | None = None

    @property
    def is_worse_on_more(self) -> bool:
        """True if the held-out samples were too few to show what the calibration samples show."""
        verdicts = [overall_verdict(outputs) for outputs in (self.judged, self.held_out)]
        return self.joined > 0 and verdicts[0].is_worse_than(verdicts[1])

    @property
    def outputs(self) -> tuple[OutputFidelity, ...]:
        """The outputs that the verdict is about."""
        return self.judged if self.is_worse_on_more else self.held_out


def compare_held_out(
    message: Message,
    samples: Samples,
    expected: Sequence[Mapping[str, Any]],
    providers: Sequence[str],
    *,
    has_integers: bool,
) -> Comparison:
    """Judge every output as ONNX Runtime usually computes it. With integer kernels, check on a few samples that it
    computes the same node by node, without its optimizations.

    That takes several times as long, so all samples are only used if `PLAIN_SAMPLES` show a difference. `expected` are
    the float outputs for `samples.judged`.
    """
    judged = samples.judged
    if not judged:
        return Comparison()
    left_out = outputs_without_numbers(expected)

    def judge(run: Run) -> tuple[Comparison, tuple[OutputFidelity, ...]]:
        """The comparison, and the outputs on the first samples alone."""
        few, first, all_of_them = OutputsMeter(), OutputsMeter(), OutputsMeter()

        def see(index: int, *outputs: Any) -> None:
            if index < PLAIN_SAMPLES:
                few.add(*outputs)
            if index < len(samples.held_out):
                first.add(*outputs)
            all_of_them.add(*outputs)

        _run_beside(run, judged, expected, left_out, see)
        comparison = Comparison(first.result(), all_of_them.result(), len(judged) - len(samples.held_out))
        return comparison, few.result()

    run = session_run(open_session(message, providers=tuple(providers), threads=threads_for(judged)))
    usual, on_few = judge(run)
    del run
    release_memory()
    if not has_integers:  # the runtime replaces nodes by other kernels only around integers
        return usual
    few = judged[:PLAIN_SAMPLES]
    try:
        session = open_session(message, providers=tuple(providers), has_optimizations=False)
        run = session_run(session, "the quantized model without optimizations")
        plain = replace(usual, judged=judge_outputs(run, few, expected, left_out))
        gap = execution_gap(on_few, plain.judged)
        if gap is not None and len(few) < len(judged):
            plain, _ = judge(run)
            gap = execution_gap(usual.judged, plain.judged)
        del run, session
    except ModelError as error:
        return replace(usual, remark=f"ONNX Runtime runs this file only with its optimizations: {error}")
    release_memory()
    if gap is None:
        return usual
    is_plain_worse = gap.plain_sqnr_db < gap.optimized_sqnr_db
    return replace(plain if is_plain_worse else usual, remark=gap_remark(gap))


def gap_remark(gap: ExecutionGap) -> str:
    """The remark about a file whose result depends on how ONNX Runtime computes it."""
    return (
        f"the result depends on ONNX Runtime's optimizations: {gap}. The verdict is about the worse of the two. Leave "
        "the layers that 'quark report' shows out of quantization (nodes_to_exclude), or use another preset"
    )


def float_outputs(model: ir.Model, samples: Samples, providers: Sequence[str]) -> list[dict[str, Any]]:
    """Run the model as it is now on the samples of the verdict."""
    with FloatRunner(model, providers=tuple(providers)) as runner:
        return runner.outputs_of(samples.judged)


def noise_remark(model: ir.Model, samples: Samples, providers: Sequence[str]) -> str | None:
    """The remark about a network that draws random numbers, so that two runs on the same sample differ; None if its
    outputs can be compared."""
    drawing = [node for node in model.graph.all_nodes() if node.op_type in RANDOM_TYPES and not node.domain]
    if not drawing or not samples.held_out:
        return None
    with FloatRunner(model, providers=tuple(providers)) as runner:
        first, second = (runner.outputs(samples.held_out[0]) for _ in range(2))
    differing = [name for name, array in first.items() if not _is_same(array, second[name])]
    if not differing:
        return None
    return (
        f"the network draws random numbers ({drawing[0].op_type} '{drawing[0].name}'), and two float runs on the same "
        f"sample differ in '{differing[0]}': outputs were not compared, and nothing was protected by measuring. "
        "Samples that turn the noise off (a noise scale of 0) give a verdict"
    )


def _is_same(first: Array, second: Array) -> bool:
    """True if two runs agree but for rounding, which the order of threads may change."""
    if first.shape != second.shape or first.dtype.kind not in "fc":
        return np.array_equal(first, second)
    return np.allclose(first, second, rtol=1e-3, atol=1e-3 * float(np.abs(first).max(initial=0)), equal_nan=True)


def output_errors(
    model: ir.Model | Message,
    samples: Sequence[Sample],
    expected: Sequence[Mapping[str, Array]],
    outputs: Sequence[str] | None = None,
    *,
    providers: Sequence[str],
    has_integer_kernels: bool = True,
) -> OutputErrors:
    """The distance of outputs from float on each sample; the rows of a batch count as samples. `outputs` are the names
    of those that count; None: all."""
    counts = [batch_size_of(sample) for sample in samples]
    known = [
        row
        for count, outputs_of_batch in zip(counts, expected, strict=True)
        for row in samples_of_batch({name: np.atleast_1d(array) for name, array in outputs_of_batch.items()}, count)
    ]
    parts = find_parts(known, known) if known else []
    classes = frozenset(part.place.output for part in parts if isinstance(part, ClassesMeter))
    threads = threads_for(samples)
    session = open_session(model, providers=tuple(providers), threads=threads, has_integer_kernels=has_integer_kernels)
    names = [output.name for output in session.get_outputs()] if outputs is None else list(outputs)
    run, errors = session_run(session), OutputErrors()

    def see(result: tuple[int, Mapping[str, Array]]) -> None:
        index, actual = result
        both = (expected[index], actual)
        exact, quantized = (samples_of_batch({name: values[name] for name in names}, counts[index]) for values in both)
        for row, other in zip(exact, quantized, strict=True):
            errors.add(row, other, classes)

    each_in_order(lambda index, sample: (index, run(sample, names)), samples, see)
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

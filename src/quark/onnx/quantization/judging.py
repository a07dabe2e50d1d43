"""The user's measure of the float and the quantized model, taken on the held-out samples of a run."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from quark.measures import FunctionMeasure, Judge, Measure, MeasureResult
from quark.measures.measure import check_count
from quark.onnx.data import Samples
from quark.onnx.message import Message
from quark.onnx.session import open_session, release_memory


def open_judge(measure: Measure, model: ir.Model, samples: Samples, providers: Sequence[str]) -> Judge | None:
    """Measure the float model, before anything is done to it.

    Returns None if the measure needs samples and none are held out, because both models would not fit into memory.
    """
    if not samples.held_out and not isinstance(measure, FunctionMeasure):
        return None
    rows = sum(len(next(iter(each.values()))) for each in samples.held_out)
    check_count(measure, rows)
    judge = Judge(measure, open_session(model, providers=tuple(providers)), samples.held_out)
    release_memory()
    return judge


def judged(judge: Judge, message: Message, providers: Sequence[str]) -> MeasureResult:
    """Measure the quantized model."""
    result = judge.judge(open_session(message.to_graph(), providers=tuple(providers)))
    release_memory()
    return result


def unmeasured_remark(measure: Measure) -> str:
    return f"measure '{measure.name}' was not taken: it needs held-out samples, and there are none"

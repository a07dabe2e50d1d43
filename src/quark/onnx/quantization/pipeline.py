"""The whole of it: load, optimize, calibrate, choose, insert, check. Each line is a folder beside this one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
import onnx_ir as ir

from quark.account import CalibrationFacts, FileFacts, Report
from quark.onnx.calibrate import FloatRunner, Wanted, calibrate
from quark.onnx.choose import RangeKey, check_overrides, choose, place, tensors_to_measure, unused_overrides
from quark.onnx.data import Samples
from quark.onnx.insert import insert
from quark.onnx.load import load
from quark.onnx.optimize import optimize
from quark.onnx.quantization.data import Data
from quark.onnx.quantization.settings import Settings
from quark.onnx.quantization.verdict import compare_outputs
from quark.onnx.quantization.versions import metadata_of, versions
from quark.onnx.save import to_proto
from quark.plan import QuantizationPlan
from quark.ranges import TensorRange


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a run gives: the quantized model, and the account of it but for the file that it is written to."""

    model: onnx.ModelProto
    report: Report


def quantize_graph(source: str | os.PathLike[str] | onnx.ModelProto | bytes, data: Data, settings: Settings) -> Outcome:
    """Quantize a model by the settings; nothing is written."""
    loaded = load(source, settings.load)
    model = loaded.model
    check_overrides(model, settings.choose.overrides)
    names = _op_types(model)
    rewrites = optimize(model, settings.optimize)
    placement = place(model, settings.choose, vanished=names)
    op_types = _op_types(model)
    wanted = tensors_to_measure(placement)
    samples = data.open(model, settings.calibrate, is_calibrating=bool(wanted))
    with FloatRunner(model, (name for name, _ in wanted), providers=settings.calibrate.providers) as runner:
        ranges = _measure(runner, wanted, samples, settings)
        expected = [runner.outputs(sample) for sample in samples.held_out]
    plan = choose(model, placement, ranges, settings.choose)
    insert(model, plan, settings.insert)
    proto = to_proto(model, metadata_of(settings, plan), settings.save)
    outputs = compare_outputs(proto, samples.held_out, expected, settings.calibrate.providers) if plan.tensors else ()
    report = Report(
        config_name=settings.name,
        config=settings.config,
        versions=versions(),
        source=FileFacts(loaded.name, loaded.bytes, loaded.sha256),
        result=None,
        plan=replace(plan, skipped=(*loaded.skipped, *plan.skipped)),
        calibration=_calibration_facts(samples, wanted),
        outputs=outputs,
        rewrites=rewrites,
        remarks=(*settings.remarks, *loaded.remarks, *_remarks(plan, samples, settings)),
        op_types=op_types,
    )
    return Outcome(proto, report)


def _measure(
    runner: FloatRunner, wanted: Sequence[RangeKey], samples: Samples, settings: Settings
) -> dict[RangeKey, TensorRange]:
    """The ranges; a tensor that is wanted for several specs is looked at once for each."""
    ranges: dict[RangeKey, TensorRange] = {}
    pending = list(wanted)
    while pending:
        once = dict(reversed(pending))
        methods = {name: Wanted(spec.method, spec.integer, spec.is_symmetric) for name, spec in once.items()}
        found = calibrate(runner, methods, samples, settings.calibrate)
        ranges |= {(name, once[name]): each for name, each in found.items()}
        pending = [key for key in pending if key not in ranges]
    return ranges


def _calibration_facts(samples: Samples, wanted: Sequence[RangeKey]) -> CalibrationFacts:
    methods = tuple(dict.fromkeys(str(spec.method) for _, spec in wanted))
    count = samples.count if wanted else 0
    return CalibrationFacts(
        samples.source, count, len(samples.held_out), methods, samples.is_random, samples.is_held_out_shared
    )


def _op_types(model: ir.Model) -> Mapping[str, str]:
    return {str(node.name): node.op_type for node in model.graph}


def _remarks(plan: QuantizationPlan, samples: Samples, settings: Settings) -> list[str]:
    remarks = unused_overrides(plan, settings.choose.overrides)
    if not plan.tensors:
        remarks.append("nothing was quantized: no node of the model fits the configuration")
    if samples.is_random:
        remarks.append("no calibration data was given: random numbers took its place, and the verdict is about those")
    if samples.is_held_out_shared:
        remarks.append("one sample only: the verdict is about the sample that was calibrated on")
    return remarks

"""The whole: load, optimize, equalize, calibrate, decide, insert, check. Each line is a folder beside this one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx
import onnx_ir as ir

from quark.account import AlgorithmFacts, CalibrationFacts, FileFacts, ProtectionFacts, Report, Rewrite
from quark.card import CARD_KEY, Card, DataFacts
from quark.fidelity import OutputFidelity, numberless_remark, outputs_without_numbers
from quark.measures import Measure, MeasureResult
from quark.onnx.calibrate import FloatRunner
from quark.onnx.choose import BlockSpec, RangeKey, check_overrides, place, tensors_to_measure, unused_overrides
from quark.onnx.data import Samples
from quark.onnx.input_files import MappedFile, check_unchanged
from quark.onnx.insert import insert
from quark.onnx.load import Digest, LoadedModel, load
from quark.onnx.message import Message
from quark.onnx.optimize import optimize
from quark.onnx.protect import ProtectMode, ProtectOptions, Structures
from quark.onnx.quantization.data import Data
from quark.onnx.quantization.deciding import decide
from quark.onnx.quantization.equalizing import equalize
from quark.onnx.quantization.judging import judged, open_judge, unmeasured_remark
from quark.onnx.quantization.making import card_of, data_facts
from quark.onnx.quantization.measuring import measure
from quark.onnx.quantization.memory import verdict_obstacle
from quark.onnx.quantization.mixing import Mixed, mix
from quark.onnx.quantization.protecting import (
    is_better,
    is_protectable,
    needs_protection,
    protect,
    protect_structures,
    runs_on_npu,
    structure_facts,
    without_effect,
)
from quark.onnx.quantization.settings import Settings
from quark.onnx.quantization.verdict import compare_outputs, float_outputs
from quark.onnx.quantization.versions import metadata_of, versions
from quark.onnx.refine import CorrectionInputs, give_biases, layer_inputs, layer_outputs
from quark.onnx.save import finish
from quark.onnx.simulate import simulate
from quark.plan import QuantizationPlan
from quark.ranges import TensorRange
from quark.report.algorithms import idle_remark


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a run gives: the quantized model, and the account of it but for the file that it is written to."""

    message: Message
    account: Report  # without the hash of the source, which takes as long as all else where that is large
    digest: Digest
    card: Card
    files: tuple[MappedFile, ...] = ()  # of the source, that weights are still read from

    def check_unchanged(self) -> None:
        """Raise a ModelError if a file that weights are still read from has changed since it was opened."""
        check_unchanged(self.files)

    @property
    def report(self) -> Report:
        """The account with the hash, which is waited for."""
        return replace(self.account, source=replace(self.account.source, sha256=self.digest.hexdigest()))


def quantize_graph(
    source: str | os.PathLike[str] | onnx.ModelProto | bytes,
    data: Data,
    settings: Settings,
    metric: Measure | None = None,
) -> Outcome:
    """Quantize a model by the settings; nothing is written. `metric` is taken of both models, for the account.

    The files of a large model are read until the result is saved. A change to them is a ModelError in the next step.
    """
    loaded = load(source, settings.load)
    model = loaded.model
    check_overrides(model, settings.choose.overrides)
    names = _op_types(model)
    samples = data.open(model, settings)
    fed = data_facts(data, samples, settings)  # before any are dropped: memory must not show in the file
    obstacle = verdict_obstacle(model, samples, settings)
    if obstacle is not None:
        samples.hold_none_out()
    judge = None if metric is None else open_judge(metric, model, samples, settings.calibrate.providers)
    expected = float_outputs(model, samples, settings) if settings.optimize.changes_outputs else []
    original = model.clone() if settings.mix is not None and settings.optimize.changes_outputs else None
    loaded.check_unchanged()
    rewrites = optimize(model, settings.optimize)
    loaded.check_unchanged()
    equalized = equalize(model, samples, settings)
    if settings.refine.changes_biases and not samples.is_random:
        give_biases(model)
    loaded.check_unchanged()
    mixed = None if settings.mix is None else mix(model, original, samples, settings, names)
    choose, structures = (mixed.choose, Structures()) if mixed else protect_structures(model, settings)
    settings = replace(settings, choose=choose)
    known = dict(mixed.ranges) if mixed else {}
    origin = _Source(loaded, fed, names, samples, expected)
    protection = structure_facts(model, structures)
    run = None
    if settings.protect.mode is ProtectMode.AUTO and is_protectable(settings) and not samples.is_random:
        # finetuning comes last: it fits the layers that are still in 8 bits
        plain = replace(settings, refine=replace(settings.refine, finetune=None))
        first = _carry_out(model.clone(), origin, plain, known)
        known = first.ranges
        if needs_protection(first.outputs):
            loaded.check_unchanged()
            protected = protect(model, samples, plain, first.ranges, structures, names)
            second = _carry_out(model.clone(), origin, replace(plain, choose=protected.choose), protected.ranges)
            if is_better(second.outputs, first.outputs):
                first, protection, known = second, protected.facts, protected.ranges
                settings = replace(settings, choose=protected.choose)
            else:
                protection = without_effect(protected.facts, protection)
        run = first if settings.refine.finetune is None else None
    run = run or _carry_out(model, origin, settings, known)
    loaded.check_unchanged()
    mixed = mixed.judged(run.message, settings) if mixed else None
    measured = None if judge is None else judged(judge, run.message, settings.calibrate.providers)
    loaded.check_unchanged()
    unmeasured = [unmeasured_remark(metric)] if metric is not None and measured is None else []
    course = _Course(
        loaded=loaded,
        run=run,
        samples=samples,
        obstacle=obstacle,
        rewrites=(*rewrites, *(replace(each, name=f"npu_{each.name}") for each in run.simulated)),
        algorithms=(*equalized, *([mixed.facts] if mixed else []), *run.refined),
        mixed=mixed,
        protection=protection,
        measured=measured,
        remarks=unmeasured,
    )
    return Outcome(run.message, _account(course, settings), loaded.digest, run.card, loaded.files)


@dataclass(frozen=True, eq=False)
class _Run:
    """A quantized model, and how it compares with the float model."""

    message: Message
    card: Card
    op_types: Mapping[str, str]
    wanted: Sequence[RangeKey]
    ranges: dict[RangeKey, TensorRange]
    simulated: Sequence[Rewrite]
    refined: tuple[AlgorithmFacts, ...]
    plan: QuantizationPlan
    expected: Sequence[Mapping[str, Any]]
    outputs: tuple[OutputFidelity, ...]


@dataclass(frozen=True, eq=False)
class _Source:
    """What a run starts from: the model file, the data, the names of all its nodes, and, if they were computed already,
    the float model's outputs for the held-out samples."""

    loaded: LoadedModel
    fed: DataFacts
    names: Mapping[str, str]
    samples: Samples
    expected: Sequence[Mapping[str, Any]]


def _carry_out(model: ir.Model, source: _Source, settings: Settings, known: Mapping[RangeKey, TensorRange]) -> _Run:
    """Place, calibrate, decide, insert and compare, in place; ranges that are known are not measured again."""
    loaded, samples, expected = source.loaded, source.samples, source.expected
    loaded.check_unchanged()
    placement = place(model, settings.choose, vanished=source.names)
    op_types = _op_types(model)
    wanted = tensors_to_measure(placement)
    with FloatRunner(
        model, _watched(wanted, model, samples, settings), providers=settings.calibrate.providers
    ) as runner:
        ranges = measure(runner, wanted, samples, settings, known)
        loaded.check_unchanged()
        expected = expected or [runner.outputs(sample) for sample in samples.held_out]
        exact = model.clone() if settings.refine.finetune is not None else None
        simulated = simulate(model, settings.simulate, [each.node for each in placement.skipped])
        plan, refined = decide(model, placement, ranges, runner, samples, expected, settings, exact)
    loaded.check_unchanged()
    insert(model, plan, settings.insert)
    card = card_of(settings, loaded, source.fed, plan.digest)
    message = finish(model, {**metadata_of(settings, plan), CARD_KEY: card.inside().to_json()}, settings.save)
    loaded.check_unchanged()
    outputs = compare_outputs(message, samples.held_out, expected, settings.calibrate.providers) if plan.tensors else ()
    return _Run(message, card, op_types, wanted, ranges, simulated, refined, plan, expected, outputs)


@dataclass(frozen=True, eq=False)
class _Course:
    """What happened on the way, for the account of it."""

    loaded: LoadedModel
    run: _Run
    samples: Samples
    obstacle: str | None
    rewrites: tuple[Rewrite, ...]
    algorithms: tuple[AlgorithmFacts, ...]
    mixed: Mixed | None
    protection: ProtectionFacts | None
    measured: MeasureResult | None
    remarks: Sequence[str]


def _account(course: _Course, settings: Settings) -> Report:
    loaded, mixed = course.loaded, course.mixed
    idle = [remark for each in course.algorithms if (remark := idle_remark(each)) is not None]
    return Report(
        config_name=settings.name,
        config=settings.config,
        versions=versions(),
        source=FileFacts(loaded.name, loaded.bytes, ""),
        result=None,
        plan=replace(course.run.plan, skipped=(*loaded.skipped, *course.run.plan.skipped)),
        calibration=_calibration_facts(course.samples, course.run.wanted, course.obstacle is not None),
        outputs=course.run.outputs,
        rewrites=course.rewrites,
        algorithms=course.algorithms,
        remarks=(
            *(*settings.remarks, *loaded.remarks, *(mixed.remarks if mixed else ())),
            *(*_remarks(course.run.plan, course.samples, settings, course.obstacle), *idle),
            *(numberless_remark(name) for name in outputs_without_numbers(course.run.expected)),
            *course.remarks,
        ),
        op_types=course.run.op_types,
        mixed=mixed.plan if mixed else None,
        protection=course.protection,
        measure=course.measured,
    )


def _watched(wanted: Sequence[RangeKey], model: ir.Model, samples: Samples, settings: Settings) -> list[str]:
    """The tensors that are looked at while the float model runs."""
    correction = None if samples.is_random else settings.refine.bias_correction
    layers = [] if correction is None else layer_inputs(model)
    if correction is not None and correction.inputs is CorrectionInputs.QUANTIZED:
        layers += layer_outputs(model)
    return list(dict.fromkeys([*(name for name, _ in wanted), *layers]))


def _calibration_facts(samples: Samples, wanted: Sequence[RangeKey], is_unchecked: bool) -> CalibrationFacts:
    methods = tuple(dict.fromkeys(str(spec.method) for _, spec in wanted))
    count, held_out = samples.count if wanted else 0, len(samples.held_out)
    shared = samples.is_held_out_shared
    return CalibrationFacts(samples.source, count, held_out, methods, samples.is_random, shared, is_unchecked)


def _op_types(model: ir.Model) -> Mapping[str, str]:
    return {str(node.name): node.op_type for node in model.graph}


def _remarks(plan: QuantizationPlan, samples: Samples, settings: Settings, obstacle: str | None) -> list[str]:
    remarks = unused_overrides(plan, settings.choose.overrides)
    if settings.protect.mode is not ProtectMode.NONE and not is_protectable(settings):
        remarks.append("Protect: only activations of 8 bits are protected, and not together with mixed precision")
    if settings.protect.mode is ProtectMode.STRUCTURES and isinstance(settings.choose.default.activation, BlockSpec):
        remarks.append("Protect 'structures': blocks only go on the operands of products, where no structure breaks")
    if settings.protect.mac_budget != ProtectOptions().mac_budget and runs_on_npu(settings.choose):
        remarks.append("ProtectBudget: for an NPU no layer is left in float, so that there is nothing for it to limit")
    if not plan.tensors:
        remarks.append("nothing was quantized: no node of the model fits the configuration")
    if samples.is_random and (obstacle is None or settings.needs_data):
        of_verdict = ", and the verdict is about those" if obstacle is None else ""
        remarks.append(f"no calibration data was given: random numbers took its place{of_verdict}")
    if obstacle is not None:
        remarks.append(obstacle)
    if samples.is_held_out_shared:
        remarks.append("one sample only: the verdict is about the sample that was calibrated on")
    return remarks

"""One quantization run: load, optimize, equalize, mix, protect, place, calibrate, decide, insert, check."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import onnx
import onnx_ir as ir

from quark.account import AlgorithmFacts, CalibrationFacts, FileFacts, Report, Rewrite
from quark.card import CARD_KEY, Card, DataFacts
from quark.compare import (
    OutputFidelity,
    batch_size_of,
    numberless_remark,
    outputs_without_numbers,
    overall_verdict,
)
from quark.decide import RangeKey, check_overrides, place, tensors_to_measure, unused_overrides
from quark.devices import device_of
from quark.features.mixed_precision.on_onnx import mix
from quark.features.order import call
from quark.features.protection.on_onnx import is_protectable, protected_run, protection_remarks
from quark.features.protection.options import ProtectMode
from quark.files.output import nothing_on_disk
from quark.measures import Measure
from quark.onnx.bodies import Body, insert_bodies, joined, measure_bodies, place_bodies
from quark.onnx.calibrate import FloatRunner, restored
from quark.onnx.comparing import (
    Comparison,
    compare_held_out,
    float_outputs,
    judged,
    noise_remark,
    open_judge,
    unmeasured_remark,
)
from quark.onnx.data import Samples
from quark.onnx.deciding import Decision, Work, decide, measure, train
from quark.onnx.evaluating import evaluate
from quark.onnx.garbage import rare_collections
from quark.onnx.input_files import MappedFile, check_unchanged
from quark.onnx.insert import insert
from quark.onnx.large_tensors import Message, free_memory, weight_bytes
from quark.onnx.load import Digest, LoadedModel, load
from quark.onnx.macs import estimated_macs
from quark.onnx.optimize import optimize
from quark.onnx.optimize.layouts import TO_CHANNELS_LAST, to_channels_last
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.data import Data
from quark.onnx.quantization.making import card_of, data_facts
from quark.onnx.save import finish, write_preprocessed
from quark.onnx.session import custom_libraries, is_slow_to_optimize
from quark.onnx.settings import Settings
from quark.onnx.simulate import simulate
from quark.onnx.value_info import declare_all
from quark.onnx.versions import metadata_of, versions
from quark.onnx.view import tensor_names, view_of
from quark.plan import AffineChoice, QuantizationPlan, Role, SkippedNode
from quark.ranges import TensorRange
from quark.report.algorithms import idle_remark
from quark.report.quantities import count_of, listed, size_text

USUAL_LIMIT_BYTES = 1_000_000_000  # bytes of weights, for a model that runs for the verdict only
VERDICT_MACS = 15_000_000_000  # for all samples that run for the verdict only
FEWEST_JUDGED = 16  # if VERDICT_MACS allows: enough to show, four times in five, a failure on a tenth of the samples
_FEWER_PASSES = (
    "the verdict was computed without ONNX Runtime's optimizations of layouts and of float operators, which take "
    "minutes in a network of this many quantized tensors; its integer kernels were used"
)


@dataclass(frozen=True, eq=False)
class Outcome:
    """The quantized model, and the report on it except for the file that it is written to."""

    message: Message
    account: Report  # without the hash of the source, which takes as long as everything else for a large file
    digest: Digest
    card: Card
    files: tuple[MappedFile, ...] = ()  # files of the source that weights are still read from

    def check_unchanged(self) -> None:
        """Raise a ModelError if a file that weights are still read from has changed since it was opened."""
        check_unchanged(self.files)

    @property
    def report(self) -> Report:
        """The report with the hash of the source; waits until it is computed."""
        return replace(self.account, source=replace(self.account.source, sha256=self.digest.hexdigest()))


def quantize_graph(
    model_input: str | os.PathLike[str] | onnx.ModelProto | bytes,
    data: Data,
    settings: Settings,
    metric: Measure | None = None,
) -> Outcome:
    """Quantize a model as the settings say, without writing it.

    `metric` is measured on both models, for the report. The files of a large model are read until the result is saved.
    If one of them changes, the next step raises a ModelError.
    """
    with ExitStack() as stack:
        if settings.save.is_in_memory:
            stack.enter_context(nothing_on_disk())
        if not settings.has_warnings:
            stack.enter_context(warnings.catch_warnings())
            for category in (ResourceWarning, UserWarning):
                warnings.simplefilter("ignore", category)
        stack.enter_context(custom_libraries(settings.load.custom_libraries))
        stack.enter_context(rare_collections())
        settings = replace(settings, calibrate=restored(settings.calibrate))
        return _quantize_graph(model_input, data, settings, metric)


def _quantize_graph(
    model_input: str | os.PathLike[str] | onnx.ModelProto | bytes,
    data: Data,
    settings: Settings,
    metric: Measure | None,
) -> Outcome:
    loaded = load(model_input, settings.load)
    model = loaded.model
    check_overrides(tensor_names(model), settings.choose.overrides)
    names = _op_types(model)
    op_types = {node.op_type for node in model.graph.all_nodes()}
    samples = data.open(model, settings)
    # before samples are dropped: the file must not depend on the machine's memory
    fed = data_facts(data, samples, settings)
    if settings.optimize.has_channels_last:
        samples.transpose(dict.fromkeys(to_channels_last(model), TO_CHANNELS_LAST))
    providers = settings.calibrate.providers
    obstacle = verdict_obstacle(model, samples, settings)
    noise = None if obstacle is not None else noise_remark(model, samples, providers)
    if obstacle is not None or noise is not None or _is_never_run(samples, settings):
        samples.hold_none_out()
    elif metric is None and samples.held_out and _is_only_judged(samples, settings):
        samples.hold_out_at_most(max(1, _verdict_count(model, samples)))
    elif samples.held_out and not samples.is_random:
        samples.judge_at_least(FEWEST_JUDGED, _verdict_count(model, samples))
    judge = None if metric is None else open_judge(metric, model, samples, providers)
    expected = float_outputs(model, samples, providers) if settings.optimize.changes_outputs else []
    is_kept = settings.mix is not None and (settings.optimize.changes_outputs or settings.mix.subgraphs is not None)
    original = model.clone() if is_kept else None
    exact = model.clone() if samples.evaluated is not None else None
    loaded.check_unchanged()
    rewrites = optimize(model, settings.optimize)
    loaded.check_unchanged()
    algorithms = call("onnx", "before_calibration", Work(model, samples, settings))
    loaded.check_unchanged()
    write_preprocessed(model, model_input, settings.save)
    mixed = None if settings.mix is None else mix(model, original, samples, settings, names)
    settings = replace(settings, choose=mixed.choose) if mixed else settings
    source = _Source(loaded, fed, names, samples, expected)
    run, settings, protection = protected_run(
        Work(model, samples, settings),
        dict(mixed.ranges) if mixed else {},
        names,
        lambda model, settings, known, stops: _carry_out(model, source, settings, known, stops),
        settings_of,
    )
    loaded.check_unchanged()
    mixed = mixed.judged(run.message, settings) if mixed else None
    measured = None if judge is None else judged(judge, run.message, providers)
    evaluations = evaluate(exact, run.message, samples, providers)
    if settings.save.has_all_value_info:
        declare_all(run.message, next(samples.in_order()), providers)
    loaded.check_unchanged()
    algorithms = (*algorithms, *([mixed.facts] if mixed else []), *run.refined)
    facts = _calibration_facts(samples, run, obstacle is not None)
    account = Report(
        config_name=settings.name,
        config=settings.config,
        versions=versions(),
        source=FileFacts(loaded.name, loaded.bytes, ""),
        result=None,
        plan=_with_skipped(run.plan, loaded.skipped),
        calibration=replace(facts, is_network_random=noise is not None),
        outputs=run.outputs,
        rewrites=(*rewrites, *(replace(rewrite, name=f"npu_{rewrite.name}") for rewrite in run.simulated)),
        algorithms=algorithms,
        remarks=(
            *(*settings.remarks, *loaded.remarks, *(mixed.remarks if mixed else ())),
            *_remarks(run.plan, samples, settings, obstacle),
            *run.ends,
            *([run.compared.remark] if run.compared.remark is not None else []),
            *([_judged_remark(samples, run.compared)] if run.compared.is_worse_on_more else []),
            *([_FEWER_PASSES] if run.outputs and is_slow_to_optimize(run.message) else []),
            *_absent_types(op_types, settings),
            *(remark for algorithm in algorithms if (remark := idle_remark(algorithm)) is not None),
            *([noise] if noise is not None else []),
            *(numberless_remark(name) for name in outputs_without_numbers(run.expected)),
            *([unmeasured_remark(metric)] if metric is not None and measured is None else []),
            *(f"EvalMetrics, {evaluation}" for evaluation in evaluations),
        ),
        op_types=run.op_types,
        mixed=mixed.plan if mixed else None,
        protection=protection,
        measure=measured,
        device=str(device_of(providers)),
    )
    return Outcome(run.message, account, loaded.digest, run.card, loaded.files)


@dataclass(frozen=True, eq=False)
class _Source:
    """The model file, the data, the names of all nodes before rewrites, and the float outputs for the samples of the
    verdict if they are computed already."""

    loaded: LoadedModel
    fed: DataFacts
    names: Mapping[str, str]
    samples: Samples
    expected: Sequence[Mapping[str, Any]]


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
    compared: Comparison
    ends: tuple[str, ...] = ()  # what KeepFirstLast did, in words
    is_trained: bool = False

    @property
    def outputs(self) -> tuple[OutputFidelity, ...]:
        return self.compared.outputs

    @property
    def judged(self) -> tuple[OutputFidelity, ...]:
        return self.compared.judged


def _carry_out(
    model: ir.Model,
    source: _Source,
    settings: Settings,
    known: Mapping[RangeKey, TensorRange],
    stops: Callable[[Sequence[OutputFidelity]], bool] | None = None,
) -> _Run:
    """Place, calibrate, decide, train, insert and compare. Changes the model in place, and does not measure `known`
    ranges again.

    With `stops`, the network is also compared before training; if `stops` returns True for its outputs, it is not
    trained.
    """
    loaded, samples, providers = source.loaded, source.samples, settings.calibrate.providers
    loaded.check_unchanged()
    inner = place_bodies(model, settings, source.names)
    names = [*source.names, *(str(node.name) for body in inner for node in body.model.graph)]
    placement = place(view_of(model), settings.choose, vanished=names)
    op_types = {**_op_types(model), **{name: kind for body in inner for name, kind in _op_types(body.model).items()}}
    wanted = tensors_to_measure(placement)
    watched = dict.fromkeys([*(name for name, _ in wanted), *call("onnx", "watched", Work(model, samples, settings))])
    with FloatRunner(model, list(watched), providers=providers, stays_open=False) as runner:
        ranges = measure_bodies(model, inner, samples, settings, measure(runner, wanted, samples, settings, known))
        loaded.check_unchanged()
        expected = source.expected or runner.outputs_of(samples.judged)
        exact = model.clone() if settings.refine.finetune is not None or settings.features else None
        simulated = simulate(model, settings.simulate, [skipped.node for skipped in placement.skipped])
        of_held_out = expected[: len(samples.held_out)]
        decision = Decision(model, samples, settings, placement, ranges, runner, of_held_out, exact)
        refined = decide(decision)

        def written(model: ir.Model, inner: Sequence[Body], *, is_trained: bool) -> _Run:
            """The quantized network as it would be written now."""
            loaded.check_unchanged()
            plan = joined(decision.plan, insert_bodies(model, inner, ranges, settings))
            insert(model, decision.plan, settings.insert)
            card = card_of(settings, loaded, source.fed, plan.digest)
            message = finish(model, {**metadata_of(settings, plan), CARD_KEY: card.inside().to_json()}, settings.save)
            loaded.check_unchanged()
            compared = _compared(message, plan, samples, expected, providers)
            loaded.check_unchanged()
            kept = settings.choose.ends
            ends = () if kept is None else (kept.remark(plan, placement.first_layers, placement.last_layers),)
            facts = (wanted, ranges, simulated, refined, plan, expected, compared, ends)
            return _Run(message, card, op_types, *facts, is_trained)

        if settings.trains:
            if stops is not None:
                copy = model.clone()
                plain = written(copy, place_bodies(copy, settings, source.names), is_trained=False)
                if stops(plain.outputs):
                    return plain
            refined = (*refined, *train(decision))
    return written(model, inner, is_trained=settings.trains)


def _compared(
    message: Message,
    plan: QuantizationPlan,
    samples: Samples,
    expected: Sequence[Mapping[str, Any]],
    providers: Sequence[str],
) -> Comparison:
    """Compare the outputs with the float network's, unless nothing was quantized."""
    if not plan.tensors:
        return Comparison()
    has_integers = any(isinstance(entry.choice, AffineChoice) and entry.role is Role.ACTIVATION for entry in plan)
    return compare_held_out(message, samples, expected, providers, has_integers=has_integers)


def _calibration_facts(samples: Samples, run: _Run, is_unchecked: bool) -> CalibrationFacts:
    methods = tuple(dict.fromkeys(str(spec.method) for _, spec in run.wanted))
    count, batches = (samples.rows, samples.count) if run.wanted else (0, 0)
    return CalibrationFacts(
        samples.source,
        count,
        samples.held_out_rows,
        methods,
        samples.is_random,
        samples.is_held_out_shared,
        is_unchecked,
        "" if samples.images is None else str(samples.images),
        batches,
        sum(map(batch_size_of, samples.judged)) if run.compared.is_worse_on_more else 0,
    )


def _with_skipped(plan: QuantizationPlan, first: Sequence[SkippedNode]) -> QuantizationPlan:
    """Put the nodes that loading left in float first. The plan may already list some of them, those with subgraphs."""
    known = {(skipped.node, skipped.op_type) for skipped in first}
    rest = (skipped for skipped in plan.skipped if (skipped.node, skipped.op_type) not in known)
    return replace(plan, skipped=(*first, *rest)) if first else plan


def _op_types(model: ir.Model) -> Mapping[str, str]:
    return {str(node.name): node.op_type for node in model.graph}


def _remarks(plan: QuantizationPlan, samples: Samples, settings: Settings, obstacle: str | None) -> list[str]:
    remarks = [*unused_overrides(plan, settings.choose.overrides), *protection_remarks(settings)]
    if not plan.tensors:
        remarks.append("nothing was quantized: no node of the model fits the configuration")
    if samples.is_random and settings.needs_data:  # otherwise only the verdict uses them, and it says so
        of_verdict = ", and the verdict is about those" if obstacle is None else ""
        remarks.append(f"no calibration data was given: random numbers took its place{of_verdict}")
    if obstacle is not None:
        remarks.append(obstacle)
    elif _is_never_run(samples, settings):
        remarks.append("no data was given, so that the float and the quantized model were not run and compared")
    if not samples.is_random and (settings.calibrate.random_shapes or settings.calibrate.random_ranges):
        remarks.append("RandomDataReaderInput...: there is calibration data, so no random data is used")
    if samples.is_held_out_shared:
        few = "one sample" if samples.rows == 1 else f"one batch of {samples.rows} samples"
        remarks.append(f"{few} only: the verdict is about what was calibrated on")
    if constants := samples.constants():
        told = listed(f"'{name}' is {value:g}" for name, value in constants.items())
        remarks.append(
            f"every value of {told}, in all samples: the ranges and the verdict are not valid for any other input. "
            "Check how the data is made"
        )
    return remarks


def _judged_remark(samples: Samples, compared: Comparison) -> str:
    held_out = count_of(samples.held_out_rows, "held-out sample")
    return (
        f"the verdict is also about samples that were calibrated on: {held_out} alone would make it "
        f"{overall_verdict(compared.held_out).value}, and too few to rely on"
    )


def _absent_types(present: Collection[str], settings: Settings) -> list[str]:
    absent = sorted(settings.choose.selection.extra_op_types.difference(present))
    return [f"extra_op_types_to_quantize: the model has no {', '.join(absent)}"] if absent else []


def _is_never_run(samples: Samples, settings: Settings) -> bool:
    """True if only weights are quantized and no data was given: comparing outputs for random inputs would not be
    informative."""
    return settings.insert.matmul_nbits is not None and samples.is_random and not settings.needs_data


def _is_only_judged(samples: Samples, settings: Settings) -> bool:
    """True if samples are needed for the verdict only, so that no byte of the result depends on them. Otherwise the
    float network runs on many samples anyway, or protection decides by the verdict."""
    is_protected = settings.protect.mode is ProtectMode.AUTO and is_protectable(settings) and not samples.is_random
    is_decided_by_samples = settings.needs_data or settings.mix is not None or is_protected
    return not is_decided_by_samples and (settings.sample_use == 0 or samples.is_random)


def _verdict_count(model: ir.Model, samples: Samples) -> int:
    """The number of samples for a network that runs for the verdict only; one is enough if they are random."""
    if samples.is_random:
        return 1
    shapes = {name: array.shape for name, array in samples.held_out[0].items()}
    return VERDICT_MACS // max(1, estimated_macs(model, shapes))


def verdict_obstacle(model: ir.Model, samples: Samples, settings: Settings) -> str | None:
    """The reason why there is no verdict on this model, or None if there is one.

    The verdict runs the float model, then the quantized one. ONNX Runtime maps the weights and rearranges them for its
    kernels, so a session takes about as much memory as the weights. If samples are needed for more than the verdict,
    the float model runs anyway, and the verdict needs no more memory. Otherwise the model would be loaded for the
    verdict alone, and its size is limited.
    """
    given = settings.calibrate.verdict_limit_bytes
    needed = weight_bytes(model)
    if given is not None:
        return _remark(needed, f"VerdictMemoryLimit allows {size_text(given)}") if needed > given else None
    is_run_anyway = settings.needs_data or (settings.sample_use != 0 and not samples.is_random)
    if needed > USUAL_LIMIT_BYTES and not is_run_anyway:
        return _remark(needed, f"the limit is {size_text(USUAL_LIMIT_BYTES)}")
    free = free_memory()
    is_short = free is not None and 2 * needed > free
    return _remark(needed, "that is more than half of the memory that is free") if is_short else None


def _remark(needed: int, limit: str) -> str:
    return (
        f"the verdict was skipped: running the float and the quantized model takes about {size_text(needed)} for each, "
        f"and {limit}. Set VerdictMemoryLimit, in MB, to have it, or run 'quark compare' on the two files"
    )

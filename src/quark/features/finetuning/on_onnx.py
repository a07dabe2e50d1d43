"""Fast finetuning, layer by layer, from the first to the last. A layer's inputs are those of the quantized network as
finetuned so far, and its weights are fitted so that its outputs are those of the float network.

A finished layer is kept on disk. The result as a whole is taken back if it is no closer to the float network than
without it, on samples that no layer was fitted to.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from numpy.typing import NDArray

import quark.features.finetuning.fit as fitting
from quark.account import AlgorithmFacts
from quark.compare.improvement import OutputErrors
from quark.errors import InvalidValueError, ModelError
from quark.features.bias_correction.on_onnx import give_biases
from quark.features.finetuning.blocks import Block, blocks
from quark.features.finetuning.checkpoint import Checkpoint
from quark.features.finetuning.layers import TrainedLayer, bias_of, trained_layers
from quark.features.finetuning.options import TRAINED_OP_TYPES, FinetuneOptions, Reconstruction
from quark.features.finetuning.problem import Fitted, Problem
from quark.features.finetuning.walk import (
    LITTLE_MEMORY,
    Gatherer,
    Targets,
    Walk,
    are_enough,
    quantized_copy,
    shares_memory,
    stages,
)
from quark.onnx.calibrate.runner import FloatRunner, processor_count
from quark.onnx.comparing import output_errors
from quark.onnx.data.samples import SampleStore
from quark.onnx.deciding import Decision, Work, quantized_errors
from quark.onnx.graph import constant, input_value, set_constant
from quark.onnx.load import load
from quark.onnx.optimize import optimize
from quark.onnx.progress import track
from quark.onnx.versions import versions
from quark.plan import QuantizationPlan, SkippedNode
from quark.rounded import rounded
from quark.text import get_logger, printable

if TYPE_CHECKING:
    from quark.features.finetuning.block_fitting import BlockFitter

Array = NDArray[Any]
_LOG = get_logger(__name__)
_NAMES = {"adaround": "AdaRound", "adaquant": "AdaQuant"}


def before_calibration(work: Work, options: FinetuneOptions) -> tuple[AlgorithmFacts, ...]:
    """Give layers a bias if biases are trained."""
    if options.fit.has_bias and not work.samples.is_random:
        give_biases(work.model)
    return ()


def after_choosing(work: Decision, options: FinetuneOptions) -> list[AlgorithmFacts]:
    """Finetune weights and biases for the plan, with its scales.

    If the whole network is no better for it, the last quarter of the layers is taken back, or the last half, and so on,
    up to all of them: a layer was fitted to those before it, and knows nothing of those behind.
    """
    model = work.model
    if work.exact is None:
        return []
    exact, expected = work.exact, work.expected
    if options.reference is not None:
        exact = load_reference(options.reference, work)
        with FloatRunner(exact, providers=work.settings.calibrate.providers) as runner:
            expected = runner.outputs_of(work.samples.held_out)
    judged = _judged_outputs(model, options.output_index)
    before = quantized_errors(work, expected, judged)
    standing = {name: value.const_value for name, value in model.graph.initializers.items()}
    facts, steps = _finetune(work, exact, options)
    fitted = {name: model.graph.initializers[name].const_value for step in steps for name in step}

    def errors_of(kept: int) -> OutputErrors:
        """The errors with the first layers as they were fitted, and the others as they stood."""
        for number, step in enumerate(steps):
            for name in step:
                model.graph.initializers[name].const_value = (fitted if number < kept else standing)[name]
        return quantized_errors(work, expected, judged)

    after = errors_of(len(steps))
    if after.is_no_worse_than(before):
        _forget_starts(work, facts)
        return [facts]
    parts = {kept: errors_of(kept) for kept in sorted({len(steps) * quarter // 4 for quarter in (1, 2, 3)} - {0})}
    better = {kept: errors.mean for kept, errors in parts.items() if errors.is_no_worse_than(before)}
    kept = min(better, key=lambda number: better[number], default=0)
    errors_of(kept)
    figures = f"error {before.mean:.4g} became {after.mean:.4g}"
    figures += f", divergence {before.mean_divergence:.4g} became {after.mean_divergence:.4g}"
    reason = f"with it the network's outputs on held-out samples got worse: {figures}"
    taken_back = [SkippedNode(change.partition(": ")[0], "", reason) for change in facts.changed[kept:]]
    facts = replace(facts, changed=facts.changed[:kept], left=(*facts.left, *taken_back))
    _forget_starts(work, facts)
    return [facts]


def _forget_starts(work: Decision, facts: AlgorithmFacts) -> None:
    """Forget the starting weights of fitted layers, so that later training starts from the fitted weights."""
    for change in facts.changed:
        work.unrounded.pop(change.partition(": ")[0], None)


def load_reference(path: Path, work: Work) -> ir.Model:
    """Read the float network of a file and rewrite it as the model was, so that their layers have the same names.

    Raises an error if its layers or its inputs and outputs are not those of the model.
    """
    subject = f"FastFinetune.RefModelPath '{path}'"
    reference = load(path, work.settings.load).model
    optimize(reference, work.settings.optimize)
    for place in ("inputs", "outputs"):
        mine, theirs = ({str(value.name) for value in getattr(model.graph, place)} for model in (work.model, reference))
        if mine != theirs:
            missing = ", ".join(sorted(mine ^ theirs)[:4])
            raise ModelError(f"{subject}: its {place} differ from those of the model: {missing}")
    nodes = {str(node.name): node for node in reference.graph}
    for node in work.model.graph:
        if node.op_type not in TRAINED_OP_TYPES or constant(input_value(node, 1)) is None:
            continue
        other = nodes.get(str(node.name))
        if other is None or other.op_type != node.op_type:
            raise ModelError(f"{subject}: it has no {node.op_type} '{node.name}', which is a layer of the model")
    return reference


def _judged_outputs(model: ir.Model, index: int | None) -> list[str] | None:
    """The output that the network is judged by; None: all of them."""
    if index is None:
        return None
    names = [str(value.name) for value in model.graph.outputs]
    if index >= len(names):
        listed = ", ".join(f"{number}: '{name}'" for number, name in enumerate(names[:8]))
        raise InvalidValueError(
            f"FastFinetune.OutputIndex {index}: the model has {len(names)} outputs, expected one of {listed}"
        )
    return [names[index]]


def _finetune(
    work: Decision, exact: ir.Model, options: FinetuneOptions
) -> tuple[AlgorithmFacts, list[tuple[str, ...]]]:
    """Change weights and biases of the model in place; also returns the constants that changed, layer by layer."""
    run = _Finetuning(work, exact, options)
    try:
        run.layer_by_layer()
    except KeyboardInterrupt:
        folder = run.checkpoint.folder
        text = f"finetuning was interrupted; finished layers are in '{folder}', run the same again to go on"
        _LOG.warning("%s", text)
        raise KeyboardInterrupt(printable(text)) from None
    finally:
        run.close()
    run.checkpoint.finish()
    return AlgorithmFacts(_NAMES[options.fit.algorithm.value], tuple(run.changed), tuple(run.left)), run.steps


class _Finetuning:
    """`model` is quantized by the plan, and its weights and biases change; `exact` is the float network that it should
    be. `copy` computes what the quantized network does: activations with quantizers, constants rounded. `steps` are the
    constants that changed, layer by layer, as the phrases of `changed` are."""

    def __init__(self, work: Decision, exact: ir.Model, options: FinetuneOptions) -> None:
        model, plan, samples = work.model, work.plan, work.samples
        self._model, self._options = model, options
        self.layers, self.left = trained_layers(model, plan, options.op_types)
        if options.is_largest_only and self.layers:
            self._keep_largest()
        self.changed: list[str] = []
        self.steps: list[tuple[str, ...]] = []
        self._choices = {(reader.node, reader.index): entry.choice for entry in plan for reader in entry.readers}
        self._samples = SampleStore(options.memory_limit // 8)
        limit = None if options.data_size is None else samples.batches(options.data_size)
        for sample in itertools.islice(samples, limit):
            self._samples.append(sample)
        digests = [FloatRunner(network).model_digest() for network in (exact, model)]
        settings = repr(replace(options, folder=None, reference=None, fit=replace(options.fit, log_period=0)))
        environment = [repr(sorted(versions().items())), fitting.arithmetic()]
        # everything that a finetuned layer follows from
        self.checkpoint = Checkpoint(options.folder, [*digests, plan.digest, samples.digest(), settings, *environment])
        self._copy = quantized_copy(model, plan)
        self._copies = [(self._copy, _nodes_by_name(self._copy))]  # the networks that follow what is fitted
        self._walks = self._device_walks(exact, plan) or self._plain_walks(exact, plan)
        float_walk, quantized_walk = self._walks
        self._nodes, self._copied, self._exact = map(_nodes_by_name, (model, quantized_walk.model, exact))
        # with inputs of both networks mixed, the float network's are needed until a stage is fitted
        is_free = type(float_walk) is Walk and options.fit.drop_ratio == 1
        self._looks_ahead = is_free and options.reconstruction is Reconstruction.LAYER
        self._background = ThreadPoolExecutor(1)
        self._gatherer = Gatherer(float_walk, quantized_walk, len(self._samples), options)
        self._starts = work.unrounded
        self._held_out = samples.held_out if options.is_selective else []
        self._judged = _judged_outputs(model, options.output_index)
        self._clock = {"inference": 0.0, "training": 0.0}

    def _plain_walks(self, exact: ir.Model, plan: QuantizationPlan) -> tuple[Walk, Walk]:
        """Walks through both networks in ONNX Runtime, one sample at a time."""
        options, processors = self._options, processor_count()
        settings: dict[str, Any] = {
            "providers": (options.infer_device,),
            "workers": min(2, processors),
            "threads": max(1, processors // 2),
            "little": min(LITTLE_MEMORY, options.memory_limit // 4),
        }
        walked = quantized_copy(self._model, plan) if options.is_parallel else self._copy
        return (
            Walk(exact, self._samples, self._make_store, **settings),
            Walk(walked, self._samples, self._make_store, **settings),
        )

    def _device_walks(self, exact: ir.Model, plan: QuantizationPlan) -> tuple[Walk, Walk] | None:
        """Walks that stay on the GPU that trains, where ONNX Runtime is to compute there too; None if torch cannot
        compute one of the networks for joined samples."""
        if not shares_memory(self._options):
            return None
        from quark.features.finetuning import device_walk  # imports torch, which takes a second

        device, samples = self._options.fit.device, self._samples
        copy, roundings = device_walk.network_with_roundings(self._model, plan)
        for network, own in ((exact, {}), (copy, roundings)):
            reason = device_walk.why_not(network, own, samples, device)
            if reason is not None:
                _LOG.info("finetuning: samples are computed one by one, since %s", reason)
                return None
        if not self._options.is_parallel:
            self._copies.append((copy, _nodes_by_name(copy)))
        return (
            device_walk.DeviceWalk(exact, samples, self._make_store, device=device),
            device_walk.DeviceWalk(copy, samples, self._make_store, device=device, roundings=roundings),
        )

    def _make_store(self) -> SampleStore:
        return SampleStore(self._options.memory_limit // 4)

    def _keep_largest(self) -> None:
        nodes = _nodes_by_name(self._model)
        sizes = [_numbers_around(nodes[layer.name]) for layer in self.layers]
        largest = self.layers[sizes.index(max(sizes))]
        reason = f"only '{largest.name}', which takes the most memory, was asked for"
        self.left += [SkippedNode(layer.name, layer.op_type, reason) for layer in self.layers if layer is not largest]
        self.layers = [largest]

    def layer_by_layer(self) -> None:
        if not len(self._samples):
            self.left += [SkippedNode(layer.name, layer.op_type, "there are no samples") for layer in self.layers]
            return
        begin = time.monotonic()
        missing = (number for number, layer in enumerate(self.layers) if self._kept(number, layer) is None)
        self._last_missing = max(missing, default=-1)
        with track(len(self.layers), "finetuning") as advance:
            for stage, block, targets in self._stages():
                place = self.layers.index(stage[0])
                # the layers of a block are kept or rolled back together, others one by one
                groups: Iterable[list[tuple[int, TrainedLayer, Fitted]]] = (
                    ([fitted] for fitted in self._fitted(dict(enumerate(stage, place)), targets))
                    if block is None
                    else [self._fitted_together(place, block)]
                )
                for group in groups:
                    self._take([(layer, fitted) for _, layer, fitted in group])
                    for number, layer, fitted in group:
                        self._log(number, layer, fitted, time.monotonic() - begin)
                        advance()
                start = time.monotonic()
                self._leave(place + len(stage))
                self._clock["inference"] += time.monotonic() - start
        _LOG.info("finetuning: %(inference).1f s of inference, %(training).1f s of training", self._clock)

    def _leave(self, count: int) -> None:
        """Walk on behind the first layers, whose weights are final."""
        if count > self._last_missing:
            return
        # a walk that stops at the input of the next layer anyway need not stop here
        walks = [self._walks[1]] if not self._steps_to(count) else []
        if not self._looks_ahead:
            walks.append(self._walks[0])
        for walk in walks:
            walk.advance(*self._split_at(count))

    def _split_at(self, count: int) -> tuple[list[str], list[str]]:
        """The names of the first layers, and of the others."""
        names = [layer.name for layer in self.layers]
        return names[:count], names[count:]

    def _around(self, number: int) -> tuple[list[str], list[str]]:
        """The tensors that the quantized network has to compute before a layer, including the layer's input, and those
        to come."""
        producer = self._copied[self.layers[number].name].inputs[0].producer()  # type: ignore[union-attr]
        done, rest = self._split_at(number)
        return done + ([] if producer is None else [str(producer.name)]), rest

    def _steps_to(self, number: int) -> bool:
        """True if the walk through the quantized network stops at the input of that layer, since little has to be
        remembered there. Otherwise it is computed again from where the stage begins."""
        is_by_layer = self._options.reconstruction is Reconstruction.LAYER
        return 0 < number <= self._last_missing and is_by_layer and self._walks[1].is_little(*self._around(number))

    def _log(self, number: int, layer: TrainedLayer, fitted: Fitted, seconds: float) -> None:
        done, total = number + 1, len(self.layers)
        _LOG.info(
            "finetuning %d of %d, %s: held-out error %.4g, was %.4g, %d iterations at %.3g; about %.0f s to go",
            *(done, total, layer.name, fitted.error_after, fitted.error_before),
            *(fitted.iterations, fitted.learning_rate, seconds / done * (total - done)),
        )

    def _stages(self) -> Iterator[tuple[Sequence[TrainedLayer], Block | None, dict[str, Targets]]]:
        """The layers that are walked through at a time, with the block if they are fitted together, and otherwise with
        their targets."""
        if self._options.reconstruction is Reconstruction.LAYER:
            yield from ((stage, None, targets) for stage, targets in self._staged())
            return
        for block in blocks(self._model, self.layers):
            reason = self._fitter.why_not(block)
            if reason is not None and len(block.layers) > 1:
                _LOG.info("%s: fitted layer by layer, since %s", block.name, reason)
            yield (
                block.layers,
                None if reason is not None else block,
                {} if reason is None else self._targets(block.layers),
            )

    def _staged(self) -> Iterator[tuple[Sequence[TrainedLayer], dict[str, Targets]]]:
        """Stages of layers with their targets. The float network does not depend on what is fitted: where its walk is
        on the processor, targets of the next stage are computed while the layers of this one are fitted."""
        staged = stages(self._walks[0], self.layers)
        if not self._looks_ahead:
            yield from ((stage, self._targets(stage)) for stage in staged)
            return
        stage = next(staged, None)
        ready = None if stage is None else self._background.submit(self._targets, stage)
        while stage is not None and ready is not None:
            start = time.monotonic()
            targets = ready.result()
            self._clock["inference"] += time.monotonic() - start
            following = next(staged, None)
            ready = None if following is None else self._background.submit(self._targets, following)
            yield stage, targets
            stage = following

    def _targets(self, stage: Sequence[TrainedLayer]) -> dict[str, Targets]:
        """What the float network computes in the layers of a stage, unless none of them and of those behind are to be
        fitted. Its walk goes on behind the stage if it may."""
        place = self.layers.index(stage[0])
        count = place + len(stage)
        if place > self._last_missing:
            return {}
        outputs = {layer.name: str(self._exact[layer.name].outputs[0].name) for layer in stage}
        names = self._split_at(count) if self._looks_ahead and count <= self._last_missing else None
        return self._gatherer.targets(dict(enumerate(stage, place)), outputs, names)

    @functools.cached_property
    def _fitter(self) -> BlockFitter:
        from quark.features.finetuning.block_fitting import BlockFitter

        float_walk, quantized_walk = self._walks
        return BlockFitter(
            *(self._model, self._choices, float_walk, quantized_walk, len(self._samples)),
            lambda: SampleStore(self._options.memory_limit // 8),
            self._options,
            self._starts,
        )

    def _fitted_together(self, place: int, block: Block) -> list[tuple[int, TrainedLayer, Fitted]]:
        numbers = range(place, place + len(block.layers))
        read = [self._kept(number, layer) for number, layer in zip(numbers, block.layers, strict=True)]
        kept = [choice for choice in read if choice is not None]
        if len(kept) < len(numbers):
            start = time.monotonic()
            kept = self._fitter.fit(block, place)
            self._clock["training"] += time.monotonic() - start
            for number, fitted in zip(numbers, kept, strict=True):
                self.checkpoint.write(number, fitted)
        return list(zip(numbers, block.layers, kept, strict=True))

    def _fitted(
        self, stage: Mapping[int, TrainedLayer], targets: dict[str, Targets]
    ) -> Iterator[tuple[int, TrainedLayer, Fitted]]:
        """Yield the layers of a stage one by one, each fitted only after the caller has applied the one before."""
        for number, layer in stage.items():
            # behind finished layers too: a run that goes on has to compute the same pieces as one without a break
            if self._steps_to(number):
                start = time.monotonic()
                self._walks[1].advance(*self._around(number))
                self._clock["inference"] += time.monotonic() - start
            fitted = self._kept(number, layer)
            if fitted is None:
                fitted = self._fit(number, layer, targets.pop(layer.name))
                self.checkpoint.write(number, fitted)
            yield number, layer, fitted

    def _kept(self, number: int, layer: TrainedLayer) -> Fitted | None:
        """The layer as an earlier run left it."""
        weight, bias = constant(input_value(self._nodes[layer.name], 1)), bias_of(self._nodes[layer.name])
        sizes = {"weight": weight, "bias": bias}
        return self.checkpoint.read(number, {name: 0 if array is None else array.size for name, array in sizes.items()})

    def _fit(self, number: int, layer: TrainedLayer, targets: Targets) -> Fitted:
        if not are_enough(targets.picks):
            return Fitted(None, None, 0.0, 0.0, 0, 0.0, "is computed at one place only")
        start = time.monotonic()
        seen, exact = (str(nodes[layer.name].inputs[0].name) for nodes in (self._copied, self._exact))  # type: ignore[union-attr]
        training, held_out = self._gatherer.rows(layer, number, targets, seen, exact)
        middle = time.monotonic()
        weight, bias = constant(input_value(self._nodes[layer.name], 1)), bias_of(self._nodes[layer.name])
        assert weight is not None, layer.name
        problem = Problem(
            layer.name,
            training,
            held_out,
            weight,
            layer.layout,
            None if bias is None else bias.reshape(-1),
            layer.weight,
            layer.bias,
            layer.activation,
            layer.output,
            layer.has_bias,
            self._starts.get(layer.name),
        )
        fitted = fitting.fit(problem, replace(self._options.fit, seed=self._options.fit.seed + number))
        self._clock["inference"] += middle - start
        self._clock["training"] += time.monotonic() - middle
        return fitted

    def _take(self, results: Sequence[tuple[TrainedLayer, Fitted]]) -> None:
        """Give layers what was fitted, if it is better; with `is_selective`, for the network as a whole too. The layers
        of a block are taken together or not at all."""
        kept = [(layer, result) for layer, result in results if result.is_kept]
        self.left += [
            SkippedNode(layer.name, layer.op_type, _reason(result)) for layer, result in results if not result.is_kept
        ]
        if not kept:
            return
        standing = [{i: constant(input_value(self._nodes[layer.name], i)) for i in (1, 2)} for layer, _ in kept]
        before = self._network_errors()
        for layer, result in kept:
            self._put(layer, {1: result.weight, 2: result.bias})
        after = self._network_errors()
        if not after.is_no_worse_than(before):
            reason = f"the network's outputs got worse: error {before.mean:.4g} became {after.mean:.4g}"
            for (layer, _), constants in zip(kept, standing, strict=True):
                self._put(layer, constants)
                self.left.append(SkippedNode(layer.name, layer.op_type, reason))
            return
        for layer, result in kept:
            self.changed.append(
                f"{layer.name}: held-out error {result.error_before:.3g} became {result.error_after:.3g}"
            )
            inputs = self._nodes[layer.name].inputs[1 : 2 if result.bias is None else 3]
            self.steps.append(tuple(str(value.name) for value in inputs if value is not None))

    def _put(self, layer: TrainedLayer, constants: Mapping[int, Array | None]) -> None:
        for index, values in constants.items():
            old = constant(input_value(self._nodes[layer.name], index)) if values is not None else None
            if values is None or old is None:
                continue
            new = values.reshape(old.shape).astype(old.dtype)
            set_constant(self._model, self._nodes[layer.name], index, new)
            choice = self._choices.get((layer.name, index))
            seen = new if choice is None else rounded(new, choice).astype(old.dtype)
            for copy, nodes in self._copies:
                set_constant(copy, nodes[layer.name], index, seen)

    def _network_errors(self) -> OutputErrors:
        """The errors of the network's outputs on held-out samples; none unless `is_selective`."""
        if not self._held_out:
            return OutputErrors()
        return output_errors(
            *(self._copy, self._held_out, self._expected, self._judged),
            providers=(self._options.infer_device,),
            has_integer_kernels=False,
        )

    @functools.cached_property
    def _expected(self) -> Sequence[Mapping[str, Array]]:
        with FloatRunner(self._walks[0].model, providers=(self._options.infer_device,)) as runner:
            return runner.outputs_of(self._held_out)

    def close(self) -> None:
        self._walks[0].cancel()
        self._background.shutdown(cancel_futures=True)
        for walk in self._walks:
            walk.close()
        self._samples.close()


def _nodes_by_name(model: ir.Model) -> dict[str, ir.Node]:
    return {str(node.name): node for node in model.graph}


def _numbers_around(node: ir.Node) -> int:
    """The number of elements that a node reads and writes for one sample; unknown dimensions count as 1."""
    values = [value for value in (*node.inputs, *node.outputs) if value is not None and value.shape is not None]
    return sum(math.prod(size if isinstance(size, int) else 1 for size in value.shape or ()) for value in values)


def _reason(fitted: Fitted) -> str:
    if fitted.remark:
        return f"its output {fitted.remark}"
    before, after = fitted.error_before, fitted.error_after
    return f"got no better on held-out samples: error {before:.3g}, after training {after:.3g}"

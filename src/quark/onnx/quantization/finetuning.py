"""Fast finetuning: layer by layer, from the first to the last, each fitted to what the float network computes there
from what the quantized network, finetuned so far, hands it.

A finished layer is kept on disk. The result as a whole is taken back where it is no closer to the float network than
without it, on samples that no layer was fitted to.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from quark.account import AlgorithmFacts
from quark.onnx.calibrate.runner import FloatRunner, processor_count
from quark.onnx.data import Samples
from quark.onnx.data.store import SampleStore
from quark.onnx.graph import constant, input_value, set_constant
from quark.onnx.insert import InsertOptions, insert
from quark.onnx.progress import track
from quark.onnx.quantization.output_error import output_error
from quark.onnx.quantization.settings import Settings
from quark.onnx.quantization.versions import versions
from quark.onnx.refine.fast_finetune.checkpoint import Checkpoint
from quark.onnx.refine.fast_finetune.devices import providers_of
from quark.onnx.refine.fast_finetune.gathering import Gatherer, Targets, are_enough
from quark.onnx.refine.fast_finetune.stages import stages
from quark.onnx.refine.fast_finetune.trained_layers import TrainedLayer, bias_of, trained_layers
from quark.onnx.refine.fast_finetune.walk import Walk
from quark.onnx.refine.options import FinetuneOptions
from quark.onnx.rounded import rounded
from quark.plan import Choice, DynamicChoice, QuantizationPlan, Role, SkippedNode
from quark.reconstruction.problem import Fitted, Problem

Array = NDArray[Any]
_LOG = logging.getLogger(__name__)
_NAMES = {"adaround": "AdaRound", "adaquant": "AdaQuant"}


def finetune(
    model: ir.Model, exact: ir.Model, plan: QuantizationPlan, samples: Samples, settings: Settings
) -> AlgorithmFacts:
    """Change weights and biases of the model in place. They are fitted with the scales of the plan, and no others."""
    options = settings.refine.finetune
    assert options is not None
    run = _Finetuning(model, exact, plan, samples, options)
    try:
        run.layer_by_layer()
    except KeyboardInterrupt:
        _LOG.warning("finetuning was interrupted; run the same again to go on from %s", run.checkpoint.folder)
        raise
    finally:
        run.close()
    run.checkpoint.finish()
    name = _NAMES[options.fit.algorithm.value]
    return AlgorithmFacts(name, tuple(run.changed), tuple(run.left))


class _Finetuning:
    """`model` is quantized by `plan`, and its weights and biases change; `exact` is the float network it should be.
    `copy` is what the quantized network computes: activations with quantizers, constants rounded."""

    def __init__(
        self, model: ir.Model, exact: ir.Model, plan: QuantizationPlan, samples: Samples, options: FinetuneOptions
    ) -> None:
        self._model, self._options = model, options
        self.layers, self.left = trained_layers(model, plan, options.op_types)
        self.changed: list[str] = []
        self._choices = {(reader.node, reader.index): each.choice for each in plan for reader in each.readers}
        self._copy = _with_quantized_activations(model, plan)
        self._nodes, self._copied, self._exact = (
            {str(node.name): node for node in each.graph} for each in (model, self._copy, exact)
        )
        for (node, index), choice in self._choices.items():
            self._round(node, index, choice)
        self._samples = SampleStore(options.memory_limit // 8)
        for sample in itertools.islice(samples, options.data_size):
            self._samples.append(sample)
        self.checkpoint = Checkpoint(options.folder, _facts(exact, model, plan, samples, options))
        self._walks = self._make_walks(exact, options)
        self._gatherer = Gatherer(*self._walks, len(self._samples), options)
        self._held_out = samples.held_out if options.is_selective else []
        self._clock = {"inference": 0.0, "training": 0.0}

    def _make_walks(self, exact: ir.Model, options: FinetuneOptions) -> tuple[Walk, Walk]:
        processors = processor_count()
        settings: dict[str, Any] = {
            "workers": min(2, processors),
            "threads": max(1, processors // 2),
            "providers": providers_of(options.infer_device),
        }

        def make_store() -> SampleStore:
            return SampleStore(options.memory_limit // 4)

        return tuple(Walk(each, self._samples, make_store, **settings) for each in (exact, self._copy))  # type: ignore[return-value]

    def layer_by_layer(self) -> None:
        if not len(self._samples):
            self.left += [SkippedNode(each.name, each.op_type, "there are no samples") for each in self.layers]
            return
        begin = time.monotonic()
        with track(len(self.layers), "finetuning") as advance:
            for stage in stages(self._walks[0], self.layers):
                place = self.layers.index(stage[0])
                numbered = dict(enumerate(stage, place))
                for number, layer, fitted in self._fitted(numbered):
                    self._take(layer, fitted)
                    self._log(number, layer, fitted, time.monotonic() - begin)
                    advance()
                self._go_on(place + len(stage))
        _LOG.info("finetuning: %(inference).1f s of inference, %(training).1f s of training", self._clock)

    def _fitted(self, stage: Mapping[int, TrainedLayer]) -> Any:
        """The layers of a stage one by one, each fitted when the one before it has been taken."""
        kept = {number: self.checkpoint.read(number) for number in stage}
        missing = {number: layer for number, layer in stage.items() if kept[number] is None}
        start = time.monotonic()
        outputs = {layer.name: str(self._exact[layer.name].outputs[0].name) for layer in missing.values()}
        targets = self._gatherer.targets(missing, outputs) if missing else {}
        self._clock["inference"] += time.monotonic() - start
        for number, layer in stage.items():
            fitted = kept[number]
            if fitted is None:
                fitted = self._fit(number, layer, targets.pop(layer.name))
                self.checkpoint.write(number, fitted)
            yield number, layer, fitted

    def _fit(self, number: int, layer: TrainedLayer, targets: Targets) -> Fitted:
        from quark.reconstruction.fit import fit

        if not are_enough(targets.picks):
            return Fitted(None, None, 0.0, 0.0, 0, 0.0, "is computed at one place only")
        start = time.monotonic()
        seen, exact = (str(each[layer.name].inputs[0].name) for each in (self._copied, self._exact))  # type: ignore[union-attr]
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
        )
        fitted = fit(problem, replace(self._options.fit, seed=self._options.fit.seed + number))
        self._clock["inference"] += middle - start
        self._clock["training"] += time.monotonic() - middle
        return fitted

    def _take(self, layer: TrainedLayer, fitted: Fitted) -> None:
        """Let the layer have what was fitted, where it is better; also for the network as a whole, where asked for."""
        if not fitted.is_kept:
            self.left.append(SkippedNode(layer.name, layer.op_type, _reason(fitted)))
            return
        standing = {index: constant(input_value(self._nodes[layer.name], index)) for index in (1, 2)}
        before = self._network_error()
        self._put(layer, {1: fitted.weight, 2: fitted.bias})
        after = self._network_error()
        if after > before:
            self._put(layer, standing)
            reason = f"the network's outputs got worse: error {before:.4g} became {after:.4g}"
            self.left.append(SkippedNode(layer.name, layer.op_type, reason))
            return
        what = f"held-out error {fitted.error_before:.3g} became {fitted.error_after:.3g}"
        self.changed.append(f"{layer.name}: {what}")

    def _put(self, layer: TrainedLayer, constants: Mapping[int, Array | None]) -> None:
        for index, values in constants.items():
            old = constant(input_value(self._nodes[layer.name], index)) if values is not None else None
            if values is None or old is None:
                continue
            new = values.reshape(old.shape).astype(old.dtype)
            set_constant(self._model, self._nodes[layer.name], index, new)
            choice = self._choices.get((layer.name, index))
            seen = new if choice is None else rounded(new, choice).astype(old.dtype)
            set_constant(self._copy, self._copied[layer.name], index, seen)

    def _network_error(self) -> float:
        """Of the network's outputs on held-out samples; 0 where nobody asks."""
        if not self._held_out:
            return 0.0
        expected = self._expected()
        return output_error(self._copy, self._held_out, expected, has_integer_kernels=False)

    def _expected(self) -> Sequence[Mapping[str, Array]]:
        if not hasattr(self, "_outputs"):
            with FloatRunner(self._walks[0].model) as runner:
                self._outputs = [runner.outputs(sample) for sample in self._held_out]
        return self._outputs

    def _round(self, node: str, index: int, choice: Choice) -> None:
        """Let a constant of the copy be what the quantized network computes with."""
        copied = self._copied.get(node)
        values = None if copied is None else constant(input_value(copied, index))
        if copied is not None and values is not None and not isinstance(choice, DynamicChoice):
            set_constant(self._copy, copied, index, rounded(values, choice).astype(values.dtype))

    def _go_on(self, count: int) -> None:
        """So many layers are final."""
        start = time.monotonic()
        done, rest = ([each.name for each in some] for some in (self.layers[:count], self.layers[count:]))
        if rest:
            for walk in self._walks:
                walk.advance(done, rest)
        self._clock["inference"] += time.monotonic() - start

    def _log(self, number: int, layer: TrainedLayer, fitted: Fitted, seconds: float) -> None:
        done, total = number + 1, len(self.layers)
        _LOG.info(
            "finetuning %d of %d, %s: held-out error %.4g, was %.4g, %d iterations at %.3g; about %.0f s to go",
            *(done, total, layer.name, fitted.error_after, fitted.error_before),
            *(fitted.iterations, fitted.learning_rate, seconds / done * (total - done)),
        )

    def close(self) -> None:
        for walk in self._walks:
            walk.close()
        self._samples.close()


def _with_quantized_activations(model: ir.Model, plan: QuantizationPlan) -> ir.Model:
    copy = model.clone()
    wanted = (each for each in plan if each.role is Role.ACTIVATION)
    known = tuple(each for each in wanted if not isinstance(each.choice, DynamicChoice))
    insert(copy, QuantizationPlan(known), InsertOptions())
    return copy


def _facts(
    exact: ir.Model, model: ir.Model, plan: QuantizationPlan, samples: Samples, options: FinetuneOptions
) -> list[str]:
    """Everything that a finetuned layer follows from."""
    from quark.reconstruction.fit import arithmetic

    digests = [FloatRunner(each).model_digest() for each in (exact, model)]
    settings = repr(replace(options, folder=None, fit=replace(options.fit, log_period=0)))
    return [*digests, plan.digest, samples.digest(), settings, repr(sorted(versions().items())), arithmetic()]


def _reason(fitted: Fitted) -> str:
    if fitted.remark:
        return f"its output {fitted.remark}"
    before, after = fitted.error_before, fitted.error_after
    return f"got no better on held-out samples: error {before:.3g}, after training {after:.3g}"

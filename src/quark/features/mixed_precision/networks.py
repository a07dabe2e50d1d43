"""Networks with some layers at the lower types: their options, their plans, and what they compute.

A plan for an assignment is what choosing makes of it where the lowered layers have the lower spec. Ranges are measured
once, for all layers at either; they are handed on, so that nobody measures them again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from quark.decide import ChoiceOptions, LayerSpec, Placement, RangeKey, choose, place, tensors_to_measure
from quark.decide.selection import select_nodes
from quark.errors import unknown_name
from quark.features.mixed_precision.options import MixOptions
from quark.features.mixed_precision.plan import LayerPrecision
from quark.features.order import call
from quark.onnx.calibrate import FloatRunner
from quark.onnx.calibrate.runner import processor_count
from quark.onnx.data import Sample, Samples
from quark.onnx.deciding import Decision, Work, decide, measure
from quark.onnx.insert import insert
from quark.onnx.macs import multiplications, weight_count
from quark.onnx.save import SaveOptions, finish
from quark.onnx.session import open_session, release_memory, running
from quark.onnx.settings import RefineOptions, Settings
from quark.onnx.view import view_of
from quark.plan import QuantizationPlan
from quark.ranges import TensorRange

Array = NDArray[Any]


class Network:
    """A model that runs, two samples at a time where there are two processors. Use as a context manager."""

    def __init__(self, model: ir.Model, providers: Sequence[str]) -> None:
        processors = processor_count()
        self._workers = 2 if processors > 1 else 1
        self._session: Any = open_session(model, providers=providers, threads=max(1, processors // self._workers))

    @property
    def session(self) -> Any:
        """The session itself, for functions that measure a network."""
        return self._session

    def outputs(self, samples: Iterable[Sample], name: str) -> Iterator[Array]:
        """The output of that name for each sample, in their order."""
        rest = iter(samples)
        with ThreadPoolExecutor(self._workers) as pool:
            while together := list(islice(rest, self._workers)):
                yield from pool.map(lambda sample: self._run(sample, name), together)

    def _run(self, sample: Sample, name: str) -> Array:
        with running("a network of mixed precision"):
            result: Array = self._session.run([name], dict(sample))[0]
        return result

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *error: object) -> None:
        self._session = None
        release_memory()


class MixedNetworks:
    """All networks that the layers of a model can be mixed to. `layers` are those that can have the lower types and
    would be quantized differently with them. Use as a context manager: a session of the float model stays open."""

    def __init__(self, model: ir.Model, samples: Samples, settings: Settings, vanished: Collection[str]) -> None:
        assert settings.mix is not None
        self._model, self._samples, self._settings, self._vanished = model, samples, settings, vanished
        self.trial_settings = settings.for_trials()  # features that take little time
        if samples.is_random:
            self.trial_settings = replace(self.trial_settings, refine=RefineOptions())
        self._low_spec = settings.mix.low
        self._nodes = {str(node.name): node for node in model.graph}
        self._high = place(view_of(model), settings.choose, vanished)
        specs, _ = select_nodes(view_of(model), settings.choose, vanished)
        usual = {name for name, spec in specs.items() if spec == settings.choose.default}
        possible = candidates(model, usual, settings.mix)
        low = self._placed([each.layer for each in possible])
        self._quantized = {each.reader.node for each in (*self._high.requests, *low.requests)} | set(specs)
        before, after = _by_node(self._high), _by_node(low)
        self.layers = tuple(each for each in possible if after.get(each.layer) not in (None, before.get(each.layer)))
        self._low = self._placed([each.layer for each in self.layers])
        self._wanted = [*tensors_to_measure(self._high), *tensors_to_measure(self._low)]
        watched = [name for name, _ in self._wanted]
        watched += call("onnx", "watched", Work(model, samples, self.trial_settings))
        self._runner = FloatRunner(model, dict.fromkeys(watched), providers=settings.calibrate.providers)
        self.ranges: dict[RangeKey, TensorRange] = {}

    def measure(self) -> None:
        """Measure the ranges that layers need at the higher types, and at the lower ones."""
        self.ranges = measure(self._runner, self._wanted, self._samples, self._settings)

    def options(self, lowered: Collection[str]) -> ChoiceOptions:
        """The options with these layers lowered. Layers that the user configures by name are not among `layers`."""
        low: list[tuple[str, LayerSpec | None]] = [(re.escape(name), self._low_spec) for name in lowered]
        return replace(self._settings.choose, by_node=(*low, *self._settings.choose.by_node))

    def alone(self, layer: str) -> Network:
        """The float network except for that layer, which has the lower types."""
        outputs = {str(value.name) for value in self._nodes[layer].outputs}
        mine = [
            each
            for each in self._low.requests
            if each.reader.node == layer or (each.tensor in outputs and each.reader.node not in self._quantized)
        ]
        # nothing fused: a quantizer before an activation would be seen by those that read it in float
        alone = replace(self._low, requests=tuple(mine), fused=())
        plan = choose(view_of(self._model), alone, self.ranges, self.options([layer]))
        return self._opened(self._model.clone(), plan)

    def mixed(self, lowered: Collection[str]) -> Network:
        """The quantized network with these layers lowered."""
        copy, options = self._model.clone(), self.options(lowered)
        placement = place(view_of(copy), options, self._vanished)
        # if operators that align tensors are lowered too, groups differ from those of either extreme
        wanted = [key for key in tensors_to_measure(placement) if key not in self.ranges]
        if wanted:
            providers = self._settings.calibrate.providers
            with FloatRunner(self._model, [name for name, _ in wanted], providers=providers) as runner:
                self.ranges = measure(runner, wanted, self._samples, self._settings, self.ranges)
        settings = replace(self.trial_settings, choose=options)
        decision = Decision(copy, self._samples, settings, placement, self.ranges, self._runner)
        decide(decision)
        return self._opened(copy, decision.plan)

    def model_digest(self) -> str:
        return self._runner.model_digest()

    def basis_digest(self, seen: Iterable[Sample], output: str) -> str:
        """A digest of all that sensitivities follow from: the model, the plan with all layers lowered, the samples."""
        low = self.options([each.layer for each in self.layers])
        plan = choose(view_of(self._model), self._low, self.ranges, low)
        state = hashlib.sha256(f"{self.model_digest()};{plan.digest};{output};".encode())
        for sample in seen:
            for name, array in sorted(sample.items()):
                state.update(f"{name}:{array.dtype}:{array.shape};".encode())
                state.update(array.tobytes())
        return state.hexdigest()

    def _placed(self, lowered: Collection[str]) -> Placement:
        return place(view_of(self._model), self.options(lowered), self._vanished)

    def _opened(self, copy: ir.Model, plan: QuantizationPlan) -> Network:
        insert(copy, plan, self._settings.insert)
        message = finish(copy, {}, SaveOptions(has_portable_functions=False))
        return Network(message.to_graph(), self._settings.calibrate.providers)

    def __enter__(self) -> MixedNetworks:
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.close()


def candidates(model: ir.Model, names: Collection[str], options: MixOptions) -> tuple[LayerPrecision, ...]:
    """The nodes of those names that the options want, in the order of the graph.

    Raises an error for a pattern that matches no node.
    """
    every_name = [str(node.name) for node in model.graph]

    def is_match(pattern: str, name: str) -> bool:
        try:
            return re.fullmatch(pattern, name) is not None
        except re.error:
            return False

    def matching(patterns: Sequence[str], option: str) -> set[str]:
        found: set[str] = set()
        for pattern in patterns:
            matches = [pattern] if pattern in every_name else [name for name in every_name if is_match(pattern, name)]
            if not matches:
                raise unknown_name(f"node ({option})", pattern, every_name)
            found.update(matches)
        return found

    included = matching(options.included, "IncludeLayers") if options.included else set(every_name)
    wanted = (included - matching(options.excluded, "ExcludeLayers")) & set(names)
    return tuple(
        LayerPrecision(str(node.name), node.op_type, weights=weight_count(node), macs=multiplications(node))
        for node in model.graph
        if str(node.name) in wanted and node.op_type in options.op_types
    )


def _by_node(placement: Placement) -> dict[str, set[tuple[int, Any]]]:
    """The inputs of each node that are quantized, with their specs."""
    found: dict[str, set[tuple[int, Any]]] = {}
    for each in placement.requests:
        found.setdefault(each.reader.node, set()).add((each.reader.index, each.spec))
    return found

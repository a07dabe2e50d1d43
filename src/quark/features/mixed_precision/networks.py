"""Networks with some layers at the lower types: their options, their plans, and what they compute.

The plan for an assignment is chosen with the lower spec for the lowered layers. Ranges are measured
once, for all layers at either; they are passed on, so that they are not measured again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
        self._mix = settings.mix
        self._nodes = {str(node.name): node for node in model.graph}
        self._high = place(view_of(model), settings.choose, vanished)
        specs, _ = select_nodes(view_of(model), settings.choose, vanished)
        usual = {name for name, spec in specs.items() if spec == settings.choose.default}
        possible = candidates(model, usual, settings.mix)
        targets = range(len(settings.mix.targets))
        low = [self._placed({candidate.layer: target for candidate in possible}) for target in targets]
        requests = (request for placement in (self._high, *low) for request in placement.requests)
        self._quantized = {request.reader.node for request in requests} | set(specs)
        before, after = _by_node(self._high), [_by_node(placement) for placement in low]
        self.layers = tuple(
            planned
            for planned in possible
            if any(lowered.get(planned.layer) not in (None, before.get(planned.layer)) for lowered in after)
        )
        self._low = [self._placed({planned.layer: target for planned in self.layers}) for target in targets]
        self._wanted = [key for placement in (self._high, *self._low) for key in tensors_to_measure(placement)]
        watched = [name for name, _ in self._wanted]
        watched += call("onnx", "watched", Work(model, samples, self.trial_settings))
        self._runner = FloatRunner(model, dict.fromkeys(watched), providers=settings.calibrate.providers)
        self.ranges: dict[RangeKey, TensorRange] = {}

    def measure(self) -> None:
        """Measure the ranges that layers need at the higher types, and at the lower ones."""
        self.ranges = measure(self._runner, self._wanted, self._samples, self._settings)

    def options(self, mixed: Mapping[str, int]) -> ChoiceOptions:
        """The options with these layers at the types of that number, or of their name. Layers that the user configures
        by name are not among `layers`."""
        own, targets = dict(self._mix.by_layer), self._mix.targets
        specs: list[tuple[str, LayerSpec | None]] = [
            (re.escape(name), own.get(name, targets[target])) for name, target in mixed.items()
        ]
        has_dual_pairs = self._settings.choose.has_dual_pairs or (self._mix.has_dual_pairs and bool(mixed))
        by_node = (*specs, *self._settings.choose.by_node)
        return replace(self._settings.choose, by_node=by_node, has_dual_pairs=has_dual_pairs)

    def alone(self, layers: Collection[str], target: int = 0) -> Network:
        """The float network except for these layers, which have the types of that number."""
        outputs = {str(value.name) for layer in layers for value in self._nodes[layer].outputs}
        mine = [
            request
            for request in self._low[target].requests
            if request.reader.node in layers
            or (request.tensor in outputs and request.reader.node not in self._quantized)
        ]
        # nothing fused: a quantizer before an activation would be seen by those that read it in float
        alone = replace(self._low[target], requests=tuple(mine), fused=())
        plan = choose(view_of(self._model), alone, self.ranges, self.options(dict.fromkeys(layers, target)))
        return self._opened(self._model.clone(), plan)

    def mixed(self, mixed: Mapping[str, int]) -> Network:
        """The quantized network with these layers at the types of that number."""
        copy, options = self._model.clone(), self.options(mixed)
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
        digests = []
        for target, placement in enumerate(self._low):
            low = self.options({planned.layer: target for planned in self.layers})
            digests.append(choose(view_of(self._model), placement, self.ranges, low).digest)
        state = hashlib.sha256(f"{self.model_digest()};{';'.join(digests)};{output};".encode())
        for sample in seen:
            for name, array in sorted(sample.items()):
                state.update(f"{name}:{array.dtype}:{array.shape};".encode())
                state.update(array.tobytes())
        return state.hexdigest()

    def _placed(self, mixed: Mapping[str, int]) -> Placement:
        return place(view_of(self._model), self.options(mixed), self._vanished)

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
        matched: set[str] = set()
        for pattern in patterns:
            matches = [pattern] if pattern in every_name else [name for name in every_name if is_match(pattern, name)]
            if not matches:
                raise unknown_name(f"node ({option})", pattern, every_name)
            matched.update(matches)
        return matched

    for name, _ in options.by_layer:
        matching([name], "TargetLayerConfig")
    included = matching(options.included, "IncludeLayers") if options.included else set(every_name)
    wanted = (included - matching(options.excluded, "ExcludeLayers")) & set(names)
    if options.skips_shared_inputs:
        wanted -= {str(node.name) for node in model.graph if _shares_input(node)}
    return tuple(
        LayerPrecision(str(node.name), node.op_type, weights=weight_count(node), macs=multiplications(node))
        for node in model.graph
        if str(node.name) in wanted and node.op_type in options.op_types
    )


def _shares_input(node: ir.Node) -> bool:
    """True if other nodes read the first input too."""
    value = node.inputs[0] if node.inputs else None
    return value is not None and len({id(user) for user, _ in value.uses()}) > 1


def _by_node(placement: Placement) -> dict[str, set[tuple[int, Any]]]:
    """The inputs of each node that are quantized, with their specs."""
    specs: dict[str, set[tuple[int, Any]]] = {}
    for request in placement.requests:
        specs.setdefault(request.reader.node, set()).add((request.reader.index, request.spec))
    return specs

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

from quark.mixed_precision import LayerPrecision
from quark.onnx.calibrate import FloatRunner
from quark.onnx.calibrate.runner import processor_count
from quark.onnx.choose import ChoiceOptions, LayerSpec, Placement, RangeKey, choose, place, tensors_to_measure
from quark.onnx.choose.selection import select_nodes
from quark.onnx.data import Sample, Samples
from quark.onnx.insert import insert
from quark.onnx.mix import MixOptions, candidates
from quark.onnx.quantization.deciding import decide
from quark.onnx.quantization.measuring import measure
from quark.onnx.quantization.settings import Settings
from quark.onnx.refine import CorrectionInputs, RefineOptions, layer_inputs
from quark.onnx.save import SaveOptions, finish
from quark.onnx.session import open_session, release_memory, running
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
    differ for it. Use as a context manager: the float model is held open in between."""

    def __init__(self, model: ir.Model, samples: Samples, settings: Settings, vanished: Collection[str]) -> None:
        assert settings.mix is not None
        self._model, self._samples, self._settings, self._vanished = model, samples, settings, vanished
        self._low_spec = settings.mix.low
        self._nodes = {str(node.name): node for node in model.graph}
        self._high = place(model, settings.choose, vanished)
        self.layers = self._candidates(settings.mix)
        self._low = self._placed([each.layer for each in self.layers])
        wanted = [*tensors_to_measure(self._high), *tensors_to_measure(self._low)]
        watched = [name for name, _ in wanted] + (layer_inputs(model) if self.refine.bias_correction else [])
        self._runner = FloatRunner(model, dict.fromkeys(watched), providers=settings.calibrate.providers)
        self.ranges: dict[RangeKey, TensorRange] = {}
        self._wanted = wanted

    @property
    def refine(self) -> RefineOptions:
        """What is refined of the networks that are tried: what takes little time."""
        correction = self._settings.refine.bias_correction
        if correction is None or self._samples.is_random:
            return RefineOptions()
        return RefineOptions(replace(correction, inputs=CorrectionInputs.FLOAT))

    def measure(self) -> None:
        """The ranges that all layers want at the higher types, and at the lower ones."""
        self.ranges = measure(self._runner, self._wanted, self._samples, self._settings)

    def options(self, lowered: Collection[str]) -> ChoiceOptions:
        """What the user wants of the layers by name stays as it is: such layers are not among `layers`."""
        low: list[tuple[str, LayerSpec | None]] = [(re.escape(name), self._low_spec) for name in lowered]
        return replace(self._settings.choose, by_node=(*low, *self._settings.choose.by_node))

    def low_plan(self) -> QuantizationPlan:
        """The plan where all layers are lowered."""
        return choose(self._model, self._low, self.ranges, self.options([each.layer for each in self.layers]))

    def alone(self, layer: str) -> Network:
        """The float network but for that layer, which has the lower types."""
        outputs = {str(value.name) for value in self._nodes[layer].outputs}
        mine = [
            each
            for each in self._low.requests
            if each.reader.node == layer or (each.tensor in outputs and each.reader.node not in self._quantized)
        ]
        # nothing fused: a quantizer before an activation would be seen by those that read it in float
        alone = replace(self._low, requests=tuple(mine), fused=())
        plan = choose(self._model, alone, self.ranges, self.options([layer]))
        return self._opened(self._model.clone(), plan)

    def mixed(self, lowered: Collection[str]) -> Network:
        """The quantized network with these layers lowered."""
        copy, options = self._model.clone(), self.options(lowered)
        placement = place(copy, options, self._vanished)
        self._measure_missing(placement)
        settings = replace(self._settings, choose=options, refine=self.refine)
        plan, _ = decide(copy, placement, self.ranges, self._runner, self._samples, (), settings, None)
        return self._opened(copy, plan)

    def model_digest(self) -> str:
        return self._runner.model_digest()

    def basis_digest(self, seen: Iterable[Sample], output: str) -> str:
        """Of all that sensitivities follow from: the model, the lowered plan with its scales, the samples."""
        state = hashlib.sha256(f"{self.model_digest()};{self.low_plan().digest};{output};".encode())
        for sample in seen:
            for name, array in sorted(sample.items()):
                state.update(f"{name}:{array.dtype}:{array.shape};".encode())
                state.update(array.tobytes())
        return state.hexdigest()

    def _candidates(self, options: MixOptions) -> tuple[LayerPrecision, ...]:
        specs, _ = select_nodes(self._model, self._settings.choose, self._vanished)
        usual = {name for name, spec in specs.items() if spec == self._settings.choose.default}
        found = candidates(self._model, usual, options)
        low = self._placed([each.layer for each in found])
        self._quantized = {each.reader.node for each in (*self._high.requests, *low.requests)} | set(specs)
        before, after = _by_node(self._high), _by_node(low)
        return tuple(each for each in found if after.get(each.layer) not in (None, before.get(each.layer)))

    def _placed(self, lowered: Collection[str]) -> Placement:
        return place(self._model, self.options(lowered), self._vanished)

    def _measure_missing(self, placement: Placement) -> None:
        """Where operators that align tensors are lowered too, groups differ from those of either extreme."""
        wanted = [key for key in tensors_to_measure(placement) if key not in self.ranges]
        if wanted:
            with FloatRunner(
                self._model, [name for name, _ in wanted], providers=self._settings.calibrate.providers
            ) as runner:
                self.ranges = measure(runner, wanted, self._samples, self._settings, self.ranges)

    def _opened(self, copy: ir.Model, plan: QuantizationPlan) -> Network:
        insert(copy, plan, self._settings.insert)
        message = finish(copy, {}, SaveOptions(has_portable_functions=False))
        return Network(message.to_graph(), self._settings.calibrate.providers)

    def __enter__(self) -> MixedNetworks:
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.close()


def _by_node(placement: Placement) -> dict[str, set[tuple[int, Any]]]:
    """What each node reads how."""
    found: dict[str, set[tuple[int, Any]]] = {}
    for each in placement.requests:
        found.setdefault(each.reader.node, set()).add((each.reader.index, each.spec))
    return found

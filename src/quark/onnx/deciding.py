"""From ranges to the final plan: choose, apply an NPU's limits, and let features improve constants for it.

`Work` and `Decision` are also the state of a run that features receive (features/order.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from quark.account import AlgorithmFacts
from quark.compare.improvement import OutputErrors
from quark.decide import Placement, RangeKey, choose, limit_positions, rechoose
from quark.features.order import FEATURES, TRAINING, call
from quark.onnx.calibrate import FloatRunner, Wanted, calibrate
from quark.onnx.comparing import output_errors
from quark.onnx.data import Samples
from quark.onnx.insert import insert
from quark.onnx.save import SaveOptions, finish
from quark.onnx.settings import Settings
from quark.onnx.view import view_of
from quark.plan import QuantizationPlan
from quark.ranges import TensorRange

Ranges = Mapping[RangeKey, TensorRange]


@dataclass(frozen=True, eq=False)
class State:
    """The plan and the constants of a Decision at one time. Features never change a constant in place."""

    plan: QuantizationPlan
    positions: AlgorithmFacts | None
    constants: Mapping[str, ir.TensorProtocol | None]

    def is_same(self, other: State) -> bool:
        """True if nothing has been replaced between the two, not even by something equal."""
        if self.plan is not other.plan or self.positions is not other.positions:
            return False
        mine, others = self.constants, other.constants
        return mine.keys() == others.keys() and all(tensor is others[name] for name, tensor in mine.items())


@dataclass(eq=False)
class Work:
    """A float model that is being quantized."""

    model: ir.Model
    samples: Samples
    settings: Settings


@dataclass(eq=False)
class Decision(Work):
    """A float model with the plan that was chosen from its ranges.

    `runner` runs the model as it was when the runner was opened. `expected` holds the float outputs for the held-out
    samples, and `exact` is a copy of the float model from before any constant was changed; networks that are only tried
    out have neither. `measured` caches statistics that took a run of the model, keyed by everything they depend on.
    `unrounded` holds weights by the name of their node, as they were before a feature rounded them to the format.
    Training starts from these, because a rounded weight is as far as possible from changing its code.
    """

    placement: Placement
    ranges: Ranges
    runner: FloatRunner
    expected: Sequence[Mapping[str, Any]] = ()
    exact: ir.Model | None = None
    plan: QuantizationPlan = field(init=False)
    positions: AlgorithmFacts | None = field(init=False, default=None)  # changes made for an NPU's limits
    measured: dict[Any, Any] = field(init=False, default_factory=dict)
    unrounded: dict[str, NDArray[Any]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._keep(choose(view_of(self.model), self.placement, self.ranges, self.settings.choose))

    @property
    def state(self) -> State:
        """The plan and the constants as they are now."""
        constants = {name: value.const_value for name, value in self.model.graph.initializers.items()}
        return State(self.plan, self.positions, constants)

    def restore(self, state: State) -> None:
        """Return to an earlier state; constants that have been added since stay."""
        self.plan, self.positions = state.plan, state.positions
        for name, value in self.model.graph.initializers.items():
            value.const_value = state.constants.get(name, value.const_value)

    def rechoose(self, constants: Collection[str]) -> None:
        """Choose new scales for constants that a feature has changed."""
        options = self.settings.choose
        self._keep(rechoose(view_of(self.model), self.plan, self.placement, self.ranges, options, frozenset(constants)))

    def _keep(self, plan: QuantizationPlan) -> None:
        if self.settings.choose.positions is not None:
            plan, facts = limit_positions(view_of(self.model), plan, self.settings.choose.positions)
            earlier = () if self.positions is None else self.positions.changed
            self.positions = replace(facts, changed=(*earlier, *facts.changed))
        self.plan = plan


def quantized_errors(
    work: Decision,
    expected: Sequence[Mapping[str, Any]] | None = None,
    outputs: Sequence[str] | None = None,
    samples: Sequence[Mapping[str, Any]] | None = None,
) -> OutputErrors:
    """Return the errors of the network as quantized so far, on the held-out samples or on those given.

    `expected` are the outputs to compare with, by default the float network's. `outputs` names the outputs that count,
    by default all.
    """
    judged = work.samples.held_out if samples is None else samples
    if not judged:
        return OutputErrors()
    copy = work.model.clone()
    insert(copy, work.plan, work.settings.insert)
    runnable = finish(copy, {}, SaveOptions(has_portable_functions=False))
    reference = work.expected if expected is None else expected
    return output_errors(runnable, judged, reference, outputs, providers=work.settings.calibrate.providers)


def decide(decision: Decision) -> tuple[AlgorithmFacts, ...]:
    """Let features that do not train change weights, biases and plan. Returns the facts, those on NPU limits first."""
    facts = call("onnx", "after_choosing", decision, [feature for feature in FEATURES if not feature.trains])
    return facts if decision.positions is None else (decision.positions, *facts)


def train(decision: Decision) -> tuple[AlgorithmFacts, ...]:
    """Let features that train change weights and biases, after the others."""
    return call("onnx", "after_choosing", decision, TRAINING)


def measure(
    runner: FloatRunner, wanted: Sequence[RangeKey], samples: Samples, settings: Settings, known: Ranges | None = None
) -> dict[RangeKey, TensorRange]:
    """Return the ranges of all `wanted` keys; `known` ranges are not measured again.

    A tensor that is wanted for several specs takes one pass over the samples per spec.
    """
    ranges = dict(known or {})
    pending = [key for key in wanted if key not in ranges]
    while pending:
        once = dict(reversed(pending))
        methods = {name: Wanted(spec.method, spec.integer, spec.is_symmetric) for name, spec in once.items()}
        measured = calibrate(runner, methods, samples, settings.calibrate)
        ranges |= {(name, once[name]): range_ for name, range_ in measured.items()}
        pending = [key for key in pending if key not in ranges]
    return ranges

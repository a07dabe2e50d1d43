"""The quantized network that a user trains, and the frozen one that is exported.

    QuantizedNetwork     an ordinary module: parameters, train() and eval(), to(device), state_dict
    FrozenNetwork        in eval mode, with fixed numbers: plain convolutions, every quantizer a node, and its plan

Their other state is in `meta`, which `copy.deepcopy` keeps.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.nn.modules.batchnorm import _BatchNorm

from quark.account import AlgorithmFacts
from quark.npu import Operation, settle
from quark.plan import AffineChoice, Choice, QuantizationPlan, Role, SkippedNode, TensorChoice
from quark.torch.graph import Network
from quark.torch.origin import Origin
from quark.torch.train.conv_batch_norm import ConvBatchNorm
from quark.torch.train.quantizers import Quantizer

QUANTIZERS = "quantizers"  # the folder of a network's quantizers
_STATE = "quark"
_LASTING = "quark_frozen"  # for parameters that training has frozen permanently


def is_derived_bias(role: Role, choice: Choice) -> bool:
    """True for a 32-bit bias, whose step is the product of the activation's and the weight's."""
    return role is Role.BIAS and isinstance(choice, AffineChoice) and choice.format == "int32"


class _NetworkWithState(Network):
    @property
    def plan(self) -> QuantizationPlan:
        """Every quantizer, with its numbers. Of a network that trains, as they were before training."""
        return self._entry("plan")  # type: ignore[no-any-return]

    @property
    def algorithms(self) -> tuple[AlgorithmFacts, ...]:
        """The changes to the float network, and those made for an NPU."""
        return self._entry("algorithms")  # type: ignore[no-any-return]

    @property
    def configuration(self) -> Mapping[str, Any]:
        """The configuration that it was quantized by. Not `config`: the Trainer of Hugging Face takes an attribute of
        that name for a configuration of its own, and writes to it."""
        return self._entry("config")  # type: ignore[no-any-return]

    @property
    def origin(self) -> Origin | None:
        """The origin of the network; None for networks of earlier versions."""
        return self.meta[_STATE].get("origin")  # type: ignore[no-any-return]

    @origin.setter
    def origin(self, origin: Origin | None) -> None:
        self.meta[_STATE]["origin"] = origin

    def _entry(self, name: str) -> Any:
        return self.meta[_STATE][name]


class QuantizedNetwork(_NetworkWithState):
    """A network with quantizers in it, which trains like any other module."""

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operators that an NPU's rules apply to, by the names of quantizers; empty for other machines."""
        return self._entry("operations")  # type: ignore[no-any-return]

    @property
    def derived_biases(self) -> tuple[TensorChoice, ...]:
        """32-bit biases, which get their step when the network is frozen."""
        return self._entry("derived_biases")  # type: ignore[no-any-return]

    @property
    def repeated(self) -> tuple[Any, ...]:
        """Places behind operators that only move values, which get their quantizer when the network is frozen."""
        return self._entry("repeated")  # type: ignore[no-any-return]

    @property
    def specs(self) -> Mapping[str, Any]:
        """The specs of the quantizers of activations, by name."""
        return self._entry("specs")  # type: ignore[no-any-return]

    def all_quantizers(self) -> dict[str, Quantizer]:
        """Return every quantizer once, by the path of its module."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Quantizer)}

    def freeze_batch_norms(self, *, is_lasting: bool = False) -> None:
        """Keep the running statistics from here on, for the last epochs of training. `train()` undoes it, unless
        `is_lasting`."""
        if is_lasting:
            self.meta[_LASTING] = {*self.meta.get(_LASTING, ()), "batch_norms"}
        for module in self.modules():
            if isinstance(module, ConvBatchNorm):
                module.freeze_batch_norm()
            elif isinstance(module, _BatchNorm):
                module.eval()

    def freeze_scales(self, *, is_lasting: bool = False) -> None:
        """Keep all scales from here on: those of weights no longer follow the weights, and those that are learned are
        no longer trained. `train()` undoes it, unless `is_lasting`."""
        if is_lasting:
            self.meta[_LASTING] = {*self.meta.get(_LASTING, ()), "scales"}
        for quantizer in self.all_quantizers().values():
            quantizer.is_frozen = True
            for parameter in quantizer.parameters():
                parameter.grad = None  # the gradient of an earlier step; optimizers skip parameters without one

    def train(self, mode: bool = True) -> QuantizedNetwork:
        """Train, or with False evaluate. Permanently frozen parameters stay frozen."""
        super().train(mode)
        if mode:
            lasting = self.meta.get(_LASTING, ())
            for quantizer in self.all_quantizers().values():
                quantizer.is_frozen = "scales" in lasting
            if "batch_norms" in lasting:
                self.freeze_batch_norms()
        return self


class FrozenNetwork(_NetworkWithState):
    """A network in eval mode, with fixed numbers. Tensors of its plan are nodes or parameters of the network."""

    def train(self, mode: bool = True) -> FrozenNetwork:
        """Stay in eval mode: train the quantized network, and freeze that again."""
        return super().train(False)


def with_state(network: fx.GraphModule, kind: type[Network], state: Mapping[str, Any]) -> Any:
    """Return a network of that kind with the same graph and parameters, and the state."""
    made = kind(network, network.graph)
    made.meta = {**network.meta, _STATE: dict(state)}
    made.recompile()  # with the call that meta has
    made.training = network.training
    return made


def device_of(network: torch.nn.Module) -> torch.device:
    """Return the device of the parameters; the CPU if there are none."""
    return next((parameter.device for parameter in network.parameters()), torch.device("cpu"))


def settle_positions(
    operations: tuple[Operation, ...], choices: Mapping[str, Choice]
) -> tuple[dict[str, AffineChoice], AlgorithmFacts]:
    """Return the new choices of quantizers that have to be moved within the limits of AMD's NPU, and what was moved.

    Scales are powers of two there, and going from one to another is a shift: the rules are about scale = 2^-position.
    """
    positions: dict[Hashable, int] = {}
    for name, choice in choices.items():
        if isinstance(choice, AffineChoice) and len(choice.scale) == 1:
            fraction, exponent = math.frexp(choice.scale[0])
            if fraction == 0.5:
                positions[name] = 1 - exponent
    before = dict(positions)
    outcome = settle(operations, positions)
    moved = {str(name): (before[name], positions[name]) for name in before if positions[name] != before[name]}
    facts = AlgorithmFacts(
        "NPU positions",
        tuple(f"{name} from {was} to {now}" for name, (was, now) in moved.items()),
        tuple(
            SkippedNode(violation.operation, "", f"{violation.rule}: {violation}") for violation in outcome.violations
        ),
    )
    made: dict[str, AffineChoice] = {}
    for name, (_, now) in moved.items():
        choice = choices[name]
        assert isinstance(choice, AffineChoice)
        made[name] = replace(choice, scale=(math.ldexp(1.0, -now),))
    return made, facts

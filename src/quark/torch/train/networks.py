"""The quantized network that a user trains, and the frozen one that is exported.

    QuantizedNetwork     an ordinary module: parameters, train() and eval(), to(device), state_dict
    FrozenNetwork        in eval mode, with fixed numbers: plain convolutions, every quantizer a node, and its plan

What they carry beside the graph lies in `meta`, which `copy.deepcopy` keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from quark.account import AlgorithmFacts
from quark.npu import Operation
from quark.plan import AffineChoice, Choice, QuantizationPlan, Role, TensorChoice
from quark.torch.graph import Network
from quark.torch.train.conv_batch_norm import ConvBatchNorm
from quark.torch.train.quantizers import Quantizer

QUANTIZERS = "quantizers"  # the folder of a network's quantizers
_STATE = "quark"


def is_derived_bias(role: Role, choice: Choice) -> bool:
    """A bias of 32 bits, whose step is the product of the activation's and the weight's."""
    return role is Role.BIAS and isinstance(choice, AffineChoice) and choice.format == "int32"


class QuantizedNetwork(Network):
    """A network with quantizers in it, which trains as any other module does."""

    @property
    def plan(self) -> QuantizationPlan:
        """What was chosen when the network was quantized; `freeze(...).plan` is what training made of it."""
        return self._entry("plan")  # type: ignore[no-any-return]

    @property
    def algorithms(self) -> tuple[AlgorithmFacts, ...]:
        """What was done to the float network, and what was moved for an NPU."""
        return self._entry("algorithms")  # type: ignore[no-any-return]

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration that it was quantized by."""
        return self._entry("config")  # type: ignore[no-any-return]

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What an NPU's rules are about, by the names of quantizers; empty where it is for another machine."""
        return self._entry("operations")  # type: ignore[no-any-return]

    @property
    def derived_biases(self) -> tuple[TensorChoice, ...]:
        """Biases of 32 bits, which get their step when the network is frozen."""
        return self._entry("derived_biases")  # type: ignore[no-any-return]

    @property
    def repeated(self) -> tuple[Any, ...]:
        """Places behind operators that only move values, which get their quantizer when the network is frozen."""
        return self._entry("repeated")  # type: ignore[no-any-return]

    def all_quantizers(self) -> dict[str, Quantizer]:
        """Every quantizer once, by its name in the plan's order: that of the module, or of the layer that holds it."""
        return {name: each for name, each in self.named_modules() if isinstance(each, Quantizer)}

    def freeze_batch_norms(self) -> None:
        """Keep the running statistics from here on: what the last epochs of training want. `train()` undoes it."""
        for module in self.modules():
            if isinstance(module, ConvBatchNorm):
                module.freeze_batch_norm()

    def _entry(self, name: str) -> Any:
        return self.meta[_STATE][name]


class FrozenNetwork(Network):
    """In eval mode, with fixed numbers."""

    @property
    def plan(self) -> QuantizationPlan:
        """Every quantizer, with its numbers: tensors are nodes or parameters of this network."""
        return self.meta[_STATE]["plan"]  # type: ignore[no-any-return]

    @property
    def config(self) -> Mapping[str, Any]:
        return self.meta[_STATE]["config"]  # type: ignore[no-any-return]

    @property
    def algorithms(self) -> tuple[AlgorithmFacts, ...]:
        return self.meta[_STATE]["algorithms"]  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> FrozenNetwork:
        """It stays in eval mode: train the quantized network, and freeze that again."""
        return super().train(False)


def with_state(network: fx.GraphModule, kind: type[Network], state: Mapping[str, Any]) -> Any:
    """The same graph and parameters as a network of that kind, which carries the state."""
    made = kind(network, network.graph)
    made.meta = {**network.meta, _STATE: dict(state)}
    made.training = network.training
    return made


def device_of(network: torch.nn.Module) -> torch.device:
    return next((each.device for each in network.parameters()), torch.device("cpu"))

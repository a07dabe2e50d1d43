"""What is fitted where several layers are fitted together: samples of a block's input and output, and its layers.

A sample is a whole activation; it is read by its number, so that samples may lie in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quark.plan import Choice
from quark.reconstruction.problem import Array, WeightLayout

Weights = Sequence[tuple[torch.Tensor, torch.Tensor | None]]  # of each layer, with its bias where that is trained
Network = Callable[[torch.Tensor, Weights], tuple[torch.Tensor, list[torch.Tensor]]]


@dataclass(frozen=True, eq=False)
class BlockLayer:
    """A layer: where it stands, and how its weight and its bias are rounded (None: not)."""

    name: str
    weight: Array
    layout: WeightLayout
    bias: Array | None
    weight_choice: Choice
    bias_choice: Choice | None = None
    can_train_bias: bool = True


@dataclass(frozen=True, eq=False)
class BlockProblem:
    """`network` computes the block's output, and what each layer gives, from an input and the layers' weights.
    `inputs` are the quantized network's, `outputs` the float network's, `float_inputs` its inputs where they are
    wanted; samples whose number is in `held_out` are not trained on. `output_choice`: how what comes out is rounded."""

    name: str
    layers: tuple[BlockLayer, ...]
    network: Network
    inputs: Sequence[Array]
    outputs: Sequence[Array]
    held_out: frozenset[int]
    float_inputs: Sequence[Array] | None = None
    output_choice: Choice | None = None

    @property
    def training(self) -> list[int]:
        return [number for number in range(len(self.inputs)) if number not in self.held_out]

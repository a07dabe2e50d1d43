"""What is asked for, with types: how the tensors of a layer are to be quantized, and what else is to be done.

    TensorSpec     AffineSpec, BlockSpec or FloatSpec: one tensor
    LayerSpecs     the four of a layer: input, output, weight, bias; None leaves a tensor as it is
    Settings       all of a run

`quantization/config` makes these out of what a user wrote; the steps read nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from quark.formats.block import BlockQuantizer
from quark.formats.spec import IntFormat
from quark.ranges import RangeMethod
from quark.torch.equalize.options import CrossLayerOptions
from quark.torch.refine.options import BiasCorrectionOptions


class Granularity(str, Enum):
    """What shares one scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    GROUP = "group"


class Algorithm(str, Enum):
    """How a quantizer learns: its threshold (TQT) or its step (LSQ)."""

    TQT = "tqt"
    LSQ = "lsq"


class ThresholdInit(str, Enum):
    """Where TQT starts from."""

    MAX = "max"
    THREE_SIGMA = "three_sigma"
    KL_J = "kl_j"


@dataclass(frozen=True)
class Learning:
    """`initial` None: the maximum for weights and KL-J for activations; LSQ has a start of its own."""

    algorithm: Algorithm
    initial: ThresholdInit | None = None


@dataclass(frozen=True)
class AffineSpec:
    """Integer codes. `axis` is that of the channels, or the one that groups lie along; None: that of the operator."""

    format: IntFormat
    method: RangeMethod
    is_symmetric: bool
    granularity: Granularity = Granularity.TENSOR
    axis: int | None = None
    group_size: int | None = None
    is_power_of_two: bool = False
    is_dynamic: bool = False
    learning: Learning | None = None


@dataclass(frozen=True)
class BlockSpec:
    """Blocks along `axis`; None: the axis that the operator sums over."""

    quantizer: BlockQuantizer
    to_bfloat16_first: bool = False
    axis: int | None = None


@dataclass(frozen=True)
class FloatSpec:
    """float16 or bfloat16."""

    format: str


TensorSpec: TypeAlias = AffineSpec | BlockSpec | FloatSpec


@dataclass(frozen=True)
class LayerSpecs:
    input: TensorSpec | None = None
    output: TensorSpec | None = None
    weight: TensorSpec | None = None
    bias: TensorSpec | None = None


@dataclass(frozen=True)
class Settings:
    """`by_name` has patterns for module paths and node names, which go before `by_node`, what a plan says of single
    nodes, and that before `by_type` (names of torch.nn classes); None, as everything under `exclude`, leaves a layer in
    float."""

    specs: LayerSpecs
    by_type: Mapping[str, LayerSpecs | None] = field(default_factory=dict)
    by_name: Mapping[str, LayerSpecs | None] = field(default_factory=dict)
    by_node: Mapping[str, LayerSpecs | None] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    equalize: CrossLayerOptions | None = None
    correct_biases: BiasCorrectionOptions | None = None
    applies_npu_rules: bool = False
    seed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)

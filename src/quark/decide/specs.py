"""The formats that a user requests for tensors, before their values are known.

    AffineSpec     integers with a scale and a zero point, found by a method of `quark.ranges`
    BlockSpec      blocks that share a scale
    FloatSpec      float16, bfloat16, or an 8-bit float with a scale
    DynamicSpec    integers whose scale is found at run time

None instead of a spec means that the tensor stays in float.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias, TypeGuard

from quark.errors import InvalidValueError
from quark.formats.affine import integer_format
from quark.formats.block import BlockQuantizer
from quark.formats.spec import IntFormat
from quark.plan import EIGHT_BIT_FLOATS
from quark.ranges import KLJ, LeastErrorStep, MinMax, RangeMethod, ThreeSigma


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
    """`initial` None: the maximum for weights and KL-J for activations; LSQ has an initial value of its own."""

    algorithm: Algorithm
    initial: ThresholdInit | None = None


class GroupRule(str, Enum):
    """How the scales of groups are found."""

    RANGE = "range"  # the range of the group, as for channels
    LOWEST_CODE = "lowest_code"  # symmetric: the largest magnitude gets the lowest code, even if that takes a scale < 0
    SEARCHED = "searched"  # LOWEST_CODE or RANGE, or another scale if that has less squared error; for channels too
    HALF_QUADRATIC = "half_quadratic"  # LOWEST_CODE or RANGE, refined for the least sum of |error|^0.7


@dataclass(frozen=True)
class AffineSpec:
    """Integers of `format`. `is_symmetric`: the middle code is zero. `is_per_channel`: for weights, a scale for each
    output channel. `group_size`: for weights, a scale for each group of that many neighbours along the reduction axis.
    `axis`: the axis of channels or groups, if it differs from the operator's. `has_reduced_range`: one bit less, for
    integer units that would saturate. `learning`: the scale is trained. `has_int16_scale`: scales are a 16-bit integer
    over a power of two (`quark.decide.scales.int16_scale`). `group_rule` is for the scales of groups."""

    format: str
    method: RangeMethod = field(default_factory=MinMax)
    is_symmetric: bool = True
    is_per_channel: bool = False
    is_power_of_two: bool = False
    group_size: int | None = None
    has_reduced_range: bool = False
    axis: int | None = None
    learning: Learning | None = None
    has_int16_scale: bool = False
    group_rule: GroupRule = GroupRule.RANGE

    def __post_init__(self) -> None:
        integer_format(self.format)

    @property
    def integer(self) -> IntFormat:
        return integer_format(self.format)

    @property
    def has_one_scale(self) -> bool:
        """True if one scale applies to the whole tensor."""
        return not self.is_per_channel and self.group_size is None

    def observed_method(self, is_weight: bool = False) -> RangeMethod:
        """The method for the tensor's range; quantizers that learn start from a range of their own."""
        if self.learning is None:
            return self.method
        if self.learning.algorithm is Algorithm.LSQ:
            return LeastErrorStep()
        initial = self.learning.initial or (ThresholdInit.MAX if is_weight else ThresholdInit.KL_J)
        starts = {ThresholdInit.MAX: MinMax(), ThresholdInit.THREE_SIGMA: ThreeSigma(), ThresholdInit.KL_J: KLJ()}
        return starts[initial]


@dataclass(frozen=True)
class BlockSpec:
    """Blocks of `quantizer` along `axis`; where `follows_reduction`, along the axis that the reader sums over.
    `is_calibrated`: if the format has a tensor scale, that of an activation comes from its measured range, instead of
    being found at every run. `is_rule_open`: nobody asked for this scale rule, so weights may have better scales."""

    quantizer: BlockQuantizer
    axis: int = 1
    follows_reduction: bool = True
    to_bfloat16_first: bool = False
    is_calibrated: bool = False
    is_rule_open: bool = field(default=False, compare=False)

    @property
    def format(self) -> str:
        return str(self.quantizer.format)

    @property
    def method(self) -> RangeMethod:
        return MinMax()

    @property
    def integer(self) -> IntFormat:
        return integer_format("int8")

    @property
    def is_symmetric(self) -> bool:
        return True

    def observed_method(self) -> RangeMethod:
        return self.method


@dataclass(frozen=True)
class FloatSpec:
    """float16 or bfloat16; beyond its range a value saturates where `is_saturating`, else becomes Inf. `is_scaled`:
    divided by a scale first, so that the largest magnitude of calibration becomes the type's largest number (float16)
    or 2 (bfloat16, whose precision is the same everywhere).

    8-bit floats (`is_eight_bits`) are always scaled and saturating; the largest magnitude becomes their largest number.
    `is_per_channel`: a scale for each output of a weight, or for each token of an activation. `is_dynamic`: the scale
    is found at run time. Both for activations are for language models alone. `axis`: where a weight's channels lie, if
    not where the operator has them. `method` finds the range of an activation. `has_searched_scales`: of the scales
    within an octave, a weight of 8-bit floats gets those of least squared error.
    """

    format: str
    is_saturating: bool = False
    is_scaled: bool = False
    is_per_channel: bool = False
    is_dynamic: bool = False
    axis: int | None = None
    method: RangeMethod = field(default_factory=MinMax)
    has_searched_scales: bool = False

    @property
    def is_eight_bits(self) -> bool:
        """True for E4M3 and E5M2."""
        return self.format in EIGHT_BIT_FLOATS

    @property
    def integer(self) -> IntFormat:
        return integer_format("int8")

    @property
    def is_symmetric(self) -> bool:
        return True

    def observed_method(self) -> RangeMethod:
        return self.method

    def __post_init__(self) -> None:
        if self.format not in ("float16", "bfloat16", *EIGHT_BIT_FLOATS):
            raise InvalidValueError(f"format '{self.format}': expected float16, bfloat16, fp8_e4m3 or fp8_e5m2")
        if self.is_eight_bits and not (self.is_scaled and self.is_saturating):
            raise InvalidValueError(f"format '{self.format}': an 8-bit float without blocks has a scale, and saturates")


@dataclass(frozen=True)
class DynamicSpec:
    """Integers whose scale and zero point are found at run time. `is_per_row`: for each position of all axes but the
    last, which is a token of a language model; graphs have no operator for it."""

    format: str = "uint8"
    is_symmetric: bool = False
    is_per_row: bool = False


TensorSpec: TypeAlias = AffineSpec | BlockSpec | FloatSpec | DynamicSpec
MeasuredSpec: TypeAlias = AffineSpec | FloatSpec | BlockSpec


def is_measured(spec: TensorSpec) -> TypeGuard[MeasuredSpec]:
    """True if the choice needs a measured range."""
    if isinstance(spec, BlockSpec):
        return spec.is_calibrated and spec.quantizer.format.has_tensor_scale
    return isinstance(spec, AffineSpec) or (isinstance(spec, FloatSpec) and spec.is_scaled and not spec.is_dynamic)


@dataclass(frozen=True)
class LayerSpec:
    """What is wanted of the tensors around one node; None leaves a tensor in float. A bias of AffineSpec("int32") has
    the product of the activation's and the weight's scales; others have ranges of their own. `output` None: as the
    readers of the output want it."""

    activation: TensorSpec | None
    weight: TensorSpec | None
    bias: TensorSpec | None = None
    output: TensorSpec | None = None


def words_of(layer: LayerSpec) -> str:
    """The types in words.

    >>> words_of(LayerSpec(AffineSpec("int16"), AffineSpec("int8")))
    'int16 activations, int8 weights'
    """
    activation, weight = ("float" if spec is None else spec.format for spec in (layer.activation, layer.weight))
    return activation if activation == weight else f"{activation} activations, {weight} weights"


def bits_of(layer: LayerSpec) -> tuple[float, float]:
    """The bits per element of activations and of weights, including the share of a block's scale; 32 for float."""
    return bits_of_spec(layer.activation), bits_of_spec(layer.weight)


def bits_of_spec(spec: TensorSpec | None) -> float:
    """The bits per element, including the share of a block's scale; 32 for float."""
    if spec is None:
        return 32.0
    if isinstance(spec, BlockSpec):
        return float(spec.quantizer.format.bits_per_element)
    if isinstance(spec, FloatSpec):
        return 8.0 if spec.is_eight_bits else 16.0
    return float(integer_format(spec.format).bits)

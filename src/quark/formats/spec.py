"""What a number format is: a few facts as a frozen value, every limit derived from them.

An *element* format is a set of numbers: a small float (`FloatFormat`) or a fixed-point integer (`IntFormat`). What
rounding needs to know of either is its `Grid`: between 2^e and 2^(e+1) the numbers are 2^(e - mantissa_bits) apart,
and below 2^min_exponent the spacing stays as it is there. An integer is the grid with a single spacing.

A *block* format (`BlockFormat`) gives `block_size` elements one scale. It covers four families:

    OCP MX            v = 2^e * P,            P in the element type, e in E8M0
    microexponents    v = 2^(e - D) * P,      D = shift of a sub-block, P a sign and magnitude with no implicit one
    block float       v = 2^e * P,            P an 8-bit integer with six fraction bits
    float scales      v = t * s * P,          s in a small float, t one float32 number for the whole tensor (NVFP4)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from quark.errors import InvalidValueError

SCALE_MIN_EXPONENT = -127
SCALE_MAX_EXPONENT = 127
MAX_BLOCK_MANTISSA = 20  # bits of an element: rounding by addition in float32 takes two more
SCALE_NAN_CODE = 255  # E8M0's only special code: every value of its block is NaN
FLOAT32_MAX = math.ldexp(2.0 - 2.0**-23, 127)


class Specials(str, Enum):
    """The codes of a small float that are not numbers."""

    IEEE = "ieee"  # the top exponent holds Inf and NaN
    NAN_ONLY = "nan_only"  # the all-ones code is NaN, the rest of the top exponent are numbers; no Inf
    NONE = "none"  # every code is a number


class ScaleRule(str, Enum):
    """How a block's scale follows from its largest magnitude. Scales that are floats take FLOOR, which for them is the
    number nearest to amax / max, and MSE."""

    FLOOR = "floor"  # OCP MX v1.0: floor(log2 amax) - emax; the largest elements may saturate
    CEIL = "ceil"  # ceil(log2 amax) - emax; never saturates, up to one bit lost
    EVEN = "even"  # floor after amax is rounded half up to the element's mantissa
    RCEIL = "rceil"  # the smallest scale with amax <= scale * max; never saturates, tightest
    MSE = "mse"  # of several scales near the usual one, the one with the least squared error; for static weights


class Rounding(str, Enum):
    """The treatment of values exactly halfway between two neighbours."""

    HALF_AWAY = "half_away"  # away from zero; operator attribute rounding_mode = 0
    HALF_UP = "half_up"  # toward +infinity; rounding_mode = 1
    HALF_EVEN = "half_even"  # to the even neighbour; rounding_mode = 2


class NonFinite(str, Enum):
    """The treatment of NaN and Inf in the input."""

    BLOCK_NAN = "block_nan"  # every element of the block becomes NaN
    PASSTHROUGH = "passthrough"  # the element is copied; the others are quantized as if it were absent


@dataclass(frozen=True)
class Grid:
    """The numbers of an element type as rounding sees them."""

    mantissa_bits: int
    min_exponent: int
    max_exponent: int
    lowest: float
    highest: float

    @property
    def is_uniform(self) -> bool:
        """True when all neighbours are equally far apart (integers)."""
        return self.min_exponent == self.max_exponent


@dataclass(frozen=True)
class FloatFormat:
    """A small binary float with subnormals. Values beyond `max` saturate; the sign of zero is free."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    specials: Specials = Specials.NONE

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bits_per_element(self) -> float:
        return float(self.bits)

    @property
    def bias(self) -> int:
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest power of two that is a number of the format."""
        top = int(2**self.exponent_bits) - 1 - self.bias
        return top - 1 if self.specials is Specials.IEEE else top

    @property
    def max(self) -> float:
        codes_lost = 1 if self.specials is Specials.NAN_ONLY else 0
        return math.ldexp(2.0 - (1 + codes_lost) * 2.0**-self.mantissa_bits, self.emax)

    @property
    def min_normal(self) -> float:
        return math.ldexp(1.0, self.emin)

    @property
    def min_subnormal(self) -> float:
        return math.ldexp(1.0, self.emin - self.mantissa_bits)

    @property
    def has_inf(self) -> bool:
        return self.specials is Specials.IEEE

    @property
    def has_nan(self) -> bool:
        return self.specials is not Specials.NONE

    @property
    def default_nonfinite(self) -> NonFinite:
        """A format that has an Inf keeps it; in one that has none, Inf can only become NaN."""
        return NonFinite.PASSTHROUGH if self.has_inf else NonFinite.BLOCK_NAN

    @property
    def grid(self) -> Grid:
        return Grid(self.mantissa_bits, self.emin, self.emax, -self.max, self.max)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class IntFormat:
    """A fixed-point integer: code times 2^-fraction_bits.

    Signed codes are two's complement; `symmetric` leaves the lowest code unused, so that the range is even about zero.
    """

    name: str
    bits: int
    signed: bool = True
    fraction_bits: int = 0
    symmetric: bool = False

    @property
    def bits_per_element(self) -> float:
        return float(self.bits)

    @property
    def qmax(self) -> int:
        return int(2 ** (self.bits - 1 if self.signed else self.bits)) - 1

    @property
    def qmin(self) -> int:
        if not self.signed:
            return 0
        return -self.qmax if self.symmetric else -self.qmax - 1

    @property
    def max(self) -> float:
        return math.ldexp(float(self.qmax), -self.fraction_bits)

    @property
    def min(self) -> float:
        return math.ldexp(float(self.qmin), -self.fraction_bits)

    @property
    def emax(self) -> int:
        """Exponent of the largest power of two in the format."""
        return self.qmax.bit_length() - 1 - self.fraction_bits

    @property
    def min_subnormal(self) -> float:
        """The step between neighbours."""
        return math.ldexp(1.0, -self.fraction_bits)

    @property
    def default_nonfinite(self) -> NonFinite:
        return NonFinite.BLOCK_NAN

    @property
    def grid(self) -> Grid:
        return Grid(self.emax + self.fraction_bits, self.emax, self.emax, self.min, self.max)

    def __str__(self) -> str:
        return self.name


ElementFormat: TypeAlias = FloatFormat | IntFormat


@dataclass(frozen=True)
class SubBlocks:
    """Runs of `size` elements inside a block with a microexponent of `shift_bits` bits: a sub-block whose largest
    magnitude is D binades below its block's gets a spacing 2^-D finer, D at most `max_shift`."""

    size: int
    shift_bits: int

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.shift_bits <= 4:
            raise InvalidValueError(f"{self}: expected a size of at least 1 and 0 to 4 shift bits")

    @property
    def max_shift(self) -> int:
        return int(2**self.shift_bits) - 1


@dataclass(frozen=True)
class BlockFormat:
    """Elements that share a scale along one axis: a power of two, or a number of the float format `scale`.

    Values beyond the element's range saturate; a shorter last block is quantized as if zeros followed it; an all-zero
    block has the smallest scale. `flush_subnormals`: inputs below 2^-126 count as zero. `carry`: an element that would
    round past the top code raises the exponent of its whole block instead of saturating. `has_tensor_scale`: all scales
    of a tensor are multiplied by one float32 number, so that its largest magnitude has the largest scale.
    """

    name: str
    element: ElementFormat
    block_size: int
    sub_blocks: SubBlocks | None = None
    flush_subnormals: bool = False
    carry: bool = False
    default_nonfinite: NonFinite = NonFinite.BLOCK_NAN
    scale: FloatFormat | None = None
    has_tensor_scale: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.block_size, bool) or not isinstance(self.block_size, int) or self.block_size < 1:
            raise InvalidValueError(
                f"block_size {self.block_size!r} of format '{self.name}': expected an integer of at least 1"
            )
        obstacle = self._obstacle()
        if obstacle:
            raise InvalidValueError(f"format '{self.name}' with element '{self.element}': {obstacle}")

    def _obstacle(self) -> str:
        """The reason why the fields describe no valid format; empty if they do."""
        grid, element = self.element.grid, self.element
        if element.emax < 0:
            return "the element holds no power of two from 1 on; give it fewer fraction bits, the scale makes up for it"
        if grid.mantissa_bits > MAX_BLOCK_MANTISSA or grid.max_exponent + 25 - grid.mantissa_bits > 127:
            return "float32 has no room to round it in; use it as a plain format"
        is_balanced = grid.lowest == -grid.highest
        if self.carry and (self.sub_blocks is not None or is_balanced or not isinstance(element, IntFormat)):
            return "only blocks of two's complement integers without sub-blocks can carry"
        if self.sub_blocks is not None and not (is_balanced and grid.is_uniform):
            return "sub-blocks hold integers with a range that is even about zero"
        return self._scale_obstacle()

    def _scale_obstacle(self) -> str:
        """The reason why the scales cannot be what the fields say; empty if they can."""
        if self.scale is None:
            return "only scales that are floats have a tensor scale besides" if self.has_tensor_scale else ""
        if self.sub_blocks is not None or self.carry or self.flush_subnormals:
            return "scales that are floats allow neither sub-blocks, nor carrying, nor flushed subnormals"
        return f"its scale '{self.scale}' has more than 8 bits; use fp8_e4m3 or fp8_e5m2" if self.scale.bits > 8 else ""

    @property
    def scale_rules(self) -> tuple[ScaleRule, ...]:
        """The scale rules that the format takes, its own first."""
        if self.carry:
            return (ScaleRule.FLOOR,)
        return tuple(ScaleRule) if self.scale is None else (ScaleRule.FLOOR, ScaleRule.MSE)

    @property
    def bits_per_element(self) -> float:
        shared = (8 if self.scale is None else self.scale.bits) / self.block_size
        if self.sub_blocks is not None:
            shared += self.sub_blocks.shift_bits / self.sub_blocks.size
        return self.element.bits + shared

    @property
    def max(self) -> float:
        """The largest value at the largest scale; may lie beyond float32."""
        if self.scale is not None:
            return FLOAT32_MAX if self.has_tensor_scale else self.element.max * self.scale.max
        return math.ldexp(self.element.max, SCALE_MAX_EXPONENT)

    @property
    def min_subnormal(self) -> float:
        """The smallest step at the smallest scale."""
        if self.scale is not None:
            return 2.0**-149 if self.has_tensor_scale else self.element.min_subnormal * self.scale.min_subnormal
        shift = 0 if self.sub_blocks is None else self.sub_blocks.max_shift
        return math.ldexp(self.element.min_subnormal, SCALE_MIN_EXPONENT - shift)

    @property
    def reach(self) -> float:
        """The largest magnitude at a tensor scale of 1, if scales are floats."""
        assert self.scale is not None, self.name
        return self.element.grid.highest * self.scale.max

    def with_block_size(self, block_size: int) -> BlockFormat:
        return replace(self, block_size=block_size)

    def __str__(self) -> str:
        return self.name


Format: TypeAlias = FloatFormat | IntFormat | BlockFormat

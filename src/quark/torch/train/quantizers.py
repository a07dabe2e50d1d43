"""Quantizers as modules that a network is trained through, each for one tensor of the plan.

    AffineQuantizer     a fixed scale and zero point; a weight's may follow the weight while it is trained
    LsqQuantizer        learns its step
    TqtQuantizer        learns its threshold, the step is a power of two
    BlockFakeQuantizer  blocks with a shared power-of-two scale
    FloatFakeQuantizer  float16 or bfloat16
    Float8FakeQuantizer 8-bit floats with a scale; a weight's follows the weight while it is trained
    DynamicQuantizer    scale and zero point of the values that it is given

Their numbers are parameters and buffers, so `state_dict`, `to(device)` and optimizers handle them as usual. `choice()`
returns what a quantizer does now, also after training, as an entry of the plan.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from quark.errors import InvalidValueError
from quark.formats.affine import AffineParameters, Granularity, choose_affine, code_dtype, find_ranges, integer_format
from quark.formats.arrays import array_kind
from quark.formats.catalog import get_format
from quark.formats.spec import IntFormat
from quark.ops.fake_quantize import affine_fake_quantize, block_fake_quantize, code_limits, lsq, tqt
from quark.plan import AffineChoice, BlockChoice, Choice, DynamicChoice, FloatChoice, Role


class Quantizer(nn.Module):
    """One tensor of the plan. A quantizer that several places share is one module, and learns from all of them."""

    def __init__(self, tensor: str, role: Role) -> None:
        super().__init__()
        self.tensor = tensor
        self.role = role
        self.name = tensor  # among the quantizers of its network; set by `insert`
        self.is_frozen = False  # its numbers neither follow a weight nor are trained

    @abstractmethod
    def choice(self) -> Choice:
        """Return what it does now."""

    def extra_repr(self) -> str:
        return f"{self.tensor}: {self.choice()}"


@dataclass(frozen=True)
class FollowedRange:
    """Scales that follow a weight while it is trained: found again from its extremes at every step, on its own device.

        symmetric       scale = 2 max|w| / (qmax - qmin)          codes are even about zero: int8 uses -127..127
        lowest code     scale = max(-low / -qmin, high / qmax)    symmetric, and -8 of int4 is used
        asymmetric      scale = (high - low) / (qmax - qmin)      for the range extended to zero
        power of two    the smallest at which no element is clipped by more than rounding

    Computed in float32 and without waiting for the device. The extreme elements change rarely, and so does the scale.
    """

    format: IntFormat
    is_symmetric: bool
    is_power_of_two: bool = False
    has_lowest_code: bool = False

    def parameters(
        self, x: torch.Tensor, axis: int | None, group_size: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scale, zero_point) of the whole tensor, of each channel of the axis, or of each group along it."""
        lowest, highest = find_ranges(x, axis, group_size)
        low, high = lowest.clamp(max=0.0), highest.clamp(min=0.0)
        if self.is_power_of_two:
            half = 1 << (self.format.bits - 1)
            wanted = torch.maximum(-low / (half + 0.5), high / (half - 0.5))
            fraction, exponent = torch.frexp(wanted)
            whole = torch.where(fraction == 0.5, exponent - 1, exponent)
            scale = torch.where(wanted > 0, torch.ldexp(torch.ones_like(wanted), whole), 1.0)
            return scale, torch.full_like(scale, 0 if self.format.signed else half)
        tiny = torch.finfo(low.dtype).tiny
        qmin, qmax = self.format.qmin, self.format.qmax
        if self.is_symmetric:
            even = -qmax if self.format.signed else qmin
            scale = 2 * torch.maximum(-low, high) / (qmax - even)
            if self.has_lowest_code:
                scale = torch.maximum(low / qmin, high / qmax)
            middle = round((even + qmax) / 2)
            return torch.where(scale < tiny, 1.0, scale), torch.full_like(scale, middle)
        scale = (high - low) / (qmax - qmin)
        scale = torch.where(scale < tiny, 1.0, scale)
        return scale, torch.round(qmin - low / scale).clamp(qmin, qmax)


class AffineQuantizer(Quantizer):
    """Scales and zero points of an `AffineChoice`. With `follows`, they are found again from the values at every step
    of training, and stay as they are in eval mode."""

    scale: torch.Tensor
    zero_point: torch.Tensor

    def __init__(
        self,
        tensor: str,
        role: Role,
        choice: AffineChoice,
        shape: tuple[int, ...],
        follows: FollowedRange | None = None,
    ) -> None:
        """`shape` is that of the values; only the number of groups depends on it."""
        super().__init__(tensor, role)
        self.format = integer_format(choice.format)
        self.axis, self.group_size = choice.axis, choice.group_size
        self.follows = follows
        self._parameters_now: AffineParameters | None = None
        self.parameter_shape: tuple[int, ...] = ()
        if choice.axis is not None and choice.group_size is None:
            self.parameter_shape = (len(choice.scale),)
        elif choice.axis is not None:
            self.parameter_shape = Granularity(choice.axis, choice.group_size).parameter_shape(shape)
        self.register_buffer("scale", torch.empty(self.parameter_shape))
        kind = array_kind(self.scale)
        self.register_buffer("zero_point", torch.empty(self.parameter_shape, dtype=code_dtype(kind, self.format)))
        self.assign(choice)

    @property
    def is_symmetric(self) -> bool:
        """True if zero is in the middle of the codes."""
        middle = 0 if self.format.signed else 1 << (self.format.bits - 1)
        return bool((self.zero_point == middle).all())

    def assign(self, choice: AffineChoice) -> None:
        """Replace the numbers; the codes stay the same."""
        if (choice.format, choice.axis, choice.group_size) != (self.format.name, self.axis, self.group_size):
            raise InvalidValueError(f"{self.tensor}: {choice} in the place of {self.choice()}")
        self.scale.copy_(torch.tensor(choice.scale, dtype=torch.float64).reshape(self.parameter_shape))
        self.zero_point.copy_(torch.tensor(choice.zero_point).reshape(self.parameter_shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.follows is not None and self.training and not self.is_frozen:
            with torch.no_grad():
                scale, zero_point = self.follows.parameters(x.detach(), self.axis, self.group_size)
                self.scale.copy_(scale)
                self.zero_point.copy_(zero_point)
        return affine_fake_quantize(x, self.parameters_now())

    def parameters_now(self) -> AffineParameters:
        """Return scales and zero points as the functions take them. They are checked only once for the same tensors,
        because following a weight writes into these."""
        known = self._parameters_now
        if known is None or known.scale is not self.scale or known.zero_point is not self.zero_point:
            known = AffineParameters(self.scale, self.zero_point, self.format, self.axis, self.group_size)
            self._parameters_now = known
        return known

    def choice(self) -> AffineChoice:
        return AffineChoice(
            self.format.name,
            tuple(self.scale.double().reshape(-1).tolist()),
            tuple(self.zero_point.reshape(-1).tolist()),
            self.axis,
            self.group_size,
        )


class LearnedQuantizer(Quantizer):
    """Codes with zero point 0, all of them used, for the whole tensor or for each channel of an axis.

    If there was no calibration data, its number is NaN until the first batch, from which `start_from` finds it. Since
    NaN marks a missing number, loading a checkpoint also sets it.
    """

    def __init__(self, tensor: str, role: Role, format: str, axis: int | None) -> None:
        super().__init__(tensor, role)
        self.format = integer_format(format)
        self.axis = axis
        self._start: Callable[[torch.Tensor], AffineChoice] | None = None

    @property
    @abstractmethod
    def learned(self) -> nn.Parameter:
        """The number that is trained."""

    @abstractmethod
    def numbers_of(self, choice: AffineChoice) -> torch.Tensor:
        """The value of `learned` that a choice stands for."""

    @property
    def _learned_now(self) -> torch.Tensor:
        """The number, without a gradient if it is frozen."""
        return self.learned.detach() if self.is_frozen else self.learned

    def start_from(self, start: Callable[[torch.Tensor], AffineChoice]) -> None:
        """Wait for the first batch; `start` finds the choice to begin with."""
        self._start = start
        with torch.no_grad():
            self.learned.fill_(math.nan)

    @property
    def is_waiting(self) -> bool:
        """True if no batch and no checkpoint has said yet where to begin."""
        return self._start is not None and bool(torch.isnan(self.learned).any())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._start is not None:
            if self.is_waiting:
                with torch.no_grad():
                    self.learned.copy_(self.numbers_of(self._start(x.detach())))
            self._start = None
        return self.fake_quantize(x)

    @abstractmethod
    def fake_quantize(self, x: torch.Tensor) -> torch.Tensor:
        """Quantize and dequantize, with a gradient for `learned`."""

    def extra_repr(self) -> str:
        return f"{self.tensor}: starts from the first batch" if self.is_waiting else super().extra_repr()

    def choice(self) -> AffineChoice:
        steps = self.step().detach().double().reshape(-1).tolist()
        return AffineChoice(self.format.name, tuple(steps), (0,) * len(steps), self.axis)

    @abstractmethod
    def step(self) -> torch.Tensor:
        """The scale, as the forward pass uses it."""


class LsqQuantizer(LearnedQuantizer):
    """A learned step (arXiv 1902.08153)."""

    def __init__(self, tensor: str, role: Role, start: AffineChoice) -> None:
        super().__init__(tensor, role, start.format, start.axis)
        self.scale = nn.Parameter(self.numbers_of(start))

    @property
    def learned(self) -> nn.Parameter:
        return self.scale

    def numbers_of(self, choice: AffineChoice) -> torch.Tensor:
        return _of_channels(choice.scale, choice.axis)

    def fake_quantize(self, x: torch.Tensor) -> torch.Tensor:
        return lsq(x, self._learned_now, self.format.bits, self.format.signed, self.axis)

    def step(self) -> torch.Tensor:
        return self.scale.clamp(min=torch.finfo(torch.float32).tiny)


class TqtQuantizer(LearnedQuantizer):
    """A learned threshold, in the log domain, with a power-of-two step (arXiv 1903.08066)."""

    def __init__(self, tensor: str, role: Role, start: AffineChoice) -> None:
        super().__init__(tensor, role, start.format, start.axis)
        self.log2_threshold = nn.Parameter(self.numbers_of(start))

    @property
    def learned(self) -> nn.Parameter:
        return self.log2_threshold

    @property
    def _log_threshold(self) -> nn.Parameter:
        """The name under which training scripts look for the parameter, to give it a learning rate of its own."""
        return self.log2_threshold

    def numbers_of(self, choice: AffineChoice) -> torch.Tensor:
        """The middle of the thresholds with that step, since a step of training moves one at the edge to the next."""
        exponents = tuple(float(exponent) - 0.5 for exponent in np.log2(choice.scale))
        return _of_channels(exponents, choice.axis) + self._code_bits

    def start_at(self, threshold: float) -> None:
        """Start from the logarithm of a threshold as it was found, if it has the step that was chosen."""
        if threshold <= 0 or self.log2_threshold.dim():
            return
        raw = math.log2(threshold)
        with torch.no_grad():
            if math.ceil(raw) == math.ceil(float(self.log2_threshold)):
                self.log2_threshold.fill_(raw)

    @property
    def _code_bits(self) -> int:
        return code_limits(self.format.bits, self.format.signed)[1].bit_length()

    def fake_quantize(self, x: torch.Tensor) -> torch.Tensor:
        return tqt(x, self._learned_now, self.format.bits, self.format.signed, self.axis)

    def step(self) -> torch.Tensor:
        return torch.exp2(torch.ceil(self.log2_threshold) - self._code_bits)


class _FixedQuantizer(Quantizer):
    """A quantizer without numbers that training could change."""

    def __init__(self, tensor: str, role: Role, choice: Choice) -> None:
        super().__init__(tensor, role)
        self._choice = choice

    def choice(self) -> Choice:
        return self._choice


class BlockFakeQuantizer(_FixedQuantizer):
    """A block format; the gradient passes through unchanged. The tensor scale of a weight, if its format has one,
    follows the weight while it is trained, until `fix`."""

    _choice: BlockChoice

    def __init__(self, tensor: str, role: Role, choice: BlockChoice) -> None:
        if role is not Role.ACTIVATION:
            choice = replace(choice, quantizer=replace(choice.quantizer, tensor_scale=None))
        super().__init__(tensor, role, choice)

    def fix(self, values: torch.Tensor) -> None:
        """Keep the tensor scale that these values have now; one that is fixed already stays."""
        wide = block_fake_quantize(values, "bfloat16") if self._choice.to_bfloat16_first else values
        self._choice = replace(self._choice, quantizer=self._choice.quantizer.fixed(wide.detach()))

    def assign(self, choice: BlockChoice) -> None:
        """Take another choice of the same format, with its tensor scale."""
        self._choice = choice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        quantizer = self._choice.quantizer
        wide = block_fake_quantize(x, "bfloat16") if self._choice.to_bfloat16_first else x
        return block_fake_quantize(
            wide,
            quantizer.format,
            self._choice.axis if x.dim() > 1 else 0,
            scale_rule=quantizer.scale_rule,
            rounding=quantizer.rounding,
            nonfinite=quantizer.nonfinite,
            tensor_scale=quantizer.tensor_scale,
        )


class FloatFakeQuantizer(_FixedQuantizer):
    """Values rounded to float16 or bfloat16; the gradient passes through unchanged."""

    _choice: FloatChoice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return block_fake_quantize(x, self._choice.format)


class Float8FakeQuantizer(Quantizer):
    """8-bit floats of values divided by a scale, for the tensor or for each channel of an axis. Values beyond the range
    saturate and get no gradient. The scale of a weight is found again from its largest magnitudes at every step of
    training while `follows` is set."""

    scale: torch.Tensor

    def __init__(self, tensor: str, role: Role, choice: FloatChoice) -> None:
        super().__init__(tensor, role)
        self.format, self.axis = choice.format, choice.axis
        self.follows = role is not Role.ACTIVATION
        self.register_buffer("scale", _of_channels(choice.scale, choice.axis))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top = float(get_format(self.format).max)
        if self.follows and self.training and not self.is_frozen:
            with torch.no_grad():
                low, high = find_ranges(x.detach(), self.axis)
                scale = torch.maximum(-low, high) / top
                self.scale.copy_(torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale))
        spread = self.scale
        if self.axis is not None:
            spread = spread.reshape([-1 if axis == self.axis % x.dim() else 1 for axis in range(x.dim())])
        return (block_fake_quantize((x / spread).clamp(-top, top), self.format) * spread).to(x.dtype)

    def choice(self) -> FloatChoice:
        return FloatChoice(self.format, True, tuple(self.scale.double().reshape(-1).tolist()), self.axis)


class DynamicQuantizer(_FixedQuantizer):
    """Scale and zero point of each tensor it is given, as ONNX's DynamicQuantizeLinear finds them; or of each row."""

    def __init__(
        self, tensor: str, role: Role, choice: DynamicChoice, is_symmetric: bool = False, is_per_row: bool = False
    ) -> None:
        super().__init__(tensor, role, choice)
        self.is_symmetric = is_symmetric
        self.is_per_row = is_per_row
        self.format = integer_format(choice.format)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = x.reshape(-1, x.shape[-1]) if self.is_per_row else x
        axis = 0 if self.is_per_row else None
        lowest, highest = find_ranges(table.detach(), axis)
        scale, zero_point = choose_affine(lowest, highest, self.format, symmetric=self.is_symmetric)
        return affine_fake_quantize(table, AffineParameters(scale, zero_point, self.format, axis)).reshape(x.shape)


def _of_channels(values: tuple[float, ...], axis: int | None) -> torch.Tensor:
    tensor = torch.tensor(values, dtype=torch.float32)
    return tensor.reshape(()) if axis is None else tensor

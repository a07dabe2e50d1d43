"""Quantizers as modules that a network is trained through, each for one tensor of the plan.

    AffineQuantizer     a fixed scale and zero point; a weight's may follow the weight while that is trained
    LsqQuantizer        learns its step
    TqtQuantizer        learns its threshold, the step is a power of two
    BlockFakeQuantizer  blocks with a shared power-of-two scale
    FloatFakeQuantizer  float16 or bfloat16
    DynamicQuantizer    scale and zero point of the values that it is given

Their numbers are parameters and buffers, so that `state_dict`, `to(device)` and optimizers treat them as any other.
`choice()` says in the words of the plan what a quantizer does now, after training too.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from torch import nn

from quark.errors import InvalidValueError
from quark.formats.affine import AffineParameters, choose_affine, code_dtype, find_ranges, integer_format
from quark.formats.arrays import array_kind
from quark.formats.granularity import Granularity
from quark.ops.fake_quantize import affine_fake_quantize, block_fake_quantize, code_limits, lsq, tqt
from quark.plan import AffineChoice, BlockChoice, Choice, DynamicChoice, FloatChoice, Role
from quark.torch.train.followed_range import FollowedRange


class Quantizer(nn.Module):
    """One tensor of the plan. A quantizer that several places share is one module: it learns from all of them."""

    def __init__(self, tensor: str, role: Role) -> None:
        super().__init__()
        self.tensor = tensor
        self.role = role
        self.name = tensor  # among the quantizers of its network; `insert` gives it

    @abstractmethod
    def choice(self) -> Choice:
        """What it does now."""

    def extra_repr(self) -> str:
        return f"{self.tensor}: {self.choice()}"


class AffineQuantizer(Quantizer):
    """Scales and zero points of an `AffineChoice`. With `follows`, they are found anew from the values at every step of
    training, and stay where they are in eval mode."""

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
        """`shape` is that of the values, which only the number of groups depends on."""
        super().__init__(tensor, role)
        self.format = integer_format(choice.format)
        self.axis, self.group_size = choice.axis, choice.group_size
        self.follows = follows
        self._parameters_now: AffineParameters | None = None
        self.parameter_shape = _parameter_shape(choice, shape)
        self.register_buffer("scale", torch.empty(self.parameter_shape))
        kind = array_kind(self.scale)
        self.register_buffer("zero_point", torch.empty(self.parameter_shape, dtype=code_dtype(kind, self.format)))
        self.assign(choice)

    def assign(self, choice: AffineChoice) -> None:
        """Take over other numbers for the same codes."""
        if (choice.format, choice.axis, choice.group_size) != (self.format.name, self.axis, self.group_size):
            raise InvalidValueError(f"{self.tensor}: {choice} in the place of {self.choice()}")
        self.scale.copy_(torch.tensor(choice.scale, dtype=torch.float64).reshape(self.parameter_shape))
        self.zero_point.copy_(torch.tensor(choice.zero_point).reshape(self.parameter_shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.follows is not None and self.training:
            with torch.no_grad():
                scale, zero_point = self.follows.parameters(x.detach(), self.axis, self.group_size)
                self.scale.copy_(scale)
                self.zero_point.copy_(zero_point)
        return affine_fake_quantize(x, self.parameters_now())

    def parameters_now(self) -> AffineParameters:
        """Scales and zero points as the functions take them. They are checked when they are put together, which is once
        for the same tensors: following a weight writes into these."""
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


class _Learned(Quantizer):
    """Codes with zero point 0, all of them used, for the whole tensor or each channel of an axis."""

    def __init__(self, tensor: str, role: Role, format: str, axis: int | None) -> None:
        super().__init__(tensor, role)
        self.format = integer_format(format)
        self.axis = axis

    def choice(self) -> AffineChoice:
        steps = self.step().detach().double().reshape(-1).tolist()
        return AffineChoice(self.format.name, tuple(steps), (0,) * len(steps), self.axis)

    @abstractmethod
    def step(self) -> torch.Tensor:
        """The scale, as the forward pass uses it."""


class LsqQuantizer(_Learned):
    """A learned step (arXiv 1902.08153)."""

    def __init__(self, tensor: str, role: Role, start: AffineChoice) -> None:
        super().__init__(tensor, role, start.format, start.axis)
        self.scale = nn.Parameter(_of_channels(start.scale, start.axis))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return lsq(x, self.scale, self.format.bits, self.format.signed, self.axis)

    def step(self) -> torch.Tensor:
        return self.scale.clamp(min=torch.finfo(torch.float32).tiny)


class TqtQuantizer(_Learned):
    """A learned threshold, in the log domain, with a power-of-two step (arXiv 1903.08066)."""

    def __init__(self, tensor: str, role: Role, start: AffineChoice) -> None:
        super().__init__(tensor, role, start.format, start.axis)
        exponents = tuple(float(each) for each in np.log2(start.scale))
        self.log2_threshold = nn.Parameter(_of_channels(exponents, start.axis) + self._code_bits)

    @property
    def _code_bits(self) -> int:
        return code_limits(self.format.bits, self.format.signed)[1].bit_length()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tqt(x, self.log2_threshold, self.format.bits, self.format.signed, self.axis)

    def step(self) -> torch.Tensor:
        return torch.exp2(torch.ceil(self.log2_threshold) - self._code_bits)


class BlockFakeQuantizer(Quantizer):
    """A block format; the gradient is passed on as it is."""

    def __init__(self, tensor: str, role: Role, choice: BlockChoice) -> None:
        super().__init__(tensor, role)
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
        )

    def choice(self) -> BlockChoice:
        return self._choice


class FloatFakeQuantizer(Quantizer):
    """float16 or bfloat16, of the same values and with the gradient passed on."""

    def __init__(self, tensor: str, role: Role, choice: FloatChoice) -> None:
        super().__init__(tensor, role)
        self._choice = choice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return block_fake_quantize(x, self._choice.format)

    def choice(self) -> FloatChoice:
        return self._choice


class DynamicQuantizer(Quantizer):
    """Scale and zero point of each tensor that comes, as ONNX's DynamicQuantizeLinear finds them."""

    def __init__(self, tensor: str, role: Role, choice: DynamicChoice, is_symmetric: bool = False) -> None:
        super().__init__(tensor, role)
        self._choice = choice
        self.is_symmetric = is_symmetric
        self.format = integer_format(choice.format)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lowest, highest = find_ranges(x.detach())
        scale, zero_point = choose_affine(lowest, highest, self.format, symmetric=self.is_symmetric)
        return affine_fake_quantize(x, AffineParameters(scale, zero_point, self.format))

    def choice(self) -> DynamicChoice:
        return self._choice


def _parameter_shape(choice: AffineChoice, shape: tuple[int, ...]) -> tuple[int, ...]:
    if choice.axis is None:
        return ()
    if choice.group_size is None:
        return (len(choice.scale),)
    return Granularity(choice.axis, choice.group_size).parameter_shape(shape)


def _of_channels(values: tuple[float, ...], axis: int | None) -> torch.Tensor:
    tensor = torch.tensor(values, dtype=torch.float32)
    return tensor.reshape(()) if axis is None else tensor

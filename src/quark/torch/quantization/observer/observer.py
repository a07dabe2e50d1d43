"""Observers by the names that configurations use. Each is a method of `quark.ranges` with a granularity.

    PerTensor...     one scale; the data may come in batches
    PerChannel...    one for each channel of `ch_axis`
    PerGroup...      one for each `group_size` neighbours along `ch_axis`
    PerBlock...      powers of two, found for each block of each tensor: nothing is remembered

A spec names the class; when a model is quantized, its method calibrates as in the ONNX flow. An observer can also be
used by itself: it observes tensors and returns their scale.

>>> import torch
>>> from quark.torch.quantization.config.config import QuantizationSpec
>>> from quark.torch.quantization.config.type import Dtype
>>> observer = PerTensorMinMaxObserver(QuantizationSpec(Dtype.int8, PerTensorMinMaxObserver, symmetric=True))
>>> _ = observer(torch.tensor([-254.0, 100.0]))
>>> observer.calculate_qparams()
(tensor([2.]), tensor([0], dtype=torch.int32))
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import torch

from quark.decide.specs import AffineSpec, Algorithm, BlockSpec, TensorSpec
from quark.errors import InvalidValueError
from quark.formats.affine import choose_affine, find_ranges
from quark.formats.arrays import normalize_axis
from quark.formats.packing import pack
from quark.formats.power_of_two import position_of_range, scale_of_position
from quark.formats.spec import IntFormat
from quark.ranges import (
    Entropy,
    MinMax,
    MinMSE,
    NonOverflow,
    Observer,
    Percentile,
    PowerOfTwoMinMSE,
    RangeMethod,
    TensorRange,
    ranges_of_channels,
)
from quark.ranges.method import MOVING_AVERAGE_CONSTANT
from quark.ranges.statistics import Floats, as_float32, extremes
from quark.torch.quantization.config.type import QSchemeType
from quark.torch.train.quantizers import TqtQuantizer

if TYPE_CHECKING:
    from quark.torch.quantization.config.tensor_spec import QuantizationSpec

Parameters: TypeAlias = tuple[torch.Tensor, torch.Tensor]

_SCALE_BIAS = 127  # of the exponent in a scale byte
_SMALLEST_THRESHOLD = 2.0**-100  # of zeros: its scale is still a normal number


class ObserverBase(ABC):
    """Base class. `schemes` are those that the class supports, the default first."""

    schemes: ClassVar[tuple[QSchemeType, ...]] = ()
    method: ClassVar[RangeMethod] = MinMax()
    is_power_of_two: ClassVar[bool] = False
    algorithm: ClassVar[Algorithm | None] = None

    def __init__(self, qspec: QuantizationSpec, device: Any = None) -> None:
        self.qspec = replace(qspec, observer_cls=type(self), is_dynamic=False)
        self.spec: TensorSpec = self.qspec.tensor_spec()
        self.device = device
        self.reset_state()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Observe a tensor, and return it unchanged."""
        if self.device is None:
            self.device = x.device
        self.observe(x.detach())
        return x

    @abstractmethod
    def reset_state(self) -> None:
        """Forget what was observed."""

    @abstractmethod
    def observe(self, x: torch.Tensor) -> None:
        """Observe one more piece of the data."""

    @abstractmethod
    def calculate_qparams(self) -> Parameters:
        """Return (scale, zero_point) for what was observed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same as calling it."""
        return self(x)

    def reset_min_max_vals(self) -> None:
        """The same as `reset_state`, by AMD's name."""
        self.reset_state()

    def _calculate_qparams(self) -> Parameters:
        """The same as `calculate_qparams`, by AMD's name."""
        return self.calculate_qparams()

    @property
    def min_val(self) -> torch.Tensor:
        """The lower end of the range that was found; of channels and groups, one for each."""
        return torch.from_numpy(np.asarray(self._extremes()[0], np.float32)).to(self.device)

    @property
    def max_val(self) -> torch.Tensor:
        """The upper end of the range that was found."""
        return torch.from_numpy(np.asarray(self._extremes()[1], np.float32)).to(self.device)

    def _extremes(self) -> tuple[Any, Any]:
        raise AttributeError(f"{type(self).__name__} finds scales, and no range")

    def _affine(self) -> AffineSpec:
        assert isinstance(self.spec, AffineSpec)
        return self.spec

    def _nothing_observed(self) -> InvalidValueError:
        return InvalidValueError(f"{type(self).__name__} has observed nothing: call it with a tensor first")


class PlaceholderObserver(ObserverBase):
    """For types that need no scale: float16 and bfloat16. Its scale is 1."""

    def reset_state(self) -> None:
        pass

    def observe(self, x: torch.Tensor) -> None:
        pass

    def calculate_qparams(self) -> Parameters:
        return torch.ones(1, device=self.device), torch.zeros(1, dtype=torch.int32, device=self.device)


class PerTensorObserver(ObserverBase):
    """One scale. A method that needs the data twice keeps it until `reset_state`."""

    schemes = (QSchemeType.per_tensor,)

    def reset_state(self) -> None:
        spec = self._affine()
        self._ranges: Observer = spec.method.observer(spec.integer, spec.is_symmetric)
        self._kept: list[Floats] = []
        self._has_observed = False

    def observe(self, x: torch.Tensor) -> None:
        flat = as_float32(x)
        self._ranges.observe(flat)
        self._ranges.end_of_sample()
        self._has_observed = True
        if self._ranges.needs_second_pass:
            self._kept.append(flat.copy())

    def calculate_qparams(self) -> Parameters:
        range_ = self._range()
        lowest, highest = np.array([range_.lowest], np.float32), np.array([range_.highest], np.float32)
        return as_tensors(*qparams(self._affine(), lowest, highest, range_.position), self.device)

    def _extremes(self) -> tuple[Any, Any]:
        range_ = self._range()
        return np.array([range_.lowest], np.float32), np.array([range_.highest], np.float32)

    def _range(self) -> TensorRange:
        if not self._has_observed:
            raise self._nothing_observed()
        observer = copy.deepcopy(self._ranges)  # more may be observed later
        for flat in self._kept:
            observer.observe_again(flat)
        return observer.result()


class PerChannelObserver(ObserverBase):
    """A scale for each channel, or each group: the extremes of all tensors, or for other methods all of their data."""

    schemes = (QSchemeType.per_channel,)

    def reset_state(self) -> None:
        self._lowest: Any = None
        self._highest: Any = None
        self._rows: list[Floats] = []

    def observe(self, x: torch.Tensor) -> None:
        spec = self._affine()
        array = as_float32(x).reshape(x.shape)
        axis = normalize_axis(-1 if spec.axis is None else spec.axis, array.ndim)
        if spec.method != MinMax():
            self._rows.append(np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1).copy())
            return
        lowest, highest = find_ranges(array, axis, spec.group_size)
        is_first = self._lowest is None
        self._lowest = lowest if is_first else np.minimum(self._lowest, lowest)
        self._highest = highest if is_first else np.maximum(self._highest, highest)

    def calculate_qparams(self) -> Parameters:
        return as_tensors(*qparams(self._affine(), *self._extremes()), self.device)

    def _extremes(self) -> tuple[Any, Any]:
        spec = self._affine()
        if self._rows:
            rows = np.concatenate(self._rows, axis=1)
            self._lowest, self._highest = ranges_of_channels(rows, 0, spec.method, spec.integer, spec.is_symmetric)
        if self._lowest is None:
            raise self._nothing_observed()
        return self._lowest, self._highest


class PerBlockObserver(ObserverBase):
    """The scales of the blocks of the last tensor, the axis of the blocks moved last; zero points are 0."""

    schemes = (QSchemeType.per_group,)

    def reset_state(self) -> None:
        self._last: torch.Tensor | None = None

    def observe(self, x: torch.Tensor) -> None:
        self._last = x

    def calculate_qparams(self) -> Parameters:
        if self._last is None:
            raise self._nothing_observed()
        assert isinstance(self.spec, BlockSpec)
        quantizer, axis = self.spec.quantizer, -1 if self.spec.follows_reduction else self.spec.axis
        packed = pack(self._last, quantizer.format, axis, scale_rule=quantizer.scale_rule, rounding=quantizer.rounding)
        codes = packed.scales if quantizer.format.sub_blocks is None else packed.scales[..., 0]
        scale = np.ldexp(np.float32(1), codes.astype(np.int32) - _SCALE_BIAS)
        return as_tensors(scale, np.zeros(scale.shape, np.int32), self.device)


def qparams(spec: AffineSpec, lowest: Any, highest: Any, position: int | None = None) -> tuple[Any, Any]:
    """Return (scale, zero_point) for ranges; powers of two if the spec says so."""
    if not spec.is_power_of_two:
        return choose_affine(lowest, highest, spec.integer, symmetric=spec.is_symmetric)
    positions = position_of_range(lowest, highest, spec.integer.bits) if position is None else np.array([position])
    scale = scale_of_position(positions).astype(np.float32)
    return scale, np.full(scale.shape, zero_code(spec.integer))


def zero_code(fmt: IntFormat) -> int:
    """The code of 0 in symmetric quantization: 0, or the middle of an unsigned format."""
    return 0 if fmt.signed else 1 << (fmt.bits - 1)


def as_tensors(scale: Any, zero_point: Any, device: Any) -> Parameters:
    """Arrays as float32 and int32."""
    return (
        torch.from_numpy(np.asarray(scale, np.float32)).to(device),
        torch.from_numpy(np.asarray(zero_point).astype(np.int32)).to(device),
    )


class PerTensorMinMaxObserver(PerTensorObserver):
    """The range from the least to the greatest value."""


class PerTensorMovingAverageMinMaxObserver(PerTensorObserver):
    """The mean of the samples' ranges, which outliers of single samples change little; beyond 100 samples, a moving
    average. Tensors of fewer than 4,000 values in a sample get the whole range. AMD Quark has no such observer."""

    method = MinMax(MOVING_AVERAGE_CONSTANT)


class PerTensorHistogramObserver(PerTensorObserver):
    """The range that loses the least information, by a histogram."""

    method = Entropy()


class PerTensorPercentileObserver(PerTensorObserver):
    """All but the outermost 0.001 percent."""

    method = Percentile()


class PerTensorMSEObserver(PerTensorObserver):
    """The range with the least squared error."""

    method = MinMSE()


class PerTensorPowOf2MinMaxObserver(PerTensorObserver):
    """The smallest power-of-two scale at which the extremes fit."""

    is_power_of_two = True


class PerTensorPowOf2MinMSEObserver(PerTensorObserver):
    """The power-of-two scale with the least squared error."""

    method = PowerOfTwoMinMSE()
    is_power_of_two = True


class PerTensorPowOf2NonOverflowObserver(PerTensorObserver):
    """The smallest power-of-two scale at which nothing is clipped."""

    method = NonOverflow()
    is_power_of_two = True


class PerChannelMinMaxObserver(PerChannelObserver):
    """The range from the least to the greatest value of each channel."""


class PerChannelPowOf2MinMaxObserver(PerChannelObserver):
    """The smallest power-of-two scale at which the extremes of a channel fit."""

    is_power_of_two = True


class PerChannelPowOf2MinMSEObserver(PerChannelObserver):
    """The power-of-two scale with the least squared error, for each channel."""

    method = PowerOfTwoMinMSE()
    is_power_of_two = True


class PerGroupMinMaxObserver(PerChannelObserver):
    """The range from the least to the greatest value of each group."""

    schemes = (QSchemeType.per_group,)


class PerBlockMXObserver(PerBlockObserver):
    """Blocks of OCP MX, and of MX4, MX6 and MX9."""


class PerBlockBFPObserver(PerBlockObserver):
    """Blocks of BFP16, and of MX4, MX6 and MX9."""


class LSQObserver(ObserverBase):
    """Learns the step of a quantizer (arXiv 1902.08153).

    In a spec, the class makes the step a parameter of the quantized model, one for the tensor or one for each channel
    of `ch_axis`, which starts from the least squared error. By itself it returns 2 * mean|v| / sqrt(Qp), the step that
    the publication starts from, Qp being the highest code.
    """

    schemes = (QSchemeType.per_tensor, QSchemeType.per_channel)
    algorithm = Algorithm.LSQ

    def reset_state(self) -> None:
        self._sum = np.zeros(1)
        self._count = 0

    def observe(self, x: torch.Tensor) -> None:
        axis = self._affine().axis
        extremes(as_float32(x))  # rejects NaN and Inf
        magnitudes = as_float32(x).reshape(x.shape).astype(np.float64)
        np.abs(magnitudes, out=magnitudes)
        whole = magnitudes[None] if axis is None else np.moveaxis(magnitudes, axis, 0)
        rows = whole.reshape(len(whole), -1)
        self._sum = self._sum + rows.sum(axis=1)
        self._count += rows.shape[1]

    def calculate_qparams(self) -> Parameters:
        if not self._count:
            raise self._nothing_observed()
        scale = 2 * self._sum / self._count / math.sqrt(self._affine().integer.qmax)
        scale = np.maximum(scale, np.finfo(np.float32).tiny)
        return as_tensors(scale, np.zeros(scale.shape), self.device)


class TQTObserver(PerTensorObserver):
    """Learns the threshold of a quantizer (arXiv 1903.08066): scale = 2^ceil(log2 t) / 2^(b-1), 2^b if unsigned.

    In a spec, the class makes the threshold a parameter of the quantized model. By itself it returns the scale that
    training would start from. `qat_spec=TQTSpec(threshold_init_meth=...)` selects it; without it, weights and
    the observer by itself start from the largest magnitude, and activations from the least divergence (KL-J).
    """

    is_power_of_two = True
    algorithm = Algorithm.TQT

    @property
    def log_threshold(self) -> float:
        """log2 t for what was observed."""
        if not self._has_observed:
            raise self._nothing_observed()
        range_ = self._range()
        return math.log2(max(-range_.lowest, range_.highest, _SMALLEST_THRESHOLD))

    def calculate_qparams(self) -> Parameters:
        fmt = self._affine().integer
        exponent = math.ceil(self.log_threshold) - (fmt.bits - 1 if fmt.signed else fmt.bits)
        return as_tensors(np.array([math.ldexp(1.0, exponent)]), np.zeros(1), self.device)


TQTObserver.register(TqtQuantizer)  # training scripts look for thresholds in the modules that are TQTObservers


__all__ = [
    "OBSERVERS",
    "LSQObserver",
    "ObserverBase",
    "PerBlockBFPObserver",
    "PerBlockMXObserver",
    "PerBlockObserver",
    "PerChannelMinMaxObserver",
    "PerChannelPowOf2MinMSEObserver",
    "PerChannelPowOf2MinMaxObserver",
    "PerGroupMinMaxObserver",
    "PerTensorHistogramObserver",
    "PerTensorMSEObserver",
    "PerTensorMinMaxObserver",
    "PerTensorMovingAverageMinMaxObserver",
    "PerTensorPercentileObserver",
    "PerTensorPowOf2MinMSEObserver",
    "PerTensorPowOf2MinMaxObserver",
    "PerTensorPowOf2NonOverflowObserver",
    "PlaceholderObserver",
    "TQTObserver",
]

OBSERVERS: Mapping[str, type[ObserverBase]] = MappingProxyType(
    {name: globals()[name] for name in __all__ if name not in ("OBSERVERS", "ObserverBase", "PerBlockObserver")}
)

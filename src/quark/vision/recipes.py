"""What the flags of the command stand for: how activations, weights and biases are quantized.

    float scale      activations one scale a tensor, with a zero point: behind a ReLU all codes are used;
                     weights one scale for each output channel, biases int32
    powers of two    one scale for a tensor, of everything: what AMD's NPU computes with
      mse_powof2       of the least squared error
      non_overflow     that nothing is beyond
      tqt              learned, as a threshold in the log domain (arXiv 1903.08066)
    lsq              float scales, learned (arXiv 1902.08153)

`a16w8` has activations of 16 bits, and then biases of 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.type import Dtype, QSchemeType
from quark.torch.quantization.observer import (
    LSQObserver,
    ObserverBase,
    PerChannelMinMaxObserver,
    PerTensorMinMaxObserver,
    PerTensorMSEObserver,
    PerTensorPowOf2MinMSEObserver,
    PerTensorPowOf2NonOverflowObserver,
    TQTObserver,
)


class Method(str, Enum):
    FLOAT_SCALE = "float_scale"
    MSE_POWOF2 = "mse_powof2"
    NON_OVERFLOW = "non_overflow"
    TQT = "tqt"
    LSQ = "lsq"


class Precision(str, Enum):
    A8W8 = "a8w8"
    A16W8 = "a16w8"


OBSERVERS: Mapping[Method, type[ObserverBase]] = {
    Method.FLOAT_SCALE: PerTensorMSEObserver,
    Method.MSE_POWOF2: PerTensorPowOf2MinMSEObserver,
    Method.NON_OVERFLOW: PerTensorPowOf2NonOverflowObserver,
    Method.TQT: TQTObserver,
    Method.LSQ: LSQObserver,
}
# a bias is not learned: it follows from the layer that it belongs to
BIAS_OBSERVERS: Mapping[Method, type[ObserverBase]] = {**OBSERVERS, Method.TQT: PerTensorPowOf2MinMSEObserver}
LEARNING = (Method.TQT, Method.LSQ)


def recipe(method: Method = Method.FLOAT_SCALE, precision: Precision = Precision.A8W8) -> Config:
    """The configuration for a flag of each kind."""
    activation = QuantizationSpec(
        Dtype.int8 if precision is Precision.A8W8 else Dtype.int16,
        OBSERVERS[method],
        qscheme=QSchemeType.per_tensor,
        symmetric=method is not Method.FLOAT_SCALE,
    )
    weight = QuantizationSpec(Dtype.int8, OBSERVERS[method], qscheme=QSchemeType.per_tensor, symmetric=True)
    if method is Method.FLOAT_SCALE:
        weight = QuantizationSpec(
            Dtype.int8, PerChannelMinMaxObserver, qscheme=QSchemeType.per_channel, ch_axis=0, symmetric=True
        )
    return Config(QuantizationConfig(activation, activation, weight, _bias(method, precision)))


def _bias(method: Method, precision: Precision) -> QuantizationSpec:
    if method in (Method.FLOAT_SCALE, Method.LSQ) or precision is Precision.A16W8:
        return QuantizationSpec(Dtype.int32, PerTensorMinMaxObserver, symmetric=True)
    return QuantizationSpec(Dtype.int8, BIAS_OBSERVERS[method], qscheme=QSchemeType.per_tensor, symmetric=True)

"""From what people write to what the steps read: `QuantizationSpec` to `TensorSpec`."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.formats.spec import BlockFormat, IntFormat, Rounding, ScaleRule
from quark.ranges import KLJ, MinMax, MinMSE, PowerOfTwoMinMSE, RangeMethod, ThreeSigma
from quark.torch.quantization.config.type import Dtype, QSchemeType, RoundType, ScaleType, TQTThresholdInitMeth
from quark.torch.quantization.observer import (
    ObserverBase,
    PerChannelMinMaxObserver,
    PerGroupMinMaxObserver,
    PerTensorMinMaxObserver,
)
from quark.torch.specs import (
    AffineSpec,
    Algorithm,
    BlockSpec,
    FloatSpec,
    Granularity,
    Learning,
    TensorSpec,
    ThresholdInit,
)

if TYPE_CHECKING:
    from quark.torch.quantization.config.tensor_spec import QuantizationSpec


class Family(Enum):
    """Which of the fields of a spec mean something."""

    INTEGER = "integer"
    FLOAT = "float"
    BLOCK = "block"


MX_FORMATS = {
    Dtype.fp8_e4m3: "mxfp8_e4m3",
    Dtype.fp8_e5m2: "mxfp8_e5m2",
    Dtype.fp6_e3m2: "mxfp6_e3m2",
    Dtype.fp6_e2m3: "mxfp6_e2m3",
    Dtype.fp4: "mxfp4_e2m1",
    Dtype.int8: "mxint8",
}
MICROEXPONENTS = (Dtype.mx4, Dtype.mx6, Dtype.mx9)

_SCHEMES = {
    QSchemeType.per_tensor: (Granularity.TENSOR, PerTensorMinMaxObserver),
    QSchemeType.per_channel: (Granularity.CHANNEL, PerChannelMinMaxObserver),
    QSchemeType.per_group: (Granularity.GROUP, PerGroupMinMaxObserver),
}
_STARTS = {
    None: (None, MinMax()),
    TQTThresholdInitMeth._MAX: (ThresholdInit.MAX, MinMax()),
    TQTThresholdInitMeth._3SD: (ThresholdInit.THREE_SIGMA, ThreeSigma()),
    TQTThresholdInitMeth._KL_J: (ThresholdInit.KL_J, KLJ()),
}


def family_of(dtype: Dtype) -> Family:
    if dtype in (Dtype.float16, Dtype.bfloat16):
        return Family.FLOAT
    is_block = dtype is Dtype.mx or dtype is Dtype.bfp16 or dtype in MICROEXPONENTS
    return Family.BLOCK if is_block or (dtype in MX_FORMATS and dtype is not Dtype.int8) else Family.INTEGER


def as_tensor_spec(spec: QuantizationSpec) -> TensorSpec:
    """The spec with all that it left open filled in; it was checked when it was built."""
    family = family_of(spec.dtype)
    if family is Family.FLOAT:
        return FloatSpec(spec.dtype.value)
    return _affine(spec) if family is Family.INTEGER else _block(spec)


def scheme_of(spec: QuantizationSpec) -> QSchemeType:
    """What shares a scale: as the spec says, or as its observer does."""
    if spec.qscheme is not None:
        return spec.qscheme
    return spec.observer_cls.schemes[0] if spec.observer_cls and spec.observer_cls.schemes else QSchemeType.per_tensor


def observer_of(spec: QuantizationSpec) -> type[ObserverBase]:
    return spec.observer_cls or _SCHEMES[scheme_of(spec)][1]


def has_power_of_two(spec: QuantizationSpec) -> bool:
    return observer_of(spec).is_power_of_two or spec.scale_type is ScaleType.pof2


def integer_of(spec: QuantizationSpec) -> IntFormat:
    fmt = get_format(spec.dtype.value)
    assert isinstance(fmt, IntFormat)
    return fmt


def _affine(spec: QuantizationSpec) -> AffineSpec:
    fmt = integer_of(spec)
    method, learning = _method(spec)
    return AffineSpec(
        fmt,
        method,
        is_symmetric=fmt.signed if spec.symmetric is None else spec.symmetric,
        granularity=_SCHEMES[scheme_of(spec)][0],
        axis=spec.ch_axis,
        group_size=spec.group_size,
        is_power_of_two=has_power_of_two(spec),
        is_dynamic=bool(spec.is_dynamic),
        learning=learning,
    )


def _method(spec: QuantizationSpec) -> tuple[RangeMethod, Learning | None]:
    observer = observer_of(spec)
    if observer.algorithm is Algorithm.TQT:
        initial, method = _STARTS[getattr(spec.qat_spec, "threshold_init_meth", None)]
        return method, Learning(Algorithm.TQT, initial)
    if observer.algorithm is Algorithm.LSQ:
        return MinMSE(), Learning(Algorithm.LSQ)
    if has_power_of_two(spec) and observer.method == MinMSE():
        return PowerOfTwoMinMSE(), None
    return observer.method, None


def block_format_of(spec: QuantizationSpec) -> BlockFormat:
    """The format by name, with the block size that the spec asks for."""
    element = spec.mx_element_dtype if spec.dtype is Dtype.mx else spec.dtype
    assert element is not None
    fmt = get_format(MX_FORMATS.get(element, element.value))
    assert isinstance(fmt, BlockFormat)
    return fmt if spec.group_size is None else fmt.with_block_size(spec.group_size)


def _block(spec: QuantizationSpec) -> BlockSpec:
    fmt = block_format_of(spec)
    is_mx = spec.dtype is Dtype.mx or spec.dtype in MX_FORMATS
    rule = ScaleRule.EVEN if is_mx else ScaleRule.FLOOR
    if spec.scale_calculation_mode is not None:
        rule = ScaleRule(spec.scale_calculation_mode)
    rounding = Rounding.HALF_AWAY if spec.round_method is RoundType.round else Rounding.HALF_EVEN
    return BlockSpec(BlockQuantizer(fmt, rule, rounding, fmt.default_nonfinite), axis=spec.ch_axis)

"""How one tensor is quantized, as users write it; impossible combinations are refused when the spec is built.

`QuantizationSpec.tensor_spec()` converts it to the `TensorSpec` that the steps read. Checks are generators of reasons:
the first reason becomes the error, and later checks may rely on what earlier ones made sure of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from quark.decide.specs import (
    AffineSpec,
    Algorithm,
    BlockSpec,
    DynamicSpec,
    FloatSpec,
    Learning,
    TensorSpec,
    ThresholdInit,
)
from quark.errors import (
    InvalidValueError,
    UnsupportedOptionError,
    UnsupportedTypeError,
    refuse_unknown_fields,
    unknown_name,
)
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.formats.spec import BlockFormat, IntFormat, Rounding, ScaleRule
from quark.ranges import KLJ, MinMax, MinMSE, PowerOfTwoMinMSE, RangeMethod, ThreeSigma
from quark.text import get_logger
from quark.torch.quantization.config.type import (
    Dtype,
    QSchemeType,
    RoundType,
    ScaleType,
    TQTThresholdInitMeth,
    ZeroPointType,
    parse,
)
from quark.torch.quantization.observer import (
    OBSERVERS,
    ObserverBase,
    PerBlockBFPObserver,
    PerBlockMXObserver,
    PerBlockObserver,
    PerChannelMinMaxObserver,
    PerGroupMinMaxObserver,
    PerTensorMinMaxObserver,
    PlaceholderObserver,
    TQTObserver,
)

_LOG = get_logger(__name__)

MX_FORMATS = {
    Dtype.fp8_e4m3: "mxfp8_e4m3",
    Dtype.fp8_e5m2: "mxfp8_e5m2",
    Dtype.fp6_e3m2: "mxfp6_e3m2",
    Dtype.fp6_e2m3: "mxfp6_e2m3",
    Dtype.fp4: "mxfp4_e2m1",
    Dtype.int8: "mxint8",
}
_MICROEXPONENTS = (Dtype.mx4, Dtype.mx6, Dtype.mx9)
_CASTS = (Dtype.float16, Dtype.bfloat16)
_BLOCKS = frozenset({Dtype.mx, Dtype.bfp16, Dtype.nvfp4, *_MICROEXPONENTS, *MX_FORMATS} - {Dtype.int8})
_EIGHT_BIT_FLOATS = (Dtype.fp8_e4m3, Dtype.fp8_e5m2)
_SCHEMES = {
    QSchemeType.per_tensor: PerTensorMinMaxObserver,
    QSchemeType.per_channel: PerChannelMinMaxObserver,
    QSchemeType.per_group: PerGroupMinMaxObserver,
}
_THRESHOLDS = {
    None: (None, MinMax()),
    TQTThresholdInitMeth._MAX: (ThresholdInit.MAX, MinMax()),
    TQTThresholdInitMeth._3SD: (ThresholdInit.THREE_SIGMA, ThreeSigma()),
    TQTThresholdInitMeth._KL_J: (ThresholdInit.KL_J, KLJ()),
}
_ENUMS: Mapping[str, type[Enum]] = {
    "dtype": Dtype,
    "qscheme": QSchemeType,
    "round_method": RoundType,
    "scale_type": ScaleType,
    "mx_element_dtype": Dtype,
    "zero_point_type": ZeroPointType,
}
_MEMORY = ("enable_buffer_reuse", "max_input_numel")  # how other versions use memory, which changes no number
_EMPTY: tuple[Any, ...] = (None, False, [], {})  # values of unknown fields that mean nothing, written by other versions


@refuse_unknown_fields
@dataclass(frozen=True)
class QATSpec:
    """Settings of an observer that learns."""


@refuse_unknown_fields
@dataclass(frozen=True)
class TQTSpec(QATSpec):
    """The initial threshold of a TQTObserver; None: weights from their largest magnitude, others by KL-J."""

    threshold_init_meth: TQTThresholdInitMeth | None = None

    def __post_init__(self) -> None:
        if self.threshold_init_meth is not None:
            parse(TQTThresholdInitMeth, self.threshold_init_meth, "threshold_init_meth")


@refuse_unknown_fields
@dataclass(unsafe_hash=True)  # a spec that is a key must not be edited afterwards
class QuantizationSpec:
    """How one tensor is quantized. Fields can be edited; they are checked when it is built and when it is used.

    Integers: `observer_cls` finds the range (MinMax where None), `qscheme` says what shares a scale (as the observer
    does where None), `ch_axis` and `group_size` go with channels and groups. `symmetric` None: for signed types. A
    power-of-two scale comes from the observer or from `scale_type` pof2. `is_dynamic`: ranges are found at run time;
    with per_channel, for each token of a language model.

    Blocks (mx with `mx_element_dtype`, fp8, fp6, fp4; mx4, mx6, mx9; bfp16; nvfp4): `group_size` is the block size, the
    format's own where None; `ch_axis` the axis that blocks run along, None for the one that the layer sums over.
    `scale_calculation_mode` is the rule for the shared power of two: even (of MX where None), floor (of others), ceil,
    rceil or mse. Their scales are always computed from the data, so `is_dynamic` has no effect.

    float16 and bfloat16 need nothing but the type.

    fp8 with per_tensor or per_channel is a float with a scale: the largest magnitude becomes the largest number of the
    type. `is_dynamic` is for language models; with per_channel, a scale for each token.

    >>> QuantizationSpec(Dtype.int8).tensor_spec().is_symmetric
    True
    """

    dtype: Dtype
    observer_cls: type[ObserverBase] | None = None
    is_dynamic: bool | None = None
    qscheme: QSchemeType | None = None
    ch_axis: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    round_method: RoundType | None = None
    scale_type: ScaleType | None = None
    scale_format: str | None = None
    scale_calculation_mode: str | None = None
    qat_spec: QATSpec | None = None
    mx_element_dtype: Dtype | None = None
    zero_point_type: ZeroPointType | None = ZeroPointType.int32
    is_scale_quant: bool = False

    def __post_init__(self) -> None:
        self._check()
        if self.dtype not in _BLOCKS and self.round_method is RoundType.round:
            _LOG.warning(
                "dtype %s: round_method round: ties go to the even code, as in ONNX QuantizeLinear, not away from 0",
                self.dtype.name,
            )

    def _check(self) -> None:
        for name, kind in _ENUMS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                example = f"{kind.__name__}.{next(iter(kind)).name}"
                raise UnsupportedTypeError(f"{name} {value!r}: expected one of {kind.__name__}, such as {example}")
        if self.dtype is None:
            raise UnsupportedTypeError(
                "dtype None: expected one of Dtype; leave a tensor in float with None as its spec"
            )
        if self.observer_cls is not None and self.observer_cls not in OBSERVERS.values():
            raise unknown_name("observer_cls", getattr(self.observer_cls, "__name__", self.observer_cls), OBSERVERS)
        for name in ("is_dynamic", "symmetric"):
            if getattr(self, name) not in (None, True, False):
                raise UnsupportedTypeError(f"{name} {getattr(self, name)!r}: expected True, False or None")
        if self.scale_type in (ScaleType.float16, ScaleType.bfloat16):
            raise UnsupportedOptionError(
                f"scale_type {self.scale_type.name}: scales are kept as float32, as ONNX files and integer kernels "
                "want them; use ScaleType.float, or ScaleType.pof2 for powers of two"
            )
        if self.zero_point_type is ZeroPointType.float32:
            raise UnsupportedOptionError(
                "zero_point_type float32: zero points are codes, that is integers; use ZeroPointType.int32"
            )
        if self.is_scale_quant:
            raise UnsupportedOptionError(
                "is_scale_quant: scales are not quantized themselves; leave it out, or use an MX type, whose scales are"
            )
        for reason in _problems(self):
            raise InvalidValueError(f"dtype {self.dtype.name}: {reason}")

    def tensor_spec(self) -> TensorSpec:
        """Return the typed spec for the pipeline, after checking the fields."""
        self._check()
        if self.dtype in _CASTS:
            return FloatSpec(self.dtype.value)
        if _is_scaled_float(self):
            is_per_channel = _scheme(self) is QSchemeType.per_channel
            return FloatSpec(
                self.dtype.value,
                is_saturating=True,
                is_scaled=True,
                is_per_channel=is_per_channel,
                is_dynamic=bool(self.is_dynamic),
                axis=self.ch_axis if is_per_channel and not self.is_dynamic else None,
            )
        if self.dtype not in _BLOCKS:
            return _affine_spec(self)
        fmt = _block_format(self)
        is_mx = self.dtype is Dtype.mx or self.dtype in MX_FORMATS
        rule = ScaleRule.EVEN if is_mx else ScaleRule.FLOOR
        if self.scale_calculation_mode is not None:
            rule = ScaleRule(self.scale_calculation_mode)
        rounding = Rounding.HALF_AWAY if self.round_method is RoundType.round else Rounding.HALF_EVEN
        quantizer = BlockQuantizer(fmt, rule, rounding, fmt.default_nonfinite)
        is_calibrated = fmt.has_tensor_scale and self.is_dynamic is False
        axis = 1 if self.ch_axis is None else self.ch_axis
        return BlockSpec(
            quantizer,
            axis,
            follows_reduction=self.ch_axis is None,
            is_calibrated=is_calibrated,
            is_rule_open=self.scale_calculation_mode is None,
        )

    def set_group_size(self, group_size: int) -> None:
        """Let so many neighbours share a scale."""
        replace(self, group_size=group_size)  # which checks it
        self.group_size = group_size

    def to_dict(self) -> dict[str, Any]:
        """Return every field as JSON can hold it."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> QuantizationSpec:
        """Read what `to_dict` wrote; missing fields get their defaults."""
        names = [field.name for field in fields(cls)]
        for key, value in content.items():
            if key not in names and key not in _MEMORY and value not in _EMPTY:
                raise unknown_name("field of QuantizationSpec", key, names)
        values = {name: content[name] for name in names if name in content}
        for name, value in values.items():
            if value is not None and name in _ENUMS:
                values[name] = parse(_ENUMS[name], value, name)
            elif value is not None and name == "observer_cls":
                if value not in OBSERVERS:
                    raise unknown_name("observer_cls", value, OBSERVERS)
                values[name] = OBSERVERS[value]
            elif value is not None and name == "qat_spec":
                initial = value.get("threshold_init_meth")
                known = None if initial is None else parse(TQTThresholdInitMeth, initial, "threshold_init_meth")
                values[name] = TQTSpec(known)
        return cls(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, TQTSpec):
        return {"name": "tqt", "threshold_init_meth": _plain(value.threshold_init_meth)}
    return value.__name__ if isinstance(value, type) else value


# ---- conversion; the spec was checked when it was built ----
def _scheme(spec: QuantizationSpec) -> QSchemeType:
    """The scope of a scale: from the spec, or else from its observer."""
    if spec.qscheme is not None:
        return spec.qscheme
    return spec.observer_cls.schemes[0] if spec.observer_cls and spec.observer_cls.schemes else QSchemeType.per_tensor


def _is_scaled_float(spec: QuantizationSpec) -> bool:
    """True for an 8-bit float with a scale for a tensor or a channel; without either it is one in blocks."""
    is_asked_for = spec.qscheme is not None or bool(spec.observer_cls and spec.observer_cls.schemes)
    return spec.dtype in _EIGHT_BIT_FLOATS and is_asked_for and _scheme(spec) is not QSchemeType.per_group


def _observer(spec: QuantizationSpec) -> type[ObserverBase]:
    return spec.observer_cls or _SCHEMES[_scheme(spec)]


def _has_power_of_two(spec: QuantizationSpec) -> bool:
    return _observer(spec).is_power_of_two or spec.scale_type is ScaleType.pof2


def _integer(spec: QuantizationSpec) -> IntFormat:
    fmt = get_format(spec.dtype.value)
    assert isinstance(fmt, IntFormat)
    return fmt


def _block_format(spec: QuantizationSpec) -> BlockFormat:
    """The format by name, with the block size that the spec asks for."""
    element = spec.mx_element_dtype if spec.dtype is Dtype.mx else spec.dtype
    assert element is not None
    fmt = get_format(MX_FORMATS.get(element, element.value))
    assert isinstance(fmt, BlockFormat)
    return fmt if spec.group_size is None else fmt.with_block_size(spec.group_size)


def _affine_spec(spec: QuantizationSpec) -> AffineSpec | DynamicSpec:
    fmt, observer = _integer(spec), _observer(spec)
    is_symmetric = fmt.signed if spec.symmetric is None else spec.symmetric
    if spec.is_dynamic:
        return DynamicSpec(fmt.name, is_symmetric, is_per_row=_scheme(spec) is QSchemeType.per_channel)
    method: RangeMethod = observer.method
    learning = None
    if observer.algorithm is Algorithm.TQT:
        initial, method = _THRESHOLDS[getattr(spec.qat_spec, "threshold_init_meth", None)]
        learning = Learning(Algorithm.TQT, initial)
    elif observer.algorithm is Algorithm.LSQ:
        method, learning = MinMSE(), Learning(Algorithm.LSQ)
    elif _has_power_of_two(spec) and method == MinMSE():
        method = PowerOfTwoMinMSE()
    return AffineSpec(
        fmt.name,
        method,
        is_symmetric=is_symmetric,
        is_per_channel=_scheme(spec) is QSchemeType.per_channel,
        axis=spec.ch_axis,
        group_size=spec.group_size if _scheme(spec) is QSchemeType.per_group else None,
        is_power_of_two=_has_power_of_two(spec),
        learning=learning,
    )


# ---- checks: contradictions, and options that would be accepted without effect ----
def _problems(spec: QuantizationSpec) -> Iterator[str]:
    if spec.dtype in _CASTS:
        return _cast_problems(spec)
    if _is_scaled_float(spec):
        return _scaled_float_problems(spec)
    return _block_problems(spec) if spec.dtype in _BLOCKS else _integer_problems(spec)


def _integer_problems(spec: QuantizationSpec) -> Iterator[str]:
    for name in ("mx_element_dtype", "scale_format", "scale_calculation_mode"):
        if getattr(spec, name) is not None:
            yield f"{name} belongs to types in blocks; leave it out, or use Dtype.mx with mx_element_dtype"
    observer, scheme = _observer(spec), _scheme(spec)
    if issubclass(observer, PerBlockObserver):
        remedy = "use Dtype.mx with mx_element_dtype=Dtype.int8, or PerTensorMinMaxObserver"
        yield f"{observer.__name__} is for types in blocks, which integers by themselves are not; {remedy}"
    if observer is PlaceholderObserver:
        yield "PlaceholderObserver finds no range, and integers need one; use PerTensorMinMaxObserver or leave it out"
    if scheme not in observer.schemes:
        possible = " or ".join(other.name for other in observer.schemes)
        yield f"{observer.__name__} with qscheme {scheme.name}: it serves {possible}; change one of the two"
    if scheme is QSchemeType.per_channel and spec.ch_axis is None:
        yield "qscheme per_channel without ch_axis: give the axis of the channels, 0 for weights of Conv2d or Linear"
    if scheme is QSchemeType.per_group and spec.group_size is None:
        yield "qscheme per_group without group_size: give the number of neighbours that share a scale, such as 32"
    if scheme is QSchemeType.per_tensor and spec.ch_axis is not None:
        yield f"ch_axis {spec.ch_axis} with qscheme per_tensor: leave it out, or use per_channel"
    if scheme is not QSchemeType.per_group and spec.group_size is not None:
        yield f"group_size {spec.group_size} with qscheme {scheme.name}: leave it out, or use per_group"
    yield from _axis_and_size_problems(spec)
    if spec.round_method is RoundType.floor:
        yield "round_method floor: integers are rounded to the nearest, as ONNX does; use RoundType.half_even"
    yield from _scale_problems(spec, observer)
    yield from _learning_problems(spec, observer)


def _axis_and_size_problems(spec: QuantizationSpec) -> Iterator[str]:
    axis, size = spec.ch_axis, spec.group_size
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
        yield f"ch_axis {axis!r}: expected an integer"
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        yield f"group_size {size!r}: expected an integer of at least 1; for a whole row, use per_channel"


def _scale_problems(spec: QuantizationSpec, observer: type[ObserverBase]) -> Iterator[str]:
    learns, has_power_of_two = observer.algorithm is not None, _has_power_of_two(spec)
    if has_power_of_two and spec.symmetric is False and not learns:
        yield "a power-of-two scale with symmetric=False: positions are for codes even about zero; use symmetric=True"
    if spec.scale_type is ScaleType.pof2 and learns and not observer.is_power_of_two:
        yield (
            f"{observer.__name__} with scale_type pof2: the step that it learns is any number; use TQTObserver or "
            "ScaleType.float"
        )
    if not spec.is_dynamic:
        return
    if learns:
        yield f"is_dynamic with {observer.__name__}: what is learned is fixed at run time; use is_dynamic=False"
    if _scheme(spec) is QSchemeType.per_group:
        yield "is_dynamic with qscheme per_group: at run time a tensor or a token has one scale; use per_tensor"
    if _scheme(spec) is QSchemeType.per_channel and spec.ch_axis == -1:
        yield "is_dynamic with qscheme per_channel and ch_axis -1: tokens lie along the axis before it; use ch_axis 1"
    if observer.method != MinMax() or has_power_of_two:
        yield (
            f"is_dynamic with {observer.__name__}, scale_type {getattr(spec.scale_type, 'name', None)}: at run time "
            "the range is that of the tensor and the scale any number; use PerTensorMinMaxObserver and ScaleType.float"
        )


def _learning_problems(spec: QuantizationSpec, observer: type[ObserverBase]) -> Iterator[str]:
    if spec.qat_spec is not None and observer is not TQTObserver:
        yield f"qat_spec {type(spec.qat_spec).__name__} with {observer.__name__}: it belongs to TQTObserver"
    if observer.algorithm is None:
        return
    if _integer(spec).signed and spec.symmetric is False:
        yield (
            f"{observer.__name__} with symmetric=False: its zero point is 0; use symmetric=True, or an unsigned type "
            "for data that are never negative"
        )
    if not _integer(spec).signed and spec.symmetric:
        yield f"{observer.__name__} with symmetric=True: codes of an unsigned type start at 0; use a signed type"


def _block_problems(spec: QuantizationSpec) -> Iterator[str]:
    names = ", ".join(fmt.name for fmt in MX_FORMATS)
    if spec.dtype is Dtype.mx and spec.mx_element_dtype is None:
        yield f"no mx_element_dtype: give the type of the elements, one of {names}"
    if spec.dtype is Dtype.mx and spec.mx_element_dtype not in MX_FORMATS:
        yield f"mx_element_dtype {getattr(spec.mx_element_dtype, 'name', None)}: expected one of {names}"
    if spec.dtype is not Dtype.mx and spec.mx_element_dtype is not None:
        yield "mx_element_dtype belongs to Dtype.mx; leave it out"
    allowed: tuple[type[ObserverBase], ...] = (PerBlockMXObserver,)
    if spec.dtype is Dtype.bfp16:
        allowed = (PerBlockBFPObserver,)
    elif spec.dtype in _MICROEXPONENTS:
        allowed = (PerBlockMXObserver, PerBlockBFPObserver)
    if spec.observer_cls is not None and spec.observer_cls not in (PlaceholderObserver, *allowed):
        yield (
            f"{spec.observer_cls.__name__} finds a scale that is any number or learned, and blocks share powers of two "
            f"that follow from their data; use {' or '.join(cls.__name__ for cls in allowed)}, or an integer type"
        )
    if spec.qscheme not in (None, QSchemeType.per_group):
        yield f"qscheme {spec.qscheme.name}: scales are those of blocks; use per_group, or an integer type"
    yield from _axis_and_size_problems(spec)
    yield from _block_rule_problems(spec)


def _block_rule_problems(spec: QuantizationSpec) -> Iterator[str]:
    fmt = _block_format(spec)
    usual = "e8m0" if fmt.scale is None else "e4m3"
    if spec.scale_format not in (None, usual):
        hint = "; Dtype.nvfp4 has scales of e4m3" if spec.scale_format == "e4m3" else ""
        yield f"scale_format {spec.scale_format!r}: scales of '{fmt}' are {usual}; use '{usual}' or leave it out{hint}"
    rules = [rule.value for rule in fmt.scale_rules]
    if spec.scale_calculation_mode is not None and spec.scale_calculation_mode not in rules:
        raise unknown_name("scale_calculation_mode", spec.scale_calculation_mode, rules)
    sub_blocks = fmt.sub_blocks
    if sub_blocks is not None and spec.group_size is not None and spec.group_size % sub_blocks.size:
        yield f"group_size {spec.group_size}: expected a multiple of {sub_blocks.size}, the size of a sub-block"
    if spec.symmetric is False:
        yield "symmetric=False: blocks have no zero point; leave it out"
    if spec.round_method is RoundType.floor:
        yield "round_method floor: elements are rounded to the nearest; use RoundType.half_even or RoundType.round"
    if spec.qat_spec is not None:
        yield f"qat_spec {type(spec.qat_spec).__name__}: blocks have nothing to learn; leave it out"


def _scaled_float_problems(spec: QuantizationSpec) -> Iterator[str]:
    observer, scheme = _observer(spec), _scheme(spec)
    if observer.method != MinMax() or observer.algorithm is not None or observer.is_power_of_two:
        yield f"{observer.__name__}: the scale of an 8-bit float comes from the largest magnitude; use min_max"
    if scheme not in observer.schemes:
        possible = " or ".join(other.name for other in observer.schemes)
        yield f"{observer.__name__} with qscheme {scheme.name}: it serves {possible}; change one of the two"
    if scheme is QSchemeType.per_channel and spec.ch_axis is None:
        yield "qscheme per_channel without ch_axis: give the axis of the channels, 0 for weights of Linear"
    if scheme is QSchemeType.per_tensor and spec.ch_axis is not None:
        yield f"ch_axis {spec.ch_axis} with qscheme per_tensor: leave it out, or use per_channel"
    yield from _axis_and_size_problems(spec)
    if spec.symmetric is False:
        yield "symmetric=False: floats have no zero point; leave it out"
    if spec.round_method is RoundType.floor:
        yield "round_method floor: floats are rounded half to even; leave it out"
    if spec.scale_type is ScaleType.pof2:
        yield "scale_type pof2: the scale is any number; use ScaleType.float, or OCP_MXFP8E4M3Spec"
    for name in ("group_size", "scale_format", "scale_calculation_mode", "qat_spec", "mx_element_dtype"):
        if getattr(spec, name) is not None:
            yield f"{name} does nothing with qscheme {scheme.name}; leave it out, or use per_group"


def _cast_problems(spec: QuantizationSpec) -> Iterator[str]:
    if spec.observer_cls not in (None, PlaceholderObserver):
        yield f"{spec.observer_cls.__name__} finds a range, and a cast needs none; leave observer_cls out"
    if spec.round_method is RoundType.floor:
        yield "round_method floor: casts round half to even; leave it out"
    names = ("qscheme", "ch_axis", "group_size", "scale_type", "scale_format", "scale_calculation_mode", "qat_spec")
    for name in (*names, "mx_element_dtype"):
        if getattr(spec, name) is not None:
            yield f"{name} does nothing for a cast; leave it out"
    if spec.is_dynamic or spec.symmetric is False:
        yield "is_dynamic and symmetric=False do nothing for a cast; leave them out"

"""What a `QuantizationSpec` cannot be: contradictions, and what would be accepted without being done.

Each check gives the reason, or nothing; the first reason is the error. `_EVERYWHERE` goes for all types, then follow
the checks of the type's family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quark.errors import InvalidValueError, UnsupportedOptionError, unknown_name
from quark.formats.spec import ScaleRule
from quark.ranges import MinMax
from quark.torch.quantization.config.spec_conversion import (
    MICROEXPONENTS,
    MX_FORMATS,
    Family,
    block_format_of,
    family_of,
    has_power_of_two,
    integer_of,
    observer_of,
    scheme_of,
)
from quark.torch.quantization.config.type import Dtype, QSchemeType, RoundType, ScaleType, ZeroPointType
from quark.torch.quantization.observer import (
    PerBlockBFPObserver,
    PerBlockMXObserver,
    PerBlockObserver,
    PlaceholderObserver,
    TQTObserver,
)

if TYPE_CHECKING:
    from quark.torch.quantization.config.tensor_spec import QuantizationSpec

Check = Callable[["QuantizationSpec"], str | None]


def check_spec(spec: QuantizationSpec) -> None:
    """Raise where the spec is impossible, or asks for what is not carried out."""
    for check in _EVERYWHERE:
        reason = check(spec)
        if reason:
            raise UnsupportedOptionError(reason)
    for check in _CHECKS[family_of(spec.dtype)]:
        reason = check(spec)
        if reason:
            raise InvalidValueError(f"dtype {spec.dtype.name}: {reason}")


def _scale_type(spec: QuantizationSpec) -> str | None:
    if spec.scale_type in (ScaleType.float16, ScaleType.bfloat16):
        return (
            f"scale_type {spec.scale_type.name}: scales are kept as float32, as ONNX files and integer kernels want "
            "them; use ScaleType.float, or ScaleType.pof2 for powers of two"
        )
    return None


def _zero_point_type(spec: QuantizationSpec) -> str | None:
    if spec.zero_point_type is ZeroPointType.float32:
        return "zero_point_type float32: zero points are codes, that is integers; use ZeroPointType.int32"
    return None


def _scale_quant(spec: QuantizationSpec) -> str | None:
    if spec.is_scale_quant:
        return "is_scale_quant: scales are not quantized themselves; leave it out, or use an MX type, whose scales are"
    return None


# ---- integers ----
def _no_block_fields(spec: QuantizationSpec) -> str | None:
    for name in ("mx_element_dtype", "scale_format", "scale_calculation_mode"):
        if getattr(spec, name) is not None:
            return f"{name} belongs to types in blocks; leave it out, or use Dtype.mx with mx_element_dtype"
    return None


def _integer_observer(spec: QuantizationSpec) -> str | None:
    observer = spec.observer_cls
    if observer is not None and issubclass(observer, PerBlockObserver):
        remedy = "use Dtype.mx with mx_element_dtype=Dtype.int8, or PerTensorMinMaxObserver"
        return f"{observer.__name__} is for types in blocks, which integers by themselves are not; {remedy}"
    if observer is PlaceholderObserver:
        return "PlaceholderObserver finds no range, and integers need one; use PerTensorMinMaxObserver or leave it out"
    return None


def _scheme_of_observer(spec: QuantizationSpec) -> str | None:
    observer, scheme = observer_of(spec), scheme_of(spec)
    if scheme in observer.schemes:
        return None
    possible = " or ".join(each.name for each in observer.schemes)
    return f"{observer.__name__} with qscheme {scheme.name}: it serves {possible}; change one of the two"


def _axis_and_group(spec: QuantizationSpec) -> str | None:
    scheme = scheme_of(spec)
    if scheme is QSchemeType.per_channel and spec.ch_axis is None:
        return "qscheme per_channel without ch_axis: say which axis has the channels, 0 for weights of Conv2d or Linear"
    if scheme is QSchemeType.per_group and spec.group_size is None:
        return "qscheme per_group without group_size: say how many neighbours share a scale, such as 32"
    if scheme is QSchemeType.per_tensor and spec.ch_axis is not None:
        return f"ch_axis {spec.ch_axis} with qscheme per_tensor: leave it out, or use per_channel"
    if scheme is not QSchemeType.per_group and spec.group_size is not None:
        return f"group_size {spec.group_size} with qscheme {scheme.name}: leave it out, or use per_group"
    return None


def _axis_and_size_values(spec: QuantizationSpec) -> str | None:
    axis, size = spec.ch_axis, spec.group_size
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
        return f"ch_axis {axis!r}: expected an integer"
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        return f"group_size {size!r}: expected an integer of at least 1; for a whole row, use per_channel"
    return None


def _integer_rounding(spec: QuantizationSpec) -> str | None:
    if spec.round_method not in (None, RoundType.half_even):
        return (
            f"round_method {spec.round_method.name}: integers are rounded half to even, as ONNX QuantizeLinear does; "
            "use RoundType.half_even"
        )
    return None


def _power_of_two(spec: QuantizationSpec) -> str | None:
    learns = observer_of(spec).algorithm is not None
    if has_power_of_two(spec) and spec.symmetric is False and not learns:
        return "a power-of-two scale with symmetric=False: positions are for codes even about zero; use symmetric=True"
    if spec.scale_type is ScaleType.pof2 and learns and not observer_of(spec).is_power_of_two:
        name = observer_of(spec).__name__
        return f"{name} with scale_type pof2: the step that it learns is any number; use TQTObserver or ScaleType.float"
    return None


def _dynamic(spec: QuantizationSpec) -> str | None:
    if not spec.is_dynamic:
        return None
    observer = observer_of(spec)
    if observer.algorithm is not None:
        return f"is_dynamic with {observer.__name__}: what is learned is fixed at run time; use is_dynamic=False"
    if scheme_of(spec) is not QSchemeType.per_tensor:
        return f"is_dynamic with qscheme {scheme_of(spec).name}: at run time a tensor has one scale; use per_tensor"
    if observer.method != MinMax() or has_power_of_two(spec):
        return (
            f"is_dynamic with {observer.__name__}, scale_type {getattr(spec.scale_type, 'name', None)}: at run time "
            "the range is that of the tensor and the scale any number; use PerTensorMinMaxObserver and ScaleType.float"
        )
    return None


def _learning(spec: QuantizationSpec) -> str | None:
    observer = observer_of(spec)
    if spec.qat_spec is not None and observer is not TQTObserver:
        return f"qat_spec {type(spec.qat_spec).__name__} with {observer.__name__}: it belongs to TQTObserver"
    if observer.algorithm is None:
        return None
    if integer_of(spec).signed and spec.symmetric is False:
        return (
            f"{observer.__name__} with symmetric=False: its zero point is 0; use symmetric=True, or an unsigned type "
            "for data that are never negative"
        )
    if not integer_of(spec).signed and spec.symmetric:
        return f"{observer.__name__} with symmetric=True: codes of an unsigned type start at 0; use a signed type"
    return None


# ---- blocks ----
def _block_element(spec: QuantizationSpec) -> str | None:
    names = ", ".join(each.name for each in MX_FORMATS)
    if spec.dtype is Dtype.mx and spec.mx_element_dtype is None:
        return f"no mx_element_dtype: say what the elements are, one of {names}"
    if spec.dtype is Dtype.mx and spec.mx_element_dtype not in MX_FORMATS:
        return f"mx_element_dtype {getattr(spec.mx_element_dtype, 'name', None)}: expected one of {names}"
    if spec.dtype is not Dtype.mx and spec.mx_element_dtype is not None:
        return "mx_element_dtype belongs to Dtype.mx; leave it out"
    return None


def _block_observer(spec: QuantizationSpec) -> str | None:
    allowed: tuple[type, ...] = (PlaceholderObserver, PerBlockMXObserver)
    if spec.dtype is Dtype.bfp16:
        allowed = (PlaceholderObserver, PerBlockBFPObserver)
    elif spec.dtype in MICROEXPONENTS:
        allowed = (PlaceholderObserver, PerBlockMXObserver, PerBlockBFPObserver)
    if spec.observer_cls is None or spec.observer_cls in allowed:
        return None
    return (
        f"{spec.observer_cls.__name__} finds a scale that is any number or learned, and blocks share powers of two "
        f"that follow from their data; use {' or '.join(each.__name__ for each in allowed[1:])}, or an integer type"
    )


def _block_scheme(spec: QuantizationSpec) -> str | None:
    if spec.qscheme in (None, QSchemeType.per_group):
        return None
    return f"qscheme {spec.qscheme.name}: scales are those of blocks; use per_group, or an integer type"


def _block_scale(spec: QuantizationSpec) -> str | None:
    if spec.scale_format not in (None, "e8m0"):
        return f"scale_format {spec.scale_format!r}: scales of blocks are powers of two; use 'e8m0' or leave it out"
    rules = [each.value for each in ScaleRule]
    if spec.scale_calculation_mode is not None and spec.scale_calculation_mode not in rules:
        raise unknown_name("scale_calculation_mode", spec.scale_calculation_mode, rules)
    return None


def _block_rest(spec: QuantizationSpec) -> str | None:
    sub_blocks = block_format_of(spec).sub_blocks
    if sub_blocks is not None and spec.group_size is not None and spec.group_size % sub_blocks.size:
        return f"group_size {spec.group_size}: expected a multiple of {sub_blocks.size}, the size of a sub-block"
    if spec.symmetric is False:
        return "symmetric=False: blocks have no zero point; leave it out"
    if spec.round_method is RoundType.floor:
        return "round_method floor: elements are rounded to the nearest; use RoundType.half_even or RoundType.round"
    if spec.qat_spec is not None:
        return f"qat_spec {type(spec.qat_spec).__name__}: blocks have nothing to learn; leave it out"
    return None


# ---- float16 and bfloat16 ----
def _float_fields(spec: QuantizationSpec) -> str | None:
    if spec.observer_cls not in (None, PlaceholderObserver):
        return f"{spec.observer_cls.__name__} finds a range, and a cast needs none; leave observer_cls out"
    if spec.round_method not in (None, RoundType.half_even):
        return f"round_method {spec.round_method.name}: casts round half to even; leave it out"
    names = ("qscheme", "ch_axis", "group_size", "scale_type", "scale_format", "scale_calculation_mode", "qat_spec")
    for name in (*names, "mx_element_dtype"):
        if getattr(spec, name) is not None:
            return f"{name} does nothing for a cast; leave it out"
    if spec.is_dynamic or spec.symmetric is False:
        return "is_dynamic and symmetric=False do nothing for a cast; leave them out"
    return None


_EVERYWHERE: tuple[Check, ...] = (_scale_type, _zero_point_type, _scale_quant)
_CHECKS: dict[Family, tuple[Check, ...]] = {
    Family.INTEGER: (
        *(_no_block_fields, _integer_observer, _scheme_of_observer, _axis_and_group, _axis_and_size_values),
        *(_integer_rounding, _power_of_two, _dynamic, _learning),
    ),
    Family.BLOCK: (_block_element, _block_observer, _block_scheme, _axis_and_size_values, _block_scale, _block_rest),
    Family.FLOAT: (_float_fields,),
}

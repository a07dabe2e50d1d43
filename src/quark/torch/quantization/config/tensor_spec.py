"""How one tensor is quantized, as people write it; impossible combinations are refused when it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from quark.errors import UnsupportedTypeError, refuse_unknown_fields, unknown_name
from quark.torch.quantization.config.spec_checks import check_spec
from quark.torch.quantization.config.spec_conversion import as_tensor_spec
from quark.torch.quantization.config.type import (
    Dtype,
    QSchemeType,
    RoundType,
    ScaleType,
    TQTThresholdInitMeth,
    ZeroPointType,
    parse,
)
from quark.torch.quantization.observer import OBSERVERS, ObserverBase
from quark.torch.specs import TensorSpec


@refuse_unknown_fields
@dataclass(frozen=True)
class QATSpec:
    """What a learning observer is told."""


@refuse_unknown_fields
@dataclass(frozen=True)
class TQTSpec(QATSpec):
    """Where the threshold of a TQTObserver starts from; None: weights from their largest magnitude, others by KL-J."""

    threshold_init_meth: TQTThresholdInitMeth | None = None

    def __post_init__(self) -> None:
        if self.threshold_init_meth is not None:
            parse(TQTThresholdInitMeth, self.threshold_init_meth, "threshold_init_meth")


@refuse_unknown_fields
@dataclass(frozen=True)
class QuantizationSpec:
    """How one tensor is quantized.

    Integers: `observer_cls` finds the range (MinMax where None), `qscheme` says what shares a scale (as the observer
    does where None), `ch_axis` and `group_size` go with channels and groups. `symmetric` None: for signed types. A
    power-of-two scale comes from the observer or from `scale_type` pof2. `is_dynamic`: ranges are found at run time.

    Blocks (mx with `mx_element_dtype`, fp8, fp6, fp4; mx4, mx6, mx9; bfp16): `group_size` is the block size, the
    format's own where None; `ch_axis` the axis that blocks run along, None for the one that the layer sums over.
    `scale_calculation_mode` is the rule for the shared power of two: even (of MX where None), floor (of others), ceil,
    rceil or mse. Their scales always follow from the data, so that `is_dynamic` says nothing new.

    float16 and bfloat16 need no more than the type.

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
        self._check_types()
        check_spec(self)

    def _check_types(self) -> None:
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

    def tensor_spec(self) -> TensorSpec:
        """The same as the steps read it."""
        return as_tensor_spec(self)

    def to_dict(self) -> dict[str, Any]:
        """Every field, as JSON can hold it."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> QuantizationSpec:
        """What `to_dict` wrote; fields that are missing have their defaults."""
        names = [each.name for each in fields(cls)]
        for key, value in content.items():
            if key not in names and value not in _EMPTY:
                raise unknown_name("field of QuantizationSpec", key, names)
        return cls(**{name: _parsed(name, content[name]) for name in names if name in content})


_ENUMS: Mapping[str, type[Enum]] = {
    "dtype": Dtype,
    "qscheme": QSchemeType,
    "round_method": RoundType,
    "scale_type": ScaleType,
    "mx_element_dtype": Dtype,
    "zero_point_type": ZeroPointType,
}

_EMPTY: tuple[Any, ...] = (None, False, [], {})  # of fields that other versions write and that say nothing


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, TQTSpec):
        return {"name": "tqt", "threshold_init_meth": _plain(value.threshold_init_meth)}
    return value.__name__ if isinstance(value, type) else value


def _parsed(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in _ENUMS:
        return parse(_ENUMS[name], value, name)
    if name == "observer_cls":
        if value not in OBSERVERS:
            raise unknown_name("observer_cls", value, OBSERVERS)
        return OBSERVERS[value]
    if name == "qat_spec":
        initial = value.get("threshold_init_meth")
        return TQTSpec(None if initial is None else parse(TQTThresholdInitMeth, initial, "threshold_init_meth"))
    return value

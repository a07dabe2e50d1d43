"""How the tensors of a layer are quantized: a spec each, and what a spec cannot be in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from quark.errors import InvalidValueError, UnsupportedTypeError, refuse_unknown_fields, unknown_name
from quark.torch.quantization.config.tensor_spec import QuantizationSpec
from quark.torch.specs import AffineSpec, Granularity, LayerSpecs, TensorSpec


@refuse_unknown_fields
@dataclass
class QuantizationConfig:
    """A spec for what a layer reads and gives, for its weight and its bias. None leaves a tensor in float, also where
    the configuration of the whole model has a spec for it. Fields can be edited; they are checked when it is built and
    again when it is used."""

    input_tensors: QuantizationSpec | None = None
    output_tensors: QuantizationSpec | None = None
    weight: QuantizationSpec | None = None
    bias: QuantizationSpec | None = None

    def __post_init__(self) -> None:
        for name in _PLACES:
            spec = getattr(self, name)
            if spec is not None and not isinstance(spec, QuantizationSpec):
                raise UnsupportedTypeError(_not_a_spec(name, spec))
        for name in ("input_tensors", "output_tensors"):
            _check_activation(name, getattr(self, name))
        for name in ("input_tensors", "output_tensors", "weight"):
            _check_bits(name, getattr(self, name))
        for name in ("weight", "bias"):
            spec = getattr(self, name)
            if isinstance(_typed(spec), AffineSpec) and spec.is_dynamic:
                raise InvalidValueError(f"{name} with is_dynamic: it is known beforehand; use is_dynamic=False")

    def layer_specs(self) -> LayerSpecs:
        """The same as the steps read it."""
        self.__post_init__()  # the fields may have been edited
        return LayerSpecs(*(_typed(getattr(self, name)) for name in _PLACES))

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for each spec, or None."""
        specs = {name: getattr(self, name) for name in _PLACES}
        return {name: None if spec is None else spec.to_dict() for name, spec in specs.items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> QuantizationConfig:
        """What `to_dict` wrote."""
        for key, value in content.items():
            if key not in _PLACES and value is not None:
                raise unknown_name("field of QuantizationConfig", key, _PLACES)
        given = {name: content[name] for name in _PLACES if content.get(name) is not None}
        return cls(**{name: QuantizationSpec.from_dict(each) for name, each in given.items()})


_MOST_BITS = 16  # of an operand; a float32 has 24 of precision
_PLACES = tuple(each.name for each in fields(QuantizationConfig))


def _typed(spec: QuantizationSpec | None) -> TensorSpec | None:
    return None if spec is None else spec.tensor_spec()


def _not_a_spec(name: str, value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"{name}: {len(value)} specs came, and a tensor is quantized once; give one QuantizationSpec"
    if hasattr(value, "to_quantization_spec"):
        return f"{name} {type(value).__name__}: call its to_quantization_spec()"
    return f"{name} {value!r}: expected a QuantizationSpec, or None for float"


def _check_bits(name: str, spec: QuantizationSpec | None) -> None:
    typed = _typed(spec)
    if isinstance(typed, AffineSpec) and typed.format.bits > _MOST_BITS:
        raise InvalidValueError(
            f"{name} with {typed.format}: float32, which it is computed in, does not hold such codes, and sums of "
            f"their products overflow; expected at most {_MOST_BITS} bits, 32 are for bias"
        )


def _check_activation(name: str, spec: QuantizationSpec | None) -> None:
    typed = _typed(spec)
    if isinstance(typed, AffineSpec) and typed.granularity is not Granularity.TENSOR:
        raise InvalidValueError(
            f"{name} with qscheme per_{typed.granularity.value}: a layer sums over what it reads, and integers of "
            "several scales do not add up; use per_tensor, or a type in blocks such as Dtype.mx"
        )

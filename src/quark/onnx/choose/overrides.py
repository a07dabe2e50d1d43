"""What a user fixes for single tensors by name, in place of what the rules choose."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quark.errors import InvalidValueError, unknown_name
from quark.formats.catalog import get_format
from quark.formats.spec import IntFormat
from quark.onnx.choose.options import TensorOverride
from quark.onnx.choose.specs import AffineSpec, TensorSpec
from quark.plan import AffineChoice, QuantizationPlan

OVERRIDDEN = "TensorQuantOverrides over "  # so begins the reason of every choice that an override had a say in


def check_overrides(model: ir.Model, overrides: Iterable[TensorOverride]) -> None:
    """That the model has the tensors that the overrides name."""
    names = {str(value.name) for value in (*model.graph.inputs, *model.graph.initializers.values())}
    names.update(str(value.name) for node in model.graph for value in node.outputs)
    for each in overrides:
        if each.tensor not in names:
            raise unknown_name("tensor (TensorQuantOverrides)", each.tensor, sorted(names))


def unused_overrides(plan: QuantizationPlan, overrides: Iterable[TensorOverride]) -> list[str]:
    """A remark for every override that the plan shows no trace of."""
    used = {each.tensor for each in plan if each.reason.startswith(OVERRIDDEN)}
    unused = (each.tensor for each in overrides if each.tensor not in used)
    return [f"TensorQuantOverrides of '{name}': nothing reads it quantized with a scale of its own" for name in unused]


def with_override(spec: TensorSpec, override: TensorOverride | None) -> TensorSpec:
    """The spec in the type that the override asks for; only integers can be overridden."""
    if override is None or not isinstance(spec, AffineSpec):
        return spec
    is_symmetric = spec.is_symmetric if override.is_symmetric is None else override.is_symmetric
    is_reduced = spec.has_reduced_range if override.has_reduced_range is None else override.has_reduced_range
    format = override.format or spec.format
    return replace(spec, format=format, is_symmetric=is_symmetric, has_reduced_range=is_reduced)


def overridden(choice: AffineChoice, override: TensorOverride | None) -> AffineChoice:
    """The choice with the scale and the zero point that the override fixes."""
    if override is None or (override.scale is None and override.zero_point is None):
        return choice
    scale = choice.scale if override.scale is None else override.scale
    scale = tuple(float(each) for each in np.array(scale, np.float32))
    zero_point = choice.zero_point if override.zero_point is None else override.zero_point
    _check_fixed(override.tensor, choice, scale, zero_point)
    return replace(choice, scale=scale, zero_point=zero_point)


def _check_fixed(tensor: str, choice: AffineChoice, scale: tuple[float, ...], zero_point: tuple[int, ...]) -> None:
    subject, count = f"TensorQuantOverrides of '{tensor}'", len(choice.scale)
    if len(scale) != count or len(zero_point) != count:
        raise InvalidValueError(
            f"{subject}: {len(scale)} scales and {len(zero_point)} zero points, expected {count} of each"
        )
    if not all(0 < each < np.inf for each in scale):
        raise InvalidValueError(f"{subject}: scale {scale}, expected finite numbers above zero")
    fmt = get_format(choice.format)
    assert isinstance(fmt, IntFormat)
    if not all(fmt.qmin <= each <= fmt.qmax for each in zero_point):
        raise InvalidValueError(f"{subject}: zero point {zero_point}, {fmt.name} has {fmt.qmin} to {fmt.qmax}")

"""UseMatMulNBits: weights of MatMul in groups of a few bits, all else float."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark.onnx.choose.specs import AffineSpec, LayerSpec
from quark.onnx.insert.options import NBitsOptions
from quark.onnx.quantization.config.layers import RunFields
from quark.onnx.quantization.config.option_treatments import Draft

# What it decides by itself, and the values that ask for the same.
_DECIDED: Mapping[str, Any] = {
    "ActivationSymmetric": None,
    "WeightSymmetric": None,
    "WeightCalibrateMethod": None,
    "Int32Bias": None,
    "Int16Bias": False,
    "WeightsOnly": True,
    "MatMulConstBOnly": True,
}


def nbits_spec(config: RunFields, draft: Draft) -> LayerSpec:
    """The spec of every layer; what else it takes goes into the draft."""
    _remark_on_what_it_decides(config, draft)
    nbits = draft.steps.setdefault("insert", {}).setdefault("matmul_nbits", NBitsOptions())
    draft.put("choose", "is_weights_only", True)
    draft.put("selection", "op_types", frozenset({"MatMul"}))
    draft.put("selection", "needs_constant_matmul_operand", True)
    draft.put("selection", "needs_weight_matrix", True)
    sign = "" if nbits.is_symmetric else "u"
    weight = AffineSpec(f"{sign}int{nbits.bits}", is_symmetric=nbits.is_symmetric, group_size=nbits.group_size)
    return LayerSpec(None, weight)


def _remark_on_what_it_decides(config: RunFields, draft: Draft) -> None:
    values = {**config.extra_options, **draft.spec_values}
    given = [name for name, same in _DECIDED.items() if values.get(name, same) != same]
    given += ["op_types_to_quantize"] if config.op_types_to_quantize else []
    for name in given:
        draft.spec_values.pop(name, None)
        draft.remarks.append(f"{name}: UseMatMulNBits says it: weights of MatMul in groups, all else float")

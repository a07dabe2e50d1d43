"""Weights in 16 bits where the runtime's 8-bit kernels are not exact.

Processors without VNNI add pairs of products of 8-bit codes with saturation. Codes of 16 bits have no such kernel: the
runtime computes these layers in float, as the standard says. The codes stay the same numbers with the same scale, and
so does every value; only the file grows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import onnx_ir as ir

from quark.onnx.graph import constant
from quark.plan import AffineChoice, QuantizationPlan, Role, TensorChoice
from quark.rounded import rounded

WIDER = {"int8": "int16", "uint8": "uint16"}
WIDENED_OPSET = 21  # the opset from which QuantizeLinear has 16 bits
# The attempts, in this order: products of matrices have the longest sums, and are the smaller change
STAGES = (("MatMul", "Gemm"), ("MatMul", "Gemm", "Conv", "ConvTranspose"))


def widen_weights(
    model: ir.Model, plan: QuantizationPlan, operators: Collection[str]
) -> tuple[QuantizationPlan, list[str]]:
    """Return the plan with 8-bit weights of these operators in 16 bits, and their names.

    The weights of the model are rounded in place: 16 bits would not clip what 8 bits do.
    """
    kinds = {str(node.name): node.op_type for node in model.graph}
    names: list[str] = []

    def widened(entry: TensorChoice) -> TensorChoice:
        choice = entry.choice
        is_read = any(kinds.get(reader.node) in operators for reader in entry.readers)
        if entry.role is not Role.WEIGHT or not isinstance(choice, AffineChoice) or not is_read:
            return entry
        value = model.graph.initializers.get(entry.tensor)
        array = constant(value)
        if choice.format not in WIDER or value is None or array is None:
            return entry
        value.const_value = ir.tensor(rounded(array, choice).astype(array.dtype, copy=False), name=entry.tensor)
        names.append(entry.tensor)
        return replace(entry, choice=replace(choice, format=WIDER[choice.format]))

    tensors = tuple(map(widened, plan.tensors))
    return replace(plan, tensors=tensors), names

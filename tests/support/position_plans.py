"""Plans for small models from positions by tensor name: int8 everywhere, biases and constants as well."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from quark.onnx.graph import constant, readers
from quark.plan import AffineChoice, QuantizationPlan, Reader, Role, TensorChoice


def plan_of(model: ir.Model, positions: Mapping[str, int], **formats: str) -> QuantizationPlan:
    """Every tensor that is named, for all of its readers; the others stay float."""
    values = {value.name: value for value in (*model.graph.inputs, *model.graph.initializers.values())}
    values |= {value.name: value for node in model.graph for value in node.outputs}
    tensors = []
    for name, position in positions.items():
        uses = [Reader(str(node.name), index) for node, index in readers(values[name])]
        uses += [Reader("", i) for i, value in enumerate(model.graph.outputs) if value is values[name]]
        role = Role.ACTIVATION
        if constant(values[name]) is not None:
            role = Role.BIAS if all(reader.index == 2 for reader in uses) else Role.WEIGHT
        choice = AffineChoice(formats.get(name, "int8"), (2.0**-position,), (0,))
        tensors.append(TensorChoice(name, role, choice, tuple(uses), "by hand"))
    return QuantizationPlan(tuple(tensors))


def scales_of(plan: QuantizationPlan) -> dict[str, float]:
    """Tensor to scale, of tensors that have one."""
    return {tensor.tensor: tensor.choice.scale[0] for tensor in plan if isinstance(tensor.choice, AffineChoice)}

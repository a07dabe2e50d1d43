"""The layers whose weights are trained, in the order in which the network computes them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from quark.onnx.graph import attribute, constant, input_value, is_read_once, rank, readers
from quark.onnx.refine.fast_finetune.activations import activation_behind
from quark.onnx.refine.fast_finetune.rows import RowSource, row_source
from quark.plan import AffineChoice, Choice, DynamicChoice, FloatChoice, QuantizationPlan, SkippedNode
from quark.reconstruction.problem import Activation, WeightLayout

_ALONG_CHANNELS = ("Conv", "ConvTranspose", "InstanceNormalization")  # their outputs are along axis 1


@dataclass(frozen=True, eq=False)
class TrainedLayer:
    """A layer by the name of its node, with how it is rounded. `outputs` is how many numbers a row gives."""

    name: str
    op_type: str
    weight: Choice
    bias: Choice | None
    output: Choice | None
    has_bias: bool
    source: RowSource
    layout: WeightLayout
    activation: Activation

    @property
    def row_numbers(self) -> int:
        """How many numbers a row of the input has."""
        groups, _, length = self.layout.matrices
        return groups * length

    @property
    def output_numbers(self) -> int:
        groups, outputs, _ = self.layout.matrices
        return groups * outputs


def trained_layers(
    model: ir.Model, plan: QuantizationPlan, op_types: Collection[str]
) -> tuple[list[TrainedLayer], list[SkippedNode]]:
    """The layers whose weight the plan quantizes; those that cannot be trained with the reason."""
    choices = {(reader.node, reader.index): each.choice for each in plan for reader in each.readers}
    found: list[TrainedLayer] = []
    left: list[SkippedNode] = []
    for node in model.graph:
        weight = choices.get((str(node.name), 1)) if node.op_type in op_types and not node.domain else None
        if weight is None:
            continue
        layer = _layer(node, weight, choices)
        if isinstance(layer, str):
            left.append(SkippedNode(str(node.name), node.op_type, layer))
        else:
            found.append(layer)
    return found, left


def _layer(node: ir.Node, weight: Choice, choices: dict[tuple[str, int], Choice]) -> TrainedLayer | str:
    value = input_value(node, 1)
    values = constant(value)
    if value is None or values is None:
        return "has no constant weight"
    if not is_read_once(value):
        return "shares its weight with another layer"
    if isinstance(weight, DynamicChoice):
        return "its scale is not known before run time"
    rows = row_source(node, values)
    if isinstance(rows, str):
        return rows
    source, layout = rows
    if reason := _why_not_its_bias(node, layout):
        return reason
    activation, behind = activation_behind(node)
    return TrainedLayer(
        str(node.name),
        node.op_type,
        weight,
        choices.get((str(node.name), 2)) if attribute(node, "beta", 1.0) == 1.0 else None,
        _choice_behind(behind, choices, node.op_type in _ALONG_CHANNELS),
        _has_own_bias(node, layout),
        source,
        layout,
        activation,
    )


def _why_not_its_bias(node: ir.Node, layout: WeightLayout) -> str:
    """What is added has to be a constant, one for each output; empty where it is, or nothing is added."""
    value = input_value(node, 2) if node.op_type != "MatMul" else None
    if value is None or attribute(node, "beta", 1.0) == 0.0:
        return ""
    values = constant(value)
    if values is None:
        return "its bias is computed"
    groups, outputs, _ = layout.matrices
    is_by_row = node.op_type == "Gemm" and values.shape[-1:] != (outputs,)
    return "its bias is not one number for each output" if is_by_row or values.size != groups * outputs else ""


def _has_own_bias(node: ir.Node, layout: WeightLayout) -> bool:
    value = input_value(node, 2) if node.op_type != "MatMul" else None
    values = constant(value)
    if value is None or values is None or attribute(node, "beta", 1.0) != 1.0:
        return False
    groups, outputs, _ = layout.matrices
    return bool(values.size == groups * outputs and is_read_once(value))


def _choice_behind(value: ir.Value, choices: dict[tuple[str, int], Choice], is_along_channels: bool) -> Choice | None:
    """How what comes out is rounded for its first quantized reader."""
    for reader, index in readers(value):
        choice = choices.get((str(reader.name), index))
        if choice is not None and not isinstance(choice, DynamicChoice):
            return _of_rows(choice, rank(value), is_along_channels)
    return None


def _of_rows(choice: Choice, axes: int | None, is_along_channels: bool) -> Choice | None:
    """The choice for rows [positions, outputs]; None where what is rounded together is not in one row."""
    if isinstance(choice, DynamicChoice | FloatChoice) or choice.axis is None:
        return choice
    axis = choice.axis if choice.axis >= 0 or axes is None else choice.axis + axes
    own = 1 if is_along_channels else -1 if axes is None else axes - 1
    has_groups = isinstance(choice, AffineChoice) and choice.group_size is not None
    return replace(choice, axis=1) if axis == own and not has_groups else None


def bias_of(node: ir.Node) -> NDArray[Any] | None:
    """The constant that the node adds, as it counts in the output."""
    values = constant(input_value(node, 2)) if node.op_type != "MatMul" else None
    beta = float(attribute(node, "beta", 1.0))
    if values is None or beta == 0.0:
        return None
    return values if beta == 1.0 else values * values.dtype.type(beta)

"""A plan becomes nodes.

An activation gets its quantizer behind the node that computes it, and the readers that the plan names read what comes
out of it. A constant becomes codes with a DequantizeLinear behind them; in a block format it becomes the numbers that
the format keeps, with the block operator behind them, which then changes nothing and tells what the numbers are.

An output of the graph keeps its name: the quantizer's result takes it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import onnx_ir as ir

from quark.errors import ModelError
from quark.onnx.graph import fresh_name, is_constant, remove_dead, replace_input
from quark.onnx.insert.constants import quantized_constant
from quark.onnx.insert.dynamic import insert_dynamic
from quark.onnx.insert.fold_relu import fold_activations
from quark.onnx.insert.keep_float import keep_float
from quark.onnx.insert.matmul_nbits import insert_matmul_nbits
from quark.onnx.insert.options import InsertOptions, NodeStyle
from quark.onnx.insert.pairs import quantizer_behind
from quark.onnx.insert.qoperator import to_qoperators
from quark.plan import DynamicChoice, QuantizationPlan, Reader, Role, TensorChoice


def insert(model: ir.Model, plan: QuantizationPlan, options: InsertOptions | None = None) -> None:
    """Change the model as the plan says. A tensor or reader that the model does not have is an error."""
    options = options or InsertOptions()
    values = _values(model)
    nodes = {str(node.name): node for node in model.graph}
    _check(plan, values, nodes, model)
    dynamic_nodes = _dynamic_nodes(plan, model)
    for name in dynamic_nodes:
        insert_dynamic(model, nodes[name], _choices_at(plan, name))
    if options.matmul_nbits is not None:
        insert_matmul_nbits(model, nodes, plan, options.matmul_nbits)
    else:
        for each in _static(plan, dynamic_nodes, options):
            _insert_one(model, values[each.tensor], each, nodes, options)
    if options.has_folded_relu:
        fold_activations(model)
    remove_dead(model)
    if options.style is NodeStyle.QOPERATOR:
        to_qoperators(model)
    keep_float(model)
    remove_dead(model)


def _insert_one(
    model: ir.Model, value: ir.Value, each: TensorChoice, nodes: dict[str, ir.Node], options: InsertOptions
) -> None:
    if is_constant(value):
        replacement = quantized_constant(model, value, each.choice, options)
    else:
        replacement = quantizer_behind(model, value, each.choice, options)
    for reader in each.readers:
        if reader.is_graph_output:
            _replace_output(model, reader.index, replacement)
        else:
            replace_input(nodes[reader.node], reader.index, replacement)


def _replace_output(model: ir.Model, index: int, replacement: ir.Value) -> None:
    """Let an output of the graph be the replacement, under the name that it had."""
    old = model.graph.outputs[index]
    name, old_name = old.name, fresh_name(model, f"{old.name}_float")
    old.name = old_name
    replacement.name = name
    if replacement.shape is None:
        replacement.shape = old.shape
    model.graph.outputs[index] = replacement


def _static(plan: QuantizationPlan, dynamic: Collection[str], options: InsertOptions) -> list[TensorChoice]:
    """What is left without the nodes that were replaced as a whole; graph outputs last, since they rename values."""
    rest = []
    for each in plan:
        readers = tuple(reader for reader in each.readers if reader.node not in dynamic)
        groups = [(reader,) for reader in readers] if options.has_dedicated_pairs else [readers]
        rest += [replace(each, readers=group) for group in groups if group]
    return sorted(rest, key=lambda each: any(reader.is_graph_output for reader in each.readers))


def _dynamic_nodes(plan: QuantizationPlan, model: ir.Model) -> list[str]:
    """In the order of the graph: the first reader of a tensor places the quantizer that the others share."""
    names = {r.node for each in plan if isinstance(each.choice, DynamicChoice) for r in each.readers}
    return [str(node.name) for node in model.graph if node.name in names]


def _choices_at(plan: QuantizationPlan, node: str) -> dict[int, TensorChoice]:
    return {reader.index: each for each in plan for reader in each.readers if reader.node == node}


def _values(model: ir.Model) -> dict[str, ir.Value]:
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    values += [value for node in model.graph for value in node.outputs]
    return {str(value.name): value for value in values}


def _check(plan: QuantizationPlan, values: dict[str, ir.Value], nodes: dict[str, ir.Node], model: ir.Model) -> None:
    """That the plan is for this model."""
    for each in plan:
        if each.tensor not in values:
            raise ModelError(f"the plan quantizes tensor '{each.tensor}', and the model has none of that name")
        for reader in each.readers:
            actual = _read_value(reader, nodes, model)
            if actual is None or actual.name != each.tensor:
                where = f"output {reader.index}" if reader.is_graph_output else f"'{reader.node}' input {reader.index}"
                raise ModelError(f"the plan lets {where} read tensor '{each.tensor}': the model has it otherwise")
        if each.role is not Role.ACTIVATION and not is_constant(values[each.tensor]):
            raise ModelError(f"the plan takes tensor '{each.tensor}' for a {each.role.value}: it is no constant")


def _read_value(reader: Reader, nodes: dict[str, ir.Node], model: ir.Model) -> ir.Value | None:
    if reader.is_graph_output:
        outputs = model.graph.outputs
        return outputs[reader.index] if 0 <= reader.index < len(outputs) else None
    node = nodes.get(reader.node)
    return node.inputs[reader.index] if node is not None and 0 <= reader.index < len(node.inputs) else None

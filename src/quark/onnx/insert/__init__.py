"""Execute a plan: it becomes nodes and integer weights in the graph. Nothing is decided here.

An activation gets its quantizer behind the node that computes it, and the readers that the plan names read the result.
A constant becomes codes with a DequantizeLinear behind them. In a block format it becomes rounded numbers with the
block operator behind them, which then changes nothing but says what the numbers are.

A graph output keeps its name: the quantizer's result takes it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quark.errors import ModelError
from quark.onnx.graph import (
    add_initializer,
    add_node,
    attribute,
    bypass,
    clip_bounds,
    constant,
    fresh_name,
    input_value,
    is_constant,
    nodes,
    readers,
    remove_dead,
    replace_input,
)
from quark.onnx.insert.dynamic import Shared, insert_dynamic
from quark.onnx.insert.float8 import keep_float8_apart
from quark.onnx.insert.pairs import (
    InsertOptions,
    NBitsOptions,
    NodeStyle,
    is_implied,
    quantized_constant,
    quantizer_behind,
)
from quark.onnx.insert.qoperator import to_qoperators
from quark.onnx.insert.recurrent import insert_dynamic_lstm
from quark.onnx.insert.tables import dequantize_rows, share_tables
from quark.onnx.insert.weight_only import insert_weight_only
from quark.plan import Choice, DynamicChoice, QuantizationPlan, Role

__all__ = ["InsertOptions", "NBitsOptions", "NodeStyle", "insert"]

_TOLERANCE = 1e-5  # relative tolerance of a bound, because scales are rounded


def insert(model: ir.Model, plan: QuantizationPlan, options: InsertOptions | None = None) -> None:
    """Change the model as the plan says. Raises ModelError if a tensor or reader of the plan is not in the model."""
    options = options or InsertOptions()
    values = {str(value.name): value for value in (*model.graph.inputs, *model.graph.initializers.values())}
    values |= {str(value.name): value for node in model.graph for value in node.outputs}
    for value in (value for node in model.graph for value in node.inputs if value is not None):
        values.setdefault(str(value.name), value)  # a body may read values of outer graphs
    nodes = {str(node.name): node for node in model.graph}
    _check(plan, values, nodes, model)
    dynamic = {r.node for entry in plan if isinstance(entry.choice, DynamicChoice) for r in entry.readers}
    shared: Shared = {}
    for name, node in nodes.items():  # in order: the first reader of a tensor places the quantizer that all share
        if name in dynamic:
            choices = {reader.index: entry for entry in plan for reader in entry.readers if reader.node == name}
            (insert_dynamic_lstm if node.op_type == "LSTM" else insert_dynamic)(model, node, choices, shared)
    packed = dynamic if options.matmul_nbits is None else insert_weight_only(model, nodes, plan, options.matmul_nbits)
    others = {name: node for name, node in nodes.items() if name not in dynamic and name not in packed}
    _insert_static(model, plan, values, others, options)
    if options.has_folded_relu:
        _fold_activations(model)
    dequantize_rows(model)
    remove_dead(model)
    share_tables(model)
    if options.style is NodeStyle.QOPERATOR:
        to_qoperators(model)
    keep_float(model)
    keep_float8_apart(model)
    remove_dead(model)


def _check(plan: QuantizationPlan, values: dict[str, ir.Value], nodes: dict[str, ir.Node], model: ir.Model) -> None:
    """Raise ModelError if the plan is not for this model."""
    for entry in plan:
        if entry.tensor not in values:
            raise ModelError(f"the plan quantizes tensor '{entry.tensor}', which the model does not have")
        for reader in entry.readers:
            node = nodes.get(reader.node)
            read = model.graph.outputs if reader.is_graph_output else node.inputs if node is not None else ()
            actual = read[reader.index] if 0 <= reader.index < len(read) else None
            if actual is None or actual.name != entry.tensor:
                where = f"output {reader.index}" if reader.is_graph_output else f"'{reader.node}' input {reader.index}"
                raise ModelError(f"the plan lets {where} read tensor '{entry.tensor}': the model has it otherwise")
        if entry.role is not Role.ACTIVATION and not is_constant(values[entry.tensor]):
            raise ModelError(
                f"the plan takes tensor '{entry.tensor}' for a {entry.role.value}, but it is not a constant"
            )


def _insert_static(
    model: ir.Model,
    plan: QuantizationPlan,
    values: dict[str, ir.Value],
    nodes: dict[str, ir.Node],
    options: InsertOptions,
) -> None:
    """Insert quantizers for graph outputs and the readers among these nodes."""
    choices = []
    for entry in plan:
        reading = tuple(reader for reader in entry.readers if reader.is_graph_output or reader.node in nodes)
        groups = [(reader,) for reader in reading] if options.has_dedicated_pairs else [reading]
        choices += [replace(entry, readers=group) for group in groups if group]
    # graph outputs last: they rename values
    choices.sort(key=lambda entry: any(reader.is_graph_output for reader in entry.readers))
    before: dict[tuple[str, Choice], ir.Value] = {}
    for entry in choices:
        value = values[entry.tensor]
        if is_implied(entry.choice, options) and value.producer() is not None:
            continue  # the compiler rounds what its operators compute
        if entry.first is not None:
            key = (entry.tensor, entry.first)
            if key not in before:
                before[key] = quantizer_behind(model, value, entry.first, options)
            value = before[key]
        quantized = quantized_constant if is_constant(value) else quantizer_behind
        replacement = quantized(model, value, entry.choice, options)
        for reader in entry.readers:
            if not reader.is_graph_output:
                replace_input(nodes[reader.node], reader.index, replacement)
                continue
            old = model.graph.outputs[reader.index]
            name, old.name = old.name, fresh_name(model, f"{old.name}_float")
            replacement.name = name
            if replacement.shape is None:
                replacement.shape = old.shape
            model.graph.outputs[reader.index] = replacement


def _fold_activations(model: ir.Model) -> None:
    """Remove activations whose effect saturation has already.

        Relu(x) before codes whose lowest one stands for zero          = the codes of x
        Clip(x, a, b) before codes that stand for nothing beyond a, b  = the codes of x

    Applies if nothing else reads the activation. Rounding is monotone, so the codes are the same.
    """
    for node in nodes(model):
        if node.op_type not in ("Relu", "Clip") or node.domain:
            continue
        following, bounds = readers(node.outputs[0]), clip_bounds(node)
        if node.outputs[0].is_graph_output() or not following or bounds is None:
            continue
        if all(_is_within(reader, *bounds) for reader, _ in following):
            bypass(node)


def _is_within(reader: ir.Node, low: float, high: float) -> bool:
    """True if the reader is a QuantizeLinear of the whole tensor whose codes stay within the bounds."""
    scale, zero_point = constant(input_value(reader, 1)), constant(input_value(reader, 2))
    if reader.op_type != "QuantizeLinear" or scale is None or zero_point is None or scale.size != 1:
        return False
    if zero_point.dtype.kind not in "iu":  # 8-bit floats
        return False
    limits = np.iinfo(zero_point.dtype)
    lowest = (limits.min - int(zero_point)) * float(scale)
    highest = (limits.max - int(zero_point)) * float(scale)
    return lowest >= low - _TOLERANCE * abs(low) and highest <= high + _TOLERANCE * abs(high)


def keep_float(model: ir.Model) -> None:
    """Keep ONNX Runtime from quantizing layers that were left in float.

    If a convolution or a Gemm reads codes of one scale, ONNX Runtime quantizes its float weight by itself, to int8 with
    one scale for all of it. The accuracy for which the layer was left in float is lost again, silently. It does so only
    behind a DequantizeLinear with a single scale. So such a layer gets its own DequantizeLinear with the same scale for
    every channel: the same numbers, and its weight stays float. This is not possible with one input channel.
    """
    for node in nodes(model):
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm") or node.domain:
            continue
        value, weight = input_value(node, 0), input_value(node, 1)
        before = None if value is None else value.producer()
        if before is None or before.op_type != "DequantizeLinear" or before.domain not in ("", "com.microsoft"):
            continue
        cast = None if weight is None else weight.producer()
        stored = weight if cast is None or cast.op_type != "Cast" else input_value(cast, 0)  # folded: float16, bfloat16
        if weight is None or stored is None or not is_constant(stored) or weight.dtype is not ir.DataType.FLOAT:
            continue
        scale, zero_point = (constant(input_value(before, index)) for index in (1, 2))
        # the axis of the input that its weight is summed along, and its length
        axis, shape = 1, weight.shape.numpy() if weight.shape else ()
        if node.op_type == "Gemm":
            axis, channels = 0 if attribute(node, "transA", 0) else 1, shape[1 if attribute(node, "transB", 0) else 0]
        else:
            channels = shape[0] if node.op_type == "ConvTranspose" else shape[1] * attribute(node, "group", 1)
        if scale is None or scale.size != 1 or channels < 2:
            continue
        inputs = [before.inputs[0]]
        for name, number in (("scale", scale), ("zero_point", zero_point)):
            if number is not None:
                repeated = np.repeat(number.reshape(1), channels)
                inputs.append(add_initializer(model, f"{node.name}_input_{name}", repeated))
        apart = add_node(
            model,
            before.op_type,
            inputs,
            after=before,
            name=f"{node.name}_input_{before.op_type}",
            domain=before.domain,
            attributes={"axis": axis},
        ).outputs[0]
        apart.type, apart.shape = before.outputs[0].type, before.outputs[0].shape
        replace_input(node, 0, apart)

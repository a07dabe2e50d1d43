"""From QuantizeLinear and DequantizeLinear around float operators to operators on the codes, as ONNX Runtime has them.

    codes -> DequantizeLinear -> Conv -> Relu -> QuantizeLinear -> codes     becomes
    codes -> QLinearConv -> codes

A node is rewritten where all that it computes goes to QuantizeLinear with one scale and zero point. Relu and Clip on
the way there act on the codes instead, and vanish where the range of the codes does as much. Nodes for which there is
no such operator, and the pairs around them, stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quark.onnx.graph import add_initializer, add_node, nodes, opset, remove_dead, replace_value
from quark.onnx.insert.codes import Ending, Parameters, ending
from quark.onnx.insert.integer_forms import FORMS, MICROSOFT, IntegerForm, clip_codes


def to_qoperators(model: ir.Model) -> int:
    """Rewrite what can be, for 8-bit codes with constant parameters; the number of nodes rewritten."""
    count = sum(_rewrite(model, node) for node in nodes(model))
    remove_dead(model)
    return count


@dataclass(frozen=True, eq=False)
class _Result:
    """What happens to the outputs of a node: they become codes with the same parameters. None for one that nobody
    reads."""

    parameters: Parameters
    endings: tuple[Ending | None, ...]


def _rewrite(model: ir.Model, node: ir.Node) -> bool:
    rule = FORMS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if rule is None:
        return False
    result = _result(node)
    form = None if result is None else rule(node, result.parameters, opset(model))
    if form is not None and result is not None:
        _emit_codes(model, node, form, result)
        return True
    form = rule(node, None, opset(model))
    return form is not None and _emit_numbers(model, node, form)


def _result(node: ir.Node) -> _Result | None:
    """None where some output is not quantized, or not as the others are."""
    endings = []
    for value in node.outputs:
        is_read = bool(value.uses()) or value.is_graph_output()
        found = ending(value) if is_read else None
        if is_read and found is None:
            return None
        endings.append(found)
    parameters = [each.parameters for each in endings if each is not None]
    if not parameters or not all(parameters[0].is_same(each) for each in parameters):
        return None
    return _Result(parameters[0], tuple(endings))


def _emit_codes(model: ir.Model, node: ir.Node, form: IntegerForm, result: _Result) -> None:
    made = _emit(model, node, form, len(node.outputs))
    dtype = ir.DataType.from_numpy(result.parameters.dtype)
    for value, old, end in zip(made.outputs, node.outputs, result.endings, strict=True):
        if end is None:
            continue
        _describe(value, dtype, old)
        codes = value
        clip = clip_codes(value, result.parameters, end.lowest, end.highest, opset(model))
        if clip is not None:
            codes = _emit(model, node, clip, 1).outputs[0]
            _describe(codes, dtype, old)
        for quantizer in end.quantizers:
            replace_value(quantizer.outputs[0], codes)


def _emit_numbers(model: ir.Model, node: ir.Node, form: IntegerForm) -> bool:
    made = _emit(model, node, form, 1).outputs[0]
    made.type, made.shape = node.outputs[0].type, node.outputs[0].shape
    return replace_value(node.outputs[0], made)


def _emit(model: ir.Model, node: ir.Node, form: IntegerForm, outputs: int) -> ir.Node:
    """The node of a form, before the one that it stands for."""
    name = f"{node.name}_{form.op_type}"
    inputs = [add_initializer(model, name, each) if isinstance(each, np.ndarray) else each for each in form.inputs]
    if form.domain == MICROSOFT:
        model.opset_imports.setdefault(MICROSOFT, 1)
    return add_node(
        model,
        form.op_type,
        inputs,
        before=node,
        name=name,
        domain=form.domain,
        attributes=form.attributes,
        outputs=outputs,
    )


def _describe(value: ir.Value, dtype: ir.DataType, old: ir.Value) -> None:
    value.type, value.shape = ir.TensorType(dtype), old.shape

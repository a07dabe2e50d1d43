"""Fuse a Gelu that was taken apart into the operator Gelu.

    x * 0.5 * (1 + erf(x / sqrt(2)))                                 becomes   Gelu(x)
    x * 0.5 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))        becomes   Gelu(x, approximate="tanh")

with the products in any order. Applies from opset 20 on, which has the operator, when nothing else reads what is in
between.
"""

from __future__ import annotations

import math
from typing import ClassVar

import onnx_ir as ir

from quark.onnx.graph import become, input_value, is_read_once, nodes, opset, readers
from quark.onnx.optimize.normalization import made_by
from quark.onnx.optimize.rewrite import scalar
from quark.text import get_logger

MIN_OPSET = 20
TOLERANCE = 1e-3  # relative: exporters write these constants with four digits or with seven

_log = get_logger(__name__)


class FuseGelu:
    name: ClassVar[str] = "fuse_gelu"
    is_default: ClassVar[bool] = True

    def apply(self, model: ir.Model) -> int:
        matches = [match for node in nodes(model) if (match := _match(node)) is not None]
        if opset(model) < MIN_OPSET:
            if matches:
                _log.info("%d Gelu stay as they are: opset %d has no Gelu (20 has)", len(matches), opset(model))
            return 0
        for last, x, approximate in matches:
            become(last, "Gelu", [x], {"approximate": approximate})
        return len(matches)


def _match(node: ir.Node) -> tuple[ir.Node, ir.Value, str] | None:
    """The last node of a Gelu around this Erf or Tanh, its input, and which approximation it is."""
    if node.domain or node.op_type not in ("Erf", "Tanh"):
        return None
    x = _erf_argument(node) if node.op_type == "Erf" else _tanh_argument(node)
    plus_one = _only_reader(node)
    if x is None or plus_one is None or plus_one.op_type != "Add" or not _has_number(plus_one, 1.0):
        return None
    last = _times_half_x(plus_one, x)
    return None if last is None else (last, x, "none" if node.op_type == "Erf" else "tanh")


def _erf_argument(erf: ir.Node) -> ir.Value | None:
    value = input_value(erf, 0)
    div, mul = made_by(value, "Div"), made_by(value, "Mul")
    if div is not None and _is_near(scalar(input_value(div, 1)), math.sqrt(2)):
        return input_value(div, 0)
    return _other_operand(mul, math.sqrt(0.5))


def _tanh_argument(tanh: ir.Node) -> ir.Value | None:
    inner = made_by(_other_operand(made_by(input_value(tanh, 0), "Mul"), math.sqrt(2 / math.pi)), "Add")
    if inner is None:
        return None
    for index in (0, 1):
        x = input_value(inner, 1 - index)
        cube = _other_operand(made_by(input_value(inner, index), "Mul"), 0.044715)
        if x is not None and cube is not None and _is_cube(cube, x):
            return x
    return None


def _is_cube(value: ir.Value, x: ir.Value) -> bool:
    power, product = made_by(value, "Pow"), made_by(value, "Mul")
    if power is not None:
        return input_value(power, 0) is x and scalar(input_value(power, 1)) == 3
    if product is None:
        return False
    for index in (0, 1):
        square = made_by(input_value(product, index), "Mul")
        is_square = square is not None and input_value(square, 0) is x and input_value(square, 1) is x
        if is_square and input_value(product, 1 - index) is x:
            return True
    return False


def _times_half_x(node: ir.Node, x: ir.Value) -> ir.Node | None:
    """The node at which the product of this one with x and 0.5 is complete, following its only readers."""
    has_x = has_half = False
    while not (has_x and has_half):
        reader = _only_reader(node)
        if reader is None or reader.op_type != "Mul" or reader.domain:
            return None
        other = next((value for value in reader.inputs if value is not node.outputs[0]), None)
        if other is x and not has_x:
            has_x = True
        elif _is_near(scalar(other), 0.5) and not has_half:
            has_half = True
        elif _other_operand(made_by(other, "Mul"), 0.5) is x and not has_x and not has_half:
            has_x = has_half = True
        else:
            return None
        node = reader
    return node


def _only_reader(node: ir.Node) -> ir.Node | None:
    if not is_read_once(node.outputs[0]):
        return None
    reader = readers(node.outputs[0])[0][0]
    return reader if reader.graph is node.graph else None


def _other_operand(node: ir.Node | None, number: float) -> ir.Value | None:
    """What a node of two inputs has beside the constant `number`."""
    for index in (0, 1):
        if node is not None and _is_near(scalar(input_value(node, index)), number):
            return input_value(node, 1 - index)
    return None


def _has_number(node: ir.Node, number: float) -> bool:
    return any(scalar(value) == number for value in node.inputs)


def _is_near(number: float | None, wanted: float) -> bool:
    return number is not None and math.isclose(number, wanted, rel_tol=TOLERANCE)

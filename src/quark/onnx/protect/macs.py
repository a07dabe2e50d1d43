"""The multiply-accumulates of every layer, with the shapes that a sample has."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from quark.onnx.mix.candidates import weight_count
from quark.onnx.protect.structures import PRODUCTS

Shapes = Mapping[str, tuple[int, ...]]


def tensors_to_size(model: ir.Model) -> list[str]:
    """The computed tensors whose shapes `layer_macs` needs."""
    names: dict[str, None] = {}
    for node in model.graph:
        if node.op_type in PRODUCTS:
            values = (node.inputs[0], node.outputs[0])
            names.update({str(value.name): None for value in values if value is not None and value.producer()})
    return list(names)


def layer_macs(model: ir.Model, shapes: Shapes) -> dict[str, int]:
    """The multiply-accumulates of one run by the name of the node; layers of unknown shape count as none."""
    found: dict[str, int] = {}
    for node in model.graph:
        if node.op_type not in PRODUCTS:
            continue
        weights = weight_count(node)
        given, made = shapes.get(_name(node.inputs[0])), shapes.get(_name(node.outputs[0]))
        if node.op_type == "Conv" and weights and made:
            macs = weights * made[0] * math.prod(made[2:])
        elif node.op_type == "ConvTranspose" and weights and given:
            macs = weights * given[0] * math.prod(given[2:])
        elif given and made:
            macs = given[-1] * math.prod(made)
        else:
            macs = 0
        found[str(node.name)] = macs
    return found


def _name(value: ir.Value | None) -> str:
    return "" if value is None else str(value.name)

"""The layers that could have lower types, with the number of their weights and multiplications.

    Conv            every weight takes part once for each position of the output
    ConvTranspose   every weight takes part once for each position of the input
    Gemm            every weight once
    MatMul          every weight once for each row; of two activations, the width of the first for each output

All of it for one sample: the first dimension of an activation counts as 1. Where others are not known, the number of
multiplications is None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

import onnx_ir as ir

from quark.errors import unknown_name
from quark.mixed_precision import LayerPrecision
from quark.onnx.graph import is_constant
from quark.onnx.mix.options import MixOptions


def candidates(model: ir.Model, names: Collection[str], options: MixOptions) -> tuple[LayerPrecision, ...]:
    """Of the nodes of those names the ones that the options want, in the order of the graph. A pattern that finds no
    node is an error."""
    nodes = [node for node in model.graph if str(node.name) in names and node.op_type in options.op_types]
    everything = [str(node.name) for node in model.graph]
    included = _matching(everything, options.included, "IncludeLayers") if options.included else set(everything)
    excluded = _matching(everything, options.excluded, "ExcludeLayers")
    chosen = [node for node in nodes if str(node.name) in included - excluded]
    return tuple(
        LayerPrecision(str(node.name), node.op_type, weights=weight_count(node), macs=multiplications(node))
        for node in chosen
    )


def weight_count(node: ir.Node) -> int:
    """The elements of its constant weight; 0 where both operands are activations."""
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    if weight is None or not is_constant(weight) or weight.shape is None:
        return 0
    return math.prod(_sizes(weight.shape, 0) or [0])


def multiplications(node: ir.Node) -> int | None:
    """For one sample; None where shapes are not known, 0 for operators that sum no products."""
    weights, op_type = weight_count(node), node.op_type
    if op_type == "Gemm":
        return weights or None
    if op_type in ("Conv", "ConvTranspose"):
        value = node.outputs[0] if op_type == "Conv" else node.inputs[0]
        places = _sizes(value.shape, 2) if value is not None else None
        return None if places is None or not weights else weights * math.prod(places)
    return _of_matmul(node, weights) if op_type == "MatMul" else 0


def _of_matmul(node: ir.Node, weights: int) -> int | None:
    left, output = node.inputs[0], node.outputs[0]
    width = None if left is None or left.shape is None else left.shape[-1]
    if weights and left is not None and left.shape is not None:
        rows = _sizes(left.shape, 1)
        return None if rows is None else weights * math.prod(rows[:-1])
    results = _sizes(output.shape, 1)
    return None if results is None or not isinstance(width, int) else width * math.prod(results)


def _sizes(shape: ir.Shape | None, start: int) -> list[int] | None:
    """The dimensions from `start` on; None where one of them is not a number."""
    sizes = None if shape is None else list(shape)[start:]
    return sizes if sizes is not None and all(isinstance(size, int) for size in sizes) else None  # type: ignore[return-value]


def _matching(names: Sequence[str], patterns: Sequence[str], option: str) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        matching = [name for name in names if name == pattern] or [n for n in names if _is_match(pattern, n)]
        if not matching:
            raise unknown_name(f"node ({option})", pattern, names)
        found.update(matching)
    return found


def _is_match(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False

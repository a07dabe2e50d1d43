"""Tensors whose values are those of another tensor, moved, so that the range of the other one serves both."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir


def range_sources(model: ir.Model, op_types: Collection[str]) -> dict[str, str]:
    """Return, for outputs of these operators, the nearest tensor before them that another operator computes, along the
    first inputs. Outputs that come from a constant, or from something else than floats, have none."""
    sources: dict[str, str] = {}
    for node in model.graph:
        first = node.inputs[0] if node.inputs else None
        if node.op_type not in op_types or first is None or first.name is None:
            continue
        source = sources.get(first.name, first.name)
        is_moved = first.name in sources or _is_float_activation(model, first)
        if is_moved:
            sources |= {str(value.name): source for value in node.outputs if _is_float_activation(model, value)}
    return sources


def _is_float_activation(model: ir.Model, value: ir.Value) -> bool:
    is_float = value.dtype is None or value.dtype.is_floating_point()
    return is_float and value.name is not None and value.name not in model.graph.initializers

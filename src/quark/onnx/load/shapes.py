"""Sizes of inputs that the user fixes."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from quark.errors import InvalidValueError, unknown_name


def fix_shapes(model: ir.Model, fixed: tuple[tuple[str, tuple[int, ...]], ...]) -> list[str]:
    """Give inputs the sizes that the user wants; a lone shape under the name '' is for every input.

    A size that the model fixes already cannot be changed. Sizes of values inside that were not known are forgotten, so
    that they are inferred again.
    """
    if not fixed:
        return []
    inputs = {value.name: value for value in model.graph.inputs if value.name}
    bindings: dict[str, int] = {}
    remarks = []
    for name, shape in fixed:
        if name and name not in inputs:
            raise unknown_name("input of the model", name, inputs)
        for value in [inputs[name]] if name else inputs.values():
            bindings |= _fix(value, shape)
            remarks.append(f"shape of input '{value.name}' fixed to {list(shape)}")
    _forget_or_bind(model, bindings)
    return remarks


def _fix(value: ir.Value, shape: tuple[int, ...]) -> dict[str, int]:
    """Set the shape of an input; return what its symbols stand for."""
    if any(size < 1 for size in shape):
        raise InvalidValueError(f"shape {list(shape)} for input '{value.name}': expected sizes from 1 on")
    old = list(value.shape) if value.shape is not None else [None] * len(shape)
    if len(old) != len(shape) or any(
        isinstance(had, int) and had != size for had, size in zip(old, shape, strict=True)
    ):
        raise InvalidValueError(
            f"shape {list(shape)} for input '{value.name}', which is {_written(old)}: the rank and the sizes that are "
            "numbers cannot change"
        )
    value.shape = ir.Shape(shape)
    return {
        had.value: size for had, size in zip(old, shape, strict=True) if isinstance(had, ir.SymbolicDim) and had.value
    }


def _forget_or_bind(model: ir.Model, bindings: dict[str, int]) -> None:
    for graph in model.graphs():
        for node in graph:
            for value in node.outputs:
                if value.shape is None or value.shape.is_static():
                    continue
                bound = [bindings.get(str(size), size) if not isinstance(size, int) else size for size in value.shape]
                if value.is_graph_output() or all(isinstance(size, int) for size in bound):
                    value.shape = ir.Shape(bound)
                else:
                    value.shape = None


def _written(dims: Sequence[int | ir.SymbolicDim | None]) -> str:
    return "[" + ", ".join("?" if size is None else str(size) for size in dims) + "]"

"""Inputs and outputs with channels last, as NPUs and cameras have them; the network inside stays as it is."""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.graph import add_node, dimensions, fresh_name, replace_input
from quark.text import get_logger

TO_CHANNELS_FIRST, TO_CHANNELS_LAST = (0, 3, 1, 2), (0, 2, 3, 1)

_LOG = get_logger(__name__)


def to_channels_last(model: ir.Model) -> tuple[str, ...]:
    """Turn inputs and outputs [n, c, h, w] into [n, h, w, c], by a Transpose at each; return the names of these inputs.

    Inputs keep their names, and an output `y` becomes `y_transpose`. Tensors without four dimensions, or whose
    channels, height and width are not all known, stay as they are, with a warning.
    """
    first, turned = next(iter(model.graph), None), []
    for value in model.graph.inputs:
        if not _is_image(value):
            continue
        uses = list(value.uses())
        inner = _transpose(model, value, TO_CHANNELS_FIRST, before=first)
        inner.shape = value.shape
        for use in uses:
            replace_input(use.node, use.idx, inner)
        value.shape = _permuted(value.shape, TO_CHANNELS_LAST)
        turned.append(str(value.name))
    for index, value in enumerate(list(model.graph.outputs)):
        if _is_image(value) and value.name not in turned:
            outer = _transpose(model, value, TO_CHANNELS_LAST)
            outer.shape = _permuted(value.shape, TO_CHANNELS_LAST)
            model.graph.outputs[index] = outer
    return tuple(turned)


def _is_image(value: ir.Value) -> bool:
    sizes = dimensions(value)
    if sizes is None or len(sizes) != 4 or None in sizes[1:]:
        shape = "unknown" if value.shape is None else value.shape
        _LOG.warning(
            "'%s' of shape %s keeps its layout: expected [n, c, h, w] with known c, h and w", value.name, shape
        )
        return False
    return True


def _transpose(model: ir.Model, value: ir.Value, order: tuple[int, ...], before: ir.Node | None = None) -> ir.Value:
    name = fresh_name(model, f"{value.name}_transpose")
    node = add_node(model, "Transpose", [value], before=before, attributes={"perm": order})
    node.name = node.outputs[0].name = name
    node.outputs[0].type = value.type
    return node.outputs[0]


def _permuted(shape: ir.Shape | None, order: tuple[int, ...]) -> ir.Shape | None:
    return None if shape is None else ir.Shape([shape[axis] for axis in order])

"""What the NPU's compiler wants of a file as a whole: an opset that it reads, and sizes that are known beforehand."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from quark.onnx.graph import dimensions, opset
from quark.onnx.lint.file_quantizers import FileQuantizers
from quark.onnx.lint.finding import Finding, Level

RECOMMENDED_OPSET = 17
READABLE_OPSETS = range(11, 23)  # before, Clip has its bounds as attributes; beyond, everything runs on the CPU
USUAL_OPSETS = range(13, 21)  # the compiler knows every operator of these


def check_opset(model: ir.Model, _: FileQuantizers) -> Iterator[Finding]:
    version = opset(model)
    if version in USUAL_OPSETS:
        return
    level = Level.WARNING if version in READABLE_OPSETS else Level.ERROR
    message = f"opset {version}, expected {USUAL_OPSETS[0]} to {USUAL_OPSETS[-1]}, best {RECOMMENDED_OPSET}"
    fix = f"export the float model for opset {RECOMMENDED_OPSET}"
    if version < RECOMMENDED_OPSET:
        fix = f"quantize with ConvertOpsetVersion: {RECOMMENDED_OPSET}"
    yield Finding("Opset", "", "", level, message, fix)


def check_inputs(model: ir.Model, _: FileQuantizers) -> Iterator[Finding]:
    """Every size of every input is fixed, and the batch is 1. A free batch alone can be bound by the compiler."""
    for value in model.graph.inputs:
        name, sizes = str(value.name), dimensions(value)
        if sizes is None:
            message = "the shape of the input is not known, expected fixed sizes"
            yield Finding("FixedShape", "", name, Level.ERROR, message, _fix(name, None))
            continue
        free = [axis for axis, size in enumerate(sizes) if size is None]
        shape = "[" + ", ".join(str(size) for size in value.shape or ()) + "]"
        if free == [0]:
            message = f"the batch of {shape} is free, expected 1; a compiler may bind it"
            yield Finding("Batch", "", name, Level.WARNING, message, _fix(name, sizes))
        elif free:
            message = f"axis {', '.join(map(str, free))} of {shape} is free, expected fixed sizes"
            yield Finding("FixedShape", "", name, Level.ERROR, message, _fix(name, sizes))
        if len(sizes) > 1 and sizes[0] not in (None, 1):
            fix = "export the model with a batch of 1, or a free one"
            yield Finding("Batch", "", name, Level.ERROR, f"the batch of {shape} is {sizes[0]}, expected 1", fix)


def _fix(name: str, sizes: tuple[int | None, ...] | None) -> str:
    if sizes is None:
        return f"quantize with FixShapes: '{name}:[1, ...]', with all sizes"
    wanted = [size or ("1" if not axis else "...") for axis, size in enumerate(sizes)]
    return f"quantize with FixShapes: '{name}:[{','.join(map(str, wanted))}]'"

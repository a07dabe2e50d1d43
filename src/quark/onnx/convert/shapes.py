"""Shapes of tensors: sizes for the free dimensions of inputs, and a declared shape for every tensor.

ONNX's inference finds most shapes. The others are observed in two runs of ONNX Runtime on random data. A shape that
depends on the data, as that of everything behind a NonMaxSuppression, has no size to declare and stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import helper

from quark.errors import InvalidValueError, UnsupportedTypeError, unknown_name
from quark.onnx.data.samples import input_infos
from quark.onnx.graph import infer_shapes, read_by
from quark.onnx.load.normalize import fix_shapes
from quark.onnx.load.reading import to_graph
from quark.onnx.load.wire import Carved
from quark.onnx.quantization.config.option_kinds import fixed_shapes
from quark.onnx.session import open_session, ort_values, running
from quark.text import get_logger

Shape = tuple[int, ...]
SEEDS = (42, 43)
OF_DATA_DEPENDENT_SHAPE = frozenset({"NonMaxSuppression", "NonZero", "Unique", "Compress"})

_LOG = get_logger(__name__)


def parse_shapes(text: str) -> dict[str, Shape]:
    """The shapes that a text such as 'input_1:[1,224,224,3];output_1:[1,1000]' gives to tensors.

    >>> parse_shapes("input:[1,3,224,224]; output:[1,1000]")
    {'input': (1, 3, 224, 224), 'output': (1, 1000)}
    """
    return dict(fixed_shapes(text))


def declared_shapes(infos: Sequence[onnx.ValueInfoProto]) -> dict[str, list[int]]:
    """Name to shape as the model declares it; 0 stands for a size that is not a number."""
    return {info.name: [dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in infos}


# ---------------------------------------------------------------- from free sizes to fixed ones
def fix_input_shapes(model: onnx.ModelProto, shapes: Mapping[str, Shape]) -> onnx.ModelProto:
    """Give inputs these shapes, in place; outputs and declared tensors get those that follow.

    The rank and the sizes that are numbers cannot change. Raises InvalidValueError that names the input.
    """
    graph = _graph(model)
    fix_shapes(graph, tuple(shapes.items()))
    infer_shapes(graph)
    names = {info.name for info in (*model.graph.input, *model.graph.output, *model.graph.value_info)}
    _declare(model, {name: value for name, value in _values(graph).items() if name in names})
    return model


def fix_input_and_output_shapes(model: onnx.ModelProto, shapes: Mapping[str, Shape]) -> onnx.ModelProto:
    """Give inputs and outputs these shapes, in place.

    Raises InvalidValueError if an output cannot have the shape: it has another rank, or a size that follows from the
    inputs is another one.
    """
    ports = [info.name for info in (*model.graph.input, *model.graph.output)]
    for name in shapes:
        if name and name not in ports:
            raise unknown_name("input or output of the model", name, ports)
    outputs = {info.name for info in model.graph.output} - {info.name for info in model.graph.input}
    fix_input_shapes(model, {name: shape for name, shape in shapes.items() if name not in outputs})
    for info in model.graph.output:
        shape = shapes.get(info.name)
        if shape is None:
            continue
        declared = info.type.tensor_type.shape
        known = [dim.dim_value if dim.HasField("dim_value") else None for dim in declared.dim]
        has_rank = info.type.tensor_type.HasField("shape")
        is_possible = len(known) == len(shape) and all(
            had in (None, size) for had, size in zip(known, shape, strict=True)
        )
        if has_rank and not is_possible:
            written = ", ".join("?" if size is None else str(size) for size in known)
            raise InvalidValueError(
                f"shape {list(shape)} for output '{info.name}', which is [{written}] with these inputs: leave the "
                "output out, or give inputs that lead to it"
            )
        _set_shape(info, shape)
    return model


# ---------------------------------------------------------------- a shape for every tensor
def random_feeds(model: onnx.ModelProto, seed: int = SEEDS[0]) -> dict[str, NDArray[Any]]:
    """Random numbers from 0 to 1 for every input, as its type: integers are 0.

    Raises InvalidValueError if an input has a free dimension.
    """
    generator = np.random.RandomState(seed)
    feeds = {}
    for info in input_infos(_graph(model)):
        if info.shape is None or not all(isinstance(size, int) for size in info.shape):
            raise InvalidValueError(
                f"input {info} has sizes that are not fixed. Give its shape: --fix_shapes '{info.name}:[1,...]'"
            )
        if info.dtype.kind not in "biufV":
            raise UnsupportedTypeError(f"input {info}: expected numbers, because the shapes are observed in a run")
        feeds[info.name] = generator.random_sample(info.shape).astype(info.dtype)  # type: ignore[arg-type]
    return feeds


def tensor_shapes(model: onnx.ModelProto) -> dict[str, Shape]:
    """The shape of every tensor that a node of the main graph computes, except where it depends on the data."""
    return {name: tuple(value.shape.numpy()) for name, value in _computed(model).items() if value.shape is not None}


def assign_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Declare type and shape of every tensor of the main graph, in place, as far as they are the same for all data."""
    _declare(model, _computed(model))
    for node in model.graph.node:
        if node.op_type in OF_DATA_DEPENDENT_SHAPE:
            _LOG.warning(
                "%s '%s': sizes behind it that depend on the data stay unknown",
                node.op_type,
                node.name or node.output[0],
            )
    return model


def declare_shapes(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> onnx.ModelProto:
    """Declare these shapes of tensors, in place, with the types that the model says or that follow from it."""
    graph = _graph(model)
    infer_shapes(graph)
    values = _values(graph)
    for name, shape in shapes.items():
        if name not in values:
            raise unknown_name("tensor of the graph", name, values)
        values[name].shape = ir.Shape(shape)
    _declare(model, {name: values[name] for name in shapes})
    return model


def _computed(model: onnx.ModelProto) -> dict[str, ir.Value]:
    """The tensors that nodes of the main graph compute, with type and shape if the shape is fixed."""
    feeds = random_feeds(model)  # an error if the sizes of inputs are not known
    graph = _graph(model)
    graph.graph.sort()
    values = {str(value.name): value for node in graph.graph for value in node.outputs if value.name}
    for value in values.values():  # shapes must follow from the inputs, and not from earlier declarations
        value.shape = None
    infer_shapes(graph)
    changing = _data_dependent(graph)
    unknown = [name for name, value in values.items() if not _is_static(value) and name not in changing]
    if unknown:
        _observe(model, values, unknown, feeds)
    return {name: value for name, value in values.items() if value.type is not None and _is_static(value)}


def _graph(model: onnx.ModelProto) -> ir.Model:
    return to_graph(Carved(model, {}), {}, model.graph.name or "model")


def _is_static(value: ir.Value) -> bool:
    return value.shape is not None and value.shape.is_static()


def _data_dependent(graph: ir.Model) -> set[str]:
    """Tensors behind operators whose shape depends on the data, unless inference knows their shape."""
    changing: set[str] = set()
    for node in graph.graph:
        is_source = node.op_type in OF_DATA_DEPENDENT_SHAPE and not node.domain
        if is_source or any(value.name in changing for value in read_by(node)):
            changing.update(str(value.name) for value in node.outputs if not _is_static(value))
    return changing


def _observe(
    model: onnx.ModelProto, values: Mapping[str, ir.Value], names: list[str], feeds: dict[str, NDArray[Any]]
) -> None:
    """Set type and shape of these values to those of two runs, if both have the same."""
    session = open_session(model, extra_outputs=names, has_optimizations=False)
    with running("the model on random data, to see the shapes of tensors"):
        given = (ort_values(inputs) for inputs in (feeds, random_feeds(model, SEEDS[1])))
        runs = [session.run_with_ort_values(names, feeds_of_run) for feeds_of_run in given]
    for name, first, second in zip(names, *runs, strict=True):
        if not first.is_tensor():
            continue
        if first.shape() != second.shape():
            _LOG.warning("tensor '%s': its shape depends on the data and stays unknown", name)
            continue
        values[name].shape = ir.Shape(first.shape())
        if values[name].type is None:
            values[name].type = ir.TensorType(ir.DataType(first.element_type()))


def _values(graph: ir.Model) -> dict[str, ir.Value]:
    computed = (value for node in graph.graph for value in node.outputs)
    return {str(value.name): value for value in (*graph.graph.inputs, *computed) if value.name}


def _declare(model: onnx.ModelProto, values: Mapping[str, ir.Value]) -> None:
    """Write types and shapes of values to where the model declares them: inputs, outputs or `value_info`."""
    declared = {info.name: info for info in (*model.graph.value_info, *model.graph.output, *model.graph.input)}
    for name, value in values.items():
        if value.type is None:
            continue
        info = declared.get(name)
        if info is None:
            info = model.graph.value_info.add()
        elif value.shape is None:  # declared with sizes that no longer hold
            if info.type.HasField("tensor_type"):
                info.type.tensor_type.ClearField("shape")
            continue
        info.CopyFrom(ir.serde.serialize_value(value))


def _set_shape(info: onnx.ValueInfoProto, shape: Shape) -> None:
    kind = info.type.tensor_type.elem_type
    info.CopyFrom(helper.make_tensor_value_info(info.name, kind, shape, info.doc_string))

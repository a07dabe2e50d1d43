"""Types and shapes of all tensors of a model, taken from a run with one sample, as compilers want them in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx import helper

from quark.onnx.large_tensors import Message
from quark.onnx.session import open_session, ort_values, release_memory, running


def declare_all(message: Message, sample: Mapping[str, Any], providers: Sequence[str]) -> None:
    """Declare the type and shape of every tensor that nodes of the graph compute, in place. Sizes are those of the
    sample; free sizes of inputs and outputs get them, too. Values that are not tensors are left out."""
    graph = message.proto.graph
    names = list(dict.fromkeys(name for node in graph.node for name in node.output if name))
    session = open_session(message.to_graph(), extra_outputs=names, providers=tuple(providers), has_optimizations=False)
    with running("the quantized model"):
        values = session.run_with_ort_values(names, ort_values(sample))
    infos = {
        name: helper.make_tensor_value_info(name, value.element_type(), value.shape())
        for name, value in zip(names, values, strict=True)
        if value.is_tensor()
    }
    del session, values
    release_memory()
    for port in graph.input:
        if port.name in sample:
            _fix_sizes(port, sample[port.name].shape)
    for port in graph.output:
        declared = infos.pop(port.name, None)
        if declared is not None:
            _fix_sizes(port, [dim.dim_value for dim in declared.type.tensor_type.shape.dim])
    kept = [info for info in graph.value_info if info.name not in infos]
    del graph.value_info[:]
    graph.value_info.extend([*kept, *infos.values()])


def _fix_sizes(port: onnx.ValueInfoProto, sizes: Sequence[int]) -> None:
    """Replace the sizes of an input or output that are not numbers."""
    dims = port.type.tensor_type.shape.dim
    if len(dims) != len(sizes):
        del dims[:]
        dims.extend(onnx.TensorShapeProto.Dimension(dim_value=size) for size in sizes)
    for dim, size in zip(dims, sizes, strict=True):
        if not dim.HasField("dim_value"):
            dim.dim_value = size

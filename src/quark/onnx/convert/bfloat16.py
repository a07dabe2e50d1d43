"""The forms of bfloat16 quantizers in a file: operators of com.amd.quark, pairs of Casts, or rounded weights alone.

    insert_clip_bfloat16_qdq     a Clip before each quantizer, so that large numbers saturate on every runtime
    replace_bfloat16_qdq_cast    Casts instead of the operators
    remove_bf16_cast             no Casts: weights are stored rounded, activations stay in float32

All of them change the model that they are given, and return it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from quark.onnx.convert.operators import custom_quantizers, drop_unused, ranks_of
from quark.onnx.graph import FreeNames
from quark.ops.onnx_nodes import all_nodes, describe, subgraphs
from quark.ops.schema import EXTENDED_AXIS, EXTENDED_QUANTIZE_LINEAR
from quark.text import get_logger

MAX_BFLOAT16 = 3.38953139e38  # from AMD's files: exactly the largest finite bfloat16 when stored in float32

Readers = dict[str, list[NodeProto]]
Array = NDArray[Any]

_log = get_logger(__name__)


# ---- operators of com.amd.quark ----


def has_custom_bfloat16(model: ModelProto) -> bool:
    """True if a quantizer of com.amd.quark rounds to bfloat16."""
    return any(_bfloat16_parameters(node, known) for _, node, known in custom_quantizers(model.graph))


def insert_clip_bfloat16_qdq(model: ModelProto) -> ModelProto:
    """Put a Clip to the largest bfloat16 number before every activation that is quantized to bfloat16."""
    names = _names(model)
    clips: dict[tuple[int, str], NodeProto] = {}  # one for all quantizers of a tensor, before the first of them
    before: dict[str, list[NodeProto]] = {}
    places = list(custom_quantizers(model.graph))
    for graph, node, known in places:
        parameters = _bfloat16_parameters(node, known)
        is_clippable = parameters is not None and parameters[0].dtype == np.float32
        if node.op_type != EXTENDED_QUANTIZE_LINEAR.name or not is_clippable or node.input[0] in known:
            continue
        tensor, key = node.input[0], (id(graph), node.input[0])
        if key not in clips:
            bounds = []
            for suffix, bound in (("min", -MAX_BFLOAT16), ("max", MAX_BFLOAT16)):
                name = names.free(f"{tensor}_clip_{suffix}")
                graph.initializer.append(numpy_helper.from_array(np.array(bound, np.float32), name))
                bounds.append(name)
            output = names.free(f"{tensor}_clip_output")
            clips[key] = helper.make_node("Clip", [tensor, *bounds], [output], f"{tensor}_Clip")
            before[_key(node)] = [clips[key], node]
        node.input[0] = clips[key].output[0]
    for graph in _graphs(model.graph):
        _rebuild(graph, before)
    return model


def replace_bfloat16_qdq_cast(model: ModelProto) -> ModelProto:
    """Replace quantizers of com.amd.quark that round to bfloat16 by Casts, and a Mul if their scale is not 1.

    A Cast turns numbers beyond bfloat16 into Inf, where the quantizer saturates: `insert_clip_bfloat16_qdq` before it
    keeps them finite. Quantizers whose scale or zero point is not a constant stay, and so do zero points other than 0.
    """
    names = _names(model)
    places = [(graph, node, _bfloat16_parameters(node, known)) for graph, node, known in custom_quantizers(model.graph)]
    is_by_axis = any(parameters is not None and parameters[0].size > 1 for _, _, parameters in places)
    ranks = ranks_of(model) if is_by_axis else {}
    replaced: dict[str, list[NodeProto]] = {}
    for graph, node, parameters in places:
        if parameters is None or parameters[1].any():
            continue
        scale = _shaped(node, parameters[0], ranks)
        if scale is None:
            _log.warning("%s stays: the rank of its input is unknown, and it has several scales", describe(node))
            continue
        replaced[_key(node)] = _casts(graph, node, scale, names)
    for graph in _graphs(model.graph):
        _rebuild(graph, replaced)
    drop_unused(model)
    return model


def _casts(graph: GraphProto, node: NodeProto, scale: Array, names: FreeNames) -> list[NodeProto]:
    """The nodes that do the same as a quantizer, or as half of one."""
    is_quantizing = node.op_type == EXTENDED_QUANTIZE_LINEAR.name
    to = TensorProto.BFLOAT16 if is_quantizing else helper.np_dtype_to_tensor_dtype(scale.dtype)
    stem, source, target = node.name or node.output[0], node.input[0], node.output[0]
    if bool((scale == 1).all()):
        return [helper.make_node("Cast", [source], [target], node.name, to=to)]
    factor, between = names.free(f"{stem}_scale"), names.free(f"{stem}_scaled")
    number = (1 / scale if is_quantizing else scale).astype(scale.dtype)
    graph.initializer.append(numpy_helper.from_array(number, factor))
    if is_quantizing:
        return [
            helper.make_node("Mul", [source, factor], [between], f"{stem}_Mul"),
            helper.make_node("Cast", [between], [target], node.name, to=to),
        ]
    return [
        helper.make_node("Cast", [source], [between], node.name, to=to),
        helper.make_node("Mul", [between, factor], [target], f"{stem}_Mul"),
    ]


def _shaped(node: NodeProto, scale: Array, ranks: Mapping[str, int]) -> Array | None:
    """The scales in a shape that broadcasts with the quantized tensor; None if its rank is unknown."""
    if scale.size == 1:
        return scale.reshape(())
    rank = ranks.get(node.input[0], ranks.get(node.output[0]))
    if rank is None:
        return None
    axis = next((attr.i for attr in node.attribute if attr.name == EXTENDED_AXIS.name), int(EXTENDED_AXIS.default or 0))
    shape = [1] * rank
    shape[axis if rank > 1 else 0] = scale.size
    return scale.reshape(shape)


def _bfloat16_parameters(node: NodeProto, known: Mapping[str, TensorProto]) -> tuple[Array, Array] | None:
    """Scale and zero point of a quantizer to bfloat16; None for other types, or if one of them is not a constant."""
    given = [known.get(name) for name in node.input[1:3]]
    if len(given) < 2 or given[0] is None or given[1] is None or given[1].data_type != TensorProto.BFLOAT16:
        return None
    return numpy_helper.to_array(given[0]), numpy_helper.to_array(given[1]).astype(np.float32)


# ---- Casts ----


def remove_bf16_cast(model: ModelProto) -> ModelProto:
    """Remove pairs of Casts to bfloat16 and back. Weights behind them are stored rounded; the network is in float32.

    A pair at an input of the graph stays, so that the network sees its inputs in bfloat16.
    """
    readers = get_input_tensor_to_node_dict(model)
    model = remove_couples_of_cast(model, readers)
    model = convert_bf16_cast_to_fp32_weights(model, readers)
    return remove_output_cast(model, readers)


def has_bfloat16_casts(model: ModelProto) -> bool:
    """True if the model casts to bfloat16, or casts weights that are stored in it."""
    stored = {tensor.name for graph in _graphs(model.graph) for tensor in graph.initializer if _is_brain(tensor)}
    nodes = [node for node in all_nodes(model.graph.node) if node.op_type == "Cast"]
    return any(_is_cast(node, TensorProto.BFLOAT16) or node.input[0] in stored for node in nodes)


def get_input_tensor_to_node_dict(model: ModelProto) -> Readers:
    """The nodes that read each tensor, also those inside of subgraphs."""
    readers: Readers = {}
    for node in all_nodes(model.graph.node):
        for name in dict.fromkeys(node.input):
            if name:
                readers.setdefault(name, []).append(node)
    return readers


def remove_couples_of_cast(model: ModelProto, input_tensor_to_node_dict: Readers) -> ModelProto:
    """Remove pairs of Casts between two nodes. `input_tensor_to_node_dict` is brought up to date."""
    readers, outputs = input_tensor_to_node_dict, _outputs(model)
    gone: set[str] = set()
    for node in list(all_nodes(model.graph.node)):
        for name in node.output:
            for first, second in _couples(name, readers):
                if second.output[0] not in outputs:
                    _redirect(second.output[0], name, readers)
                    gone.update(_detached(name, first, second, readers))
    _remove(model, gone)
    return model


def float32_to_bfloat16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The numbers rounded to bfloat16, in float32."""
    return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)


def convert_bf16_cast_to_fp32_weights(model: ModelProto, input_tensor_to_node_dict: Readers) -> ModelProto:
    """Store weights that Casts round to bfloat16, or that are stored in it, as rounded float32 numbers.

    `input_tensor_to_node_dict` is brought up to date.
    """
    readers, outputs = input_tensor_to_node_dict, _outputs(model)
    names, gone = _names(model), set[str]()
    for graph in _graphs(model.graph):
        for tensor in list(graph.initializer):
            ends = [] if tensor.name in outputs else _cast_weights(tensor, readers, outputs)
            if not ends:
                continue
            rounded = float32_to_bfloat16(numpy_helper.to_array(tensor))
            name = names.free(f"{tensor.name.removesuffix('_bfloat16')}_bf16")
            for nodes in ends:
                readers[tensor.name] = [node for node in readers[tensor.name] if node is not nodes[0]]
                _redirect(nodes[-1].output[0], name, readers)
                gone.update(map(_key, nodes))
            if readers[tensor.name]:
                graph.initializer.append(numpy_helper.from_array(rounded, name))
            else:
                tensor.CopyFrom(numpy_helper.from_array(rounded, name))
    _remove(model, gone)
    return model


def remove_output_cast(model: ModelProto, input_tensor_to_node_dict: Readers) -> ModelProto:
    """Remove pairs of Casts before outputs of the graph. `input_tensor_to_node_dict` is brought up to date."""
    readers, gone = input_tensor_to_node_dict, set[str]()
    renamed: list[tuple[NodeProto, int, str]] = []
    for graph in _graphs(model.graph):
        own = {info.name for info in graph.output}
        for node in graph.node:
            for index, name in enumerate(node.output):
                couples = [] if name in own else [pair for pair in _couples(name, readers) if pair[1].output[0] in own]
                if couples:
                    first, second = couples[0]
                    gone.update(_detached(name, first, second, readers))
                    _redirect(name, second.output[0], readers)
                    renamed.append((node, index, second.output[0]))
    _remove(model, gone)
    for node, index, name in renamed:
        node.output[index] = name
    return model


def _couples(name: str, readers: Readers) -> list[tuple[NodeProto, NodeProto]]:
    """The Casts of a tensor to bfloat16, with the Casts back behind them."""
    couples = []
    for first in readers.get(name, []):
        behind = readers.get(first.output[0], []) if _is_cast(first, TensorProto.BFLOAT16) else []
        if all(_is_cast(node, TensorProto.FLOAT) for node in behind):
            couples += [(first, second) for second in behind]
    return couples


def _detached(name: str, first: NodeProto, second: NodeProto, readers: Readers) -> Iterator[str]:
    """The keys of the Casts that nothing needs any more: the second, and the first if that was its last reader."""
    yield _key(second)
    rest = [node for node in readers[first.output[0]] if node is not second]
    readers[first.output[0]] = rest
    if not rest:
        yield _key(first)
        readers[name] = [node for node in readers[name] if node is not first]


def _cast_weights(tensor: TensorProto, readers: Readers, outputs: set[str]) -> list[tuple[NodeProto, ...]]:
    """The Casts through which a weight is read in bfloat16: a pair, or one if it is stored in that type."""
    casts: list[tuple[NodeProto, ...]] = []
    for first in readers.get(tensor.name, []):
        if _is_brain(tensor) and _is_cast(first, TensorProto.FLOAT):
            casts.append((first,))
        elif tensor.data_type == TensorProto.FLOAT and _is_cast(first, TensorProto.BFLOAT16):
            second = readers.get(first.output[0], [])
            if len(second) == 1 and _is_cast(second[0], TensorProto.FLOAT):
                casts.append((first, second[0]))
    return [nodes for nodes in casts if not outputs & {node.output[0] for node in nodes}]


def _redirect(old: str, new: str, readers: Readers) -> None:
    """Replace a tensor by another one for all readers."""
    for node in readers.pop(old, []):
        for index, name in enumerate(node.input):
            if name == old:
                node.input[index] = new
        readers.setdefault(new, []).append(node)


def _is_cast(node: NodeProto, to: int) -> bool:
    return node.op_type == "Cast" and not node.domain and any(a.name == "to" and a.i == to for a in node.attribute)


def _is_brain(tensor: TensorProto) -> bool:
    return bool(tensor.data_type == TensorProto.BFLOAT16)


# ---- graphs ----


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """A graph and its subgraphs."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _graphs(inner)


def _outputs(model: ModelProto) -> set[str]:
    """The outputs of the graph and of its subgraphs."""
    return {info.name for graph in _graphs(model.graph) for info in graph.output}


def _names(model: ModelProto) -> FreeNames:
    names = FreeNames([""])
    for graph in _graphs(model.graph):
        names.take(value.name for value in (*graph.input, *graph.initializer))
        names.take(name for node in graph.node for name in (node.name, *node.output))
    return names


def _key(node: NodeProto) -> str:
    """The identity of a node: the first tensor that it computes."""
    return next((name for name in node.output if name), "")


def _rebuild(graph: GraphProto, replaced: Mapping[str, Sequence[NodeProto]]) -> None:
    """Replace nodes, which are known by their key."""
    if any(_key(node) in replaced for node in graph.node):
        nodes = [new for node in graph.node for new in replaced.get(_key(node), [node])]
        copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)


def _remove(model: ModelProto, gone: set[str]) -> None:
    """Remove the nodes with these keys."""
    for graph in _graphs(model.graph):
        for index in reversed([index for index, node in enumerate(graph.node) if _key(node) in gone]):
            del graph.node[index]

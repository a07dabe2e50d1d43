"""Edits of the graph that leave what a model computes as it is: another opset, initializers of their own for every
reader, inputs without initializers, channels last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from importlib.util import find_spec

import onnx
import onnx_ir as ir
from onnx import helper

from quark.errors import InvalidValueError, ModelError
from quark.onnx.graph import FreeNames, add_node, attribute, dimensions, fresh_name, input_value
from quark.onnx.load.conversions import convert_opset
from quark.onnx.load.reading import to_graph
from quark.onnx.load.source import MAX_BYTES
from quark.onnx.load.structure import all_nodes, opset_versions
from quark.onnx.load.wire import Carved
from quark.onnx.optimize.layouts import TO_CHANNELS_LAST, to_channels_last
from quark.onnx.session import open_session
from quark.ops.portable_functions import define_portable_functions
from quark.ops.schema import DOMAIN

IR_VERSION_OF_CONSTANTS = 4  # from here on an initializer need not be an input
IR_VERSION = 7  # for models with an older one
LARGE_TENSOR_BYTES = 1 << 20


# ---------------------------------------------------------------- opset
def convert_opset_version(model: onnx.ModelProto, target_opset: int) -> onnx.ModelProto:
    """Return the model at another opset, newer or older, as ONNX's converter writes it; functions stay.

    Raises ModelError if the converter cannot do it, or if ONNX Runtime takes the model but not the result.
    """
    present = opset_versions(model.opset_import).get("") or opset_versions(model.opset_import).get("ai.onnx")
    if present is None:
        raise ModelError("the model does not declare its opset (opset_import). Export it again")
    newest = onnx.defs.onnx_opset_version()
    if not 1 <= target_opset <= newest:
        raise InvalidValueError(f"opset {target_opset}: expected 1 to {newest}, the newest that the package onnx has")
    if present == target_opset:
        return model
    large = {
        tensor.name: memoryview(b"") for tensor in model.graph.initializer if len(tensor.raw_data) >= LARGE_TENSOR_BYTES
    }
    try:
        converted = convert_opset(Carved(model, large), target_opset)
    except ModelError as error:
        raise ModelError(
            f"the model is of opset {present}, and ONNX's converter cannot bring it to {target_opset}: {error}. Export "
            "the model again for that opset"
        ) from error
    converted.functions.extend(model.functions)
    if any(function.domain == DOMAIN for function in model.functions):
        define_portable_functions(converted)  # ours are written for one opset
    problem = _problem(converted)
    if problem is not None and _problem(model) is None:
        raise ModelError(
            f"ONNX Runtime does not take what ONNX's converter makes of the model for opset {target_opset}: "
            f"{problem}. Export the model again for that opset"
        )
    return converted


def _problem(model: onnx.ModelProto) -> str | None:
    """The reason why ONNX Runtime rejects the model; None if it does not, is not installed, or cannot be given 2 GB."""
    if find_spec("onnxruntime") is None or model.ByteSize() > MAX_BYTES:
        return None
    try:
        open_session(model.SerializeToString(), threads=1, has_optimizations=False)
    except ModelError as error:
        return " ".join(str(error.__cause__ or error).split())
    return None


# ---------------------------------------------------------------- initializers
def unshare_initializers(
    model: onnx.ModelProto, op_types: Collection[str] = (), prefix: str = "duplicated", *, only_bias: bool = False
) -> onnx.ModelProto:
    """Give each reader of a shared initializer its own copy, in place. The first reader keeps the original.

    Applies to nodes of the listed operators, or of all; with `only_bias`, to their third input. A copy is called
    `prefix`, the initializer's name and a number from 2 on. An initializer that is also an input of the graph may be
    replaced by the caller, so its readers go on sharing it.
    """
    graph = model.graph
    needs_inputs = model.ir_version < IR_VERSION_OF_CONSTANTS
    declared = {info.name: info for info in graph.input}
    shared = {tensor.name: tensor for tensor in graph.initializer if needs_inputs or tensor.name not in declared}
    names = FreeNames([*shared, *declared], first=2)
    names.take(output for node in all_nodes(graph.node) for output in node.output)
    counts: Counter[str] = Counter()
    for node in graph.node:
        if op_types and node.op_type not in op_types:
            continue
        for index, name in enumerate(node.input):
            if name not in shared or (only_bias and index != 2):
                continue
            counts[name] += 1
            if counts[name] == 1:
                continue
            copy = graph.initializer.add()
            copy.CopyFrom(shared[name])
            copy.name = node.input[index] = names.free(f"{prefix}{name}{counts[name]}")
            if needs_inputs:
                graph.input.append(helper.make_tensor_value_info(copy.name, copy.data_type, copy.dims))
    return model


def remove_initializers_from_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Make constants of initializers that are also inputs of the graph, in place. An IR version below 4, which does not
    know constants, becomes 7."""
    if model.ir_version < IR_VERSION_OF_CONSTANTS:
        model.ir_version = IR_VERSION
    constants = {tensor.name for tensor in model.graph.initializer}
    kept = [info for info in model.graph.input if info.name not in constants]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return model


# ---------------------------------------------------------------- channels last
def convert_nchw_to_nhwc(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with inputs and outputs [n, h, w, c] instead of [n, c, h, w], by a Transpose at each.

    Inputs keep their names; an output `y` becomes `y_transpose`. Tensors that do not have four dimensions, or whose
    channels, height and width are not all known, stay as they are, with a warning. An output that is quantized is
    quantized with the same scale behind its Transpose, which changes no value: `y_transpose_DequantizeLinear`.
    """
    changed = to_graph(Carved(remove_initializers_from_inputs(model), {}), {}, model.graph.name or "model")
    to_channels_last(changed)
    for index, value in enumerate(list(changed.graph.outputs)):
        changed.graph.outputs[index] = _quantized_again(changed, value)
    return ir.to_proto(changed)


def _quantized_again(model: ir.Model, output: ir.Value) -> ir.Value:
    """The output of a Transpose that reads a quantized tensor, with the same quantizer behind it; others unchanged."""
    transpose = output.producer()
    dequantize = _producer(transpose, "Transpose")
    quantize = _producer(dequantize, "DequantizeLinear")
    if dequantize is None or quantize is None or quantize.op_type != "QuantizeLinear":
        return output
    result = output
    for quantizer in (quantize, dequantize):
        copied = {key: attr.value for key, attr in quantizer.attributes.items()}
        if dimensions(quantizer.inputs[1]) not in ((), (1,)):
            copied["axis"] = TO_CHANNELS_LAST.index(attribute(quantizer, "axis", 1) % len(TO_CHANNELS_LAST))
        inputs = [result, *quantizer.inputs[1:]]
        node = add_node(model, quantizer.op_type, inputs, domain=quantizer.domain, attributes=copied)
        result = node.outputs[0]
        node.name = result.name = fresh_name(model, f"{output.name}_{quantizer.op_type}")
        result.type = quantizer.outputs[0].type
        result.shape = None if result.type is None else output.shape
    return result


def _producer(node: ir.Node | None, op_type: str) -> ir.Node | None:
    """The node that computes the first input of a node; None unless the node is of that operator."""
    value = None if node is None or node.op_type != op_type else input_value(node, 0)
    return None if value is None else value.producer()

"""Convert a model to an opset and a float type that the pipeline and the installed ONNX Runtime can work with.

Opsets below 13 have other forms of operators (axes as attributes, no scale per channel). ONNX's own converter lifts
such models; if it cannot, the model is refused. Large initializers are kept aside meanwhile.

float16 models become float32 if the user asks for it. Models whose layers compute in float64 or bfloat16 always do:
ONNX Runtime has no convolution for either on the CPU, and quantizers take float32. A model that only casts to float64
in between, for a more exact sum for example, stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, version_converter

from quark.errors import InvalidValueError, ModelError
from quark.onnx.graph import add_node, fresh_name, infer_shapes, replace_input
from quark.onnx.large_tensors import ComputedTensor, is_large_model, is_large_tensor, pieces
from quark.onnx.load.structure import MIN_OPSET, all_nodes, check_operators, describe, opset_versions
from quark.onnx.load.wire import Carved
from quark.onnx.session import open_session

MIN_IR_VERSION = 8  # has functions, and initializers that are not inputs
UNQUESTIONED_OPSET = 21  # the oldest supported ONNX Runtime takes it
UNQUESTIONED_IR_VERSION = 10
LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN"})
_OF_ONE_SHAPE = ("Softmax", "LogSoftmax", "Hardmax")  # operators that the converter writes according to their rank
_NAMES = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16", ir.DataType.DOUBLE: "float64"}
_SINGLE = ir.DataType.FLOAT
_OPSET_OF_REDUCED_AXES = 18  # reductions other than ReduceSum have axes as an input


def lift_opset(
    carved: Carved,
    wanted: int | None,
    name: str,
    *,
    is_runnable: bool,
    least: int = MIN_OPSET,
    has_foreign_domains: bool = False,
) -> tuple[Carved, list[str]]:
    """Return the model at opset `wanted`, or at `least` if it is older and nothing is wanted, and remarks for the user.

    A lifted model is tried out in ONNX Runtime if `is_runnable`: one that is converted afterwards may not run yet.
    `has_foreign_domains`: operators of unknown domains are in libraries of the user's.
    """
    proto, remarks = carved.proto, []
    own_version = proto.ir_version  # the version of the container, which says nothing about the network
    proto.ir_version = max(own_version, MIN_IR_VERSION)
    while proto.ir_version > UNQUESTIONED_IR_VERSION and not _takes(UNQUESTIONED_OPSET, proto.ir_version):
        proto.ir_version = min(proto.ir_version - 1, onnx.IR_VERSION)
    if proto.ir_version < own_version:
        remarks.append(
            f"IR version lowered from {own_version} to {proto.ir_version}, the newest that the installed ONNX Runtime "
            "takes"
        )
    present = opset_versions(proto.opset_import).get("")
    if present is None or present < 1:
        raise ModelError(f"'{name}' does not declare its opset (opset_import). Export it again")
    if present > runtime_limit(present):
        raise ModelError(
            f"'{name}' is of opset {present}, and the installed ONNX Runtime takes up to "
            f"{runtime_limit(present)}. Export for that opset, or install a newer ONNX Runtime"
        )
    target = max(present, least) if wanted is None else wanted
    if target == present:
        return carved, remarks
    if target < max(present, MIN_OPSET):
        raise InvalidValueError(
            f"opset {target} for '{name}', whose opset is {present}: a model can be lifted to a newer opset from "
            f"{MIN_OPSET} on, and never brought to an older one"
        )
    if runtime_limit(target) < target:
        raise InvalidValueError(f"opset {target}: the installed ONNX Runtime takes up to {runtime_limit(target)}")
    lifted = Carved(_lifted(carved, present, target, name), carved.raw)
    check_operators(lifted.proto, name, has_foreign_domains=has_foreign_domains)
    problem = _session_problem(_without_large(lifted)) if is_runnable else None
    if problem is not None:
        raise ModelError(
            f"'{name}': ONNX's converter lifted the model to opset {target}, and ONNX Runtime does not take the result"
            f": {problem}. Export the model again for opset {MIN_OPSET} or newer"
        )
    return lifted, [*remarks, f"opset lifted from {present} to {target}"]


def runtime_limit(wanted: int) -> int:
    """The newest opset up to `wanted` that the installed ONNX Runtime takes."""
    newest = min(wanted, UNQUESTIONED_OPSET)
    while newest < wanted and _takes(newest + 1, UNQUESTIONED_IR_VERSION):
        newest += 1
    return newest


def convert_opset(carved: Carved, target: int) -> onnx.ModelProto:
    """The message as ONNX's converter brings it to another opset, without its functions. Large initializers are inputs
    meanwhile, and put back afterwards. Raises ModelError with the converter's reason."""
    aside = _without_large(carved)
    # The input of a Softmax is declared with the shape that the file declares for its output: the converter takes an
    # unknown rank for 0 and writes the operator with a Reshape, which ONNX Runtime refuses in a model with functions.
    infos = [*aside.graph.input, *aside.graph.output, *aside.graph.value_info]
    known = {info.name: info.type for info in infos if info.type.tensor_type.HasField("shape")}
    named = {info.name for info in infos}
    for node in aside.graph.node:
        if node.op_type in _OF_ONE_SHAPE and node.output[0] in known and node.input[0] not in named:
            aside.graph.value_info.append(onnx.ValueInfoProto(name=node.input[0], type=known[node.output[0]]))
    if target < _OPSET_OF_REDUCED_AXES:
        # the converter leaves the attribute there, which reductions of older opsets do not know; 0 is the default
        for node in all_nodes(aside.graph.node):
            for attr in [attr for attr in node.attribute if attr.name == "noop_with_empty_axes" and not attr.i]:
                node.attribute.remove(attr)
    try:
        converted = version_converter.convert_version(aside, target)
    except Exception as error:  # the converter throws what its C++ side threw
        reason = " ".join(str(error).split())
        words = {word.strip("'\",.:;()") for word in reason.split()}
        culprit = next((node for node in all_nodes(aside.graph.node) if node.op_type in words), None)
        if culprit is not None:
            reason += f" (at {describe(culprit)})"
        raise ModelError(reason) from error
    outside = [tensor for tensor in carved.proto.graph.initializer if _is_outside(tensor, carved)]
    added = {tensor.name for tensor in outside} - {info.name for info in carved.proto.graph.input}
    kept = [info for info in converted.graph.input if info.name not in added]
    del converted.graph.input[:]
    converted.graph.input.extend(kept)
    converted.graph.initializer.extend(outside)
    return converted


def _lifted(carved: Carved, present: int, target: int, name: str) -> onnx.ModelProto:
    if carved.proto.functions:
        raise ModelError(
            f"'{name}' has functions, and ONNX's converter lifts no opset inside of them. Export it for opset "
            f"{MIN_OPSET} or newer"
        )
    try:
        converted = convert_opset(carved, target)
    except ModelError as error:
        raise ModelError(
            f"'{name}' is of opset {present}, and ONNX's converter cannot lift it to {target}: {error}"
            f". Export the model again for opset {MIN_OPSET} or newer"
        ) from error
    converted.ir_version = max(carved.proto.ir_version, MIN_IR_VERSION)
    return converted


def _without_large(carved: Carved) -> onnx.ModelProto:
    """A copy in which large initializers are inputs, so that neither the converter nor the runtime needs their
    bytes."""
    result = onnx.ModelProto()
    result.CopyFrom(carved.proto)
    declared = {info.name for info in result.graph.input}
    for tensor in [tensor for tensor in result.graph.initializer if _is_outside(tensor, carved)]:
        if tensor.name not in declared:
            result.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        result.graph.initializer.remove(tensor)
    return result


def _is_outside(tensor: onnx.TensorProto, carved: Carved) -> bool:
    return tensor.name in carved.raw or tensor.data_location == onnx.TensorProto.EXTERNAL


@lru_cache(maxsize=32)
def _takes(version: int, ir_version: int) -> bool:
    """True if the installed ONNX Runtime takes a tiny model of that opset and IR version."""
    info = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "probe", info[:1], info[1:])
    opsets = [helper.make_opsetid("", version)]
    return _session_problem(helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)) is None


def _session_problem(proto: onnx.ModelProto) -> str | None:
    try:
        open_session(proto.SerializeToString(), threads=1, has_optimizations=False, has_library=False)
    except ModelError as error:
        return " ".join(str(error.__cause__ or error).split())
    return None


def learn_types(model: ir.Model) -> None:
    """Fill in the types and shapes that only ONNX Runtime knows, in place: those behind operators of libraries."""
    unknown = {str(value.name): value for node in model.graph for value in node.outputs if value.type is None}
    if not unknown:
        return
    session = open_session(model, extra_outputs=unknown, threads=1, has_optimizations=False)
    kinds = {kind.name.lower(): kind for kind in ir.DataType} | {"double": ir.DataType.DOUBLE}
    for port in session.get_outputs():
        kind = kinds.get(port.type.removeprefix("tensor(").removesuffix(")"))
        if port.name in unknown and kind is not None:
            unknown[port.name].type = ir.TensorType(kind)
            unknown[port.name].shape = ir.Shape(port.shape) if port.shape else None  # [] may be any rank
    infer_shapes(model)


# ---- to float32 ----


def unusual_layer_types(proto: onnx.ModelProto) -> list[ir.DataType]:
    """The types of layers' weights among float64 and bfloat16, anywhere in the model."""
    functions = proto.functions
    nodes = [*all_nodes(proto.graph.node), *(node for function in functions for node in all_nodes(function.node))]
    kinds = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t") and node.op_type == "Constant" and node.output:
                kinds[node.output[0]] = attribute.t.data_type
            if attribute.HasField("g"):
                kinds.update((tensor.name, tensor.data_type) for tensor in attribute.g.initializer)
    used = {kinds.get(name) for node in nodes if node.op_type in LAYERS and not node.domain for name in node.input}
    return [kind for kind in (ir.DataType.DOUBLE, ir.DataType.BFLOAT16) if int(kind) in used]


def convert_to_float32(
    model: ir.Model, kinds: Iterable[ir.DataType], name: str, kept: Collection[ir.DataType] = (ir.DataType.DOUBLE,)
) -> list[str]:
    """Convert tensors of these types in place, subgraphs included; return remarks for the user.

    Weights and constants are converted, Casts to the type go to float32, and so do the types of all values. Inputs and
    outputs of the graph whose type is in `kept` keep it and get a Cast: programs that use the model pass such arrays.
    Those of other types become float32. Large weights of a large model are converted each time they are read. Raises
    ModelError if a weight holds a number beyond the range of float32.
    """
    remarks = []
    is_large = is_large_model(model)
    for kind in kinds:
        count, ports = 0, set()
        if kind in kept:
            count += _cast_ports(model, kind)
            ports = {id(value) for value in (*model.graph.inputs, *model.graph.outputs)}
        for graph in model.graphs():
            for value in (*graph.inputs, *graph.initializers.values(), *graph.outputs):
                count += id(value) not in ports and _convert_value(value, kind, is_large, name)
            for node in graph:
                if any(id(value) in ports for value in node.outputs):
                    continue  # the Cast to an output
                for key, attr in list(node.attributes.items()):  # tensors (Constant ...) and types (Cast ...)
                    is_type = key in ("to", "dtype", "output_dtype") and attr.type == ir.AttributeType.INT
                    if attr.type == ir.AttributeType.TENSOR and attr.as_tensor().dtype == kind:
                        node.attributes[key] = ir.AttrTensor(key, _converted(attr.as_tensor(), name))
                        count += 1
                    elif is_type and attr.value == int(kind):
                        node.attributes[key] = ir.AttrInt64(key, int(_SINGLE))
                        count += 1
                count += sum(_convert_value(output, kind, is_large, name) for output in node.outputs)
        if count and kind in kept:
            remarks.append(f"{_NAMES[kind]} converted to float32; {_NAMES[kind]} inputs and outputs stay, with a Cast")
        elif count:
            remarks.append(f"{_NAMES[kind]} converted to float32, inputs and outputs as well")
    return remarks


def _cast_ports(model: ir.Model, kind: ir.DataType) -> int:
    """Insert a Cast to float32 behind inputs of the type, and a Cast back before outputs of the type."""
    count = 0
    first = next(iter(model.graph), None)
    for value in model.graph.inputs:
        if value.dtype != kind or value.is_initializer() or value.is_graph_output():
            continue
        readers = list(value.uses())
        cast = add_node(model, "Cast", [value], before=first, name=f"{value.name}_float32", attributes={"to": _SINGLE})
        cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(_SINGLE), value.shape
        for reader, index in readers:
            replace_input(reader, index, cast.outputs[0])
        count += 1
    for position, value in enumerate(model.graph.outputs):
        if value.dtype != kind or value.producer() is None:
            continue
        output_name = str(value.name)
        value.name = fresh_name(model, f"{output_name}_float32")
        cast = add_node(model, "Cast", [value], name=f"{output_name}_{_NAMES[kind]}", attributes={"to": kind})
        result = cast.outputs[0]
        result.name, result.type, result.shape = output_name, ir.TensorType(kind), value.shape
        model.graph.outputs[position] = result
        count += 1
    return count


def _convert_value(value: ir.Value, kind: ir.DataType, is_large: bool, name: str) -> bool:
    is_converted = value.dtype == kind
    if is_converted:
        value.type = _as_single(value.type)
    tensor = value.const_value
    if tensor is None or tensor.dtype != kind:
        return is_converted

    def compute() -> Iterator[np.ndarray]:
        return (piece.array.astype(np.float32) for piece in pieces(tensor))

    if is_large and is_large_tensor(tensor):
        value.const_value = ComputedTensor(compute, _SINGLE, ir.Shape(tensor.shape.numpy()), tensor.name)
    else:
        value.const_value = _converted(tensor, name)
    value.type = ir.TensorType(_SINGLE)
    return True


def _as_single(kind: ir.TypeProtocol | None) -> ir.TypeProtocol | None:
    if isinstance(kind, ir.TensorType):
        return ir.TensorType(_SINGLE, denotation=kind.denotation)
    if isinstance(kind, (ir.SequenceType, ir.OptionalType)):
        inner = _as_single(kind.elem_type)
        assert inner is not None
        return type(kind)(inner, denotation=kind.denotation)
    return kind


def _converted(tensor: ir.TensorProtocol, name: str) -> ir.Tensor[np.ndarray]:
    array = tensor.numpy()
    with np.errstate(over="ignore"):
        result = array.astype(np.float32)
    if tensor.dtype == ir.DataType.DOUBLE and bool((np.isinf(result) & np.isfinite(array)).any()):
        raise ModelError(
            f"'{name}': tensor '{tensor.name}' of float64 holds numbers beyond the range of float32 (3.4e38), in which "
            "the model would compute. Scale the model's weights, or leave such numbers out"
        )
    return ir.Tensor(result, name=tensor.name)

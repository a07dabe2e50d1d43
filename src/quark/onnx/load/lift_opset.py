"""Bring a model to an opset that the pipeline and the installed ONNX Runtime can work with.

Below 13 operators say things differently (axes as attributes, no scale per channel), so that such models are lifted by
ONNX's own converter; where that cannot, the model is refused. The large initializers stay aside while it works.
"""

from __future__ import annotations

from functools import lru_cache

import onnx
from onnx import helper

from quark.errors import InvalidValueError, ModelError
from quark.onnx.load.operators import check_operators, opset_versions
from quark.onnx.load.structure import all_nodes, describe
from quark.onnx.load.wire import Carved
from quark.onnx.session import open_session

MIN_OPSET = 13
MIN_IR_VERSION = 8  # functions, and initializers that are no inputs
UNQUESTIONED_OPSET = 21  # the oldest supported ONNX Runtime takes it
UNQUESTIONED_IR_VERSION = 10
_OF_ONE_SHAPE = ("Softmax", "LogSoftmax", "Hardmax")  # of those that the converter writes by their rank


def lift_opset(carved: Carved, wanted: int | None, name: str, *, is_runnable: bool) -> tuple[Carved, list[str]]:
    """The model at opset `wanted`, or at 13 where it is older and nothing is wanted; and what was done, in words.

    A lifted model is tried out in ONNX Runtime if `is_runnable`: one that is converted afterwards may not run yet.
    """
    proto = carved.proto
    remarks = _fit_ir_version(proto)
    present = _standard_opset(proto, name)
    if present > runtime_limit(present):
        raise ModelError(
            f"'{name}' is of opset {present}, and the installed ONNX Runtime takes up to "
            f"{runtime_limit(present)}. Export for that opset, or install a newer ONNX Runtime"
        )
    target = max(present, MIN_OPSET) if wanted is None else wanted
    if target == present:
        return carved, remarks
    _check_target(target, present, name)
    lifted = Carved(_convert(carved, target, name), carved.raw)
    check_operators(lifted.proto, name)
    if is_runnable:
        _check_runs(lifted, target, name)
    return lifted, [*remarks, f"opset lifted from {present} to {target}"]


def runtime_limit(wanted: int) -> int:
    """The newest opset up to `wanted` that the installed ONNX Runtime takes."""
    newest = min(wanted, UNQUESTIONED_OPSET)
    while newest < wanted and _takes(newest + 1, UNQUESTIONED_IR_VERSION):
        newest += 1
    return newest


def _standard_opset(proto: onnx.ModelProto, name: str) -> int:
    version = opset_versions(proto.opset_import).get("")
    if version is None or version < 1:
        raise ModelError(f"'{name}' does not say which opset it is of (opset_import). Export it again")
    return version


def _check_target(target: int, present: int, name: str) -> None:
    if target < max(present, MIN_OPSET):
        raise InvalidValueError(
            f"opset {target} for '{name}', which is of opset {present}: a model can be lifted to a newer opset from "
            f"{MIN_OPSET} on, and never brought to an older one"
        )
    if runtime_limit(target) < target:
        raise InvalidValueError(f"opset {target}: the installed ONNX Runtime takes up to {runtime_limit(target)}")


def _convert(carved: Carved, target: int, name: str) -> onnx.ModelProto:
    from onnx import version_converter

    if carved.proto.functions:
        raise ModelError(
            f"'{name}' has functions, and ONNX's converter lifts no opset inside of them. Export it for opset "
            f"{MIN_OPSET} or newer"
        )
    aside = _without_large(carved)
    _tell_ranks(aside)
    try:
        converted = version_converter.convert_version(aside, target)
    except Exception as error:  # the converter throws what its C++ side threw
        present = opset_versions(carved.proto.opset_import)[""]
        raise ModelError(
            f"'{name}' is of opset {present}, and ONNX's converter cannot lift it to {target}: {_reason(error, aside)}"
            f". Export the model again for opset {MIN_OPSET} or newer"
        ) from error
    _with_large(converted, carved)
    converted.ir_version = max(carved.proto.ir_version, MIN_IR_VERSION)
    return converted


def _tell_ranks(proto: onnx.ModelProto) -> None:
    """Say of what goes into a Softmax what the file says of what comes out of it: both are of one shape.

    The converter takes an unknown rank for 0 and writes the operator with a Reshape, which ONNX Runtime refuses in a
    model that has functions as well.
    """
    infos = [*proto.graph.input, *proto.graph.output, *proto.graph.value_info]
    known = {info.name: info.type for info in infos if info.type.tensor_type.HasField("shape")}
    named = {info.name for info in infos}
    for node in proto.graph.node:
        if node.op_type in _OF_ONE_SHAPE and node.output[0] in known and node.input[0] not in named:
            proto.graph.value_info.append(onnx.ValueInfoProto(name=node.input[0], type=known[node.output[0]]))


def _reason(error: Exception, proto: onnx.ModelProto) -> str:
    """The converter's words, and a node of the operator that they speak of."""
    text = " ".join(str(error).split())
    words = {word.strip("'\",.:;()") for word in text.split()}
    culprit = next((node for node in all_nodes(proto.graph.node) if node.op_type in words), None)
    return f"{text} (at {describe(culprit)})" if culprit is not None else text


def _without_large(carved: Carved) -> onnx.ModelProto:
    """A copy in which large initializers are inputs, so that the converter never sees their bytes."""
    result = onnx.ModelProto()
    result.CopyFrom(carved.proto)
    declared = {info.name for info in result.graph.input}
    outside = [tensor for tensor in result.graph.initializer if _is_outside(tensor, carved)]
    for tensor in outside:
        if tensor.name not in declared:
            result.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        result.graph.initializer.remove(tensor)
    return result


def _with_large(proto: onnx.ModelProto, carved: Carved) -> None:
    """Put the initializers back, and remove the inputs that stood for them."""
    declared = {info.name for info in carved.proto.graph.input}
    outside = [tensor for tensor in carved.proto.graph.initializer if _is_outside(tensor, carved)]
    added = {tensor.name for tensor in outside} - declared
    kept = [info for info in proto.graph.input if info.name not in added]
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    proto.graph.initializer.extend(outside)


def _is_outside(tensor: onnx.TensorProto, carved: Carved) -> bool:
    return tensor.name in carved.raw or tensor.data_location == onnx.TensorProto.EXTERNAL


def _check_runs(lifted: Carved, target: int, name: str) -> None:
    """That ONNX Runtime takes what the converter made. Its large weights stand as inputs for this."""
    problem = _session_problem(_without_large(lifted))
    if problem is not None:
        raise ModelError(
            f"'{name}': ONNX's converter lifted the model to opset {target}, and ONNX Runtime does not take the result"
            f": {problem}. Export the model again for opset {MIN_OPSET} or newer"
        )


def _fit_ir_version(proto: onnx.ModelProto) -> list[str]:
    """The version of the container says nothing about the network: one that the runtime takes is written instead."""
    present = proto.ir_version
    proto.ir_version = max(present, MIN_IR_VERSION)
    while proto.ir_version > UNQUESTIONED_IR_VERSION and not _takes(UNQUESTIONED_OPSET, proto.ir_version):
        proto.ir_version = min(proto.ir_version - 1, onnx.IR_VERSION)
    if proto.ir_version < present:
        return [
            f"IR version lowered from {present} to {proto.ir_version}, the newest that the installed ONNX Runtime takes"
        ]
    return []


@lru_cache(maxsize=32)
def _takes(version: int, ir_version: int) -> bool:
    """Whether the installed ONNX Runtime takes a model of that opset and IR version: it is asked with a tiny one."""
    info = [helper.make_tensor_value_info(each, onnx.TensorProto.FLOAT, [1]) for each in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "probe", info[:1], info[1:])
    opsets = [helper.make_opsetid("", version)]
    return _session_problem(helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)) is None


def _session_problem(proto: onnx.ModelProto) -> str | None:
    try:
        open_session(proto.SerializeToString(), threads=1, has_optimizations=False, has_library=False)
    except ModelError as error:
        return " ".join(str(error.__cause__ or error).split())
    return None

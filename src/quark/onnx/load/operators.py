"""That every operator of a model is known, and that none says that it is quantized already."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping

import onnx

from quark.errors import ModelError, unknown_name
from quark.onnx.load.structure import all_nodes, describe, subgraphs

KNOWN_DOMAINS = ("", "ai.onnx.ml", "com.microsoft")  # those that ONNX Runtime's CPU build runs
QUARK_DOMAINS = (
    *("com.amd.quark", "com.amd.quark.constant", "com.amd.quark.packed"),
    *("com.vai.quantize", "com.amd.quantize"),
)

_QUANTIZED = frozenset(
    {
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "ConvInteger",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "DynamicQuantizeMatMul",
        "DynamicQuantizeLSTM",
        "MatMulNBits",
        "MatMulBnb4",
        "MatMulFpQ4",
        "QAttention",
        "QGemm",
        "QMoE",
        "QEmbedLayerNormalization",
        "QOrderedMatMul",
        "GatherBlockQuantized",
        "BFPQuantizeDequantize",
    }
)

MAX_OPSET = 2**31 - 1  # what onnx can be asked for


def check_operators(proto: onnx.ModelProto, name: str) -> None:
    """A ModelError that names the node, where an operator or domain is not known or belongs to a quantized model.

    The model's own functions count as known. Which operators of com.microsoft there are only ONNX Runtime knows: it
    says so when the model first runs.
    """
    functions = {(function.domain, function.name) for function in proto.functions}
    for node in all_nodes(proto.graph.node):
        _check_not_quantized(node, name)
    opsets = opset_versions(proto.opset_import)
    _check_nodes(proto.graph.node, opsets, functions, name)
    for function in proto.functions:
        for node in all_nodes(function.node):
            _check_not_quantized(node, name)
        _check_nodes(function.node, ChainMap(opset_versions(function.opset_import), opsets), functions, name)


def check_forms(proto: onnx.ModelProto, name: str) -> None:
    """A ModelError where an operator has fewer inputs or outputs than it must have, or an attribute of another type.
    For files that are only looked at: whether the operators are known does not matter there."""
    version = opset_versions(proto.opset_import).get("", 0)
    for node in all_nodes(proto.graph.node):
        if node.domain in QUARK_DOMAINS:
            _check_counts(node, 1, 1, name)
        elif not node.domain and 0 < version <= MAX_OPSET and onnx.defs.has(node.op_type, version, ""):
            schema = onnx.defs.get_schema(node.op_type, version, "")
            _check_counts(node, schema.min_input, schema.min_output, name)
            for each in node.attribute:
                if each.name in schema.attributes and not each.ref_attr_name:
                    _check_type(node, each, str(schema.attributes[each.name].type).rpartition(".")[2], name)


def _check_counts(node: onnx.NodeProto, inputs: int, outputs: int, name: str) -> None:
    if len(node.input) < inputs or len(node.output) < outputs:
        raise ModelError(
            f"'{name}': {describe(node)} has {len(node.input)} inputs and {len(node.output)} outputs, expected at "
            f"least {inputs} and {outputs}. Export the model again"
        )


def _check_type(node: onnx.NodeProto, attribute: onnx.AttributeProto, expected: str, name: str) -> None:
    kind = onnx.AttributeProto.AttributeType.Name(attribute.type)
    if kind != expected:
        raise ModelError(
            f"'{name}': attribute '{attribute.name}' of {describe(node)} is of type {kind}, expected {expected}. "
            "Export the model again"
        )


def shorten_domains(proto: onnx.ModelProto) -> None:
    """Write the standard domain as the empty text everywhere, in place: `ai.onnx` is its long name."""
    functions = proto.functions
    for part in (
        *proto.opset_import,
        *all_nodes(proto.graph.node),
        *(each for function in functions for each in function.opset_import),
        *(node for function in functions for node in all_nodes(function.node)),
    ):
        if part.domain == "ai.onnx":
            part.domain = ""


def opset_versions(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Domain to version."""
    return {each.domain: each.version for each in imports}


def _check_not_quantized(node: onnx.NodeProto, name: str) -> None:
    domain = node.domain
    is_operator = domain in ("", "com.microsoft") and (node.op_type in _QUANTIZED or node.op_type.startswith("QLinear"))
    if is_operator or domain in QUARK_DOMAINS:
        where = f" of domain '{domain}'" if domain else ""
        raise ModelError(
            f"'{name}' is already quantized: it has {describe(node)}{where}. Start from the float model "
            "that it was made from"
        )


def _check_nodes(
    nodes: Iterable[onnx.NodeProto], opsets: Mapping[str, int], functions: set[tuple[str, str]], name: str
) -> None:
    if not 0 < opsets.get("", 1) <= MAX_OPSET:
        raise ModelError(f"'{name}' says that it is of opset {opsets['']}, which is none. Export it again")
    for node in all_nodes(nodes):
        domain = node.domain
        if (domain, node.op_type) in functions:
            continue
        if domain not in KNOWN_DOMAINS:
            raise ModelError(
                f"'{name}': {describe(node)} is of domain '{domain}', which ONNX Runtime does not run, and the model "
                f"has no function for it. Known domains: ai.onnx, {', '.join(KNOWN_DOMAINS[1:])}. Replace the node by "
                "standard operators, or give the model a function for it"
            )
        if domain not in opsets and domain != "com.microsoft":
            raise ModelError(
                f"'{name}': {describe(node)} is of domain '{domain or 'ai.onnx'}', and the model does not say which "
                "version of it (opset_import). Export it again"
            )
        if not domain:
            _check_standard(node, opsets[""], name)


def _check_standard(node: onnx.NodeProto, version: int, name: str) -> None:
    if node.op_type == "Constant" and any(each.name == "sparse_value" for each in node.attribute):
        raise ModelError(f"'{name}': {describe(node)} is sparse, which cannot be quantized. Store it as a dense tensor")
    if onnx.defs.has(node.op_type, version, ""):
        _check_schema(node, version, name)
        return
    known = {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}
    if node.op_type in known:
        since = onnx.defs.get_schema(node.op_type).since_version
        raise ModelError(
            f"'{name}': {describe(node)} is no operator of opset {version}; ONNX has {node.op_type} in other versions "
            f"(newest: {since}). Export the model again, for an opset that has it"
        )
    raise ModelError(f"'{name}': {describe(node)}: {unknown_name('standard operator', node.op_type, sorted(known))}")


def _check_schema(node: onnx.NodeProto, version: int, name: str) -> None:
    """That the node has the inputs and attributes that its operator has, no others, and of the right kind."""
    if any(True for _ in subgraphs(node)):
        return  # ONNX's checker would go inside, where names come from outside
    context = onnx.checker.C.CheckerContext()
    context.ir_version = onnx.IR_VERSION
    context.opset_imports = {"": version}
    try:
        onnx.checker.check_node(node, context)
    except onnx.checker.ValidationError as error:
        reason = str(error).split("\n")[0].strip()
        raise ModelError(f"'{name}': {describe(node)} is not as opset {version} has it: {reason}") from error

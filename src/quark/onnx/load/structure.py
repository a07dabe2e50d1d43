"""Check that a graph is consistent (it has nodes, every value that is read is made once, there is no cycle), that its
operators are known, and that it is not quantized already."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping
from math import isqrt

import onnx

from quark.errors import ModelError, unknown_name

MIN_OPSET = 13  # older models are lifted to it
MOST_CHARACTERS = 200  # characters of a name in a message
_WORDS = {"sequence_type": "sequence of tensors", "map_type": "map", "sparse_tensor_type": "sparse tensor"}
MAX_INPUT_SQUARES = 100_000_000  # over all nodes: adding an input to a node takes time for each input it has


def check_structure(proto: onnx.ModelProto, name: str) -> None:
    """Raise ModelError, naming the node or value, if the main graph, a subgraph or a function is not a graph."""
    if not proto.graph.node:
        raise ModelError(f"'{name}': the graph has no nodes. Expected a network")
    if not proto.graph.output:
        raise ModelError(f"'{name}': the graph has no outputs. Name its results among them, and export it again")
    if proto.graph.sparse_initializer:
        sparse = proto.graph.sparse_initializer[0].values.name
        raise ModelError(
            f"'{name}': initializer '{sparse}' is sparse, which cannot be quantized. Store it as a dense tensor"
        )
    nodes = [node for part in (proto.graph, *proto.functions) for node in all_nodes(part.node)]
    if sum(len(node.input) ** 2 for node in nodes) > MAX_INPUT_SQUARES:
        largest = max(nodes, key=lambda node: len(node.input))
        raise ModelError(
            f"'{name}': its nodes have too many inputs, {describe(largest)} alone {len(largest.input):,}. The squares "
            f"of the numbers of inputs may add up to {MAX_INPUT_SQUARES:,}, as those of one node with "
            f"{isqrt(MAX_INPUT_SQUARES):,} do"
        )
    _Place(f"'{name}'").check_graph(proto.graph)
    for node in all_nodes(proto.graph.node):
        for attribute in node.attribute:
            what = ""
            if attribute.ref_attr_name:
                what = "refers to a function's attribute, and is in none"
            elif attribute.type == onnx.AttributeProto.GRAPH and not attribute.HasField("g"):
                what = "holds no graph"
            elif attribute.type == onnx.AttributeProto.UNDEFINED:
                what = "has no type"
            if what:
                raise ModelError(
                    f"'{name}': attribute '{_shortened(attribute.name)}' of {describe(node)} {what}. Export the model "
                    "again"
                )
    for function in proto.functions:
        _Place(f"'{name}', function '{_shortened(function.name)}'").check_nodes(function.node, set(function.input))


def check_ports(proto: onnx.ModelProto, name: str) -> None:
    """Raise ModelError if an input or output of the graph is a sequence or a map: samples and verdicts need tensors.

    An optional tensor counts as one. An input without a type is accepted; code that needs the type checks it.
    """
    for role, infos in (("input", proto.graph.input), ("output", proto.graph.output)):
        for info in infos:
            kind, words = info.type, ""
            if kind.HasField("optional_type"):
                kind, words = kind.optional_type.elem_type, "optional "
            what = kind.WhichOneof("value")
            if what in (None, "tensor_type"):
                continue
            is_map = what == "map_type" or kind.sequence_type.elem_type.HasField("map_type")
            words += "sequence of maps" if is_map and what == "sequence_type" else _WORDS.get(what, what)
            hint = "Remove it from the outputs" if role == "output" else "Build what it holds from tensors"
            if is_map:
                hint += " (skl2onnx: options={'zipmap': False})"
            raise ModelError(
                f"'{name}': {role} '{_shortened(info.name)}' is of type {words}, and only networks whose inputs and "
                f"outputs are tensors can be quantized or compared. {hint}, and export the model again"
            )


def describe(node: onnx.NodeProto) -> str:
    """The node as it appears in messages: by its name, or by its first output."""
    if node.name:
        return f"{_shortened(node.op_type)} '{_shortened(node.name)}'"
    made = next(iter(node.output), "")
    return f"{_shortened(node.op_type)} (unnamed, makes '{_shortened(made)}')"


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs that the node holds, as If, Loop and Scan do."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes, each followed by those of the subgraphs that it holds."""
    for node in nodes:
        yield node
        if node.attribute:
            for graph in subgraphs(node):
                yield from all_nodes(graph.node)


class _Place:
    """A graph that is being checked: the nodes around it, and the values that are visible in each of their graphs. Sets
    of outer values are shared, not copied, because a graph may have thousands of subgraphs."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.holders: list[onnx.NodeProto] = []
        self.visible: list[set[str]] = []

    def error(self, text: str) -> ModelError:
        inside = "".join(f", inside {describe(node)}" for node in self.holders)
        return ModelError(f"{self.label}{inside}: {text}")

    def sees(self, value: str) -> bool:
        return any(value in values for values in reversed(self.visible))

    def check_graph(self, graph: onnx.GraphProto) -> None:
        given: set[str] = set()
        for info in graph.input:
            if info.name in given:
                raise self.error(f"two inputs of the graph are called '{_shortened(info.name)}'")
            given.add(info.name)
        given.update(tensor.name for tensor in graph.initializer)
        made = self.check_nodes(graph.node, given)
        results: set[str] = set()
        for info in graph.output:
            if info.name in results:
                raise self.error(f"two outputs of the graph are called '{_shortened(info.name)}'. Remove one of them")
            results.add(info.name)
            if info.name not in made and not self.sees(info.name):
                raise self.error(f"output '{_shortened(info.name)}' of the graph is made by no node")

    def check_nodes(self, nodes: Iterable[onnx.NodeProto], given: set[str]) -> set[str]:
        """Check the nodes of one graph, return the names of all values in it."""
        nodes = list(nodes)
        made = given
        for node in nodes:
            for output in node.output:
                if output and output in made:
                    raise self.error(
                        f"{describe(node)} makes '{_shortened(output)}', which another node, an input or an "
                        "initializer makes already. Every value is made once: rename one of them"
                    )
                made.add(output)
        made.discard("")
        self.visible.append(made)
        for node in nodes:
            for value in node.input:
                if value and not self.sees(value):
                    raise self.error(f"{describe(node)} reads '{_shortened(value)}', which nothing makes")
            if node.attribute:
                self.holders.append(node)
                for graph in subgraphs(node):
                    self.check_graph(graph)
                self.holders.pop()
        self.visible.pop()
        self._check_acyclic(nodes)
        return made

    def _check_acyclic(self, nodes: list[onnx.NodeProto]) -> None:
        maker = {output: index for index, node in enumerate(nodes) for output in node.output if output}
        needs = [{maker[value] for value in _reads(node) if value in maker} for node in nodes]
        readers: dict[int, list[int]] = {}
        for index, makers in enumerate(needs):
            for writer in makers:
                readers.setdefault(writer, []).append(index)
        missing = [len(makers) for makers in needs]
        ready = [index for index, count in enumerate(missing) if not count]
        done = 0
        while ready:
            done += 1
            for reader in readers.get(ready.pop(), ()):
                missing[reader] -= 1
                if not missing[reader]:
                    ready.append(reader)
        if done < len(nodes):
            stuck = next(node for node, count in zip(nodes, missing, strict=True) if count)
            raise self.error(f"the graph has a cycle: {describe(stuck)} needs a value that depends on its own result")


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """The values that the node reads, also inside its subgraphs."""
    yield from node.input
    if node.attribute:
        for graph in subgraphs(node):
            for inner in graph.node:
                yield from _reads(inner)
            yield from (info.name for info in graph.output)


def _shortened(name: str) -> str:
    return name if len(name) <= MOST_CHARACTERS else f"{name[:MOST_CHARACTERS]}..."


# ---- operators ----


KNOWN_DOMAINS = ("", "ai.onnx.ml", "com.microsoft")  # the domains that ONNX Runtime's CPU build runs
QUARK_DOMAINS = (
    *("com.amd.quark", "com.amd.quark.constant", "com.amd.quark.packed"),
    *("com.vai.quantize", "com.amd.quantize"),
)

_QUANTIZED = frozenset(
    {
        *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "BFPQuantizeDequantize"),
        *("ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"),
        *("MatMulNBits", "MatMulBnb4", "MatMulFpQ4", "GatherBlockQuantized", "QOrderedMatMul"),
        *("QAttention", "QGemm", "QMoE", "QEmbedLayerNormalization"),
    }
)

MAX_OPSET = 2**31 - 1  # the largest version that onnx accepts


def check_operators(proto: onnx.ModelProto, name: str, *, has_foreign_domains: bool = False) -> None:
    """Raise ModelError, naming the node, if an operator or domain is unknown or belongs to a quantized model.

    The model's own functions count as known. Only ONNX Runtime knows the operators of com.microsoft, and with
    `has_foreign_domains` those of libraries: it refuses unknown ones when the model first runs.
    """
    functions = {(function.domain, function.name) for function in proto.functions}
    opsets = opset_versions(proto.opset_import)
    foreign = {opset.domain for opset in proto.opset_import} if has_foreign_domains else set()
    _check_nodes(proto.graph.node, opsets, functions, name, foreign)
    for function in proto.functions:
        versions = ChainMap(opset_versions(function.opset_import), opsets)
        _check_nodes(function.node, versions, functions, name, foreign)


def check_forms(proto: onnx.ModelProto, name: str) -> None:
    """Raise ModelError if an operator has fewer inputs or outputs than required, or an attribute of the wrong type. For
    files that are only inspected, where unknown operators do not matter."""
    version = opset_versions(proto.opset_import).get("", 0)
    for node in all_nodes(proto.graph.node):
        if node.domain in QUARK_DOMAINS:
            _check_counts(node, 1, 1, name)
        elif not node.domain and 0 < version <= MAX_OPSET and onnx.defs.has(node.op_type, version, ""):
            schema = onnx.defs.get_schema(node.op_type, version, "")
            _check_counts(node, schema.min_input, schema.min_output, name)
            for attribute in node.attribute:
                if attribute.name not in schema.attributes or attribute.ref_attr_name:
                    continue
                kind = onnx.AttributeProto.AttributeType.Name(attribute.type)
                expected = str(schema.attributes[attribute.name].type).rpartition(".")[2]
                if kind != expected:
                    raise ModelError(
                        f"'{name}': attribute '{attribute.name}' of {describe(node)} is of type {kind}, expected "
                        f"{expected}. Export the model again"
                    )


def _check_counts(node: onnx.NodeProto, inputs: int, outputs: int, name: str) -> None:
    if len(node.input) < inputs or len(node.output) < outputs:
        raise ModelError(
            f"'{name}': {describe(node)} has {len(node.input)} inputs and {len(node.output)} outputs, expected at "
            f"least {inputs} and {outputs}. Export the model again"
        )


def shorten_domains(proto: onnx.ModelProto) -> None:
    """Replace `ai.onnx`, the long name of the standard domain, by the empty text everywhere, in place."""
    for part in (proto, *proto.functions):
        nodes = part.graph.node if isinstance(part, onnx.ModelProto) else part.node
        for entry in (*part.opset_import, *all_nodes(nodes)):
            if entry.domain == "ai.onnx":
                entry.domain = ""


def declare_standard_opset(proto: onnx.ModelProto) -> None:
    """Give a model without standard operators, such as a forest of trees, a version of them, in place: what is added
    to the graph has one. It is that of its functions, or the oldest that is quantized."""
    if not proto.opset_import or "" in opset_versions(proto.opset_import):
        return
    if any(not node.domain for node in all_nodes(proto.graph.node)):
        return
    known = [opset_versions(function.opset_import).get("", 0) for function in proto.functions]
    proto.opset_import.add(domain="", version=max(known, default=0) or MIN_OPSET)


def opset_versions(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Domain to version."""
    return {opset.domain: opset.version for opset in imports}


def _check_nodes(
    nodes: Iterable[onnx.NodeProto],
    opsets: Mapping[str, int],
    functions: set[tuple[str, str]],
    name: str,
    foreign: Collection[str],
) -> None:
    nodes = list(all_nodes(nodes))
    for node in nodes:
        is_quantized = node.op_type in _QUANTIZED or node.op_type.startswith("QLinear")
        if (is_quantized and node.domain in ("", "com.microsoft")) or node.domain in QUARK_DOMAINS:
            where = f" of domain '{node.domain}'" if node.domain else ""
            raise ModelError(
                f"'{name}' is already quantized: it has {describe(node)}{where}. Start from the float model "
                "that it was made from"
            )
    if not 0 < opsets.get("", 1) <= MAX_OPSET:
        raise ModelError(f"'{name}' declares opset {opsets['']}, which does not exist. Export it again")
    for node in nodes:
        domain = node.domain
        if (domain, node.op_type) in functions:
            continue
        if domain not in KNOWN_DOMAINS and domain not in foreign:
            raise ModelError(
                f"'{name}': {describe(node)} is of domain '{domain}', which ONNX Runtime does not run, and the model "
                f"has no function for it. Known domains: ai.onnx, {', '.join(KNOWN_DOMAINS[1:])}. Replace the node by "
                "standard operators, give the model a function for it, or name the library that has the operator "
                "(UserCustomOpLibPath)"
            )
        if domain not in opsets and domain != "com.microsoft":
            raise ModelError(
                f"'{name}': {describe(node)} is of domain '{domain or 'ai.onnx'}', and the model does not say which "
                "version of it (opset_import). Export it again"
            )
        if not domain:
            _check_standard(node, opsets[""], name)


def _check_standard(node: onnx.NodeProto, version: int, name: str) -> None:
    """Raise ModelError if the opset has no such operator, or its inputs and attributes do not fit the operator."""
    if node.op_type == "Constant" and any(attr.name == "sparse_value" for attr in node.attribute):
        raise ModelError(f"'{name}': {describe(node)} is sparse, which cannot be quantized. Store it as a dense tensor")
    if onnx.defs.has(node.op_type, version, ""):
        if any(True for _ in subgraphs(node)):
            return  # ONNX's checker would go inside, where values come from outside
        context = onnx.checker.C.CheckerContext()
        context.ir_version = onnx.IR_VERSION
        context.opset_imports = {"": version}
        try:
            onnx.checker.check_node(node, context)
        except onnx.checker.ValidationError as error:
            reason = str(error).split("\n")[0].strip()
            raise ModelError(f"'{name}': {describe(node)} is not as opset {version} has it: {reason}") from error
        return
    known = {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}
    if node.op_type in known:
        since = onnx.defs.get_schema(node.op_type).since_version
        raise ModelError(
            f"'{name}': {describe(node)} is not an operator of opset {version}; ONNX has {node.op_type} in other "
            f"versions (newest: {since}). Export the model again, for an opset that has it"
        )
    raise ModelError(f"'{name}': {describe(node)}: {unknown_name('standard operator', node.op_type, sorted(known))}")

"""Translate a network to ONNX by torch's own exporter, with taps that mark places on the way.

A tap is an operator of torch that returns its input, with a number:

    x -> Quantizer -> conv      becomes      x -> tap(17) -> conv

The exporter translates it into a node `QuarkTap`, which no optimization touches. Afterwards the number says which
quantizer belongs there, so the plan, and not the exporter, decides which nodes a quantizer becomes. Taps without a
quantizer are marks: they carry the names of parameters and layers through. The node is declared in com.microsoft, the
one domain in which `quark.onnx.load` accepts unknown operators; no runtime ever sees it.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from torch import fx

from quark.errors import MissingDependencyError
from quark.plan import Choice, Role
from quark.torch.capture import why_not_run
from quark.torch.export.deployable import ExportError, batch_size, quiet
from quark.torch.graph import attribute_of, copy_graph, is_float, layer_name, module_of, rank_of, source_line
from quark.torch.operators import input_first_linear
from quark.torch.pickling import free_axes_of
from quark.torch.train.quantizers import Quantizer

TAP_DOMAIN, TAP = "com.microsoft", "QuarkTap"
_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)"]


@dataclass(frozen=True)
class Tap:
    """A place in the network. `tensor` is the node or the parameter that is read there; a mark has no `choice`."""

    number: int
    tensor: str
    role: Role
    choice: Choice | None = None


def with_taps(network: fx.GraphModule) -> tuple[fx.GraphModule, tuple[Tap, ...]]:
    """Return the network with taps instead of quantizers, and marks on its parameters and the results of its layers.

    The network is not changed; the result shares its parameters.
    """
    with quiet():
        graph = copy_graph(network.graph)
    graph.set_codegen(fx.graph.CodeGen())  # flat inputs and outputs: a file knows no others
    _slice_free_parts(graph)
    taps: list[Tap] = []

    def add(source: fx.Node, role: Role, choice: Choice | None) -> fx.Node:
        tensor = str(source.target) if source.op == "get_attr" else str(source.name)
        tap = graph.call_function(tap_operator(), (source, len(taps)))
        taps.append(Tap(len(taps), tensor, role, choice))
        return tap

    for node in list(graph.nodes):
        quantizer = module_of(network, node)
        if isinstance(quantizer, Quantizer):
            source = node.args[0]
            with graph.inserting_before(node):
                tap = add(source, quantizer.role, quantizer.choice())
            tap.meta["val"] = node.meta.get("val", source.meta.get("val"))
            node.replace_all_uses_with(tap)
            graph.erase_node(node)
    for node in list(graph.nodes):
        if _is_markable(network, node):
            others = [user for user in node.users if not _is_tap(user)]
            with graph.inserting_after(node):
                mark = add(node, Role.WEIGHT if node.op == "get_attr" else Role.ACTIVATION, None)
            mark.meta["val"] = node.meta.get("val")
            for user in others:
                user.replace_input_with(node, mark)
    return fx.GraphModule(network, graph), tuple(taps)


def _slice_free_parts(graph: fx.Graph) -> None:
    """Write chunks and splits along an axis of free size as slices, in place, since torch's exporter does not write
    sequences of free sizes.

        chunk(x, n)[i] = x[i s : (i + 1) s],   s = ceil(size / n)         split(x, s)[i] likewise
    """
    aten = torch.ops.aten
    for node in list(graph.nodes):
        cuts = (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default)
        if node.op != "call_function" or node.target not in cuts or not _cuts_free_axis(node):
            continue
        parts = [user for user in node.users if user.target is operator.getitem]
        if len(parts) != len(node.users):
            continue
        source, given = node.args[:2]
        axis = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
        with graph.inserting_before(node):
            if node.target is aten.chunk.default:
                size = graph.call_function(aten.sym_size.int, (source, axis))
                more = graph.call_function(operator.add, (size, given - 1))
                given = graph.call_function(operator.floordiv, (more, given))
            bounds: list[Any] = [0]
            for number in range(len(node.meta["val"])):
                step = given[number] if isinstance(given, (list, tuple)) else given
                bounds.append(graph.call_function(operator.add, (bounds[-1], step)))
        for part in parts:
            with graph.inserting_before(part):
                arguments = (source, axis, bounds[part.args[1]], bounds[part.args[1] + 1])
                cut = graph.call_function(aten.slice.Tensor, arguments)
            cut.meta, name = dict(part.meta), str(part.name)
            part.replace_all_uses_with(cut)
            graph.erase_node(part)
            cut.name = name
        graph.erase_node(node)


def tap_operator() -> Any:
    """Return the operator `quark::tap(x, number)`; it is defined on first use."""
    _define_tap()
    return torch.ops.quark.tap.default


@functools.cache
def _define_tap() -> torch.library.Library:
    """Define the operator; the library has to live as long as it. The result is a copy, since an operator may not
    return its input."""
    library = torch.library.Library("quark", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("tap(Tensor x, int number) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("tap", lambda x, number: x.clone(), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake("quark::tap", lambda x, number: torch.empty_like(x), lib=library)
    return library


def _is_tap(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is tap_operator()


def _is_markable(network: fx.GraphModule, node: fx.Node) -> bool:
    """True if a node is a parameter, or computes with one or with a quantized value, and has a reader that is not a
    quantizer."""
    if not is_float(node) or all(_is_tap(user) for user in node.users):
        return False
    if node.op == "get_attr":
        value = attribute_of(network, node)
        return value is not None and value.is_floating_point()
    if node.target is input_first_linear:
        return True
    returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    computes = len(returns) == 1 and str(returns[0].type) == "Tensor" and not _is_tap(node)
    return computes and any(input_.op == "get_attr" or _is_tap(input_) for input_ in node.all_input_nodes)


def translate(
    network: fx.GraphModule, example: Sequence[torch.Tensor], free: Sequence[set[int]], *, opset: int
) -> onnx.ModelProto:
    """Return the network as ONNX, with nodes for its taps. `free` has the free axes of each input. An ExportError names
    what cannot be translated."""
    inputs, shapes = tuple(example), None
    if any(free):
        if batch_size(inputs) == 1:  # torch treats a size of 1 as a constant
            inputs = tuple(torch.cat([x, x]) if 0 in axes else x for x, axes in zip(inputs, free, strict=True))
        # torch 2.6 knows these values and not yet their type's name
        kinds = {True: torch.export.Dim.AUTO, False: torch.export.Dim.DYNAMIC}
        shapes = tuple({axis: kinds[axis > 0] for axis in sorted(axes)} or None for axes in free)
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(network, inputs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        if reason := why_not_run(network, inputs, {}):
            raise ExportError(f"example input: {reason}") from error
        remedy = "; it may have been captured with a fixed batch: export with dynamic_batch=False" if shapes else ""
        raise ExportError(f"torch.export does not take the network: {first_line(error)}{remedy}") from error
    return translate_program(program, opset).model_proto


def translate_program(program: torch.export.ExportedProgram, opset: int) -> torch.onnx.ONNXProgram:
    """Return an exported program as ONNX, with nodes for its taps. An ExportError names what cannot be translated."""
    if importlib.util.find_spec("onnxscript") is None:
        raise MissingDependencyError("exporting to ONNX needs onnxscript: pip install onnxscript")
    import onnxscript

    schema = onnx.defs.OpSchema
    signature = schema(
        TAP,
        TAP_DOMAIN,
        1,
        inputs=[schema.FormalParameter("x", "T")],
        outputs=[schema.FormalParameter("y", "T")],
        type_constraints=[("T", _FLOATS, "")],
        attributes=[schema.Attribute("number", schema.AttrType.INT, "", required=True)],
    )
    mark = onnxscript.values.Op(onnxscript.values.Opset(TAP_DOMAIN, 1), TAP, signature)

    def tap(x: Any, number: int) -> Any:
        return mark(x, number=number)

    try:
        with quiet():
            result = torch.onnx.export(
                program,
                (),
                dynamo=True,
                opset_version=opset,
                verbose=False,
                optimize=True,
                custom_translation_table={tap_operator(): tap},
            )
    except Exception as error:  # the exporter's own classes are not public
        raise _untranslated(error, program) from error
    assert result is not None
    return result


def _untranslated(error: BaseException, program: torch.export.ExportedProgram) -> ExportError:
    """Return an error that names the node, its module and the line, as far as they can be found."""
    messages = [str(error)]
    while error.__cause__ is not None:
        error = error.__cause__
        messages.append(str(error))
    node = _culprit(messages, program.graph)
    if node is None:  # the exporter sees smaller operators, which remember the lines that they come from
        try:
            with quiet():
                node = _culprit(messages, program.run_decompositions().graph)
        except Exception:  # noqa: BLE001 - an error is being reported already
            node = None
    reason = first_line(error)
    advice = "Replace the operator by others in the model's code, or leave that part out of the network"
    if node is None:
        return ExportError(f"torch's exporter cannot write the network as ONNX: {reason}. {advice}")
    line = source_line(node)
    where = f"node '{node.name}' ({node.target}) of '{layer_name(node)}'" + (f", {line}" if line else "")
    return ExportError(f"{where}, cannot be written as ONNX: {reason}. {advice}")


def _culprit(messages: Sequence[str], graph: fx.Graph) -> fx.Node | None:
    """The node that the exporter's messages name, or the first one with the operator that they name."""
    names = [match[1] for text in messages for match in re.finditer(r"translating node %(\w+)", text)]
    named = [node for node in graph.nodes if node.name in names]
    operators = [match[1] for text in messages for match in re.finditer(r"op='\w+\.(\w+)'", text)]
    alike = [node for node in graph.nodes if _operator(node) in operators]
    return next(iter([*named, *alike]), None)


def _cuts_free_axis(node: fx.Node) -> bool:
    """True for a chunk or split along an axis whose size is a symbol, as are the sizes of its parts."""
    parts = node.meta.get("val")
    if not isinstance(parts, (list, tuple)) or not _operator(node).startswith(("chunk", "split", "tensor_split")):
        return False
    axis = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    source = node.all_input_nodes[0]
    return isinstance(axis, int) and axis % (rank_of(source) or 1) in free_axes_of(source)


def _operator(node: fx.Node) -> str:
    """bessel_j0 for aten.special_bessel_j0.default."""
    name = str(node.target).split(".")[1:2]
    return name[0].removeprefix("special_") if name else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")

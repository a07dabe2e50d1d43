"""From a network with taps to ONNX, by torch's own exporter.

A tap becomes the node `QuarkTap`. It is said to be of com.microsoft, the one domain in which `quark.onnx.load` takes
operators that it does not know; no runtime ever sees it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx
import torch
from torch import fx

from quark.errors import MissingDependencyError
from quark.torch.capture import why_not_run
from quark.torch.export.errors import ExportError
from quark.torch.export.quiet import quiet
from quark.torch.export.taps import tap_operator
from quark.torch.graph import layer_name, source_line

TAP_DOMAIN, TAP = "com.microsoft", "QuarkTap"
_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)"]


def translate(
    network: fx.GraphModule, example: Sequence[torch.Tensor], *, opset: int, has_dynamic_batch: bool
) -> onnx.ModelProto:
    """The network as ONNX, with nodes for its taps. An ExportError names what cannot be translated."""
    if importlib.util.find_spec("onnxscript") is None:
        raise MissingDependencyError("exporting to ONNX needs onnxscript: pip install 'quark-quantizer[torch]'")
    program = _program(network, example, has_dynamic_batch)
    try:
        with quiet():
            result = torch.onnx.export(
                program,
                (),
                dynamo=True,
                opset_version=opset,
                verbose=False,
                optimize=True,
                custom_translation_table={tap_operator(): _tap_translation()},
            )
    except Exception as error:  # the exporter's own classes are not public
        raise _untranslated(error, program) from error
    assert result is not None
    proto: onnx.ModelProto = result.model_proto
    return proto


def _program(
    network: fx.GraphModule, example: Sequence[torch.Tensor], has_dynamic_batch: bool
) -> torch.export.ExportedProgram:
    """Traced with at least two samples where the batch is free: torch takes a size of 1 for a constant."""
    inputs = tuple(example)
    shapes = None
    if has_dynamic_batch:
        size = batch_size(inputs)
        is_batch = [each.dim() > 0 and each.shape[0] == size for each in inputs]
        if size == 1:
            inputs = tuple(torch.cat([x, x]) if batched else x for x, batched in zip(inputs, is_batch, strict=True))
        # torch 2.6 knows this value and not yet its type's name
        shapes = tuple({0: torch.export.Dim.DYNAMIC} if batched else None for batched in is_batch)
    try:
        with quiet(), torch.no_grad():
            return torch.export.export(network, inputs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        if reason := why_not_run(network, inputs, {}):
            raise ExportError(f"example input: {reason}") from error
        remedy = "; it may have been captured with a fixed batch: export with dynamic_batch=False" if shapes else ""
        raise ExportError(f"torch.export does not take the network: {_first_line(error)}{remedy}") from error


def batch_size(example: Sequence[torch.Tensor]) -> int:
    """The length of the first axis of the first input that has one; 1 where none has."""
    return next((int(each.shape[0]) for each in example if each.dim()), 1)


def _tap_translation() -> Callable[..., Any]:
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
    operator = onnxscript.values.Op(onnxscript.values.Opset(TAP_DOMAIN, 1), TAP, signature)

    def tap(x: Any, number: int) -> Any:
        return operator(x, number=number)

    return tap


def _untranslated(error: Exception, program: torch.export.ExportedProgram) -> ExportError:
    """An error that names the node, its module and the line, as far as they can be found."""
    chain = list(_chain(error))
    messages = [str(each) for each in chain]
    node = _culprit(messages, program.graph) or _culprit(messages, _taken_apart(program))
    reason = _first_line(chain[-1])
    advice = "Replace the operator by others in the model's code, or leave that part out of the network"
    if node is None and any("SplitToSequence" in text for text in messages):
        node = next((each for each in program.graph.nodes if _cuts_free_axis(each)), None)
        reason = "it cuts an axis whose size is free into parts, which torch's exporter does not write"
        advice = "Take the parts by slices (x[:n], x[n:], n being a size), or export with dynamic_batch=False"
    if node is None:
        return ExportError(f"torch's exporter cannot write the network as ONNX: {reason}. {advice}")
    line = source_line(node)
    where = f"node '{node.name}' ({node.target}) of '{layer_name(node)}'" + (f", {line}" if line else "")
    return ExportError(f"{where}, cannot be written as ONNX: {reason}. {advice}")


def _culprit(messages: Sequence[str], graph: fx.Graph) -> fx.Node | None:
    """The node that the exporter's messages speak of: the one of that name, or the first one of that operator."""
    found = [match[1] for text in messages for match in re.finditer(r"translating node %(\w+)", text)]
    named = [node for node in graph.nodes if node.name in found]
    operators = [match[1] for text in messages for match in re.finditer(r"op='\w+\.(\w+)'", text)]
    alike = [node for node in graph.nodes if _operator(node) in operators]
    return next(iter([*named, *alike]), None)


def _cuts_free_axis(node: fx.Node) -> bool:
    """That the node is a chunk or split along an axis whose size is a symbol: so are the sizes of its parts."""
    parts = node.meta.get("val")
    if not isinstance(parts, (list, tuple)) or not _operator(node).startswith(("chunk", "split", "tensor_split")):
        return False
    axis = _argument(node, 2, "dim", 0)
    return any(isinstance(part.shape[axis], torch.SymInt) for part in parts)


def _argument(node: fx.Node, place: int, name: str, default: int) -> int:
    value = node.args[place] if len(node.args) > place else node.kwargs.get(name, default)
    return value if isinstance(value, int) else default


def _taken_apart(program: torch.export.ExportedProgram) -> fx.Graph:
    """The graph in the small operators that the exporter saw; nodes remember their lines."""
    try:
        with quiet():
            graph: fx.Graph = program.run_decompositions().graph
            return graph
    except Exception:  # an error is being reported already
        return fx.Graph()


def _operator(node: fx.Node) -> str:
    """bessel_j0 of aten.special_bessel_j0.default."""
    name = str(node.target).split(".")[1:2]
    return name[0].removeprefix("special_") if name else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")

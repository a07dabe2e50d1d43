"""Names that people recognize, in what the exporter made.

    nodes      the path of the module that they came from, `layer1.0.conv1`; where several nodes came from it, with the
               operator: `layer1.0/Add`. Outside of any module, the name that the node had in torch
    outputs    output, output_1 ...; inputs keep the names of the arguments
    sizes      `batch` for the free axis

What else the exporter wrote down about a node, such as the lines of code that it came from with the folders of the
machine, goes.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable

import onnx_ir as ir

from quark.onnx.graph import fresh_name, nodes

BATCH = "batch"
_SCOPES = "pkg.torch.onnx.name_scopes"
_MADE_UP = re.compile(r"(val|n|node)_?\w*\d+")


def give_names(model: ir.Model) -> None:
    """Name nodes, outputs and the batch; in place."""
    _name_nodes(model)
    for value in model.graph.outputs:
        value.name = f"{value.name}/output"  # so that no two are in each other's way
    for index, value in enumerate(model.graph.outputs):
        rename(model, value, "output" if index == 0 else f"output_{index}")
    for node in nodes(model):
        for value in node.outputs:
            if _MADE_UP.fullmatch(str(value.name)):
                rename(model, value, f"{node.name}_output")
    _name_batch(model)
    _forget_origins(model)


def rename(model: ir.Model, value: ir.Value, name: str) -> None:
    """Give a value a name. Another value that has it gets another one, unless it is an input, an output or a constant:
    then the value's own is numbered."""
    holder = next((each for each in _values(model) if each.name == name), None)
    if holder is value:
        return
    if holder is None:
        fresh_name(model, name)  # so that it is known to be taken
        value.name = name
    elif holder.is_graph_input() or holder.is_graph_output() or holder.is_initializer():
        value.name = fresh_name(model, name)
    else:
        holder.name = fresh_name(model, f"{name}_inner")
        value.name = name


def _values(model: ir.Model) -> Iterable[ir.Value]:
    yield from model.graph.inputs
    yield from list(model.graph.initializers.values())
    for node in model.graph:
        yield from node.outputs


def _name_nodes(model: ir.Model) -> None:
    own = nodes(model)
    bases = {node: _base(node) for node in own}
    counts = Counter(bases.values())
    taken: set[str] = set()
    for node in own:
        base = bases[node]
        name = base if counts[base] == 1 else f"{base}/{node.op_type}"
        count = 0
        while name in taken:
            count += 1
            name = f"{base}/{node.op_type}_{count}"
        taken.add(name)
        node.name = name


def _base(node: ir.Node) -> str:
    """The innermost module, or the node of torch, that an ONNX node came from."""
    try:
        scopes = [str(each) for each in ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))]
    except (ValueError, SyntaxError):
        scopes = []
    path, name = (scopes[-2] if len(scopes) > 1 else ""), (scopes[-1] if scopes else "")
    given = str(node.outputs[0].name) if node.outputs else ""
    return path.removeprefix("L['self'].") or ("" if _MADE_UP.fullmatch(given) else given) or name or str(node.name)


def _name_batch(model: ir.Model) -> None:
    """The symbols that torch gave to first axes of inputs, wherever they stand."""
    symbols: list[str] = []
    for value in model.graph.inputs:
        first = value.shape[0] if value.shape else None
        if isinstance(first, ir.SymbolicDim) and first.value and first.value not in symbols:
            symbols.append(first.value)
    names = {symbol: BATCH if index == 0 else f"{BATCH}_{index}" for index, symbol in enumerate(symbols)}
    for value in _values(model):
        if value.shape is not None and value.shape.is_dynamic():
            value.shape = ir.Shape([_renamed(size, names) for size in value.shape])


def _renamed(size: int | ir.SymbolicDim, names: dict[str, str]) -> int | ir.SymbolicDim:
    if isinstance(size, int) or not size.value:
        return size
    return ir.SymbolicDim(re.sub(r"\w+", lambda found: names.get(found[0], found[0]), size.value))


def _forget_origins(model: ir.Model) -> None:
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.graph.name, model.doc_string, model.graph.doc_string = "network", "", ""
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
    for value in _values(model):
        value.metadata_props.clear()

"""Capture an exported program, its module, or a plain module as a `Network` that can be trained.

Parameters are copied, so the model itself is not changed. The graph is brought into one form:

    guards      checks of input shapes are removed
    blocks      code under `torch.no_grad()` or with autocast switched off, which the tracer puts into graphs of its
                own, is inlined
    in place    operators that write into their input are replaced by those that return a new tensor
    modules     batch norms and dropouts become modules again, which behave differently in training and inference

The network has attributes of its own (`plan`, `config`, `quantizers`): a model's attribute of that name gets a trailing
underscore. Patterns of a configuration still match the model's own names.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import operator
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.nn.modules.batchnorm import _BatchNorm

from quark.errors import ModelError
from quark.torch.capture.batches import read_batch
from quark.torch.capture.program import DynamicShapes, export_for_training
from quark.torch.capture.signature import Call, signature_of
from quark.torch.graph import (
    CALL,
    Network,
    attribute_of,
    copy_graph,
    is_call,
    layer_name,
    rank_of,
    set_attribute,
    source_line,
)
from quark.torch.train.networks import QUANTIZERS, FrozenNetwork, QuantizedNetwork

aten = torch.ops.aten
_ASSERTIONS = (
    aten._assert_scalar.default,
    aten.sym_constrain_range_for_size.default,
    aten._assert_tensor_metadata.default,
)
_ALIASES = (aten.dropout.default,)  # returns its input in eval mode, though its schema does not say so
_FOLDERS = (QUANTIZERS, "dropouts")


def capture(
    model: nn.Module | ExportedProgram,
    example: Callable[[], Any],
    dynamic_shapes: DynamicShapes | None = None,
    call: Call | None = None,
) -> Network:
    """Return the model as a network, in eval mode. `example` returns a batch, for models that have to be traced: that
    of `call`, or what `read_batch` takes. `dynamic_shapes` is that of `export_for_training`."""
    if isinstance(model, (QuantizedNetwork, FrozenNetwork)):
        raise ModelError(
            f"the model is a {type(model).__name__}, which quantize_model or freeze returned: pass the float model "
            "that it was made from"
        )
    if isinstance(model, ExportedProgram):
        module: nn.Module = model.module()
    elif isinstance(model, fx.GraphModule) and _is_exported(model):
        module = model
    else:
        signature = signature_of(model)  # first, because it rejects everything but modules
        batch = example()
        if call is None:
            call, batch = read_batch(batch, signature, "the example input")
        _check_names(model)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        arguments, named = call.split([tensor.to(device) for tensor in batch])
        with _called_as(model, call):
            module = export_for_training(model, arguments, named, dynamic_shapes=dynamic_shapes).module()
    if not isinstance(module, fx.GraphModule):
        raise ModelError(f"the exported program returned a {type(module).__name__}: expected a graph module")
    graph = copy_graph(module.graph)
    for node in list(graph.nodes):
        is_guard = node.op == "call_module" and str(node.target).startswith("_guards")
        if (is_guard or is_call(node, *_ASSERTIONS)) and not node.users:
            graph.erase_node(node)
        elif node.op == "call_module" and not is_guard:
            kind = type(module.get_submodule(str(node.target))).__name__
            raise ModelError(
                f"node '{node.name}' calls a module ({kind}): expected a graph of aten operators, as "
                "quark.torch.export_for_training returns; pass the model itself instead"
            )
    _inline_blocks(module, graph)
    network = Network(_copied_attributes(module, graph), graph)
    _make_functional(graph)
    _restore_modules(network)
    graph.eliminate_dead_code()
    network.delete_all_unused_submodules()
    graph.lint()
    if call is not None and call.signature.python is not None:
        network.meta[CALL] = call
    network.recompile()
    return network.eval()


def _check_names(model: nn.Module) -> None:
    """Raise ModelError if the model has an attribute whose name a graph module cannot hold."""
    for name, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers()):
        first, *rest = name.split(".")
        is_held = hasattr(fx.GraphModule, first) or first == "meta"
        if (is_held and not hasattr(nn.Module, first)) or any(map(keyword.iskeyword, (first, *rest))):
            raise ModelError(
                f"{type(model).__name__} has '{name}', a name that torch's graph modules cannot hold: rename it in "
                "the model's code (and in its state_dict), for example with a trailing underscore"
            )


@contextmanager
def _called_as(model: nn.Module, call: Call) -> Iterator[None]:
    """Make the model's forward callable with the call's tensors alone: its constants are set, and tensors that the
    model takes by **kwargs are parameters, without which torch.export finds no place for their free axes."""
    python = call.signature.python
    others = [] if python is None else [name for name in call.names if name not in python.parameters]
    if not call.constants and not others:
        yield
        return
    own = vars(model).get("forward")
    forward: Any = functools.partial(model.forward, **call.constants)
    if others and python is not None:
        known = [parameter for parameter in python.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in others]
        forward.__signature__ = inspect.Signature([*known, *named])
    model.forward = forward
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own


def _is_exported(module: fx.GraphModule) -> bool:
    """True if the graph consists of operators; what torch.fx traces calls modules, methods and torch functions."""
    return not any(
        (node.op == "call_module" and not str(node.target).startswith("_guards"))
        or node.op == "call_method"
        or str(getattr(node.target, "__module__", "")).startswith("torch.nn.functional")
        for node in module.graph.nodes
    )


def _copied_attributes(module: fx.GraphModule, graph: fx.Graph) -> dict[str, torch.Tensor | nn.Module]:
    """Copy the parameters and buffers that the graph reads; shared tensors stay shared. Renames them in the graph."""
    copies: dict[int, torch.Tensor] = {}
    attributes: dict[str, torch.Tensor | nn.Module] = {}
    reads = [node for node in graph.nodes if node.op == "get_attr"]
    names = {str(node.target) for node in reads}
    for node in reads:
        value = attribute_of(module, node)
        if value is None:
            raise ModelError(
                f"'{node.target}' is a separate graph, as control flow (torch.cond, map) and autocast "
                "within the forward produce: put autocast around the call of the model, and export control flow to "
                "ONNX, where quark.onnx leaves it in float"
            )
        if value.is_meta:
            raise ModelError(
                f"'{node.target}' is on the meta device and has no values: load the weights first, "
                "as with model.to_empty(device='cpu') and load_state_dict"
            )
        if id(value) not in copies:
            fresh = value.detach().clone()
            is_trained = isinstance(value, nn.Parameter)
            copies[id(value)] = nn.Parameter(fresh, requires_grad=value.requires_grad) if is_trained else fresh
        node.target = free_name(str(node.target), names)
        attributes[node.target] = copies[id(value)]
    return attributes


def free_name(path: str, taken: Collection[str]) -> str:
    """Return the path that a model's attribute has in a network; `taken` are the paths of the model.

    >>> free_name("plan.0.weight", ["plan.0.weight"]), free_name("features.0.weight", ["features.0.weight"])
    ('plan_.0.weight', 'features.0.weight')
    """

    def is_ours(name: str) -> bool:
        return name in _FOLDERS or any(hasattr(kind, name) for kind in (QuantizedNetwork, FrozenNetwork))

    first, *rest = path.split(".")
    if not is_ours(first):
        return path
    others = {name.partition(".")[0] for name in taken}
    while first in others or is_ours(first):
        first += "_"
    return ".".join((first, *rest))


# ---- blocks ----
def _inline_blocks(module: fx.GraphModule, graph: fx.Graph) -> None:
    """Inline blocks, also nested ones, into the graph, which is a copy of the module's.

    Results of a block without gradients are detached, so that nothing inside learns, as the model wants. Blocks with
    autocast switched on compute in other types; they stay, and are refused later.
    """

    def block_argument(node: fx.Node) -> int:
        """The argument of the node that is a block to inline; 0 if it has none."""
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "wrap_with_set_grad_enabled":
            return 1
        return 4 if name == "wrap_with_autocast" and not node.args[2] else 0

    while (node := next((node for node in graph.nodes if block_argument(node)), None)) is not None:
        place = block_argument(node)
        source: Any = node.args[place]
        block: fx.Graph = operator.attrgetter(str(source.target))(module).graph
        inputs = iter(node.args[place + 1 :])
        is_detached = place == 1 and not node.args[0]
        known: dict[fx.Node, Any] = {}
        with graph.inserting_before(node):
            for inner in block.nodes:
                if inner.op == "placeholder":
                    known[inner] = next(inputs)
                elif inner.op != "output":
                    known[inner] = graph.node_copy(inner, known.__getitem__)
                if inner.op == "get_attr":
                    known[inner].target = f"{source.target}.{inner.target}"
            returned: Any = block.output_node().args[0]
            results = [known[value] if isinstance(value, fx.Node) else value for value in returned]
            for index, value in enumerate(results):
                if is_detached and isinstance(value, fx.Node):
                    results[index] = graph.call_function(aten.detach.default, (value,))
                    results[index].meta = dict(value.meta)
        for user in list(node.users):  # the operator returns a tuple, of which users take one item each
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        if not source.users:
            graph.erase_node(source)


# ---- operators in place ----
def _make_functional(graph: fx.Graph) -> None:
    """Replace operators that write into their input; the order of nodes stays.

        y = relu_(x)        becomes   y = relu(x),  and later readers of x read y

    So a model may use one in-place module in many places. If the input is a view of another tensor that is read
    afterwards, that one would have changed too: this is refused, with the line to change.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function" or not _is_mutating(node.target):
            continue
        where = f"node '{node.name}' of {layer_name(node)} ({source_line(node)})"
        written = node.args[0]
        if written.op == "get_attr":
            # A model captured in training mode counts its batches; its batch norms do so again as modules
            if not str(written.target).endswith("num_batches_tracked"):
                raise ModelError(
                    f"{where} changes the parameter or buffer '{written.target}' while the network runs: a quantized "
                    "network has constant weights"
                )
            node.replace_all_uses_with(written)
            graph.erase_node(node)
            continue
        _refuse_aliases(node, written, order, where)
        name, overload = node.target._schema.name.removeprefix("aten::"), node.target._overloadname
        functional = getattr(getattr(aten, name[:-1], None), overload, None) if name.endswith("_") else None
        if functional is None:
            raise ModelError(
                f"{where} writes into a tensor with {node.target}, which has no variant that returns a new one: "
                "write the line without '_' or out="
            )
        node.target = functional
        for user in [user for user in written.users if user is not node and order[user] > order[node]]:
            user.replace_input_with(written, node)


def _is_mutating(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _refuse_aliases(node: fx.Node, written: fx.Node, order: dict[fx.Node, int], where: str) -> None:
    """Raise ModelError if a tensor that shares memory with the written one is read afterwards."""
    root = written
    while _is_view(root) and root.args and isinstance(root.args[0], fx.Node):
        root = root.args[0]
    family, pending = {root}, [root]
    while pending:
        views = [user for user in pending.pop().users if user not in family and _is_view(user)]
        family.update(views)
        pending += views
    for other in family - {written, node}:
        reader = next((user for user in other.users if order[user] > order[node] and user not in family), None)
        if reader is not None and not _is_mutating(reader.target):
            raise ModelError(
                f"{where} writes into a view of '{other.name}', which '{reader.name}' reads afterwards: write the line "
                "without in-place operators"
            )


def _is_view(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    aliases = [result.alias_info for result in node.target._schema.returns if result.alias_info is not None]
    return any(not alias.is_write for alias in aliases) or node.target in _ALIASES


# ---- modules ----
def _restore_modules(network: Network) -> None:
    """Turn batch norms and dropouts into modules. Parameters keep their names; a batch norm without running statistics
    stays a function."""
    dropouts: dict[Any, type[nn.Module]] = {
        aten.dropout.default: nn.Dropout,
        aten.feature_dropout.default: nn.Dropout2d,
        aten.alpha_dropout.default: nn.AlphaDropout,
    }
    before = dict(network.named_modules())
    made: set[str] = set()
    for node in list(network.graph.nodes):
        if is_call(node, aten.batch_norm.default) and node.args[3] is not None and node.args[4] is not None:
            path = str(node.args[3].target).rpartition(".")[0] or str(node.name)
            if path not in made:
                made.add(path)
                set_attribute(network, path, _batch_norm(network, node, before.get(path)))
            name = str(node.name)
            _call_module_instead(network, node, path).name = name
        elif is_call(node, *dropouts):
            path = f"dropouts.{node.name}"
            set_attribute(network, path, dropouts[node.target](float(node.args[1])).eval())
            _call_module_instead(network, node, path)


def _batch_norm(network: Network, node: fx.Node, before: nn.Module | None) -> _BatchNorm:
    """The batch norm that the node computes; `before` is the module that holds its parameters now."""
    values = [attribute_of(network, argument) for argument in node.args[1:5]]
    mean = values[2]
    assert mean is not None
    kinds: dict[int | None, type[_BatchNorm]] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 5: nn.BatchNorm3d}
    kind = kinds.get(rank_of(node), nn.BatchNorm2d)
    momentum, eps = (float(node.args[i]) for i in (6, 7))  # type: ignore[arg-type]
    norm = kind(mean.numel(), eps, momentum, affine=values[0] is not None, device=mean.device, dtype=mean.dtype)
    for field, value in zip(("weight", "bias", "running_mean", "running_var"), values, strict=True):
        if value is not None:
            setattr(norm, field, value)
    tracked = getattr(before, "num_batches_tracked", None)
    if isinstance(tracked, torch.Tensor) and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.copy_(tracked)
    return norm.eval()


def _call_module_instead(network: Network, node: fx.Node, path: str) -> fx.Node:
    with network.graph.inserting_before(node):
        call = network.graph.call_module(path, (node.args[0],))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    network.graph.erase_node(node)
    return call

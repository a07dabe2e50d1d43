"""An exported program, its module, or a plain module, as a network of our own that trains.

The parameters are copies: the model that it came from is left as it is. Guards on input shapes are gone, and so are
in-place operators; batch norms and dropouts are modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from quark.errors import ModelError
from quark.torch.capture.attribute_names import free_name, refuse_names
from quark.torch.capture.batches import Batch
from quark.torch.capture.functional import make_functional
from quark.torch.capture.inline_blocks import inline_blocks
from quark.torch.capture.modules import restore_modules
from quark.torch.capture.program import export_for_training
from quark.torch.graph import Network, attribute_of, copy_graph
from quark.torch.train.networks import FrozenNetwork, QuantizedNetwork


def input_names(model: nn.Module | ExportedProgram) -> list[str]:
    """The inputs without which the model does not run."""
    if isinstance(model, ExportedProgram):
        return [str(name) for name in model.graph_signature.user_inputs]
    if isinstance(model, fx.GraphModule):
        return [str(node.target) for node in model.graph.nodes if node.op == "placeholder"]
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"expected a torch.nn.Module, an exported program or its module, got {type(model).__name__}; ONNX files go "
            "to quark.onnx"
        )
    parameters = inspect.signature(model.forward).parameters.values()
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    required = [each.name for each in (*positional, *_by_name(model)) if each.default is each.empty]
    return required or [each.name for each in positional[:1]] or ["x"]


def _by_name(model: nn.Module) -> list[inspect.Parameter]:
    """The inputs that are handed over by name alone, without which the model does not run."""
    parameters = inspect.signature(model.forward).parameters.values()
    return [each for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty]


def capture(model: nn.Module | ExportedProgram, example: Callable[[], Batch]) -> Network:
    """The model as a network, in eval mode; `example` gives a batch where the model has to be traced."""
    if isinstance(model, (QuantizedNetwork, FrozenNetwork)):
        raise ModelError(
            f"the model is a {type(model).__name__}, which quantize_model or freeze gave already: hand over the float "
            "model that it was made of"
        )
    if isinstance(model, fx.GraphModule) and _is_exported(model):
        module: nn.Module = model
    elif isinstance(model, ExportedProgram):
        module = model.module()
    else:
        module = _traced(model, example())
    if not isinstance(module, fx.GraphModule):
        raise ModelError(f"the exported program gave a {type(module).__name__}: expected a graph module")
    return network_of(module)


def _is_exported(module: fx.GraphModule) -> bool:
    """That the graph is one of operators; what torch.fx traces calls modules, methods and functions of torch."""
    guards = [node for node in module.graph.nodes if node.op == "call_module"]
    return all(str(node.target).startswith("_guards") for node in guards) and not any(
        node.op == "call_method" or str(getattr(node.target, "__module__", "")).startswith("torch.nn.functional")
        for node in module.graph.nodes
    )


def _traced(model: nn.Module, example: Batch) -> nn.Module:
    refuse_names(model)
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    inputs = [each.to(device) for each in example]
    names = [each.name for each in _by_name(model)]
    count = len(inputs) - len(names)
    return export_for_training(model, inputs[:count], dict(zip(names, inputs[count:], strict=True))).module()


def network_of(module: fx.GraphModule) -> Network:
    """A network with a copy of the module's graph and parameters."""
    graph = copy_graph(module.graph)
    _remove_guards(module, graph)
    inline_blocks(module, graph)
    root = _attributes(module, graph)
    network = Network(root, graph)
    make_functional(graph)
    restore_modules(network)
    graph.eliminate_dead_code()
    network.delete_all_unused_submodules()
    graph.lint()
    network.recompile()
    return network.eval()


def _remove_guards(module: fx.GraphModule, graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        is_guard = node.op == "call_module" and str(node.target).startswith("_guards")
        is_assertion = node.op == "call_function" and node.target in (
            torch.ops.aten._assert_scalar.default,
            torch.ops.aten.sym_constrain_range_for_size.default,
            torch.ops.aten._assert_tensor_metadata.default,
        )
        if (is_guard or is_assertion) and not node.users:
            graph.erase_node(node)
        elif node.op == "call_module" and not is_guard:
            kind = type(module.get_submodule(str(node.target))).__name__
            raise ModelError(
                f"node '{node.name}' calls a module ({kind}): expected a graph of aten operators, as "
                "quark.torch.export_for_training gives; hand over the model itself instead"
            )


def _attributes(module: fx.GraphModule, graph: fx.Graph) -> dict[str, torch.Tensor | nn.Module]:
    """Copies of the parameters and buffers that the graph reads, by name; what is shared stays shared."""
    copies: dict[int, torch.Tensor] = {}
    names = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    found: dict[str, torch.Tensor | nn.Module] = {}
    for node in graph.nodes:
        if node.op != "get_attr":
            continue
        value = attribute_of(module, node)
        if value is None:
            raise ModelError(
                f"'{node.target}' is a graph of its own, which control flow (torch.cond, map) and autocast "
                "within the forward give: put autocast around the call of the model, and export control flow to "
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
        found[node.target] = copies[id(value)]
    return found

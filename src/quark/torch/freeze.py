"""Freeze a trained network into the one that is shipped.

    1  learned steps and thresholds become fixed numbers
    2  positions that training moved beyond an NPU's limits are brought back
    3  layers with a batch norm become plain convolutions with folded parameters, their quantizers nodes
    4  values that were only moved since they were quantized get their quantizer again, which runtimes look for
    5  32-bit biases get their step, and weights of NVFP4 keep the tensor scale that they have
    6  dropouts are removed

The trained network itself is not changed.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd

from quark.decide.scales import derived_bias, fit_weight_to_bias
from quark.errors import ModelError
from quark.plan import AffineChoice, FloatChoice, QuantizationPlan, Reader, Role, TensorChoice
from quark.torch.graph import attribute_of, inputs_of, module_of, outputs_of, replace_input, set_attribute
from quark.torch.insert import insert_nodes
from quark.torch.origin import state_digest
from quark.torch.train.conv_batch_norm import ConvBatchNorm
from quark.torch.train.networks import QUANTIZERS, FrozenNetwork, QuantizedNetwork, settle_positions, with_state
from quark.torch.train.quantizers import (
    AffineQuantizer,
    BlockFakeQuantizer,
    Float8FakeQuantizer,
    LearnedQuantizer,
    Quantizer,
)

_WEIGHT, _BIAS = 1, 2  # the places of weight and bias among a layer's inputs


def freeze(network: QuantizedNetwork | FrozenNetwork) -> FrozenNetwork:
    """Return the network in eval mode, with fixed numbers; one that is already frozen is returned unchanged."""
    if isinstance(network, FrozenNetwork):
        return network
    if not isinstance(network, QuantizedNetwork):
        raise ModelError(
            f"freeze: expected what ModelQuantizer.quantize_model gave, got {type(network).__name__}; a module "
            "that was wrapped (DistributedDataParallel, torch.compile) has it under .module or ._orig_mod"
        )
    thawed = copy.deepcopy(network).eval()
    with torch.no_grad():
        _fix_numbers(thawed)
        quantizers = _quantizers_by_name(thawed)
        choices = {name: quantizer.choice() for name, quantizer in quantizers.items()}
        moved, facts = settle_positions(thawed.operations, choices)
        for name, choice in moved.items():
            quantizer = quantizers[name]
            assert isinstance(quantizer, AffineQuantizer)
            quantizer.assign(choice)
        settled = (replace(facts, name="NPU positions after training"),) if facts.changed else ()
        for node in list(thawed.graph.nodes):
            layer = module_of(thawed, node)
            if isinstance(layer, ConvBatchNorm):
                _unfold_batch_norm(thawed, node, layer)
        insert_nodes(thawed, thawed.repeated, _quantizers_by_name(thawed))
        _give_biases_their_steps(thawed)
        for node in thawed.graph.nodes:
            blocks = module_of(thawed, node)
            values = attribute_of(thawed, node.args[0]) if isinstance(blocks, BlockFakeQuantizer) else None
            if isinstance(blocks, BlockFakeQuantizer) and values is not None:
                blocks.fix(values)
    for node in list(thawed.graph.nodes):
        if isinstance(module_of(thawed, node), _DropoutNd):
            node.replace_all_uses_with(node.all_input_nodes[0])
            thawed.graph.erase_node(node)
    thawed.graph.eliminate_dead_code()
    thawed.delete_all_unused_submodules()
    thawed.graph.lint()
    plan = QuantizationPlan(_choices(thawed), network.plan.skipped)
    state = {"plan": plan, "config": network.configuration, "algorithms": (*network.algorithms, *settled)}
    frozen: FrozenNetwork = with_state(thawed, FrozenNetwork, state)
    if network.origin is not None:
        frozen.origin = replace(network.origin, state_sha256=state_digest(network.state_dict()))
    return frozen.eval().requires_grad_(False)


def _quantizers_by_name(network: QuantizedNetwork) -> dict[str, Quantizer]:
    return {quantizer.name: quantizer for quantizer in network.all_quantizers().values()}


def _fix_numbers(network: QuantizedNetwork) -> None:
    """Replace every quantizer with a scale by one whose scale stays."""
    for path, quantizer in network.all_quantizers().items():
        if isinstance(quantizer, LearnedQuantizer) and quantizer.is_waiting:
            raise ModelError(
                f"the scale of '{quantizer.tensor}' ({path}) starts from the first batch, and there was none: train "
                "the network or run a batch through it before you freeze it, or hand data to quantize_model"
            )
        choice = quantizer.choice()
        if not isinstance(choice, AffineChoice) and not isinstance(quantizer, Float8FakeQuantizer):
            continue
        assert isinstance(choice, (AffineChoice, FloatChoice))
        if not all(0 < scale < math.inf for scale in choice.scale):
            raise ModelError(
                f"the scale of '{quantizer.tensor}' ({path}) became NaN, Inf or 0 in training: look for a loss or a "
                "gradient that is not finite, and lower the learning rate of scales and thresholds"
            )
        if isinstance(quantizer, Float8FakeQuantizer):
            quantizer.follows = False
            continue
        if isinstance(quantizer, AffineQuantizer):
            quantizer.follows = None
            continue
        assert isinstance(choice, AffineChoice)
        fixed = AffineQuantizer(quantizer.tensor, quantizer.role, choice, ())
        fixed.name = quantizer.name
        set_attribute(network, path, fixed.to(next(quantizer.parameters()).device))


def _unfold_batch_norm(network: QuantizedNetwork, node: fx.Node, layer: ConvBatchNorm) -> None:
    """Replace a layer with a batch norm by a call of its operator with folded parameters."""
    path = str(node.target)
    plain = nn.Module()
    plain.weight = nn.Parameter(layer.folded_weight().detach().clone())
    plain.bias = nn.Parameter(layer.folded_bias().detach().clone())
    set_attribute(network, path, plain)
    with network.graph.inserting_before(node):
        parameters = []
        for name, quantizer in (("weight", layer.weight_quantizer), ("bias", layer.bias_quantizer)):
            source = network.graph.get_attr(f"{path}.{name}")
            parameters.append(source if quantizer is None else _quantized(network, source, quantizer))
        arguments = (node.args[0], *parameters, *layer.operation.arguments)
        call = network.graph.call_function(layer.operation.target, arguments)
    call.meta = dict(node.meta)
    name = str(node.name)
    node.replace_all_uses_with(call)
    network.graph.erase_node(node)
    call.name = name


def _quantized(network: QuantizedNetwork, source: fx.Node, quantizer: Quantizer) -> fx.Node:
    """Add a call of the quantizer at the graph's place of insertion."""
    path = f"{QUANTIZERS}.{quantizer.name}"
    set_attribute(network, path, quantizer)
    return network.graph.call_module(path, (source,))


def _give_biases_their_steps(network: QuantizedNetwork) -> None:
    nodes = {str(node.name): node for node in network.graph.nodes}
    given = [(nodes[reader.node], bias) for bias in network.derived_biases for reader in bias.readers]
    for node, _ in given:
        _fit_weight(network, node)
    for node, bias in given:
        inputs = dict(inputs_of(node))
        activation, weight = (_affine_of(network, inputs.get(index)) for index in (0, _WEIGHT))
        source = inputs.get(_BIAS)
        if activation is None or weight is None or source is None:
            continue
        assert isinstance(bias.choice, AffineChoice)
        choice = derived_bias(bias.choice.format, activation, weight)
        values = attribute_of(network, source)
        assert values is not None
        quantizer = AffineQuantizer(bias.tensor, Role.BIAS, choice, tuple(values.shape)).to(values.device)
        quantizer.name = f"{node.name!s}_bias"
        with network.graph.inserting_before(node):
            call = _quantized(network, source, quantizer)
        replace_input(node, _BIAS, source, call)


def _fit_weight(network: QuantizedNetwork, node: fx.Node) -> None:
    """Raise the weight's scale if the bias would overflow 32 bits, because a scale that follows its weight in training
    ignores the bias. Powers of two stay powers of two."""
    inputs = dict(inputs_of(node))
    activation, weight = (_affine_of(network, inputs.get(index)) for index in (0, _WEIGHT))
    bias, call = attribute_of(network, inputs.get(_BIAS)), inputs.get(_WEIGHT)
    if activation is None or weight is None or bias is None or call is None or weight.group_size is not None:
        return
    quantizer, values = module_of(network, call), attribute_of(network, call.all_input_nodes[0])
    if not isinstance(quantizer, AffineQuantizer) or values is None:
        return
    fitted = fit_weight_to_bias(weight, _array(values), activation.scale[0], _array(bias))
    if fitted.scale != weight.scale:
        is_power_of_two = all(math.frexp(scale)[0] == 0.5 for scale in weight.scale)
        scales = tuple(2.0 ** math.ceil(math.log2(scale)) if is_power_of_two else scale for scale in fitted.scale)
        quantizer.assign(replace(fitted, scale=scales))


def _array(values: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = values.detach().float().cpu().numpy()
    return array


def _affine_of(network: QuantizedNetwork, node: fx.Node | None) -> AffineChoice | None:
    """The choice of the quantizer at that input; a dropout in between has no effect any more."""
    while node is not None and isinstance(module_of(network, node), _DropoutNd):
        node = node.all_input_nodes[0]
    module = None if node is None else module_of(network, node)
    choice = module.choice() if isinstance(module, Quantizer) else None
    return choice if isinstance(choice, AffineChoice) else None


def _choices(network: QuantizedNetwork) -> tuple[TensorChoice, ...]:
    """The choice of every quantizer node, and its readers."""
    reasons = {entry.tensor: entry.reason for entry in network.plan}
    outputs = outputs_of(network.graph)
    tensors = []
    for node in network.graph.nodes:
        module = module_of(network, node)
        if not isinstance(module, Quantizer):
            continue
        source = node.all_input_nodes[0]
        tensor = str(source.target if source.op == "get_attr" else source.name)
        readers = [
            Reader(str(user.name), index)
            for user in node.users
            for index, input_ in inputs_of(user)
            if input_ is node and user.op != "output"
        ]
        readers += [Reader("", index) for index, output in enumerate(outputs) if output is node]
        tensors.append(TensorChoice(tensor, module.role, module.choice(), tuple(readers), reasons.get(tensor, "")))
    return tuple(tensors)

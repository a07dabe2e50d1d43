"""Insert quantizers into the graph: behind a value, before those of its readers that see it quantized.

Nothing is decided here. Places that share a scale share the module. A layer with a batch norm holds the quantizers of
its weight and bias itself. Two kinds are left to `freeze`: a 32-bit bias, whose step is the product of two others and
far below what training sees; and a value that was only moved since it went through the same quantizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from quark.decide.specs import AffineSpec, Algorithm, DynamicSpec, ThresholdInit
from quark.errors import ModelError
from quark.plan import AffineChoice, BlockChoice, DynamicChoice, FloatChoice, Role
from quark.ranges import MinMax, NonOverflow, TensorRange
from quark.torch.decisions import Chosen, Decisions
from quark.torch.graph import Network, module_of, outputs_of, replace_input, set_attribute
from quark.torch.train.conv_batch_norm import ConvBatchNorm
from quark.torch.train.networks import QUANTIZERS, device_of, is_derived_bias
from quark.torch.train.quantizers import (
    AffineQuantizer,
    BlockFakeQuantizer,
    DynamicQuantizer,
    Float8FakeQuantizer,
    FloatFakeQuantizer,
    FollowedRange,
    LearnedQuantizer,
    LsqQuantizer,
    Quantizer,
    TqtQuantizer,
)
from quark.torch.view import parameter_of

Start = Callable[[str, AffineSpec], Callable[[torch.Tensor], AffineChoice]]


def insert(
    network: Network,
    decisions: Decisions,
    start: Start | None = None,
    ranges: Mapping[tuple[str, Any], TensorRange] | None = None,
) -> None:
    """Carry the decisions out, in place. If `start` is given, learned quantizers of activations begin with what it
    finds for their tensor and spec in the first batch that they see. `ranges` has what was observed: thresholds that
    are learned begin with them."""
    quantizers: dict[str, Quantizer] = {}
    nodes = {str(node.name): node for node in network.graph.nodes}
    inserted = []
    for entry in decisions.chosen:
        role = entry.request.role
        if entry.is_repeated or is_derived_bias(role, entry.choice):
            continue
        if entry.quantizer not in quantizers:
            quantizer = quantizers[entry.quantizer] = quantizer_for(network, entry).to(device_of(network))
            quantizer.name = entry.quantizer
            if isinstance(quantizer, TqtQuantizer):
                quantizer.start_at(_threshold(network, entry, ranges or {}))
            if start is not None and role is Role.ACTIVATION and isinstance(quantizer, LearnedQuantizer):
                assert isinstance(entry.request.spec, AffineSpec)
                quantizer.start_from(start(entry.request.tensor, entry.request.spec))
        node = nodes.get(entry.request.reader.node)
        layer = None if node is None or role is Role.ACTIVATION else module_of(network, node)
        if isinstance(layer, ConvBatchNorm):
            setattr(layer, "weight_quantizer" if role is Role.WEIGHT else "bias_quantizer", quantizers[entry.quantizer])
        else:
            inserted.append(entry)
    insert_nodes(network, inserted, quantizers)
    network.graph.lint()
    network.recompile()


def _threshold(network: Network, entry: Chosen, ranges: Mapping[tuple[str, Any], TensorRange]) -> float:
    """The threshold that a learned one starts from: what was observed, or the largest weight; 0 if it is not known."""
    spec = entry.request.spec
    assert isinstance(spec, AffineSpec)
    assert spec.learning is not None
    if entry.request.role is Role.ACTIVATION:
        range_ = ranges.get((entry.request.tensor, spec))
        return 0.0 if range_ is None else max(-range_.lowest, range_.highest)
    values = parameter_of(network, entry.request.tensor)
    is_largest = spec.learning.initial in (None, ThresholdInit.MAX)
    return 0.0 if values is None or not is_largest else float(values.detach().abs().max())


def insert_nodes(network: Network, chosen: Sequence[Chosen], quantizers: Mapping[str, Quantizer]) -> None:
    """Put quantizers, by name, into the places that were chosen for them."""
    calls: dict[tuple[str, str], fx.Node] = {}
    nodes = {str(node.name): node for node in network.graph.nodes}
    for entry in chosen:
        request, reader = entry.request, entry.request.reader
        if request.role is Role.ACTIVATION:
            source = nodes[request.tensor]
        else:
            read = nodes[reader.node].all_input_nodes
            constants = [node for node in read if node.op == "get_attr" and node.target == request.tensor]
            if not constants:
                raise ModelError(
                    f"node '{reader.node}' does not read '{request.tensor}', for which a quantizer was chosen"
                )
            source = constants[0]
        key = (str(source.name), entry.quantizer)
        if key not in calls:
            path = f"{QUANTIZERS}.{entry.quantizer}"
            set_attribute(network, path, quantizers[entry.quantizer])
            last = source
            while last.next.op in ("placeholder", "get_attr"):  # inputs and parameters of the graph have to come first
                last = last.next
            with network.graph.inserting_after(last):
                calls[key] = network.graph.call_module(path, (source,))
            calls[key].meta = {name: value for name, value in source.meta.items() if name in ("val", "nn_module_stack")}
        if reader.is_graph_output:
            _replace_output(network.graph, reader.index, calls[key])
        else:
            replace_input(nodes[reader.node], reader.index, source, calls[key])


def quantizer_for(network: Network, chosen: Chosen) -> Quantizer:
    """Return the module that does what was chosen."""
    request, choice = chosen.request, chosen.choice
    tensor, role = request.tensor, request.role
    if isinstance(choice, BlockChoice):
        return BlockFakeQuantizer(tensor, role, choice)
    if isinstance(choice, FloatChoice):
        return (Float8FakeQuantizer if choice.is_eight_bits else FloatFakeQuantizer)(tensor, role, choice)
    spec = request.spec
    if isinstance(choice, DynamicChoice):
        assert isinstance(spec, DynamicSpec)
        return DynamicQuantizer(tensor, role, choice, spec.is_symmetric)
    assert isinstance(spec, AffineSpec)
    if spec.learning is not None:
        learned = TqtQuantizer if spec.learning.algorithm is Algorithm.TQT else LsqQuantizer
        return learned(tensor, role, choice)
    if role is Role.ACTIVATION:
        return AffineQuantizer(tensor, role, choice, ())
    values = parameter_of(network, tensor)
    follows = None  # a constant's scale is recomputed in training, if its method only uses extremes
    if spec.method in (MinMax(), NonOverflow()):
        even = FollowedRange(spec.integer, spec.is_symmetric, spec.is_power_of_two)
        follows = even
        if values is not None and spec.is_symmetric and spec.integer.signed and not spec.is_power_of_two:
            wide = replace(even, has_lowest_code=True)
            scale = torch.tensor(choice.scale)
            scales = [
                quantizer.parameters(values.detach().float(), choice.axis, choice.group_size)[0]
                for quantizer in (even, wide)
            ]
            distances = [float((candidate.cpu().reshape(-1) - scale).abs().sum()) for candidate in scales]
            follows = wide if distances[1] < distances[0] else even
    return AffineQuantizer(tensor, role, choice, () if values is None else tuple(values.shape), follows)


def _replace_output(graph: fx.Graph, index: int, new: fx.Node) -> None:
    output = graph.output_node()
    numbers = iter(range(len(outputs_of(graph))))
    output.args = fx.node.map_arg(output.args, lambda node: new if next(numbers) == index else node)

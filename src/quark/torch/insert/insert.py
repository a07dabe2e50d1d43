"""Quantizers go into the graph: behind a value, before those of its readers that see it quantized.

Places that share a scale share the module. A layer with a batch norm holds the quantizers of its weight and bias
itself. Two kinds wait for `freeze`: a bias of 32 bits, whose step is the product of two others and far below what
training sees; and a value that was only moved since it went through the same quantizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from quark.errors import ModelError
from quark.plan import AffineChoice, BlockChoice, DynamicChoice, FloatChoice, Reader, Role
from quark.ranges import MinMax, NonOverflow
from quark.torch.choose import Chosen, Decisions
from quark.torch.choose.parameters import parameter_of
from quark.torch.graph import Network, outputs_of, replace_input, set_attribute
from quark.torch.specs import AffineSpec, Algorithm
from quark.torch.train.conv_batch_norm import ConvBatchNorm
from quark.torch.train.followed_range import FollowedRange
from quark.torch.train.networks import QUANTIZERS, device_of, is_derived_bias
from quark.torch.train.quantizers import (
    AffineQuantizer,
    BlockFakeQuantizer,
    DynamicQuantizer,
    FloatFakeQuantizer,
    LsqQuantizer,
    Quantizer,
    TqtQuantizer,
)


def insert(network: Network, decisions: Decisions) -> None:
    """Carry the decisions out, in place."""
    made: dict[str, Quantizer] = {}
    calls: dict[tuple[str, str], fx.Node] = {}
    nodes = {str(node.name): node for node in network.graph.nodes}
    for each in decisions.chosen:
        if each.is_repeated or is_derived_bias(each.request.role, each.choice):
            continue
        if each.quantizer not in made:
            made[each.quantizer] = quantizer_for(network, each).to(device_of(network))
            made[each.quantizer].name = each.quantizer
        layer = _layer(network, nodes, each)
        if layer is not None:
            name = "weight_quantizer" if each.request.role is Role.WEIGHT else "bias_quantizer"
            setattr(layer, name, made[each.quantizer])
            continue
        _insert_one(network, nodes, each, made[each.quantizer], calls)
    network.graph.lint()
    network.recompile()


def insert_repeated(network: Network, decided: Sequence[Chosen], quantizers: Mapping[str, Quantizer]) -> None:
    """Put quantizers where values that went through them were only moved since."""
    calls: dict[tuple[str, str], fx.Node] = {}
    nodes = {str(node.name): node for node in network.graph.nodes}
    for each in decided:
        _insert_one(network, nodes, each, quantizers[each.quantizer], calls)


def quantizer_for(network: Network, each: Chosen) -> Quantizer:
    """The module that does what was chosen."""
    request, choice = each.request, each.choice
    if isinstance(choice, BlockChoice):
        return BlockFakeQuantizer(request.tensor, request.role, choice)
    if isinstance(choice, FloatChoice):
        return FloatFakeQuantizer(request.tensor, request.role, choice)
    spec = request.spec
    assert isinstance(spec, AffineSpec)
    if isinstance(choice, DynamicChoice):
        return DynamicQuantizer(request.tensor, request.role, choice, spec.is_symmetric)
    if spec.learning is not None:
        learned = TqtQuantizer if spec.learning.algorithm is Algorithm.TQT else LsqQuantizer
        return learned(request.tensor, request.role, choice)
    values = parameter_of(network, request.tensor) if request.role is not Role.ACTIVATION else None
    shape = () if values is None else tuple(values.shape)
    return AffineQuantizer(request.tensor, request.role, choice, shape, _followed(each, spec, choice))


def _followed(each: Chosen, spec: AffineSpec, choice: AffineChoice) -> FollowedRange | None:
    """How the scale of a constant follows it while it is trained; None where its method looks at more than extremes."""
    if each.request.role is Role.ACTIVATION or spec.method not in (MinMax(), NonOverflow()):
        return None
    return FollowedRange(spec.format, spec.is_symmetric, spec.is_power_of_two)


def _layer(network: Network, nodes: dict[str, fx.Node], each: Chosen) -> ConvBatchNorm | None:
    """The layer with a batch norm that holds the constant."""
    node = nodes.get(each.request.reader.node)
    if node is None or node.op != "call_module" or each.request.role is Role.ACTIVATION:
        return None
    module = network.get_submodule(str(node.target))
    return module if isinstance(module, ConvBatchNorm) else None


def _insert_one(
    network: Network,
    nodes: dict[str, fx.Node],
    each: Chosen,
    quantizer: Quantizer,
    calls: dict[tuple[str, str], fx.Node],
) -> None:
    source = _source(network, nodes, each)
    key = (str(source.name), each.quantizer)
    path = f"{QUANTIZERS}.{each.quantizer}"
    if key not in calls:
        set_attribute(network, path, quantizer)
        with network.graph.inserting_after(_last_of_kind(source)):
            calls[key] = network.graph.call_module(path, (source,))
        calls[key].meta = {name: value for name, value in source.meta.items() if name in ("val", "nn_module_stack")}
    _redirect(network, nodes, each.request.reader, source, calls[key])


def _source(network: Network, nodes: dict[str, fx.Node], each: Chosen) -> fx.Node:
    request = each.request
    if request.role is Role.ACTIVATION:
        return nodes[request.tensor]
    reader = nodes[request.reader.node]
    for source in reader.all_input_nodes:
        if source.op == "get_attr" and source.target == request.tensor:
            return source
    raise ModelError(f"node '{reader.name}' does not read '{request.tensor}', for which a quantizer was chosen")


def _redirect(network: Network, nodes: dict[str, fx.Node], reader: Reader, source: fx.Node, new: fx.Node) -> None:
    if not reader.is_graph_output:
        replace_input(nodes[reader.node], reader.index, source, new)
        return
    output = network.graph.output_node()
    places = outputs_of(network.graph)
    seen = iter(range(len(places)))
    output.args = fx.node.map_arg(output.args, lambda node: new if next(seen) == reader.index else node)


def _last_of_kind(source: fx.Node) -> fx.Node:
    """Behind all inputs and parameters of the graph, which have to come first."""
    last = source
    while last.next.op in ("placeholder", "get_attr"):
        last = last.next
    return last

"""Where quantizers go: nothing inside fused pairs, one scale where values are only moved, dropouts left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch_networks import images, trained
from torch_specs import affine, settings

from quark.decide import Placement, place
from quark.decide.npu_positions import npu_operations
from quark.decide.specs import LayerSpec
from quark.decide.view import Node, Value
from quark.errors import UnknownNameError
from quark.plan import Role
from quark.torch.capture import capture
from quark.torch.graph import Network
from quark.torch.optimize import optimize
from quark.torch.specs import Settings
from quark.torch.view import view_of


def prepared(model: nn.Module, x: torch.Tensor | None = None) -> Network:
    network = capture(model, lambda: (images(2) if x is None else x,))
    optimize(network)
    return network


def placed(model: nn.Module, wanted: Settings, x: torch.Tensor | None = None) -> tuple[Network, Placement]:
    network = prepared(model, x)
    return network, place(view_of(network), wanted.choose)


def tensors(placement: Placement, role: Role = Role.ACTIVATION) -> set[str]:
    return {request.tensor for request in placement.requests if request.role is role}


class Pair(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.layer(x))


@pytest.mark.parametrize(
    ("activation", "is_fused"),
    [(nn.ReLU(), True), (nn.ReLU6(), True), (nn.Hardtanh(0, 4), True), (nn.Sigmoid(), False), (nn.LeakyReLU(), False)],
    ids=str,
)
def test_nothing_is_quantized_between_a_layer_and_its_activation(activation: nn.Module, is_fused: bool) -> None:
    _, placement = placed(Pair(activation), settings("int8"), torch.rand(2, 4))
    assert ("linear" in tensors(placement)) is not is_fused
    assert len(tensors(placement)) == (2 if is_fused else 3)


def test_an_activation_behind_a_float_layer_reads_float() -> None:
    wanted = settings("int8", exclude=("layer",))
    _, placement = placed(Pair(nn.ReLU()), wanted, torch.rand(2, 4))
    assert tensors(placement) == {"relu"}
    assert [node.reason for node in placement.skipped] == ["excluded by 'layer'"]


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(8, 2, 1)
        self.pool, self.dropout = nn.AvgPool2d(2), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.first(x), self.second(x)], 1)
        return self.last(self.dropout(self.pool(both)))


def group(placement: Placement, tensor: str) -> set[str]:
    request = next(request for request in placement.requests if request.tensor == tensor)
    return {name for name, _ in placement.groups.members((tensor, request.spec))}


def test_a_concatenation_has_one_scale_and_pooling_too_for_an_npu() -> None:
    _, placement = placed(Joined(), settings("int8"))
    assert group(placement, "cat") == {"conv2d", "conv2d_1", "cat"}
    assert group(placement, "avg_pool2d") == {"avg_pool2d"}
    _, placement = placed(Joined(), settings("non-overflow"))
    assert group(placement, "cat") == {"conv2d", "conv2d_1", "cat", "avg_pool2d"}


def test_the_quantizer_goes_before_a_dropout() -> None:
    network, placement = placed(Joined(), settings("int8"))
    (request,) = [request for request in placement.requests if request.tensor == "avg_pool2d"]
    by_name = {node.name: node for node in network.graph.nodes}
    assert by_name[request.reader.node].target == "dropouts.dropout"
    assert request.consumer.node == "conv2d_2"


def test_moved_values_share_the_scale_of_where_they_come_from() -> None:
    _, placement = placed(trained("resnet"), settings("int8"))
    assert {"relu_", "max_pool2d"} <= group(placement, "max_pool2d")
    assert "max_pool2d" in placement.derived


@pytest.mark.parametrize("name", ["mxfp4_e2m1", "mx6", "dynamic"])
def test_blocks_and_dynamic_scales_go_on_products_alone(name: str) -> None:
    network, placement = placed(trained("resnet"), settings(name))
    convolutions = [node for node in network.graph.nodes if node.op == "call_module" or "linear" in node.name]
    readers = {request.consumer.node for request in placement.requests}
    assert readers <= {node.name for node in convolutions}
    assert len(tensors(placement, Role.WEIGHT)) == 9


def test_specs_of_a_layer_go_before_those_of_its_kind_and_of_all() -> None:
    wider = LayerSpec(affine("int16"), affine("int16"), output=affine("int16"))
    wanted = settings("int8", by_name={"layer1.0.conv1": wider}, by_type={"Linear": None})
    _, placement = placed(trained("resnet"), wanted)
    formats = {request.tensor: request.spec.format for request in placement.requests if request.role is Role.WEIGHT}
    assert formats["layer1.0.conv1.weight"] == "int16"
    assert formats["layer1.0.conv2.weight"] == "int8"
    assert "fc.weight" not in formats
    assert [node.reason for node in placement.skipped] == ["left in float by 'Linear'"]


@pytest.mark.parametrize("option", ["exclude", "by_name"])
def test_a_pattern_that_fits_nothing_is_a_mistake(option: str) -> None:
    entries: dict[str, Any] = {"exclude": ("fcc",), "by_name": {"fcc": None}}
    with pytest.raises(UnknownNameError, match="no layer .*'fcc'.*Did you mean fc"):
        placed(trained("resnet"), settings("int8", **{option: entries[option]}))


def test_weights_alone() -> None:
    _, placement = placed(trained("vit"), settings("int4 groups"))
    assert not tensors(placement)
    assert len(tensors(placement, Role.WEIGHT)) == 10


def test_what_has_no_quantized_form_is_told() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cumsum(x, 1)

    _, placement = placed(Odd(), settings("int8"))
    assert [(node.op_type, node.reason) for node in placement.skipped] == [("cumsum", "no quantized form is known")]


class Called(nn.Module):
    """Layers a and b, and what is done with them."""

    def __init__(self, forward: Any, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def test_outputs_alone_also_leave_nothing_inside_fused_pairs() -> None:
    only_outputs = Settings(LayerSpec(None, None, output=affine()))
    _, placement = placed(Pair(nn.ReLU()), only_outputs, torch.rand(2, 4))
    assert tensors(placement) == {"relu"}


def test_a_concatenation_is_not_computed_with_the_activation_behind_it() -> None:
    model = Called(lambda m, x: torch.relu(torch.cat([m.a(x), m.b(x)], 1)), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 1))
    _, placement = placed(model, settings("int8"))
    assert {"cat", "relu"} <= tensors(placement)


def test_what_is_quantized_goes_by_the_spec_of_the_layer() -> None:
    model = Called(lambda m, x: m.a(x) + m.b(x), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 1))
    both = LayerSpec(affine(), affine(), output=affine())
    weights_and_sums = Settings(LayerSpec(None, affine()), by_name={"add": both})
    _, placement = placed(model, weights_and_sums)
    assert tensors(placement) == {"conv2d", "conv2d_1", "add"}
    gelu = Called(lambda m, x: nn.functional.gelu(m.a(x)), a=nn.Conv2d(3, 4, 1))
    bfloat16 = settings("bfloat16").specs
    for inside, expected in (("gelu", {"x", "conv2d", "gelu"}), (None, {"x", "conv2d"})):
        by_name = {} if inside is None else {inside: bfloat16}
        _, placement = placed(gelu, settings("int8", by_name=by_name))
        assert len(tensors(placement)) == len(expected)


@pytest.mark.parametrize("option", ["exclude", "by_name"])
def test_a_dropout_may_be_named(option: str) -> None:
    entries: dict[str, Any] = {"exclude": ("dropout",), "by_name": {"dropout": None}}
    _, placement = placed(Joined(), settings("int8", **{option: entries[option]}))
    assert "avg_pool2d" in tensors(placement)


def test_the_nodes_of_a_plan_are_names_and_not_patterns() -> None:
    model = nn.Sequential()
    model.add_module("linear_1", nn.Linear(4, 4))
    model.add_module("linear", nn.Linear(4, 4))
    wide = LayerSpec(affine("int16"), affine("int16"), output=affine("int16"))
    network = prepared(model, torch.rand(2, 4))
    names = [node.name for node in network.graph.nodes if "linear" in node.name and node.op == "call_function"]
    placement = place(view_of(network), settings("int8", by_node={names[1]: wide}).choose)
    formats = {
        request.consumer.node: request.spec.format for request in placement.requests if request.role is Role.WEIGHT
    }
    assert formats == {names[0]: "int8", names[1]: "int16"}


def test_a_copy_of_a_parameter_is_no_activation() -> None:
    model = Called(
        lambda m, x: m.a(x) + m.drop(m.p), a=nn.Linear(4, 4), drop=nn.Dropout(), p=nn.Parameter(torch.rand(4))
    )
    _, placement = placed(model, settings("int8"), torch.rand(2, 4))
    assert "p" not in tensors(placement)


def test_parts_of_a_split_are_quantized_and_measured_themselves() -> None:
    model = Called(
        lambda m, x: (lambda p, q: m.b(torch.cat([torch.sigmoid(p), q], 1)))(*m.a(x).chunk(2, 1)),
        a=nn.Conv2d(3, 4, 1),
        b=nn.Conv2d(4, 2, 1),
    )
    _, placement = placed(model, settings("int8"))
    parts = {name for name in tensors(placement) if name.startswith("getitem")}
    assert parts
    assert not parts & placement.derived


def test_a_computed_weight_of_a_convolution_stays_float() -> None:
    weight = nn.Parameter(torch.rand(4, 3, 1, 1))
    model = Called(lambda m, x: nn.functional.conv2d(x, torch.sin(m.w)), w=weight)
    _, placement = placed(model, settings("int8"))
    readers = {(request.consumer.node, request.consumer.index) for request in placement.requests}
    assert ("conv2d", 0) in readers
    assert ("conv2d", 1) not in readers


def test_quantizers_come_in_the_order_of_the_values() -> None:
    """Checkpoints have the names that quantizers get in this order."""
    network, placement = placed(trained("mobilenet"), settings("int8"))
    order = {node.name: i for i, node in enumerate(network.graph.nodes)}
    activations = [order[request.tensor] for request in placement.requests if request.role is Role.ACTIVATION]
    assert activations == sorted(activations)


def test_a_product_with_a_number_has_one_operand_for_an_npu() -> None:
    model = Called(lambda m, x: m.a(x) * 0.25, a=nn.Linear(4, 4))
    graph = view_of(prepared(model, torch.rand(2, 4)))

    class Everything:
        def read(self, node: Node, index: int) -> str:
            return f"{node.name} {index}"

        def written(self, value: Value) -> str:
            return value.name

        def source(self, value: Value) -> Value:
            return value

    (product,) = [operation for operation in npu_operations(graph, Everything()) if operation.op_type == "Mul"]
    assert len(product.inputs) == 1

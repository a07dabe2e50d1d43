"""Where the walk through a network stops: every layer once, in order, and where little has to be kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from onnx_models import Net

from quark.features.finetuning.layers import TrainedLayer, trained_layers
from quark.features.finetuning.walk import LONGEST, Walk, stages
from quark.onnx.graph import infer_shapes
from quark.plan import AffineChoice, QuantizationPlan, Reader, Role, TensorChoice


def staged(model: onnx.ModelProto) -> list[list[str]]:
    net = ir.serde.deserialize_model(model)
    infer_shapes(net)
    layers = layers_of(net)
    return [[layer.name for layer in stage] for stage in stages(Walk(net, [], list), layers)]


def layers_of(net: ir.Model) -> list[TrainedLayer]:
    choice = AffineChoice("int8", (0.1,), (0,))
    plan = QuantizationPlan(
        tuple(
            TensorChoice(str(node.inputs[1].name), Role.WEIGHT, choice, (Reader(str(node.name), 1),))
            for node in net.graph
            if node.op_type == "Conv" and node.inputs[1] is not None
        )
    )
    found, left = trained_layers(net, plan, ("Conv",))
    assert not left
    return found


def convolutions(channels: Sequence[int]) -> onnx.ModelProto:
    """A chain whose tensors have so many channels."""
    net = Net()
    x: Any = net.input("x", (1, channels[0], 8, 8))
    for into, out in itertools.pairwise(channels):
        x = net.node("Relu", net.conv(x, (into, out), 1))
    return net.model(x)


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 20])
def test_every_layer_is_in_one_stage_and_in_order(count: int) -> None:
    model = convolutions([4] * (count + 1))
    found = staged(model)
    assert [name for stage in found for name in stage] == [n.name for n in model.graph.node if n.op_type == "Conv"]
    assert all(1 <= len(stage) <= LONGEST for stage in found)


def test_of_equal_places_the_last_is_taken() -> None:
    assert [len(stage) for stage in staged(convolutions([4] * 14))] == [6, 6, 1]


def test_a_stage_ends_where_the_least_is_remembered() -> None:
    # behind the second and the seventh layer there are two channels
    assert [len(stage) for stage in staged(convolutions([4, 8, 2, 8, 8, 8, 8, 2, 8, 8]))] == [2, 5, 2]


def test_the_end_costs_nothing() -> None:
    assert [len(stage) for stage in staged(convolutions([4, 1, 8, 8]))] == [3]


def test_a_shortcut_counts_until_it_is_added() -> None:
    net = Net()
    x = net.conv(net.input("x", (1, 8, 8, 8)), (8, 8), 1)
    y = net.conv(x, (8, 4), 1)
    y = net.conv(y, (4, 8), 1)
    x = net.conv(net.node("Add", x, y), (8, 8), 1)
    for _ in range(4):
        x = net.conv(x, (8, 8), 1)
    # inside the block 8 + 4 channels would be kept; before it or from its end on 8 (behind the add of both 8 + 8)
    assert [len(stage) for stage in staged(net.model(x))] == [6, 2]


def test_there_may_be_no_layers() -> None:
    net = Net()
    model = net.model(net.node("Relu", net.input("x", (1, 2))))
    assert staged(model) == []


def test_sizes_that_are_not_known_do_no_harm() -> None:
    net = Net()
    x: Any = net.input("x", ("N", 4, "H", "W"))
    for _ in range(8):
        x = net.conv(x, (4, 4))
    found = staged(net.model(x))
    assert sum(len(stage) for stage in found) == 8

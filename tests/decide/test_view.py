"""The same network as a torch module and as an ONNX model is the same picture to what decides."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from onnx_models import Net, with_if
from torch import nn
from torch.nn import functional

from quark.decide.operators import channel_axis, facts, reduction_axis
from quark.decide.view import Graph, Node
from quark.onnx.load import load
from quark.onnx.view import view_of as onnx_view
from quark.torch.capture import capture
from quark.torch.view import view_of as torch_view

X = (2, 4, 6, 6)


class Call(nn.Module):
    """A module of one function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def of_torch(module: nn.Module) -> Node:
    graph = torch_view(capture(module.eval(), lambda: (torch.rand(X),)))
    return next(node for node in graph if not node.is_plumbing)


def of_onnx(op_type: str, *inputs: Any, **attributes: Any) -> Node:
    """A node with x and these constants; None leaves an input out."""
    net = Net(opset=18)
    x = net.input("x", X)
    values = ["" if input_ is None else net.constant(np.asarray(input_)) for input_ in inputs]
    model = load(net.model(net.node(op_type, x, *values, **attributes))).model
    return next(iter(onnx_view(model)))


conv, transposed = nn.Conv2d(4, 8, 3, groups=2), nn.ConvTranspose2d(4, 6, 3, groups=2)
ZEROS = np.zeros(0, np.float32)
f32 = np.float32
PADS = [0, 0, 1, 2, 0, 0, 1, 2]  # one before and behind axis 2, two before and behind axis 3

# (torch, ONNX, settings that both have)
CASES: dict[str, tuple[nn.Module, Node, dict[str, Any]]] = {
    "clip": (Call(lambda x: torch.clamp(x, 0, 4)), of_onnx("Clip", f32(0), f32(4)), {"bounds": (0.0, 4.0)}),
    "one bound": (Call(lambda x: torch.clamp(x, min=1)), of_onnx("Clip", f32(1)), {"bounds": (1.0, math.inf)}),
    "relu6": (nn.ReLU6(), of_onnx("Clip", f32(0), f32(6)), {"bounds": (0.0, 6.0)}),
    "transpose": (
        Call(lambda x: x.permute(0, 2, 3, 1)),
        of_onnx("Transpose", perm=[0, 2, 3, 1]),
        {"perm": [0, 2, 3, 1]},
    ),
    "mean": (Call(lambda x: x.mean((1, 2))), of_onnx("ReduceMean", np.array([1, 2])), {"axes": [1, 2]}),
    "pad": (Call(lambda x: functional.pad(x, (2, 2, 1, 1))), of_onnx("Pad", np.array(PADS)), {"mode": "constant"}),
    "conv": (conv, of_onnx("Conv", conv.weight.detach(), conv.bias.detach(), group=2), {"group": 2}),
    "transposed": (transposed, of_onnx("ConvTranspose", transposed.weight.detach(), group=2), {"group": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_settings_are_the_same_on_both_roads(name: str) -> None:
    module, theirs, settings = CASES[name]
    ours = of_torch(module)
    assert ours.op_type == theirs.op_type
    assert facts(ours) == facts(theirs)
    for key, expected in settings.items():
        for node in (ours, theirs):
            found = node.setting(key, "constant" if key == "mode" else None)
            assert (list(found) if isinstance(expected, list) else found) == expected
    assert ours.inputs[0] is not None
    assert theirs.inputs[0] is not None
    assert len(ours.inputs[0].shape or ()) == len(theirs.inputs[0].shape or ()) == 4


def test_pads_are_by_axis_on_both_roads() -> None:
    module, theirs, _ = CASES["pad"]
    wanted = {(2, 1, 1), (3, 2, 2)}
    assert {each for each in theirs.setting("pads") if any(each[1:])} == wanted
    assert {each for each in of_torch(module).setting("pads") if any(each[1:])} == wanted
    filled = Call(lambda x: functional.pad(x, (1, 1), value=3.0))
    assert of_torch(filled).setting("fill") == 3
    assert facts(of_torch(filled)) == facts(of_onnx("Pad", np.array(PADS), f32(3)))


@pytest.mark.parametrize("name", ["conv", "transposed"])
def test_weights_have_the_same_axes_and_numbers(name: str) -> None:
    module, theirs, _ = CASES[name]
    ours = of_torch(module)
    first, second = ours.inputs[1], theirs.inputs[1]
    assert first is not None
    assert second is not None
    assert first.constant is not None
    assert second.constant is not None
    np.testing.assert_array_equal(first.constant.array(), second.constant.array())
    for axis in (None, 0, 1):
        for one, other in zip(first.constant.extremes(axis), second.constant.extremes(axis), strict=True):
            np.testing.assert_array_equal(one, other)
    assert channel_axis(ours, 4) == channel_axis(theirs, 4)
    assert [reduction_axis(ours, i) for i in range(3)] == [reduction_axis(theirs, i) for i in range(3)]


def test_readers_outputs_and_captures() -> None:
    graph: Graph = onnx_view(load(with_if()).model)
    read = [(value, reader) for node in graph for value in node.outputs for reader, _ in value.readers]
    assert any(reader.is_inner for _, reader in read)
    assert not any(node.is_inner for node in graph)
    for value, reader in read:
        assert reader.is_inner or value in reader.inputs
    assert sorted(index for node in graph for value in node.outputs for index in value.outputs) == [0]


def test_a_dropout_is_transparent_and_no_layer() -> None:
    graph = torch_view(capture(nn.Sequential(nn.Conv2d(4, 4, 1), nn.Dropout(0.5)), lambda: (torch.rand(X),)))
    dropout = next(node for node in graph if node.op_type == "Dropout")
    assert dropout.is_transparent
    assert dropout.is_plumbing
    assert graph.matching("*") == [node.name for node in graph if node is not dropout]

"""Positions of a plan within the NPU's limits: what moves along, what is told, and what is stored in the end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_models import Net
from position_plans import plan_of, scales_of

from quark.decide.npu_positions import limit_positions
from quark.decide.options import PositionOptions
from quark.errors import UnknownNameError
from quark.npu import RULE_NAMES
from quark.onnx.insert import insert
from quark.onnx.load import load
from quark.onnx.simulate import DEFAULT_SUBSTITUTIONS, SimulateOptions, simulate
from quark.onnx.view import view_of
from quark.plan import AffineChoice, FloatChoice, QuantizationPlan, Reader, Role, TensorChoice

ALL = PositionOptions(frozenset(RULE_NAMES))


def scale_of(entry: TensorChoice) -> float:
    assert isinstance(entry.choice, AffineChoice)
    return entry.choice.scale[0]


def limited(model, positions, options=ALL, **formats):
    """The positions of activations and constants afterwards, by tensor, and what was told."""
    plan, facts = limit_positions(view_of(model), plan_of(model, positions, **formats), options)
    return {name: int(-np.log2(scale)) for name, scale in scales_of(plan).items()}, facts


def conv_net(activation="Relu"):
    net = Net()
    y = net.node("Conv", net.input("x", (1, 3, 8, 8)), net.weight(4, 3, 3, 3, name="w"), net.weight(4, name="b"),
                 name="conv", output="c")  # fmt: skip
    more = [net.constant([0.1, 0.2, 0.3, 0.4], "slope")] if activation == "PRelu" else []
    if activation == "PRelu":
        net.initializers[-1].dims[:] = [4, 1, 1]
    return load(net.model(net.node(activation, y, *more, name="act", output="y"))).model


@pytest.mark.parametrize("activation", ["Relu", "LeakyRelu", "PRelu"])
def test_the_output_of_a_convolution_is_that_of_its_activation(activation):
    after, facts = limited(conv_net(activation), {"x": 5, "w": 14, "b": 12, "y": 2})
    assert after == {"x": 5, "w": 13, "b": 12, "y": 2}
    assert facts.changed == ("AdjustShiftCut moved weight w from 14 to 13",)
    assert facts.left == ()


def test_a_leaky_relu_behind_leaves_the_bias_less_room():
    positions = {"x": 5, "w": 5, "b": 12, "y": 2}
    assert limited(conv_net("Relu"), positions)[0]["b"] == 12
    assert limited(conv_net("LeakyRelu"), positions)[0]["b"] == 10


def test_moved_constants_are_quantized_anew_from_float():
    """What is stored are the codes of the float weight at the new scale, not of the old codes."""
    model = conv_net()
    weight, bias = (np.array(model.graph.initializers[name].const_value.numpy()) for name in ("w", "b"))
    plan, _ = limit_positions(view_of(model), plan_of(model, {"x": 9, "w": 11, "b": 22, "y": 0}), ALL)
    scale = scales_of(plan)
    assert (scale["w"], scale["b"]) == (2.0**-7, 2.0**-16)
    insert(model, plan)
    stored = {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}
    for name, array in (("w", weight), ("b", bias)):
        exact = np.clip(np.rint(array.astype(np.float64) / scale[name]), -128, 127)
        np.testing.assert_array_equal(stored[f"{name}_quantized"], exact)
        assert stored[f"{name}_scale"] == scale[name]


def test_the_reason_says_which_rule_moved_it_from_where():
    model = conv_net()
    plan, _ = limit_positions(view_of(model), plan_of(model, {"x": 5, "w": 14, "b": 12, "y": 2}), ALL)
    reasons = {tensor.tensor: tensor.reason for tensor in plan}
    assert reasons["w"] == "by hand; AdjustShiftCut moved it from 14 to 13"
    assert reasons["x"] == "by hand"


def joined(*, has_pool=True):
    """Two branches, one of them behind a Reshape, in a Concat with a constant; a pool behind it."""
    net = Net()
    x, z = net.input("x", (1, 2, 4, 4)), net.input("z", (1, 32))
    turned = net.node("Reshape", z, net.integers([1, 2, 4, 4]), name="reshape", output="turned")
    y = net.node("Concat", x, turned, net.weight(1, 1, 4, 4, name="k"), axis=1, name="join", output="joined")
    if has_pool:
        y = net.node("AveragePool", y, kernel_shape=[2, 2], name="pool", output="pooled")
    return load(net.model(y)).model


def test_alignment_takes_the_largest_scale():
    after, facts = limited(joined(), {"x": 6, "z": 5, "turned": 5, "k": 7, "joined": 4, "pooled": 3})
    assert set(after.values()) == {3}
    assert "AlignConcat moved activation x from 6 to 3" in facts.changed
    assert "AlignPool moved activation joined from 4 to 3" in facts.changed


def test_what_only_moves_values_keeps_one_scale_where_it_had_one():
    positions = {"x": 2, "z": 5, "turned": 5, "k": 7, "joined": 4}
    assert limited(joined(has_pool=False), positions)[0]["z"] == 2
    assert limited(joined(has_pool=False), {**positions, "z": 6})[0]["z"] == 6  # it had two


def test_rules_that_are_off_and_rounds():
    positions = {"x": 6, "z": 5, "turned": 5, "k": 7, "joined": 4, "pooled": 3}
    off = replace(ALL, rules=ALL.rules - {"AlignConcat", "AlignPool"})
    assert limited(joined(), positions, off)[0] == positions
    after, facts = limited(joined(), positions, replace(ALL, max_rounds=0))
    assert after == positions
    assert {each.node for each in facts.left} == {"join", "pool"}
    assert "after 0 rounds" in facts.left[0].reason
    with pytest.raises(UnknownNameError, match="AlignPool"):
        limited(joined(), positions, PositionOptions(frozenset({"AlignPol"})))


def test_a_constant_that_two_layers_read_moves_for_one_of_them():
    net = Net()
    x, w = net.input("x", (4, 8)), net.weight(8, 8, name="w")
    y = net.node("Gemm", net.node("Gemm", x, w, name="first", output="m"), w, name="second", output="y")
    model = load(net.model(y)).model
    plan, facts = limit_positions(view_of(model), plan_of(model, {"x": 5, "w": 8, "m": 5, "y": -6}), ALL)
    readers = {scale_of(each): each.readers for each in plan.of("w")}
    assert readers == {2.0**-8: (Reader("first", 1),), 2.0**-5: (Reader("second", 1),)}
    assert facts.changed == ("AdjustShiftCut moved weight w from 8 to 5",)
    insert(model, plan)
    onnx.checker.check_model(ir.to_proto(model))


def test_entries_of_one_activation_move_together():
    net = Net()
    x = net.input("x", (1, 4))
    y = net.node("Add", x, net.node("Sub", x, net.input("z", (1, 4)), name="sub", output="d"), name="add", output="y")
    model = load(net.model(y)).model
    plan = plan_of(model, {"x": 9, "z": 1, "d": 2, "y": 1})
    entry = plan.tensors[0]
    parts = tuple(replace(entry, readers=(reader,)) for reader in entry.readers)
    after, _ = limit_positions(view_of(model), replace(plan, tensors=(*parts, *plan.tensors[1:])), ALL)
    assert [scale_of(each) for each in after.of("x")] == [2.0**-8, 2.0**-8]


def test_what_has_no_position_takes_no_part():
    """A scale that is not a power of two, one for each channel, another kind of number, readers that disagree."""
    model = conv_net()
    plan = plan_of(model, {"x": 9, "w": 11, "b": 22, "y": 0})
    odd = [
        AffineChoice("int8", (0.3,), (0,)),
        AffineChoice("int8", (0.25,) * 4, (0,) * 4, axis=0),
        FloatChoice("bfloat16"),
    ]
    for choice in odd:
        tensors = tuple(replace(tensor, choice=choice) if tensor.tensor == "w" else tensor for tensor in plan)
        after, facts = limit_positions(view_of(model), QuantizationPlan(tensors), ALL)
        assert after.tensors == tensors
        assert facts.changed == ()
    different = TensorChoice("x", Role.ACTIVATION, AffineChoice("int8", (0.5,), (0,)), (Reader("conv", 0),))
    after, facts = limit_positions(view_of(model), QuantizationPlan((*plan.tensors, different)), ALL)
    assert facts.changed == ()


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
def test_a_bias_of_32_bits_keeps_the_scale_of_the_products(op_type):
    net = Net()
    inputs = net.input("x", (1, 4, 8, 8)), net.weight(4, 4, 3, 3, name="w"), net.weight(4, name="b")
    y = net.node("MaxPool", net.node(op_type, *inputs, name="conv", output="c"), kernel_shape=[2, 2], output="y")
    pool = net.node("MaxPool", inputs[0], kernel_shape=[2, 2], name="pool", output="p")
    model = load(net.model(y, pool)).model
    after, facts = limited(model, {"x": 9, "w": 11, "b": 20, "c": 4, "y": 4, "p": 3}, b="int32")
    assert after["x"] == 3
    assert after["b"] == after["x"] + after["w"]
    assert "the scale of the products moved bias b from 20 to 14" in facts.changed


def test_zeros_pull_nothing_along():
    """A layer that was silent on all samples has no position of its own; its weights stay as they are."""
    after, facts = limited(conv_net(), {"x": 5, "w": 8, "b": 127, "y": 127})
    assert after == {"x": 5, "w": 8, "b": 7, "y": 7}
    assert "a position for zeros moved activation y from 127 to 7" in facts.changed


def swish_net():
    net = Net()
    x = net.input("x", (1, 4))
    gate = net.node("Sigmoid", x, name="gate", output="g")
    return load(net.model(net.node("Mul", gate, x, name="mul", output="y"))).model


def test_swish_is_seen_through_what_stands_for_the_npus_constant():
    model = swish_net()
    plan = plan_of(model, {"x": -1, "g": 5, "y": -18})
    simulate(model, SimulateOptions(DEFAULT_SUBSTITUTIONS))
    after, facts = limit_positions(view_of(model), plan, ALL)
    assert scales_of(after) == {"x": 1.0, "g": 2.0**-7, "y": 2.0**8}
    rules = " ".join(facts.changed)
    assert all(
        name in rules for name in ("AdjustHardSigmoid moved activation g", "AdjustShiftSwish moved activation y")
    )
    without, _ = limit_positions(view_of(model), plan, replace(ALL, rules=ALL.rules - {"AdjustShiftSwish"}))
    assert scales_of(without)["y"] == 2.0**18  # a plain Mul has room for 32


def test_it_comes_to_rest_and_touches_no_model():
    model = joined()
    before = ir.to_proto(model).SerializeToString()
    plan = plan_of(model, {"x": 6, "z": 5, "turned": 5, "k": 7, "joined": 4, "pooled": 3})
    once, _ = limit_positions(view_of(model), plan, ALL)
    again, facts = limit_positions(view_of(model), once, ALL)
    assert again == once
    assert facts.changed == ()
    assert ir.to_proto(model).SerializeToString() == before

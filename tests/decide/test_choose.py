"""What a plan holds: where quantizers go, which scales they have, and why nodes are skipped."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx_models import Net, conv_bn_relu, residual, transformer_block, with_if

from quark.decide import (
    AffineSpec,
    BlockPlacement,
    BlockSpec,
    ChoiceOptions,
    DynamicSpec,
    FloatSpec,
    LayerSpec,
    Selection,
    Target,
    TensorOverride,
    choose,
    place,
    tensors_to_measure,
)
from quark.errors import InvalidValueError, ModelError, UnknownNameError
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.formats.spec import ScaleRule
from quark.onnx.load import load
from quark.onnx.view import view_of
from quark.plan import AffineChoice, BlockChoice, FloatChoice, Reader, Role
from quark.ranges import MinMax, PowerOfTwoMinMSE, TensorRange

UNSIGNED = LayerSpec(AffineSpec("uint8", is_symmetric=False), AffineSpec("int8"), AffineSpec("int32"))
SIGNED = LayerSpec(AffineSpec("int8"), AffineSpec("int8"), AffineSpec("int32"))
BLOCKS = LayerSpec(*[BlockSpec(BlockQuantizer(get_format("mxint8"), ScaleRule.RCEIL))] * 2)


def plan_of(model, options, ranges=None):
    """The plan with every activation measured as -1..3, or as told."""
    graph = load(model).model
    placement = place(view_of(graph), options)
    found = {}
    for name, spec in tensors_to_measure(placement):
        low, high = (ranges or {}).get(name, (-1.0, 3.0))
        position = 5 if spec.is_power_of_two else None
        found[name, spec] = TensorRange(low, high, position)
    return choose(view_of(graph), placement, found, options)


def with_selection(spec=UNSIGNED, **fields):
    return ChoiceOptions(spec, selection=Selection(**fields))


def conv_relu_conv():
    net = Net()
    x = net.input("x", (1, 3, 8, 8))
    y = net.node("Relu", net.node("Conv", x, net.weight(4, 3, 3, 3, name="w"), net.weight(4, name="b"), name="first"))
    y = net.conv(y, (4, 4), 1)
    return net.model(net.node("Flatten", y, name="flat", output="y"))


def skipped_reasons(plan):
    return {node.node: node.reason for node in plan.skipped}


def test_nothing_is_quantized_between_a_convolution_and_its_activation():
    plan = plan_of(conv_relu_conv(), ChoiceOptions(UNSIGNED), {"relu1_out": (0.0, 3.0)})
    assert not plan.of("first_out")
    assert [r.node for each in plan.of("relu1_out") for r in each.readers] == ["conv2"]


def test_a_bias_has_the_product_of_the_scales():
    plan = plan_of(conv_relu_conv(), ChoiceOptions(replace(UNSIGNED, weight=AffineSpec("int8", is_per_channel=True))))
    (x,), (w,), (b,) = (plan.of(name) for name in ("x", "w", "b"))
    assert b.choice.format == "int32"
    assert len(b.choice.scale) == 4
    product = np.float32(x.choice.scale[0]) * np.array(w.choice.scale, np.float32)
    np.testing.assert_array_equal(np.array(b.choice.scale, np.float32), product)


def test_a_per_channel_weight_follows_the_output_channels():
    net = Net()
    x = net.input("x", (2, 6))
    y = net.node("Gemm", x, net.weight(5, 6, name="rows"), transB=1)
    y = net.node("Gemm", y, net.weight(5, 7, name="columns"))
    y = net.node("MatMul", y, net.weight(7, 3, name="matrix"))
    spec = LayerSpec(UNSIGNED.activation, AffineSpec("int8", is_per_channel=True))
    plan = plan_of(net.model(y), ChoiceOptions(spec))
    found = {
        name: (plan.of(name)[0].choice.axis, len(plan.of(name)[0].choice.scale))
        for name in ("rows", "columns", "matrix")
    }
    assert found == {"rows": (0, 5), "columns": (1, 7), "matrix": (1, 3)}


def test_symmetric_int8_has_the_same_quantizer_on_both_sides_of_relu():
    plan = plan_of(conv_relu_conv(), ChoiceOptions(SIGNED), {"relu1_out": (0.0, 3.0)})
    (before,), (after,) = plan.of("first_out"), plan.of("relu1_out")
    assert before.choice == after.choice
    assert before.readers == (Reader("relu1", 0),)


def test_an_npu_has_nothing_before_relu_either_way():
    plan = plan_of(conv_relu_conv(), ChoiceOptions(SIGNED, target=Target.NPU_CNN))
    assert not plan.of("first_out")


def test_readers_behind_a_float_activation_have_pairs_of_their_own():
    net = Net()
    x = net.input("x", (1, 4, 8, 8))
    y = net.node("Relu", net.conv(x, (4, 4), 1))
    y = net.node("Add", net.conv(y, (4, 4), 1), y, output="y")
    plan = plan_of(net.model(y), ChoiceOptions(SIGNED))
    assert [len(each.readers) for each in plan.of("relu1_out")] == [1, 1]


@pytest.mark.parametrize(("target", "is_quantized"), [(Target.ONNX_RUNTIME, False), (Target.NPU_CNN, True)])
def test_logits_of_a_product_stay_float_for_the_runtime(target, is_quantized):
    plan = plan_of(residual(), ChoiceOptions(UNSIGNED, target=target))
    assert bool(plan.of("y")) is is_quantized


def test_operators_that_move_values_share_the_scale_and_are_not_measured():
    graph = load(conv_relu_conv()).model
    options = ChoiceOptions(UNSIGNED)
    measured = {name for name, _ in tensors_to_measure(place(view_of(graph), options))}
    assert "conv2_out" in measured
    assert "y" not in measured
    plan = plan_of(conv_relu_conv(), options)
    assert plan.of("y")[0].choice == plan.of("conv2_out")[0].choice


def concat_model():
    net = Net()
    a, b = net.input("a", (1, 2, 4, 4)), net.input("b", (1, 3, 4, 4))
    y = net.node("Concat", net.conv(a, (2, 2), 1), net.conv(b, (3, 3), 1), axis=1, output="y")
    return net.model(net.conv(y, (5, 2), 1))


@pytest.mark.parametrize("aligned", [frozenset({"Concat"}), frozenset()])
def test_concat_shares_one_scale_only_when_aligned(aligned):
    ranges = {"conv0_out": (-1.0, 1.0), "conv1_out": (-4.0, 2.0), "y": (-4.0, 2.0)}
    plan = plan_of(concat_model(), ChoiceOptions(UNSIGNED, aligned=aligned), ranges)
    choices = {plan.of(name)[0].choice for name in ("conv0_out", "conv1_out", "y")}
    assert len(choices) == (1 if aligned else 2)
    if aligned:
        assert choices.pop().scale[0] == pytest.approx(6 / 255)


def test_moving_operators_between_float_nodes_stay_float():
    net = Net()
    x = net.input("x", (2, 3, 4))
    y = net.node("Erf", net.node("Transpose", net.node("Exp", x), name="idle", perm=[0, 2, 1]))
    plan = plan_of(net.model(y), ChoiceOptions(UNSIGNED))
    assert "only moves" in skipped_reasons(plan)["idle"]
    assert not plan.tensors


@pytest.mark.parametrize(
    ("fields", "skipped"),
    [
        ({"excluded_nodes": ("first",)}, {"first"}),
        ({"excluded_nodes": (r"conv\d|first",)}, {"first", "conv2"}),
        ({"excluded_op_types": frozenset({"Conv"})}, {"first", "conv2"}),
        ({"nodes": ("first", "relu1")}, {"conv2", "flat"}),
        ({"op_types": frozenset({"Conv"})}, {"relu1", "flat"}),
        ({"excluded_subgraphs": ((("relu1",), ("flat",)),)}, {"relu1", "conv2", "flat"}),
        ({"input_nodes": ("relu1",)}, {"first"}),
        ({"output_nodes": ("relu1",)}, {"conv2", "flat"}),
    ],
)
def test_selection_by_name_pattern_type_and_subgraph(fields, skipped):
    plan = plan_of(conv_relu_conv(), with_selection(**fields))
    assert set(skipped_reasons(plan)) >= skipped
    readers = {reader.node for tensor in plan for reader in tensor.readers if tensor.role is not Role.ACTIVATION}
    assert not readers & skipped


@pytest.mark.parametrize("field", ["nodes", "excluded_nodes", "input_nodes", "output_nodes"])
def test_an_unknown_node_name_is_an_error_that_offers_the_nearest(field):
    with pytest.raises(UnknownNameError, match="frist.*first"):
        plan_of(conv_relu_conv(), with_selection(**{field: ("frist",)}))


def test_the_name_of_a_node_that_a_rewrite_removed_is_no_mistake():
    graph = load(conv_relu_conv()).model
    selection = with_selection(excluded_nodes=("bn7",))
    with pytest.raises(UnknownNameError, match="bn7"):
        place(view_of(graph), selection)
    placement = place(view_of(graph), selection, vanished=["bn7"])
    assert placement.requests == place(view_of(graph), with_selection()).requests


@pytest.mark.parametrize("field", ["op_types", "excluded_op_types"])
def test_an_unknown_operator_type_is_an_error(field):
    with pytest.raises(UnknownNameError, match="Convv"):
        plan_of(conv_relu_conv(), with_selection(**{field: frozenset({"Convv"})}))


def test_specs_by_name_and_by_type():
    options = ChoiceOptions(UNSIGNED, by_op_type=(("Flatten", None),), by_node=(("first", SIGNED),))
    plan = plan_of(conv_relu_conv(), options)
    assert plan.of("x")[0].choice.format == "int8"
    assert "flat" in skipped_reasons(plan)


@pytest.mark.parametrize("placement", list(BlockPlacement))
def test_block_formats_go_on_operands_or_everywhere(placement):
    spec = replace(BLOCKS, bias=BLOCKS.weight)
    plan = plan_of(residual(), ChoiceOptions(spec, block_placement=placement))
    op_types = {
        r.node.rstrip("0123456789") for tensor in plan for r in tensor.readers if tensor.role is Role.ACTIVATION
    }
    if placement is BlockPlacement.COMPUTE:
        assert op_types == {"conv", "gemm"}
    else:
        assert {"add", "", "conv", "gemm"} <= op_types


def test_blocks_run_along_the_axis_that_is_summed_over():
    net = Net()
    x = net.input("x", (2, 6))
    net.node("Gemm", x, net.weight(5, 6, name="rows"), transB=1, output="g")
    net.node("Gemm", "g", net.weight(5, 4, name="columns"), output="h")
    net.node("MatMul", "h", net.weight(4, 3, name="matrix"), output="m")
    image = net.input("image", (1, 8, 4, 4))
    net.node("Conv", image, net.weight(4, 8, 1, 1, name="kernel"), output="c")
    net.node("ConvTranspose", "c", net.weight(4, 2, 2, 2, name="up"), output="t")
    plan = plan_of(net.model("m", "t"), ChoiceOptions(BLOCKS))
    names = ("x", "rows", "columns", "h", "matrix", "image", "kernel", "c", "up")
    axes = {name: plan.of(name)[0].choice.axis for name in names}
    expected = {"x": 1, "rows": 1, "columns": 0, "h": -1, "matrix": -2, "image": 1, "kernel": 1, "c": 1, "up": 0}
    assert axes == expected


def test_casts_and_power_of_two_positions():
    plan = plan_of(residual(), ChoiceOptions(LayerSpec(FloatSpec("bfloat16"), FloatSpec("bfloat16"))))
    assert plan.of("x")[0].choice == FloatChoice("bfloat16")
    method = PowerOfTwoMinMSE()
    spec = LayerSpec(
        AffineSpec("uint8", method, is_power_of_two=True),
        AffineSpec("int8", method, is_power_of_two=True),
        AffineSpec("int8", method, is_power_of_two=True),
    )
    plan = plan_of(residual(), ChoiceOptions(spec, target=Target.NPU_CNN))
    for tensor in plan:
        assert all(np.log2(scale) == round(np.log2(scale)) for scale in tensor.choice.scale)
        assert tensor.choice.zero_point == ((128,) if tensor.role is Role.ACTIVATION else (0,))


def big_bias_model(bias):
    net = Net()
    x = net.input("x", (1, 3, 8, 8))
    weight = np.full((2, 3, 1, 1), 1e-3, np.float32)
    weight[1] = 0.0
    y = net.node("Conv", x, net.constant(weight, "w"), net.constant(np.array(bias, np.float32), "b"), output="y")
    return net.model(y)


@pytest.mark.parametrize("is_per_channel", [False, True])
def test_a_bias_that_would_overflow_raises_the_weight_scale(is_per_channel):
    spec = LayerSpec(
        AffineSpec("uint16", is_symmetric=False),
        AffineSpec("int16", is_per_channel=is_per_channel),
        AffineSpec("int32"),
    )
    bias = [500.0, -3.0]
    plan = plan_of(big_bias_model(bias), ChoiceOptions(spec), {"x": (-1e-3, 1e-3)})
    (w,), (b,) = plan.of("w"), plan.of("b")
    codes = np.array(bias) / np.array(b.choice.scale)
    assert np.abs(codes).max() < 2**31
    assert np.abs(np.rint(codes) * np.array(b.choice.scale) - bias).max() < 1e-3
    assert w.choice.scale[0] > 1e-3 / 32767


def test_a_channel_of_zeros_keeps_its_bias():
    spec = replace(UNSIGNED, weight=AffineSpec("int8", is_per_channel=True))
    plan = plan_of(big_bias_model([0.1, 0.7]), ChoiceOptions(spec))
    scale = plan.of("b")[0].choice.scale[1]
    assert abs(round(0.7 / scale) * scale - 0.7) < 1e-6


def test_weights_with_nan_are_refused_by_name():
    model = big_bias_model([0.1, 0.7])
    broken = np.full((2, 3, 1, 1), np.nan, np.float32).tobytes()
    next(t for t in model.graph.initializer if t.name == "w").raw_data = broken
    with pytest.raises(ModelError, match="'w'.*NaN"):
        plan_of(model, ChoiceOptions(UNSIGNED))


@pytest.mark.parametrize("bound", [-np.inf, np.nan])
def test_an_operand_without_bounds_leaves_its_node_in_float(bound):
    net = Net()
    y = net.node("MatMul", net.input("x", (2, 4)), net.weight(4, 4))
    model = net.model(net.node("Max", net.constant(bound), y, name="start_of_a_maximum"))
    plan = plan_of(model, with_selection(has_all_op_types=True))
    reasons = {node.node: node.reason for node in plan.skipped}
    assert reasons == {"start_of_a_maximum": "one of its constants holds NaN or Inf, which has no scale"}


def test_a_weight_that_is_computed_leaves_the_bias_in_float():
    net = Net()
    x, kernel = net.input("x", (1, 3, 6, 6)), net.input("kernel", (4, 3, 3, 3))
    model = net.model(net.node("Conv", x, kernel, net.weight(4, name="b"), name="conv"))
    assert {tensor.tensor for tensor in plan_of(model, ChoiceOptions(UNSIGNED))} == {"x", "kernel", "conv_out"}


def test_a_weight_without_elements_stays_as_it_is():
    net = Net()
    model = net.model(net.node("MatMul", net.input("x", (2, 0)), net.constant(np.zeros((0, 4), np.float32)), name="p"))
    plan = plan_of(model, with_selection())
    assert {node.node: node.reason for node in plan.skipped} == {"p": "its weight has no element"}


def test_overrides_replace_range_scale_and_type():
    overrides = (
        TensorOverride("x", range=(-2.0, 2.0)),
        TensorOverride("relu1_out", format="int8", is_symmetric=True),
        TensorOverride("w", axis=0),
    )
    plan = plan_of(conv_relu_conv(), ChoiceOptions(UNSIGNED, overrides=overrides))
    assert plan.of("x")[0].choice.scale[0] == pytest.approx(4 / 255)
    assert plan.of("relu1_out")[0].choice.format == "int8"
    assert len(plan.of("w")[0].choice.scale) == 4


def test_an_override_of_the_wrong_length_is_refused():
    overrides = (TensorOverride("w", scale=(1.0, 2.0), zero_point=(0, 0)),)
    with pytest.raises(InvalidValueError, match="'w'"):
        plan_of(conv_relu_conv(), ChoiceOptions(UNSIGNED, overrides=overrides))


def test_unsigned_relu_uses_the_whole_range():
    spec = replace(UNSIGNED, activation=AffineSpec("uint8", is_symmetric=True))
    options = ChoiceOptions(spec, has_unsigned_relu=True)
    plan = plan_of(conv_relu_conv(), options, {"relu1_out": (0.0, 2.55)})
    assert plan.of("relu1_out")[0].choice == AffineChoice("uint8", (pytest.approx(0.01),), (0,))
    assert plan.of("x")[0].choice.zero_point == (128,)


def test_weights_only_leaves_activations_alone():
    plan = plan_of(residual(), ChoiceOptions(UNSIGNED, is_weights_only=True))
    assert {tensor.role for tensor in plan} == {Role.WEIGHT}


def test_dynamic_quantization_needs_a_constant_weight():
    spec = LayerSpec(DynamicSpec(), AffineSpec("uint8", is_symmetric=False))
    plan = plan_of(transformer_block(), ChoiceOptions(spec))
    reasons = skipped_reasons(plan)
    assert any("constant weight" in reason for reason in reasons.values())
    assert all(not isinstance(tensor.choice, BlockChoice) for tensor in plan)


def test_every_node_is_quantized_or_has_a_reason():
    for model in (conv_bn_relu(), residual(), transformer_block(), with_if()):
        graph = load(model).model
        names = {node.name for node in graph.graph}
        plan = plan_of(model, ChoiceOptions(UNSIGNED))
        readers = {reader.node for tensor in plan for reader in tensor.readers}
        fused = {node.node for node in plan.skipped}
        assert names - readers - fused <= {node.name for node in graph.graph if node.op_type in ("Relu", "Clip")}


def test_equal_input_gives_an_equal_plan():
    first, second = (plan_of(transformer_block(), ChoiceOptions(UNSIGNED)).to_json() for _ in range(2))
    assert first == second


def test_groups_share_a_scale_along_the_summed_axis():
    net = Net()
    x = net.input("x", (2, 64))
    model = net.model(net.node("MatMul", x, net.weight(64, 3, name="w"), output="y"))
    spec = LayerSpec(None, AffineSpec("int4", MinMax(), group_size=32))
    (choice,) = (each.choice for each in plan_of(model, ChoiceOptions(spec)).of("w"))
    assert (choice.axis, choice.group_size, len(choice.scale)) == (0, 32, 6)

"""Options that change where quantizers go: excluded outputs, pairs of two types, operators by name."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import Net, transformer_block

from quark.decide import (
    AffineSpec,
    BlockPlacement,
    BlockSpec,
    ChoiceOptions,
    LayerSpec,
    Selection,
    Target,
    choose,
    place,
    tensors_to_measure,
)
from quark.errors import UnknownNameError
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.formats.spec import ScaleRule
from quark.onnx.load import load
from quark.onnx.view import view_of
from quark.plan import QuantizationPlan, Reader, Role
from quark.ranges import TensorRange

SIGNED = LayerSpec(AffineSpec("int8"), AffineSpec("int8"), AffineSpec("int32"))
UNSIGNED = LayerSpec(AffineSpec("uint8", is_symmetric=False), AffineSpec("int8"), AffineSpec("int32"))
WIDE = LayerSpec(AffineSpec("int16"), AffineSpec("int8"))
BLOCKS = LayerSpec(*[BlockSpec(BlockQuantizer(get_format("mxint8"), ScaleRule.RCEIL))] * 2)


def plan_of(model, options):
    """The plan with every activation measured as -1..3."""
    view = view_of(load(model).model)
    placement = place(view, options)
    return choose(view, placement, dict.fromkeys(tensors_to_measure(placement), TensorRange(-1.0, 3.0)), options)


def with_types(*names):
    return ChoiceOptions(UNSIGNED, selection=Selection(extra_op_types=frozenset(names)))


def conv_relu_conv():
    net = Net()
    y = net.node("Conv", net.input("x", (1, 3, 8, 8)), net.weight(4, 3, 3, 3), net.weight(4), name="first")
    return net.model(net.node("Flatten", net.conv(net.node("Relu", y), (4, 4), 1), name="flat", output="y"))


def activations(plan: QuantizationPlan) -> set[str]:
    return {tensor.tensor for tensor in plan if tensor.role is Role.ACTIVATION}


def test_outputs_of_named_nodes_stay_float_for_every_reader():
    usual = activations(plan_of(conv_relu_conv(), ChoiceOptions(SIGNED)))
    found = activations(plan_of(conv_relu_conv(), ChoiceOptions(SIGNED, nodes_with_float_output=("relu1",))))
    assert usual - found == {"relu1_out", "first_out"}  # the quantizer before the Relu repeats the one behind it
    assert found <= usual


def test_an_unknown_node_among_them_is_an_error():
    with pytest.raises(UnknownNameError, match="NodesToExcludeOutputQuantization.*relu2.*relu1"):
        plan_of(conv_relu_conv(), ChoiceOptions(SIGNED, nodes_with_float_output=("relu2",)))


@pytest.mark.parametrize(("has_fused_blocks", "count"), [(False, 1), (True, 0)])
def test_blocks_on_all_tensors_can_leave_out_what_is_before_an_activation(has_fused_blocks, count):
    options = ChoiceOptions(BLOCKS, block_placement=BlockPlacement.ALL, has_fused_blocks=has_fused_blocks)
    assert len(plan_of(conv_relu_conv(), options).of("first_out")) == count


def test_between_two_types_a_tensor_is_quantized_as_written_then_as_read():
    options = ChoiceOptions(SIGNED, by_node=(("conv2", WIDE),), has_dual_pairs=True)
    plan = plan_of(conv_relu_conv(), options)
    (read,) = plan.of("relu1_out")
    assert (read.first.format, read.choice.format, read.readers) == ("int8", "int16", (Reader("conv2", 0),))
    (written,) = plan.of("conv2_out")
    assert (written.first.format, written.choice.format) == ("int16", "int8")
    assert not any(tensor.first for tensor in plan if tensor.tensor not in ("relu1_out", "conv2_out"))
    assert QuantizationPlan.from_json(plan.to_json()) == plan


def test_without_the_option_the_reader_decides_alone():
    plan = plan_of(conv_relu_conv(), ChoiceOptions(SIGNED, by_node=(("conv2", WIDE),)))
    assert not any(tensor.first for tensor in plan)
    assert '"first": {' not in plan.to_json()


def exp_behind_a_table():
    net = Net()
    rows = net.node("Gather", net.weight(5, 4, name="table"), net.input("i", (1, 3), np.int64), name="rows")
    return net.model(net.node("Exp", rows, name="exp"))


def test_an_operator_without_a_row_is_quantized_if_it_is_named():
    plan = plan_of(exp_behind_a_table(), ChoiceOptions(UNSIGNED))
    assert not plan.tensors
    plan = plan_of(exp_behind_a_table(), with_types("Exp"))
    assert activations(plan) == {"rows_out", "exp_out"}


def test_a_named_operator_that_moves_values_needs_no_quantized_neighbour():
    plan = plan_of(exp_behind_a_table(), with_types("Gather"))
    assert {tensor.tensor for tensor in plan} == {"table", "rows_out"}


def test_transformers_on_an_npu_have_integer_products_with_weights_only():
    selection = Selection(needs_constant_matmul_operand=True)
    model = transformer_block()
    plan = plan_of(model, ChoiceOptions(UNSIGNED, selection=selection, target=Target.NPU_TRANSFORMER))
    reasons = [node.reason for node in plan.skipped]
    op_types = {node.name: node.op_type for node in load(model).model.graph}
    constants = {reader.node for tensor in plan if tensor.role is not Role.ACTIVATION for reader in tensor.readers}
    assert {op_types[node] for node in constants} == {"MatMul"}
    assert any("MatMulConstBOnly" in reason for reason in reasons)
    assert any("Softmax is not quantized for this target" in reason for reason in reasons)


def embedding_network(rows):
    """A product of the rows of a table."""
    net = Net()
    table = net.constant(rows.astype(np.float32), "table")
    y = net.node("Gather", table, net.input("i", (1, 3), np.int64), name="rows")
    return net.model(net.node("MatMul", net.node("Sqrt", y, name="root"), net.weight(rows.shape[1], 4), name="product"))


WITH_EMBEDDINGS = ChoiceOptions(UNSIGNED, selection=Selection(has_embeddings=True), target=Target.NPU_TRANSFORMER)


def test_the_rows_of_an_embedding_have_the_scale_of_its_table():
    rows = np.random.default_rng(0).uniform(-2, 6, (200, 16))
    plan = plan_of(embedding_network(rows), WITH_EMBEDDINGS)
    choices = {tensor.tensor: tensor.choice for tensor in plan}
    assert choices["rows_out"] == choices["table"]
    low, high = np.float32(rows.min()), np.float32(rows.max())
    assert choices["table"].scale == pytest.approx([(high - low) / 255])
    without = plan_of(embedding_network(rows), ChoiceOptions(UNSIGNED, target=Target.NPU_TRANSFORMER))
    assert "table" not in {each.tensor for each in without}


def test_a_table_with_rows_too_unlike_for_one_scale_stays_float():
    rows = np.random.default_rng(0).uniform(-1, 1, (200, 16))
    rows[7] *= 9  # others use 28 of 256 codes
    plan = plan_of(embedding_network(rows), WITH_EMBEDDINGS)
    assert "table" not in {tensor.tensor for tensor in plan}
    assert any("fewer than 32 of 256 codes" in node.reason for node in plan.skipped if node.node == "rows")
    assert "table" in {tensor.tensor for tensor in plan_of(embedding_network(rows), with_types("Gather"))}


@pytest.mark.parametrize(("highest", "scale"), [(0.5, 0.5 / 255), (1 / 64, 1 / 128 / 64)], ids=["peaked", "flat"])
def test_the_result_of_a_softmax_has_a_scale_that_the_kernel_can_compute_with(highest, scale):
    """ONNX Runtime's QLinearSoftmax gives zeros if the scale times 64 positions is below exp(-5)."""
    net = Net()
    weights = net.node("Softmax", net.node("MatMul", net.input("x", (1, 8, 16)), net.weight(16, 64)), axis=-1, name="p")
    view = view_of(load(net.model(net.node("MatMul", weights, net.weight(64, 4)))).model)
    options = ChoiceOptions(UNSIGNED)
    placement = place(view, options)
    ranges = dict.fromkeys(tensors_to_measure(placement), TensorRange(0.0, highest))
    found = {each.tensor: each.choice for each in choose(view, placement, ranges, options)}
    assert found["p_out"].scale == pytest.approx([scale])
    assert found["p_out"].zero_point == (0,)

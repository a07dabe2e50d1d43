"""Models that a rewrite must leave as they are, each for one reason."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnx_models import Net, gelu_erf, random_feed, run_model, with_if

from quark.onnx.load import load
from quark.onnx.optimize import REWRITES, OptimizeOptions, optimize

Build = Callable[[Net], list[str]]


def identity_between_input_and_output(net: Net) -> list[str]:
    return [net.node("Identity", "x", output="y")]


def identities_to_two_outputs(net: Net) -> list[str]:
    z = net.node("Relu", "x", output="z")
    return [z, net.node("Identity", z, output="y")]


def dropout_in_training(net: Net) -> list[str]:
    training = net.constant(np.array(True))
    return [net.node("Dropout", net.node("Relu", "x"), net.constant(0.0), training)]


def sum_that_grows(net: Net) -> list[str]:
    return [net.node("Add", net.node("Relu", "x"), net.constant(np.zeros((1, 1, 1, 1, 1), np.float32)))]


def reshape_with_zero_sizes(net: Net) -> list[str]:
    return [net.node("Reshape", net.node("Relu", "x"), net.integers([2, 4, 36]))]


def random_numbers(net: Net) -> list[str]:
    return [net.node("Add", "x", net.node("RandomNormalLike", net.weight(6)))]


def large_expansion(net: Net) -> list[str]:
    return [
        net.node(
            "Add",
            net.reduce("ReduceMean", "x", [0]),
            net.node("Expand", net.weight(1, 6), net.integers([256, 4, 6, 6])),
        )
    ]


def constant_output(net: Net) -> list[str]:
    return [net.node("Relu", "x"), net.node("Relu", net.weight(3), output="c")]


def norm_after_a_shared_conv(net: Net) -> list[str]:
    y = net.conv("x", (4, 4))
    return [net.batch_norm(y, 4), net.node("Relu", y)]


def norm_after_an_output(net: Net) -> list[str]:
    y = net.conv("x", (4, 4))
    return [net.batch_norm(y, 4), y]


def norm_after_a_joined_input(net: Net) -> list[str]:
    return [net.batch_norm(net.node("Concat", net.conv("x", (4, 4), kernel=1), "x", axis=1), 8)]


def norm_after_a_joined_and_shared_conv(net: Net) -> list[str]:
    y = net.conv("x", (4, 4))
    return [net.batch_norm(net.node("Concat", net.conv("x", (4, 4)), y, axis=1), 8), net.node("Relu", y)]


def norm_after_joined_rows(net: Net) -> list[str]:
    return [net.batch_norm(net.node("Concat", net.conv("x", (4, 4)), net.conv("x", (4, 4)), axis=2), 4)]


def norm_in_training(net: Net) -> list[str]:
    return [net.batch_norm(net.conv("x", (4, 4)), 4, training_mode=1)]


def norm_that_overflows(net: Net) -> list[str]:
    y = net.conv("x", (4, 4))
    huge = net.constant(np.full(4, 3e38, np.float32))
    tiny = net.constant(np.full(4, 1e-10, np.float32))
    return [net.node("BatchNormalization", y, huge, net.weight(4), net.weight(4), tiny, epsilon=1e-12)]


def norm_with_an_unknown_scale(net: Net) -> list[str]:
    scale = net.reduce("ReduceMean", "x", [0, 2, 3], keepdims=0)
    y = net.conv("x", (4, 4))
    return [
        net.node("BatchNormalization", y, scale, net.weight(4), net.weight(4), net.constant(np.ones(4, np.float32)))
    ]


def pad_with_ones(net: Net) -> list[str]:
    y = net.node("Pad", "x", net.integers([0, 0, 1, 1, 0, 0, 1, 1]), net.constant(1.0))
    return [net.conv(y, (4, 4))]


def pad_of_channels(net: Net) -> list[str]:
    y = net.node("Pad", "x", net.integers([0, 1, 0, 0, 0, 1, 0, 0]))
    return [net.conv(y, (6, 4))]


def pad_that_crops(net: Net) -> list[str]:
    y = net.node("Pad", "x", net.integers([0, 0, -1, 0, 0, 0, 1, 0]))
    return [net.conv(y, (4, 4))]


def pad_by_reflection(net: Net) -> list[str]:
    y = net.node("Pad", "x", net.integers([0, 0, 1, 1, 0, 0, 1, 1]), mode="reflect")
    return [net.conv(y, (4, 4))]


def pad_before_automatic_padding(net: Net) -> list[str]:
    y = net.node("Pad", "x", net.integers([0, 0, 1, 1, 0, 0, 1, 1]))
    return [net.conv(y, (4, 4), auto_pad="SAME_UPPER", strides=[2, 2])]


def pad_read_by_a_pool(net: Net) -> list[str]:
    y = net.node("Pad", "x", net.integers([0, 0, 1, 1, 0, 0, 1, 1]))
    return [net.conv(y, (4, 4)), net.node("MaxPool", y, kernel_shape=[2, 2])]


def relu6(net: Net) -> list[str]:
    return [net.node("Clip", "x", net.constant(0.0), net.constant(6.0))]


def crossed_bounds(net: Net) -> list[str]:
    return [net.node("Min", net.node("Max", "x", net.constant(1.0)), net.constant(-1.0))]


def inner_relu_with_two_readers(net: Net) -> list[str]:
    y = net.node("Relu", "x")
    return [net.node("Clip", y, net.constant(-1.0), net.constant(2.0)), net.node("Neg", y)]


def mean_over_channels(net: Net) -> list[str]:
    return [net.reduce("ReduceMean", "x", [1, 2, 3])]


def mean_of_one_axis(net: Net) -> list[str]:
    return [net.reduce("ReduceMean", "x", [3])]


def norm_of_other_axes(net: Net) -> list[str]:
    return [net.normalized("x", [1])]


def norm_with_two_kinds_of_mean(net: Net) -> list[str]:
    centred = net.node("Sub", "x", net.reduce("ReduceMean", "x", [3]))
    variance = net.reduce("ReduceMean", net.node("Pow", centred, net.constant(2.0)), [2])
    return [net.node("Div", centred, net.node("Sqrt", net.node("Add", variance, net.constant(1e-5))))]


def norm_with_a_large_bound(net: Net) -> list[str]:
    return [net.node("Div", "x", net.node("Clip", net.reduce("ReduceL2", "x", [1]), net.constant(0.1)))]


def norm_of_something_else(net: Net) -> list[str]:
    return [net.node("Div", "x", net.reduce("ReduceL2", net.node("Neg", "x"), [1]))]


def gelu_read_in_between(net: Net) -> list[str]:
    y = gelu_erf(net, "x")
    erf = next(node for node in net.nodes if node.op_type == "Erf")
    return [y, net.node("Neg", erf.output[0])]


def gelu_with_another_factor(net: Net) -> list[str]:
    erf = net.node("Erf", net.node("Div", "x", net.constant(2.0)))
    return [net.node("Mul", net.node("Mul", "x", net.node("Add", erf, net.constant(1.0))), net.constant(0.5))]


def matmul_of_batches(net: Net) -> list[str]:
    return [net.node("Add", net.node("MatMul", "x", net.weight(6, 5)), net.weight(5))]


CASES: tuple[tuple[str, Build], ...] = (
    ("remove_identity", identity_between_input_and_output),
    ("remove_identity", identities_to_two_outputs),
    ("remove_identity", dropout_in_training),
    ("remove_identity", sum_that_grows),
    ("remove_identity", reshape_with_zero_sizes),
    ("fold_constants", large_expansion),
    ("fold_constants", constant_output),
    ("fold_batch_norm", norm_after_a_shared_conv),
    ("fold_batch_norm", norm_after_an_output),
    ("fold_batch_norm", norm_that_overflows),
    ("fold_batch_norm", norm_after_a_joined_input),
    ("fold_batch_norm", norm_after_a_joined_and_shared_conv),
    ("fold_batch_norm", norm_after_joined_rows),
    ("fold_batch_norm", norm_with_an_unknown_scale),
    ("fuse_pad_into_conv", pad_with_ones),
    ("fuse_pad_into_conv", pad_of_channels),
    ("fuse_pad_into_conv", pad_that_crops),
    ("fuse_pad_into_conv", pad_by_reflection),
    ("fuse_pad_into_conv", pad_before_automatic_padding),
    ("fuse_pad_into_conv", pad_read_by_a_pool),
    ("clip_to_relu", relu6),
    ("relu_forms", crossed_bounds),
    ("relu_forms", inner_relu_with_two_readers),
    ("reduce_mean_to_global_average_pool", mean_over_channels),
    ("reduce_mean_to_global_average_pool", mean_of_one_axis),
    ("fuse_layer_norm", norm_of_other_axes),
    ("fuse_layer_norm", norm_with_two_kinds_of_mean),
    ("fuse_instance_norm", norm_of_other_axes),
    ("fuse_l2_norm", norm_with_a_large_bound),
    ("fuse_l2_norm", norm_of_something_else),
    ("fuse_gelu", gelu_read_in_between),
    ("fuse_gelu", gelu_with_another_factor),
    ("fuse_matmul_add", matmul_of_batches),
)
NOT_RUNNABLE = ((("fold_constants"), random_numbers), ("fold_batch_norm", norm_in_training))


def _model(build: Build, opset: int) -> onnx.ModelProto:
    net = Net(opset)
    net.input("x", (2, 4, 6, 6))
    return net.model(*build(net))


def _only(name: str) -> OptimizeOptions:
    return OptimizeOptions(disabled=frozenset(rewrite.name for rewrite in REWRITES) - {name}, enabled=frozenset({name}))


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize(("rewrite", "build"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_is_left_alone_by_that_rewrite_and_unchanged_by_all(rewrite: str, build: Build, opset: int) -> None:
    before = _model(build, opset)
    assert optimize(load(before).model, _only(rewrite)) == ()
    loaded = load(before)
    exact = frozenset(rewrite.name for rewrite in REWRITES) - {"replace_clip6_relu"}
    optimize(loaded.model, OptimizeOptions(enabled=exact))
    feed = random_feed(before)
    expected, got = run_model(before, feed), run_model(ir.serde.serialize_model(loaded.model), feed)
    assert list(got) == list(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-5 * np.abs(array).max(), err_msg=name)


@pytest.mark.parametrize(("rewrite", "build"), NOT_RUNNABLE)
def test_random_numbers_and_training_are_left_alone(rewrite: str, build: Build) -> None:
    assert optimize(load(_model(build, 17)).model, _only(rewrite)) == ()


def test_a_value_that_a_branch_reads_has_a_reader() -> None:
    """The convolution is read by the norm and, inside an If, by both branches: the norm must not go into it."""
    model = with_if()
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    net = Net()
    net.nodes, net.initializers = list(model.graph.node), list(model.graph.initializer)
    net.inputs = list(model.graph.input)
    normed = net.batch_norm(conv.output[0], 2)
    model = net.model(normed, "y")
    loaded = load(model)
    assert optimize(loaded.model) == ()
    feed = {"x": np.ones((1, 2, 4, 4), np.float32), "flag": np.array(True)}
    expected, got = run_model(model, feed), run_model(ir.serde.serialize_model(loaded.model), feed)
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array)


def test_an_unused_shared_initializer_of_integers_is_not_copied() -> None:
    net = Net()
    net.input("x", (2, 4, 6, 6))
    axes = net.integers([0])
    y = net.node("Unsqueeze", net.node("Unsqueeze", "x", axes), axes)
    assert optimize(load(net.model(y)).model, _only("copy_shared_init")) == ()


def test_dimensions_that_are_not_known_stop_what_needs_them() -> None:
    graph = helper.make_graph(
        [helper.make_node("Split", ["x"], ["a", "b"], axis=0), helper.make_node("Shape", ["a"], ["s"])],
        "unknown",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("a", "b")]
        + [helper.make_tensor_value_info("s", TensorProto.INT64, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    everything = OptimizeOptions(enabled=frozenset(rewrite.name for rewrite in REWRITES))
    assert optimize(load(model).model, everything) == ()

"""Every rewrite, on models where it applies: it does, the float output stays, and so do the names of inputs and
outputs; a second run finds nothing more. And models where it must not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_models import (
    OPSETS,
    Net,
    conv_bn_relu,
    gelu_erf,
    random_feed,
    residual,
    run_model,
    transformer_block,
    with_if,
)

from quark.errors import UnknownNameError
from quark.onnx import quantize
from quark.onnx.load import load
from quark.onnx.optimize import REWRITE_OF_OPTION, REWRITES, OptimizeOptions, optimize
from quark.onnx.optimize.pools_and_pads import resize_all_axes


@dataclass(frozen=True)
class Case:
    """A model that a rewrite changes: how often, and which operators there are afterwards (some of them)."""

    rewrite: str
    build: Callable[[Net], str]
    count: int = 1
    after: dict[str, int] = field(default_factory=dict)
    min_opset: int = 13
    shape: tuple[int, ...] = (2, 4, 6, 6)
    tolerance: float = 1e-5

    def __str__(self) -> str:
        return f"{self.rewrite}-{self.build.__name__.strip('_')}"


def _model(case: Case, opset: int, dtype: type = np.float32) -> onnx.ModelProto:
    net = Net(opset, dtype=dtype)
    net.input("x", case.shape)
    last = case.build(net)
    return net.model(net.node("Neg", last, output="y"))


# --- what each rewrite is for


def _resize_two_axes(net: Net, x: str = "x") -> str:
    if net.opset < 18:  # has no axes
        return net.node("Resize", x, "", net.constant(np.array([1, 1, 2, 3], np.float32)), mode="nearest")
    return net.node("Resize", x, "", net.constant(np.array([3, 2], np.float32)), mode="nearest", axes=[-1, 2])


def _resize_two_axes_to_sizes(net: Net, x: str = "x") -> str:
    if net.opset < 18:
        return _resize_two_axes(net, x)
    return net.node("Resize", x, "", "", net.integers([15, 12]), mode="linear", axes=[-1, 2])


def _resize_within(net: Net, x: str = "x") -> str:
    if net.opset < 18:
        return _resize_two_axes(net, x)
    sizes = net.integers([15, 12])
    return net.node("Resize", x, "", "", sizes, mode="linear", axes=[3, 2], keep_aspect_ratio_policy="not_larger")


def _identities(net: Net) -> str:
    y = net.node("Identity", net.node("Dropout", net.node("Relu", "x")))
    y = net.node("Transpose", net.node("Cast", y, to=1), perm=[0, 1, 2, 3])
    y = net.node("Reshape", y, net.integers([0, -1, 6, 6]))
    y = net.node("Pad", y, net.integers([0] * 8))
    y = net.node("Slice", y, net.integers([0]), net.integers([2**63 - 1]), net.integers([2]))
    y = net.node("Concat", net.node("Sum", y), axis=1)
    y = net.node("Expand", net.node("Tile", y, net.integers([1] * 4)), net.integers([1, 1]))
    y = net.node("Div", net.node("Mul", y, net.constant(1.0)), net.constant([1.0]))
    return net.node("Sub", net.node("Add", net.constant(0.0), y), net.constant(0.0))


def _constant_chain(net: Net) -> str:
    shape = net.node("Concat", net.integers([2, 4]), net.node("Mul", net.integers([6]), net.integers([6])), axis=0)
    bias = net.node("Unsqueeze", net.node("Sqrt", net.node("Abs", net.weight(36))), net.integers([0]))
    return net.node("Add", net.node("Reshape", "x", shape), bias)


def _position_biases(net: Net) -> str:
    """The small network of Swin-V2 from coordinates to position biases: large in its middle, and small at its end."""
    hidden = net.node("Relu", net.node("MatMul", net.weight(36, 2), net.weight(2, 1024)))
    biases = net.node("MatMul", hidden, net.weight(1024, 1))
    return net.node("Add", net.node("Reshape", "x", net.integers([8, 36, 1])), biases)


def _shape_of_known(net: Net) -> str:
    return net.node("Reshape", net.node("Relu", "x"), net.node("Shape", "x"))


def _conv(net: Net) -> str:
    return net.batch_norm(net.conv("x", (4, 6)), 6)


def _conv_without_bias(net: Net) -> str:
    return net.batch_norm(net.conv("x", (4, 4), has_bias=False, group=2), 4, epsilon=1e-3)


def _conv_transpose(net: Net) -> str:
    return net.batch_norm(net.conv("x", (4, 6), op_type="ConvTranspose", group=2, strides=[2, 2]), 6)


def _gemm(net: Net) -> str:
    y = net.node("Gemm", "x", net.weight(4, 5), net.weight(1, 5), alpha=0.5, beta=2.0)
    return net.batch_norm(y, 5)


def _gemm_transposed(net: Net) -> str:
    return net.batch_norm(net.node("Gemm", "x", net.weight(5, 4), transB=1), 5)


def _matmul(net: Net) -> str:
    return net.batch_norm(net.node("MatMul", "x", net.weight(4, 5)), 5)


def _shared_weight(net: Net) -> str:
    weight = net.weight(4, 4, 1, 1)
    one = net.batch_norm(net.node("Conv", "x", weight), 4)
    return net.node("Add", one, net.node("Conv", "x", weight))


def _layers_joined(net: Net) -> str:
    layers = [
        net.conv("x", (4, 2), kernel=1),
        net.conv("x", (4, 3), kernel=1, has_bias=False),
        net.conv("x", (4, 4), kernel=1, op_type="ConvTranspose", group=2),
    ]
    return net.batch_norm(net.node("Concat", *layers, axis=1), 9)


def _gemms_joined(net: Net) -> str:
    weight = net.weight(4, 5)  # shared, so that both need a copy
    layers = [net.node("Gemm", "x", weight, net.weight(5), beta=0.5), net.node("Gemm", "x", weight)]
    return net.batch_norm(net.node("Concat", *layers, axis=-1), 10)


def _alone(net: Net) -> str:
    return net.batch_norm(net.node("Relu", "x"), 4)


def _pad(net: Net) -> str:
    y = net.node("Pad", "x", net.integers([0, 0, 1, 0, 0, 0, 2, 1]))
    return net.conv(y, (4, 4), pads=[1, 0, 0, 1], strides=[2, 2])


def _pad_for_two(net: Net) -> str:
    y = net.node("Pad", "x", net.integers([0, 0, 1, 1, 0, 0, 1, 1]), net.constant(0.0))
    return net.node("Add", net.conv(y, (4, 4)), net.conv(y, (4, 4), auto_pad="VALID"))


def _pad_of_axes(net: Net) -> str:
    if net.opset < 18:
        return _pad(net)
    y = net.node("Pad", "x", net.integers([1, 2, 1, 0]), "", net.integers([-1, 2]))
    return net.conv(y, (4, 4))


def _clip(net: Net) -> str:
    return net.node(
        "Add",
        net.node("Clip", "x", net.constant(0.0)),
        net.node("Clip", "x", net.constant(0.0), net.constant(np.array(np.inf, net.dtype))),
    )


def _clip6_of_small_numbers(net: Net) -> str:
    six = net.constant(6.0)
    y = net.node("Clip", net.node("Tanh", "x"), net.constant(0.0), six)
    return net.node("Clip", net.node("Clip", y, net.constant(0.0), net.constant(5.0)), net.constant(0.5), six)


def _max(net: Net) -> str:
    return net.node("Max", net.constant([0.0]), net.node("Neg", "x"))


def _min_max(net: Net) -> str:
    y = net.node("Min", net.node("Max", net.node("Neg", "x"), net.constant(-1.0)), net.constant(0.5))
    return net.node("Max", net.node("Min", net.constant(0.25), y), net.constant(-0.5))


def _relu_and_clip(net: Net) -> str:
    y = net.node("Clip", net.node("Relu", net.node("Relu", "x")), net.constant(-1.0), net.constant(6.0))
    z = net.node("Relu", net.node("Clip", net.node("Neg", "x"), net.constant(-1.0), net.constant(1.0)))
    return net.node("Add", y, z)


def _mean_kept(net: Net) -> str:
    return net.reduce("ReduceMean", "x", [-1, 2])


def _mean_dropped(net: Net) -> str:
    return net.reduce("ReduceMean", "x", [2, 3], keepdims=0)


def _split(net: Net) -> str:
    a, b = net.nodes_of("Split", "x", net.integers([1, 3]), outputs=["a", "b"], axis=1)
    more = {"num_outputs": 2} if net.opset >= 18 else {}
    c, d = net.nodes_of("Split", b, outputs=["c", "d"], axis=-1, **more)
    return net.node("Add", net.node("Mul", c, d), net.reduce("ReduceMean", a, [1, 2, 3]))


def _layer_norm(net: Net) -> str:
    y = net.normalized("x", [-1])
    return net.node("Add", net.node("Mul", net.weight(6), y), net.weight(6))


def _layer_norm_plain(net: Net) -> str:
    centred = net.node("Sub", "x", net.reduce("ReduceMean", "x", [2, 3]))
    variance = net.reduce("ReduceMean", net.node("Mul", centred, centred), [2, 3])
    root = net.node("Sqrt", net.node("Add", net.constant(1e-3), variance))
    return net.node("Mul", net.node("Reciprocal", root), centred)


def _instance_norm(net: Net) -> str:
    y = net.normalized("x", [2, 3])
    return net.node("Add", net.node("Mul", y, net.weight(4, 1, 1)), net.weight(1, 4, 1, 1))


def _l2(net: Net) -> str:
    return net.node("Div", "x", net.reduce("ReduceL2", "x", [1]))


def _l2_taken_apart(net: Net) -> str:
    norm = net.node("Sqrt", net.reduce("ReduceSum", net.node("Mul", "x", "x"), [-1]))
    bounded = net.node("Clip", norm, net.constant(1e-12))
    return net.node("Div", "x", net.node("Expand", bounded, net.node("Shape", "x")))


def _gelu(net: Net) -> str:
    y = gelu_erf(net, "x")
    erf = net.node("Erf", net.node("Mul", y, net.constant(0.5**0.5)))
    half = net.node("Mul", net.constant(0.5), y)
    return net.node("Mul", half, net.node("Add", net.constant(1.0), erf))


def _gelu_tanh(net: Net) -> str:
    cube = net.node("Mul", net.node("Pow", "x", net.constant(3.0)), net.constant(0.044715))
    tanh = net.node("Tanh", net.node("Mul", net.node("Add", "x", cube), net.constant((2 / np.pi) ** 0.5)))
    return net.node("Mul", "x", net.node("Mul", net.node("Add", tanh, net.constant(1.0)), net.constant(0.5)))


def _matmul_add(net: Net) -> str:
    return net.node("Add", net.weight(5), net.node("MatMul", "x", net.weight(4, 5)))


def _large_pool(net: Net) -> str:
    return net.node("GlobalAveragePool", "x")


def _shared(net: Net) -> str:
    weight, bias = net.weight(4, 4, 1, 1), net.weight(4)
    return net.node("Conv", net.node("Conv", net.node("Conv", "x", weight, bias), weight, bias), weight, bias)


CASES = (
    Case("remove_identity", _identities, count=15, after={"Relu": 1, "Neg": 1}),
    Case("fold_constants", _constant_chain, count=5, after={"Reshape": 1, "Add": 1, "Neg": 1}),
    Case("fold_constants", _position_biases, count=3, after={"Reshape": 1, "Add": 1, "MatMul": 0}),
    Case("fold_constants", _shape_of_known, after={"Shape": 0}),
    Case("fold_batch_norm", _conv, after={"Conv": 1, "BatchNormalization": 0}),
    Case("fold_batch_norm", _conv_without_bias, after={"BatchNormalization": 0}),
    Case("fold_batch_norm", _conv_transpose, after={"BatchNormalization": 0}),
    Case("fold_batch_norm", _gemm, after={"BatchNormalization": 0}, shape=(3, 4)),
    Case("fold_batch_norm", _gemm_transposed, after={"BatchNormalization": 0}, shape=(3, 4)),
    Case("fold_batch_norm", _matmul, after={"MatMul": 1, "Add": 1}, shape=(3, 4)),
    Case("fold_batch_norm", _shared_weight, after={"BatchNormalization": 0}),
    Case("fold_batch_norm", _layers_joined, after={"BatchNormalization": 0}),
    Case("fold_batch_norm", _gemms_joined, after={"BatchNormalization": 0}, shape=(3, 4)),
    Case("batch_norm_to_conv", _alone, after={"Conv": 1}),
    Case("batch_norm_to_conv", _alone, after={"Conv": 1}, shape=(2, 4, 5)),
    Case("fuse_pad_into_conv", _pad, after={"Pad": 0}),
    Case("fuse_pad_into_conv", _pad_for_two, after={"Pad": 0}),
    Case("fuse_pad_into_conv", _pad_of_axes, after={"Pad": 0}),
    Case("clip_to_relu", _clip, count=2, after={"Relu": 2}),
    Case("replace_clip6_relu", _clip6_of_small_numbers, after={"Relu": 1, "Clip": 2}),
    Case("relu_forms", _max, after={"Relu": 1}),
    Case("relu_forms", _min_max, count=2, after={"Clip": 2, "Max": 0, "Min": 0}),
    Case("relu_forms", _relu_and_clip, count=3, after={"Clip": 2, "Relu": 0}),
    Case("reduce_mean_to_global_average_pool", _mean_kept, after={"GlobalAveragePool": 1, "Flatten": 0}),
    Case("reduce_mean_to_global_average_pool", _mean_dropped, after={"GlobalAveragePool": 1, "Flatten": 1}),
    Case("reduce_mean_to_global_average_pool", _mean_dropped, after={"Flatten": 1}, shape=(2, 4, 3, 3)),
    Case("resize_all_axes", _resize_two_axes, min_opset=18, tolerance=0),
    Case("resize_all_axes", _resize_two_axes_to_sizes, min_opset=18, tolerance=0),
    Case("resize_all_axes", _resize_within, min_opset=18, tolerance=0),
    Case("split_to_slice", _split, count=2, after={"Split": 0, "Slice": 4}),
    Case("fuse_layer_norm", _layer_norm, after={"LayerNormalization": 1, "Neg": 1, "Sub": 0}, min_opset=17),
    Case("fuse_layer_norm", _layer_norm_plain, after={"LayerNormalization": 1, "Mul": 0}, min_opset=17),
    Case("fuse_instance_norm", _instance_norm, after={"InstanceNormalization": 1, "Mul": 0, "Add": 0}),
    Case("fuse_instance_norm", _layer_norm_plain, after={"InstanceNormalization": 1}),
    Case("fuse_l2_norm", _l2, after={"LpNormalization": 1, "Div": 0}),
    Case("fuse_l2_norm", _l2_taken_apart, after={"LpNormalization": 1, "Div": 0}),
    Case("fuse_gelu", _gelu, count=2, after={"Gelu": 2, "Erf": 0, "Mul": 0}, min_opset=20),
    Case("fuse_gelu", _gelu_tanh, after={"Gelu": 1, "Tanh": 0}, min_opset=20),
    Case("fuse_matmul_add", _matmul_add, after={"Gemm": 1, "MatMul": 0, "Add": 0}, shape=(3, 4)),
    Case(
        "split_large_kernel_pool", _large_pool, after={"AveragePool": 1, "GlobalAveragePool": 1}, shape=(1, 4, 24, 28)
    ),
    Case("copy_shared_init", _shared, count=4),
    Case("copy_bias_init", _shared, count=2),
)


def only(name: str) -> OptimizeOptions:
    """That rewrite and no other."""
    others = frozenset(rewrite.name for rewrite in REWRITES) - {name}
    return OptimizeOptions(disabled=others, enabled=frozenset({name}))


def optimized(model: onnx.ModelProto, options: OptimizeOptions) -> tuple[onnx.ModelProto, dict[str, int]]:
    loaded = load(model)
    found = {each.name: each.count for each in optimize(loaded.model, options)}
    assert optimize(loaded.model, options) == ()  # nothing is left to do
    return ir.serde.serialize_model(loaded.model), found


def assert_same_output(before: onnx.ModelProto, after: onnx.ModelProto, tolerance: float = 1e-5) -> None:
    onnx.checker.check_model(after, full_check=True)
    assert [info.name for info in after.graph.input] == [info.name for info in before.graph.input]
    assert [info.name for info in after.graph.output] == [info.name for info in before.graph.output]
    feed = random_feed(before)
    expected, got = run_model(before, feed), run_model(after, feed)
    for name, array in expected.items():
        assert got[name].dtype == array.dtype
        largest = np.abs(array.astype(np.float64)).max()
        np.testing.assert_allclose(got[name], array, rtol=tolerance, atol=tolerance * largest, err_msg=name)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_applies_and_keeps_the_float_output(case: Case, opset: int) -> None:
    before = _model(case, opset)
    after, found = optimized(before, only(case.rewrite))
    if opset < case.min_opset:
        assert found == {}
        return
    assert found == {case.rewrite: case.count}
    operators = Counter(node.op_type for node in after.graph.node)
    assert {op_type: operators[op_type] for op_type in case.after} == case.after
    assert_same_output(before, after, case.tolerance)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.rewrite not in ("fuse_l2_norm", "remove_identity")], ids=str
)
def test_float16_keeps_its_type_and_output(case: Case) -> None:
    before = _model(case, 21, np.float16)
    after, found = optimized(before, only(case.rewrite))
    assert set(found) <= {case.rewrite}
    assert_same_output(before, after, 1e-2)


def test_every_rewrite_has_a_case_a_name_of_its_own_and_its_algebra_in_words() -> None:
    assert {case.rewrite for case in CASES} == {rewrite.name for rewrite in REWRITES}
    assert len({rewrite.name for rewrite in REWRITES}) == len(REWRITES)
    for rewrite in REWRITES:
        assert rewrite.apply.__module__.startswith("quark.onnx.optimize.")
        assert rewrite.apply.__doc__
    assert set(REWRITE_OF_OPTION.values()) <= {rewrite.name for rewrite in REWRITES}


@pytest.mark.parametrize("opset", [13, 17, 20, 21])
@pytest.mark.parametrize("build", [conv_bn_relu, residual, transformer_block, with_if])
def test_all_rewrites_together_keep_the_float_output(build: Callable[[int], onnx.ModelProto], opset: int) -> None:
    before = build(opset)
    everything = OptimizeOptions(enabled=frozenset(rewrite.name for rewrite in REWRITES) - {"replace_clip6_relu"})
    for options in (OptimizeOptions(), everything):
        after, _ = optimized(before, options)
        assert_same_output(before, after)


def test_a_float16_network_keeps_its_output() -> None:
    before = conv_bn_relu(17, np.float16)
    after, found = optimized(before, OptimizeOptions())
    assert found["fold_batch_norm"] == 2
    assert_same_output(before, after, 2e-2)


@pytest.mark.parametrize(
    ("size", "tile"), [((25, 25), [5, 5]), ((28, 28), [4, 4]), ((24, 28), [4, 4]), ((23, 23), None), ((16, 32), None)]
)
def test_a_large_pool_is_cut_into_the_tiles_that_amds_compilers_know(size, tile) -> None:
    case = Case("split_large_kernel_pool", _large_pool, shape=(1, 2, *size))
    after, _ = optimized(_model(case, 17), only(case.rewrite))
    found = [each for node in after.graph.node for each in node.attribute if each.name == "kernel_shape"]
    assert [list(each.ints) for each in found] == ([] if tile is None else [tile])


def test_the_copies_are_made_for_the_listed_operators_only() -> None:
    before = _model(next(case for case in CASES if case.rewrite == "copy_shared_init"), 17)
    enabled = frozenset({"copy_shared_init", "copy_bias_init"})
    _, found = optimized(
        before, OptimizeOptions(enabled=enabled, shared_init_op_types=("Gemm",), bias_init_op_types=("Gemm",))
    )
    assert found == {}


def test_an_unknown_rewrite_is_an_error_that_offers_the_nearest() -> None:
    model = load(conv_bn_relu()).model
    with pytest.raises(UnknownNameError, match="fold_batch_norm"):
        optimize(model, OptimizeOptions(disabled=frozenset({"fold_batchnorm"})))


def test_replacing_clip6_changes_the_function_beyond_six_alone() -> None:
    before = conv_bn_relu()
    after, found = optimized(before, OptimizeOptions(enabled=frozenset({"replace_clip6_relu"})))
    assert found["replace_clip6_relu"] == 1
    feed = {name: 10 * array for name, array in random_feed(before).items()}
    expected, got = run_model(before, feed)["y"], run_model(after, feed)["y"]
    assert got.max() > 6
    np.testing.assert_allclose(np.minimum(got, 6), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [1, "n"])
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (_resize_two_axes, (1, 3, 8, 12)),
        (_resize_two_axes_to_sizes, (1, 3, 12, 15)),
        (_resize_within, (1, 3, 12, 12)),
    ],
)
def test_a_resize_of_some_axes_runs_with_channels_last(build, shape, batch) -> None:
    """ONNX Runtime's integer convolutions have channels last, and its optimizer takes these axes for all."""
    net = Net(18)
    y = build(net, net.conv(net.input("image", (batch, 4, 6, 6)), (4, 4)))
    data = [np.random.default_rng(i).normal(size=(1, 4, 6, 6)).astype(np.float32) for i in range(4)]
    source = net.model(net.conv(y, (4, 3), 1, name="last"))
    (exact,), (found,) = (
        run_model(value, {"image": data[0]}).values() for value in (source, quantize(source, data, "A8W8").model)
    )
    assert exact.shape == found.shape == shape
    np.testing.assert_allclose(found, exact, atol=0.15)


def test_sizes_that_no_scale_gives_are_left() -> None:
    """The other axis has 5 * 1.5 = 7.5 elements, rounded to 8; a scale of 1.5 gives 7."""
    net = Net(18)
    net.input("x", (1, 2, 5, 6))
    y = net.node("Resize", "x", "", "", net.integers([9, 9]), axes=[2, 3], keep_aspect_ratio_policy="not_larger")
    graph = ir.from_proto(net.model(net.node("Neg", y, output="y")))
    assert resize_all_axes(graph) == 0

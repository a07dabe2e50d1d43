"""What the NPU computes in the place of the standard's operators: the numbers, and that names stay."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnx_models import Net, random_feed, run_model

from quark.account import Rewrite
from quark.errors import UnknownNameError
from quark.npu import HARD_SIGMOID_FACTOR, average_pool_factor, mean_factor
from quark.onnx import get_default_config, quantize
from quark.onnx.load import load
from quark.onnx.simulate import DEFAULT_SUBSTITUTIONS, SUBSTITUTION_OF_OPTION, SUBSTITUTIONS, SimulateOptions, simulate

ALL = SimulateOptions(frozenset(substitution.name for substitution in SUBSTITUTIONS) - {"bounded_clip_to_relu"})


def names_of(proto):
    graph = proto.graph
    tensors = {name for node in graph.node for name in node.output}
    return {node.name for node in graph.node}, tensors, [each.name for each in (*graph.input, *graph.output)]


def simulated(model, options=ALL, excluded=()):
    """The model as the NPU computes it, checked, and what was done; every name that was there is still there."""
    loaded = load(model).model
    before = names_of(ir.to_proto(loaded))
    done = simulate(loaded, options, excluded)
    proto = ir.to_proto(loaded)
    onnx.checker.check_model(proto, full_check=True)
    nodes, tensors, ports = names_of(proto)
    assert before[0] <= nodes
    assert before[1] <= tensors
    assert before[2] == ports
    return proto, {rewrite.name: rewrite.count for rewrite in done}


def ratio(model, options=ALL):
    """What comes out, by what came out before; the numbers are far from zero."""
    feed = {name: np.abs(array) + 1 for name, array in random_feed(model).items()}
    proto, done = simulated(model, options)
    before, after = run_model(model, feed), run_model(proto, feed)
    return {name: after[name] / before[name] for name in before}, done


def one_node(op_type, shape, *, opset=17, dtype=np.float32, **attributes):
    net = Net(opset, dtype=dtype)
    return net.model(net.node(op_type, net.input("x", shape), output="y", name="node", **attributes))


def test_every_option_has_its_substitution():
    assert set(SUBSTITUTION_OF_OPTION.values()) == {substitution.name for substitution in SUBSTITUTIONS}
    assert {substitution.name for substitution in SUBSTITUTIONS} - DEFAULT_SUBSTITUTIONS == {
        "clip",
        "bounded_clip_to_relu",
        "softmax",
    }


@pytest.mark.parametrize("side", [2, 3, 5, 7, 9])
def test_average_pool(side):
    model = one_node("AveragePool", (1, 2, 9, 9), kernel_shape=[side, side])
    found, done = ratio(model)
    np.testing.assert_allclose(found["y"], average_pool_factor(side, side), rtol=1e-6)
    assert done == ({} if side == 2 else {"average_pool": 1})


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_global_average_pool(dtype):
    found, _ = ratio(one_node("GlobalAveragePool", (1, 4, 7, 7), dtype=dtype))
    np.testing.assert_allclose(found["y"], 49 * 21 / 1024, rtol=2e-3 if dtype == np.float16 else 1e-6)


@pytest.mark.parametrize("opset", [13, 17, 18])
@pytest.mark.parametrize("axes", [[-1], [2, 3], [1]])
def test_reduce_mean(opset, axes):
    net = Net(opset)
    model = net.model(net.reduce("ReduceMean", net.input("x", (1, 6, 5, 3)), axes))
    (found,), done = ratio(model)[0].values(), ratio(model)[1]
    count = int(np.prod([(1, 6, 5, 3)[axis] for axis in axes]))
    np.testing.assert_allclose(found, mean_factor(count), rtol=1e-6)
    assert done == {"reduce_mean": 1}


def test_sigmoid_becomes_the_npus_hard_sigmoid():
    model = one_node("Sigmoid", (1, 50))
    proto, done = simulated(model)
    x = np.linspace(-5, 5, 50, dtype=np.float32)[None]
    exact = np.clip(x / 6 + 0.5, 0, 1) * HARD_SIGMOID_FACTOR
    np.testing.assert_allclose(run_model(proto, {"x": x})["y"], exact, atol=1e-6)
    assert done == {"sigmoid_to_hard_sigmoid": 1, "hard_sigmoid": 1}


def test_a_hard_sigmoid_that_is_not_the_npus_stays():
    assert simulated(one_node("HardSigmoid", (1, 4)))[1] == {}
    assert simulated(one_node("HardSigmoid", (1, 4), alpha=1 / 6))[1] == {"hard_sigmoid": 1}


@pytest.mark.parametrize(("given", "expected"), [({"alpha": 0.1}, 26 / 256), ({}, 3 / 256), ({"alpha": 0.25}, 0.25)])
def test_leaky_relu(given, expected):
    proto, done = simulated(one_node("LeakyRelu", (1, 4), **given))
    x = np.array([[-256, -1, 0, 2]], np.float32)
    np.testing.assert_allclose(run_model(proto, {"x": x})["y"], np.where(x < 0, x * expected, x), rtol=1e-6)
    assert done == ({} if expected == 0.25 else {"leaky_relu": 1})


@pytest.mark.parametrize(("bounds", "expected"), [
    ((0.0, 6.0), None), ((-0.7, 6.4), (-1, 6)), ((-1e9, 1e9), (-128, 127)), ((None, 6.4), (-128, 6)),
    ((-0.7, None), (-1, 127)),
])  # fmt: skip
def test_clip(bounds, expected):
    net = Net()
    x = net.input("x", (1, 64))
    given = ["" if bound is None else net.constant(bound) for bound in bounds]
    model = net.model(net.node("Clip", x, *given, output="y"))
    assert simulated(model, SimulateOptions(DEFAULT_SUBSTITUTIONS))[1] == {}
    proto, done = simulated(model)
    assert done == ({} if expected is None else {"clip": 1})
    values = np.linspace(-300, 300, 64, dtype=np.float32)[None]
    np.testing.assert_array_equal(run_model(proto, {"x": values})["y"], np.clip(values, *(expected or bounds)))


@pytest.mark.parametrize(("lowest", "count"), [(0.0, 1), (0.5, 0), (-1.0, 0)])
def test_a_clip_from_zero_on_becomes_a_relu(lowest, count):
    net = Net()
    bounds = net.constant(lowest), net.constant(6.0)
    model = net.model(net.node("Clip", net.input("x", (1, 4)), *bounds, output="y"))
    proto, done = simulated(model, SimulateOptions(frozenset({"bounded_clip_to_relu"})))
    assert done == ({"bounded_clip_to_relu": 1} if count else {})
    values = np.array([[-2, 0, 5, 9]], np.float32)
    expected = np.maximum(values, 0) if count else np.clip(values, lowest, 6)
    np.testing.assert_array_equal(run_model(proto, {"x": values})["y"], expected)


@pytest.mark.parametrize(("shape", "axis"), [((2, 7), -1), ((1, 3, 5), 1)])
def test_softmax_is_computed_in_bfloat16_with_the_npus_exponential(shape, axis):
    model = one_node("Softmax", shape, axis=axis)
    proto, done = simulated(model)
    assert done == {"softmax": 1}

    def rounded(array):
        return array.astype(ml_dtypes.bfloat16).astype(np.float32)

    x = rounded(np.random.default_rng(0).normal(scale=4, size=shape).astype(np.float32))
    power = np.floor(rounded(x * rounded(np.float32(1 / np.log(2)))))
    rest = rounded(x - rounded(power * rounded(np.float32(np.log(2)))))
    inner = rounded(rest * np.float32(0.21875) + np.float32(0.486328125))
    value = rounded(rest * rounded(rest * inner + np.float32(1)) + np.float32(1))
    exponential = rounded(rounded(np.float32(2) ** power) * value)
    expected = rounded(exponential / rounded(exponential.sum(axis, keepdims=True, dtype=np.float32)))
    found = run_model(proto, {"x": x})["y"]
    np.testing.assert_allclose(found, expected, rtol=2**-7)  # the runtime may fuse a product and a sum
    assert np.mean(found == expected) > 0.9
    exact = run_model(model, {"x": x})["y"]
    assert 0 < np.abs(found - exact).max() < 0.02


@pytest.mark.parametrize("preset", ["XINT8", "A16W8", "BF16"])
def test_softmax_of_the_npu_between_quantizers(preset):
    net = Net()
    inner = net.node("MatMul", net.input("x", (1, 4, 8)), net.weight(8, 6))
    middle = net.node("Softmax", inner, axis=-1, name="softmax", output="middle")
    model = net.model(middle, net.node("MatMul", middle, net.weight(6, 3), output="y"))
    config = get_default_config(preset)
    config.extra_options["ConvertSoftmaxToDPUVersion"] = True
    samples = [{"x": each} for each in np.random.default_rng(0).normal(size=(4, 1, 4, 8)).astype(np.float32)]
    result = quantize(model, samples, config)
    assert result.report.rewrites
    assert [value.name for value in result.model.graph.output] == ["middle", "y"]
    assert "Softmax" not in {node.op_type for node in result.model.graph.node}
    assert min(output.sqnr_db for output in result.report.outputs) > 25


def test_bounds_that_other_nodes_read_stay_theirs():
    net = Net()
    x, low, high = net.input("x", (1, 4)), net.constant(0.0), net.constant(6.4)
    model = net.model(net.node("Clip", x, low, high, name="one"), net.node("Clip", x, low, high, name="two"))
    proto, _ = simulated(model, ALL, excluded=["two"])
    one, two = run_model(proto, {"x": np.full((1, 4), 9, np.float32)}).values()
    assert (one.max(), two.max()) == (6.0, np.float32(6.4))


@pytest.mark.parametrize(
    "model",
    [
        one_node("AveragePool", (1, 2, 9, 9), kernel_shape=[3, 2]),
        one_node("AveragePool", (1, 2, 9), kernel_shape=[3]),
        one_node("GlobalAveragePool", (1, 2, 7, 5)),
        one_node("GlobalAveragePool", (1, 2, "H", "W")),
        one_node("ReduceMean", ("N", 3), axes=[0]),
        one_node("ReduceMean", (2, 3)),
    ],
    ids=["oblong", "one dimension", "oblong image", "free image", "free axis", "all axes"],
)
def test_windows_that_are_not_known_stay(model):
    assert simulated(model)[1] == {}


def test_nodes_that_stay_float_stay_exact():
    net = Net()
    x = net.input("x", (1, 2, 7, 7))
    pools = [net.node("GlobalAveragePool", x, name=name, output=f"{name}_y") for name in ("npu", "cpu")]
    model = net.model(*pools)
    proto, done = simulated(model, ALL, excluded=["cpu"])
    feed = random_feed(model)
    before, after = run_model(model, feed), run_model(proto, feed)
    np.testing.assert_array_equal(after["cpu_y"], before["cpu_y"])
    assert (after["npu_y"] != before["npu_y"]).any()
    assert done == {"average_pool": 1}


def test_readers_everywhere_read_what_the_npu_gives():
    """Two nodes, an output of the graph, and a branch that captures the tensor."""
    net = Net()
    x, flag = net.input("x", (1, 2, 7, 7)), net.input("flag", (), np.bool_)
    pool = net.node("GlobalAveragePool", x, name="pool", output="p")
    branches = {}
    for key in ("then_branch", "else_branch"):
        out = helper.make_tensor_value_info(f"{key}_out", TensorProto.FLOAT, None)
        branches[key] = helper.make_graph([helper.make_node("Neg", [pool], [out.name], name=key)], key, [], [out])
    picked = net.node("If", flag, name="if", output="i", **branches)
    model = net.model(pool, net.node("Neg", pool, output="n"), net.node("Add", pool, pool, output="a"), picked)
    feed = random_feed(model) | {"flag": np.array(True)}
    before = run_model(model, feed)
    after = run_model(simulated(model)[0], feed)
    for name, array in before.items():
        np.testing.assert_allclose(after[name], array * (49 * 21 / 1024), rtol=1e-5)


def test_what_was_done_is_told_in_order():
    net = Net()
    y = net.node("LeakyRelu", net.node("Sigmoid", net.input("x", (1, 2, 7, 7))), alpha=0.1)
    model = load(net.model(net.node("GlobalAveragePool", y))).model
    done = simulate(model, ALL)
    names = ("leaky_relu", "sigmoid_to_hard_sigmoid", "hard_sigmoid", "average_pool")
    assert done == tuple(Rewrite(name, 1) for name in names)
    assert simulate(model, SimulateOptions()) == ()


def test_an_unknown_substitution():
    with pytest.raises(UnknownNameError, match="leaky_relu"):
        simulate(load(one_node("Sigmoid", (1, 4))).model, SimulateOptions(frozenset({"leaky"})))

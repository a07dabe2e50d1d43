"""Weights of a few bits: every form computes with the numbers of its plan, and none is worse than ONNX Runtime's."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx_models import Net, run_model

import quark.features.compensation.layer_rounding as layer_rounding
from quark.errors import InvalidValueError
from quark.onnx import get_default_config, quantize
from quark.onnx.plan_reader import read_plan
from quark.rounded import rounded

ROWS, WIDTH, INNER = 80, 64, 96


def network(*, is_tied: bool = False, is_turned: bool = False, alpha: float = 1.0) -> onnx.ModelProto:
    """An embedding, a normalization, two layers and a projection, which may be the embedding's table. Channels vary
    together, and some are much larger than others."""
    net = Net(seed=4)
    values = net.random.standard_normal((ROWS, 12)) @ net.random.standard_normal((12, WIDTH))
    values = (values + net.random.standard_normal((ROWS, WIDTH))).astype(np.float32)
    table = net.constant(values, name="table")
    x = net.node("Gather", table, net.input("ids", (1, 6), np.int64), name="embedding")
    gamma = np.exp(net.random.standard_normal(WIDTH) * 1.5).astype(np.float32)
    x = net.node("LayerNormalization", x, net.constant(gamma), net.constant(0 * gamma), name="norm")
    x = net.node("Relu", net.node("MatMul", x, net.weight(WIDTH, INNER, name="up_w"), name="up"))
    x = net.node("MatMul", x, net.weight(INNER, WIDTH, name="down_w"), name="down")
    if is_turned:
        x = net.node("Reshape", x, net.integers([-1, WIDTH]))
        weight = table if is_tied else net.weight(ROWS, WIDTH, name="last_w")
        return net.model(net.node("Gemm", x, weight, name="last", output="y", transB=1, alpha=alpha))
    weight = net.constant(np.ascontiguousarray(values.T), name="last_w") if is_tied else net.weight(WIDTH, ROWS)
    return net.model(net.node("MatMul", x, weight, name="last", output="y"))


def samples(count: int = 24):
    rng = np.random.default_rng(1)
    return [{"ids": rng.integers(0, ROWS, (1, 6))} for _ in range(count)]


def result(model: onnx.ModelProto, data=None, preset: str = "INT4_WEIGHT_ONLY", **params):
    config = get_default_config(preset)
    config.print_summary = False
    config.extra_options["MatMulNBitsParams"] = {**config.extra_options["MatMulNBitsParams"], **params}
    return quantize(model, data, config)


def arrays(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}


def op_types(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def assert_computes_with_its_plan(model: onnx.ModelProto, made) -> None:
    """Compare with the float model whose weights are rounded as the plan says."""
    expected, held = onnx.ModelProto(), arrays(model)
    expected.CopyFrom(model)
    for each in made.plan:
        index = [tensor.name for tensor in expected.graph.initializer].index(each.tensor)
        numbers = rounded(held[each.tensor], each.choice)
        expected.graph.initializer[index].CopyFrom(numpy_helper.from_array(numbers, each.tensor))
    feed = samples(1)[0]
    wanted, found = run_model(expected, feed)["y"], run_model(made.model, feed)["y"]
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max())


@pytest.mark.parametrize("form", ["matmul_nbits", "dequantize_linear"])
@pytest.mark.parametrize("size", [16, 128, -1])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_form_computes_with_its_plan(bits, is_symmetric, size, form):
    if (bits, form) == (2, "dequantize_linear"):
        return
    model = network(is_turned=True, alpha=0.5)
    made = result(model, Bits=bits, Symmetric=is_symmetric, GroupSize=size, Form=form, EmbeddingBits=bits)
    assert {tensor.tensor for tensor in made.plan} == {"table", "up_w", "down_w", "last_w"}
    has_products = form == "matmul_nbits"
    assert op_types(made.model).count("MatMulNBits") == 3 * has_products
    assert op_types(made.model).count("DequantizeLinear") == 3 * (not has_products)
    assert op_types(made.model).count("GatherBlockQuantized") == 1
    assert_computes_with_its_plan(model, made)


def test_block_dequantize_linear_is_as_small_as_it_says():
    made = result(network(), GroupSize=32, Form="dequantize_linear", EmbeddingBits=0)
    types = {each.name: each.data_type for each in made.model.graph.initializer}
    sizes = {each.name: len(each.raw_data) for each in made.model.graph.initializer}
    assert made.model.opset_import[0].version == 21
    assert types["up_w_quantized"] == onnx.TensorProto.INT4
    assert sizes["up_w_quantized"] == WIDTH * INNER // 2
    assert "com.microsoft" not in {node.domain for node in made.model.graph.node}
    assert [tensor.choice for tensor in read_plan(made.model)] == [tensor.choice for tensor in made.plan]


def test_convolutions_have_blocks_along_their_input_channels():
    net = Net(seed=6)
    x = net.input("x", (1, 40, 6, 6))
    model = net.model(net.node("Conv", x, net.weight(8, 40, 3, 3, name="w"), name="conv", output="y"))
    config = get_default_config("INT4_WEIGHT_ONLY")
    config.extra_op_types_to_quantize = ["Conv"]
    config.extra_options["MatMulNBitsParams"] |= {"Form": "dequantize_linear", "GroupSize": 16}
    made = quantize(model, None, config)
    (each,) = made.plan
    assert (each.choice.axis, each.choice.group_size, len(each.choice.scale)) == (1, 16, 8 * 3 * 9)
    assert len(next(t.raw_data for t in made.model.graph.initializer if t.name == "w_quantized")) == 8 * 40 * 9 // 2
    expected = onnx.ModelProto()
    expected.CopyFrom(model)
    numbers = rounded(arrays(model)["w"], each.choice)
    expected.graph.initializer[0].CopyFrom(numpy_helper.from_array(numbers, "w"))
    feed = {"x": np.random.default_rng(0).standard_normal((1, 40, 6, 6)).astype(np.float32)}
    np.testing.assert_allclose(run_model(made.model, feed)["y"], run_model(expected, feed)["y"], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("is_turned", [True, False])
def test_tied_weights_are_stored_once(is_turned, is_symmetric):
    model = network(is_tied=True, is_turned=is_turned)
    made = result(model, Symmetric=is_symmetric)
    assert sum(array.size for name, array in arrays(made.model).items() if "packed" in name) == (
        (ROWS * WIDTH + 2 * WIDTH * INNER) // 2
    )
    assert_computes_with_its_plan(model, made)
    read = {reader.node: tensor.choice for tensor in read_plan(made.model) for reader in tensor.readers}
    assert len(read["embedding"].scale) == len(read["last"].scale) == ROWS * WIDTH // 32


def test_a_projection_that_gptq_would_change_stays_tied():
    made = result(network(is_tied=True), samples(), "INT4_WEIGHT_ONLY_GPTQ")
    (facts,) = (algorithm for algorithm in made.report.algorithms if algorithm.name == "compensation")
    assert {each.partition(":")[0] for each in facts.changed} == {"up", "down"}
    assert "stored together with the table 'table'" in facts.left[0].reason
    assert "last_w_packed" in arrays(made.model)
    assert "table_packed" not in arrays(made.model)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_no_group_is_worse_than_onnx_runtime_makes_it(is_symmetric, bits):
    quantizers = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    net = Net(seed=21)
    model = net.model(
        net.node("MatMul", net.input("x", ("n", 256)), net.weight(256, 24, name="w"), name="p", output="y")
    )
    settings = quantizers.DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=is_symmetric, bits=bits)
    weight = arrays(model)["w"]
    ours = result(model, Bits=bits, Symmetric=is_symmetric, GroupSize=32, EmbeddingBits=0).model
    peer = quantizers.MatMulNBitsQuantizer(model, algo_config=settings)  # which changes the model
    peer.process()
    (own,), (other,) = (
        [n for n in value.graph.node if n.op_type == "MatMulNBits"] for value in (ours, peer.model.model)
    )
    settings = [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in (own, other)]
    assert settings[0] == {**settings[1], "accuracy_level": 1}  # which computes in float32, as it does without one
    errors = []
    for value in (ours, peer.model.model):
        numbers = run_model(value, {"x": np.eye(256, dtype=np.float32)})["y"]
        errors.append(np.square(numbers.astype(np.float64) - weight).reshape(8, 32, 24).sum(axis=1))
    assert (errors[0] <= errors[1] * (1 + 1e-4)).all()
    assert errors[0].sum() < errors[1].sum()


def sqnr(made) -> float:
    return min(output.sqnr_db for output in made.report.outputs)


@pytest.mark.parametrize("params", [
    {"Bits": 2}, {}, {"Bits": 8}, {"Bits": 2, "Symmetric": False}, {"Symmetric": False}, {"GroupSize": -1},
    {"Form": "dequantize_linear"}, {"ActOrder": True},
], ids=str)  # fmt: skip
def test_gptq_gets_closer_to_float(params):
    params = {"EmbeddingBits": 0, **params}
    config = get_default_config("INT4_WEIGHT_ONLY_GPTQ")
    config.extra_options["CompensationActOrder"] = params.pop("ActOrder", False)
    config.extra_options["MatMulNBitsParams"] |= params
    made, plain = quantize(network(), samples(), config), result(network(), samples(), **params)
    (facts,) = (algorithm for algorithm in made.report.algorithms if algorithm.name == "compensation")
    assert len(facts.changed) == 3
    assert sqnr(made) > sqnr(plain) + 1.5


@pytest.mark.parametrize("params", [{"Bits": 2}, {}, {"Bits": 8}, {"Symmetric": False}, {"GroupSize": -1}], ids=str)
def test_awq_gets_closer_to_float(params):
    params = {"EmbeddingBits": 0, **params}
    made = result(network(), samples(), "INT4_WEIGHT_ONLY_AWQ", **params)
    scaled, ranges = (next(f for f in made.report.algorithms if f.name == name) for name in ("AWQ", "AWQ ranges"))
    assert any("folded into LayerNormalization norm" in each for each in scaled.changed)
    assert len(ranges.changed) == 3
    assert sqnr(made) > sqnr(result(network(), samples(), **params)) + 0.5


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_hqq_leaves_a_smaller_sum_of_small_powers(bits):
    model, losses = network(), []
    for algorithm in ("RTN", "HQQ"):
        made = result(model, Bits=bits, Algorithm=algorithm, EmbeddingBits=0)
        choice = next(tensor.choice for tensor in made.plan if tensor.tensor == "up_w")
        losses.append((np.abs(rounded(arrays(model)["up_w"], choice) - arrays(model)["up_w"]) ** 0.7).sum())
    assert losses[1] < losses[0]


def test_gptq_leaves_no_matrices_to_the_garbage_collector(monkeypatch):
    groups, first = [], layer_rounding.Groups.__init__

    def init(self, *arguments):
        groups.append(weakref.ref(self))
        first(self, *arguments)

    monkeypatch.setattr(layer_rounding.Groups, "__init__", init)
    gc.disable()
    try:
        result(network(), samples(), "INT4_WEIGHT_ONLY_GPTQ")
        assert groups
        assert all(group() is None for group in groups)
    finally:
        gc.enable()


def test_hqq_takes_a_column_for_a_group():
    model = network()
    whole, groups = (
        next(tensor.choice for tensor in result(model, GroupSize=size, Algorithm="HQQ").plan if tensor.tensor == "up_w")
        for size in (-1, WIDTH)
    )
    assert (whole.axis, whole.group_size) == (1, None)
    assert whole.scale == groups.scale


def test_without_data_no_network_is_run(monkeypatch):
    import onnxruntime

    def refuse(*_, **__):
        raise AssertionError("a session was made")

    model = network()
    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    made = result(model)
    assert any("were not run and compared" in remark for remark in made.report.remarks)


@pytest.mark.parametrize(("params", "message"), [
    ({"Bits": 3}, "2, 4 or 8"), ({"GroupSize": 48}, "16, 32"), ({"EmbeddingBits": 3}, "EmbeddingBits"),
    ({"Bits": 2, "Form": "dequantize_linear"}, "use Form 'matmul_nbits'"),
    ({"AccuracyLevel": 4, "Form": "dequantize_linear"}, "session.qdq_matmulnbits_accuracy_level"),
])  # fmt: skip
def test_what_no_kernel_takes_is_refused(params, message):
    with pytest.raises(InvalidValueError, match=message):
        result(network(), **params)


@pytest.mark.parametrize("form", ["matmul_nbits", "dequantize_linear"])
def test_codes_of_float16_weights_belong_to_the_stored_scales(form):
    """The smaller of the two weights has scales that float16 holds as subnormal numbers only, or not at all."""
    net = Net(seed=2, dtype=np.float16)
    weights = [net.random.standard_normal((32, 32)) * size for size in (0.2, 4e-6)]
    names = [net.constant(weight.astype(np.float16), name=name) for weight, name in zip(weights, "wv", strict=True)]
    x = net.input("x", (32, 32))
    net.node("MatMul", x, names[0], name="first", output="y")
    model = net.model("y", net.node("MatMul", x, names[1], name="second", output="z"))
    made = result(model, Bits=8, Form=form)
    found = run_model(made.model, {"x": np.eye(32, dtype=np.float16)})
    for name, weight in zip("yz", weights, strict=True):
        exact = weight.astype(np.float16).astype(np.float64)
        assert np.abs(found[name] - exact).max() < np.abs(exact).max() / 127 + 6e-8
    if form == "dequantize_linear":  # a scale below 0 is not a small one
        assert arrays(made.model)["w_scale"].dtype == np.float16


def test_what_stays_in_float_has_its_own_reason():
    net = Net(seed=2)
    rows = net.node("Gather", net.weight(64, 33, name="odd"), net.input("i", (4,), np.int64), name="rows")
    few = net.node("Gather", net.weight(4, 33, name="few"), net.input("j", (4,), np.int64), name="tiny")
    y = net.node("MatMul", net.node("Add", rows, few), net.weight(33, 16, name="w"), name="product")
    model = net.model(net.node("MatMul", y, net.weight(16, name="v"), name="vector", output="y"))
    made = result(model, Bits=8, Form="dequantize_linear")
    reasons = {node.node: node.reason for node in made.plan.skipped}
    assert "end within a byte" in reasons["rows"]
    assert "1024 numbers or more" in reasons["tiny"]
    assert "is a vector" in reasons["vector"]
    assert {tensor.tensor for tensor in made.plan} == {"w"}
    feed = {"i": np.arange(4), "j": np.arange(4)}
    np.testing.assert_allclose(run_model(made.model, feed)["y"], run_model(model, feed)["y"], atol=0.05)

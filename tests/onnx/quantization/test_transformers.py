"""Transformers in 8 bits: what is quantized, and that norms, Gelu and attention written as many nodes do no harm."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx_models import Net, gelu_erf

from quark.onnx import get_default_config, quantize
from quark.onnx.session import open_session
from quark.plan import Role

TOKENS, WIDTH, WORDS, BEFORE_LAYER_NORM = 6, 16, 300, 14


def encoder(opset: int) -> onnx.ModelProto:
    """Embedding, two blocks of attention and feed-forward, a class from the first token; all of it in many nodes."""
    net = Net(opset, seed=3)

    def linear(x: str, into: int, out: int) -> str:
        weight = net.constant((net.random.standard_normal((into, out)) / 2 / into**0.5).astype(np.float32))
        return net.node("Add", net.node("MatMul", x, weight), net.weight(out))

    def norm(x: str) -> str:
        scale = net.constant(np.exp(net.random.standard_normal(WIDTH) / 2).astype(np.float32))
        return net.node("Add", net.node("Mul", net.normalized(x, [-1]), scale), net.weight(WIDTH))

    x = net.node(
        "Gather", net.weight(WORDS, WIDTH, name="table"), net.input("ids", (1, TOKENS), np.int64), name="words"
    )
    for _ in range(2):
        y = norm(x)
        q, k, v = (linear(y, WIDTH, WIDTH) for _ in range(3))
        scores = net.node("MatMul", q, net.node("Transpose", k, perm=[0, 2, 1]))
        weights = net.node("Softmax", net.node("Div", scores, net.constant(WIDTH**0.5)), axis=-1)
        x = net.node("Add", x, linear(net.node("MatMul", weights, v), WIDTH, WIDTH))
        x = net.node("Add", x, linear(gelu_erf(net, linear(norm(x), WIDTH, 32)), 32, WIDTH))
    first = net.node("Gather", norm(x), net.constant(np.array(0, np.int64)), axis=1)
    weight = net.constant((net.random.standard_normal((WIDTH, 10)) / 4).astype(np.float32))
    return net.model(net.node("Gemm", first, weight, net.weight(10), output="y"))


@pytest.fixture(scope="module")
def samples() -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    return [{"ids": random.integers(0, WORDS, (1, TOKENS))} for _ in range(24)]


def largest_error(model: onnx.ModelProto, quantized: onnx.ModelProto, samples, **how: bool) -> float:
    """Over the standard deviation of the outputs."""
    sessions = open_session(model), open_session(quantized, **how)
    exact, found = (np.concatenate([session.run(None, sample)[0] for sample in samples]) for session in sessions)
    return float(np.abs(found - exact).max() / exact.std())


@pytest.mark.parametrize("preset", ["INT8_TRANSFORMER_DEFAULT", "S8S8_AAWS", "A8W8", "A16W8"])
def test_norms_that_are_many_nodes_do_no_harm(preset, samples) -> None:
    """Neither do ONNX Runtime's optimizations, which fuse them again, nor simplifications that are left out."""
    model = encoder(BEFORE_LAYER_NORM)
    config = get_default_config(preset)
    config.optimize_model, config.extra_options["SimplifyModel"] = False, False
    result = quantize(model, samples, config)
    bound = 0.02 if preset == "A16W8" else 0.06
    for has_optimizations in (True, False):
        assert largest_error(model, result.model, samples, has_optimizations=has_optimizations) < bound
    if preset != "A16W8":
        op_types = {node.name: node.op_type for node in model.graph.node}
        activations = [
            tensor for tensor in result.report.plan if tensor.role is Role.ACTIVATION and tensor.tensor != "words_out"
        ]
        assert {op_types[reader.node] for activation in activations for reader in activation.readers} == {"MatMul"}


def test_the_preset_for_transformers_quantizes_products_with_weights_and_the_embedding(samples) -> None:
    model = encoder(17)
    result = quantize(model, samples, "INT8_TRANSFORMER_DEFAULT")
    op_types = {node.name: node.op_type for node in model.graph.node}
    weights = [tensor for tensor in result.report.plan if tensor.role is Role.WEIGHT]
    assert Counter(op_types[weight.readers[0].node] for weight in weights) == {"MatMul": 12, "Gemm": 1, "Gather": 1}
    gathers = [node for node in result.model.graph.node if node.op_type == "Gather" and node.name == "words"]
    makers = {output: node for node in result.model.graph.node for output in node.output}
    before, after = makers[gathers[0].input[0]], next(n for n in result.model.graph.node if n.input[0] == "words_out")
    assert (before.op_type, after.op_type) == ("DequantizeLinear", "QuantizeLinear")
    sums = {node.input[0] for node in result.model.graph.node if node.op_type == "Add"}
    assert sum(maker.op_type == "MatMul" for name, maker in makers.items() if name in sums) == 12  # with float results
    assert largest_error(model, result.model, samples) < 0.06


def test_products_of_two_activations_are_quantized_on_request(samples) -> None:
    config = get_default_config("INT8_TRANSFORMER_DEFAULT")
    config.extra_options["MatMulConstBOnly"] = False
    result = quantize(encoder(17), samples, config)
    readers = Counter(reader.node for tensor in result.report.plan for reader in tensor.readers if reader.node)
    products = [node.name for node in encoder(17).graph.node if node.op_type == "MatMul"]
    assert all(readers[name] == 2 for name in products)

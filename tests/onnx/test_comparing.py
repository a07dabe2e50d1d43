"""A file that ONNX Runtime computes differently with its optimizations is noticed, and others are not."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx_models import Net

from quark.compare import OutputFidelity, execution_gap
from quark.onnx import get_default_config, quantize

POSITIONS, WIDTH = 64, 16


@pytest.fixture(scope="module")
def attention() -> onnx.ModelProto:
    """Attention over flat logits: every position gets about the same weight."""
    net = Net()
    x = net.input("x", (1, POSITIONS, WIDTH))
    q, k, v = (net.node("MatMul", x, net.weight(WIDTH, WIDTH), name=name) for name in "qkv")
    scores = net.node("MatMul", q, net.node("Transpose", k, perm=[0, 2, 1]), name="scores")
    weights = net.node("Softmax", net.node("Mul", scores, net.constant(1e-3)), axis=-1, name="softmax")
    return net.model(net.node("MatMul", weights, v, output="y"))


@pytest.fixture(scope="module")
def samples() -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    return [{"x": random.standard_normal((1, POSITIONS, WIDTH)).astype(np.float32) + 1} for _ in range(8)]


def outputs(model: onnx.ModelProto, sample: dict[str, np.ndarray], level: str) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, sample)[0]


def distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max() / np.abs(other).max())


@pytest.mark.parametrize("preset", ["U8S8_AAWS", "S8S8_AAWS", "A8W8"])
def test_flat_attention_in_8_bits_is_the_same_with_and_without_optimizations(preset, attention, samples) -> None:
    config = get_default_config(preset)
    config.extra_options["Protect"] = "none"
    result = quantize(attention, samples, config)
    exact = outputs(attention, samples[0], "ORT_ENABLE_ALL")
    for level in ("ORT_ENABLE_ALL", "ORT_DISABLE_ALL"):
        assert distance(outputs(result.model, samples[0], level), exact) < 0.05
    assert result.report.outputs[0].sqnr_db > 25
    assert not any("optimizations" in remark for remark in result.report.remarks)


def test_a_kernel_that_gives_something_else_is_what_the_verdict_is_about(attention, samples) -> None:
    """A scale that a user fixes is used, although ONNX Runtime's QLinearSoftmax gives zeros with it."""
    config = get_default_config("U8S8_AAWS")
    config.extra_options.update(Protect="none", BiasCorrection=False)
    config.extra_options["TensorQuantOverrides"] = {"softmax_out": [{"scale": 1.05 / POSITIONS / 255, "zero_point": 0}]}
    result = quantize(attention, samples, config)
    exact = outputs(attention, samples[0], "ORT_ENABLE_ALL")
    assert distance(outputs(result.model, samples[0], "ORT_ENABLE_ALL"), exact) > 0.5
    assert distance(outputs(result.model, samples[0], "ORT_DISABLE_ALL"), exact) < 0.05
    assert result.report.outputs[0].sqnr_db < 3
    assert any("depends on ONNX Runtime's optimizations: output 'y'" in remark for remark in result.report.remarks)


def test_a_gap_counts_either_way_unless_both_are_close_to_float() -> None:
    def fidelity(sqnr_db: float, kind: str = "values") -> list[OutputFidelity]:
        return [OutputFidelity("y", 0.99, sqnr_db, kind=kind)]

    for one, other in ((12.0, 20.0), (20.0, 12.0)):
        gap = execution_gap(fidelity(one), fidelity(other))
        assert gap is not None
        assert (gap.optimized_sqnr_db, gap.plain_sqnr_db) == (one, other)
    assert execution_gap(fidelity(31.0), fidelity(80.0)) is None
    assert execution_gap(fidelity(12.0), fidelity(17.0)) is None
    assert execution_gap(fidelity(5.0, "detections"), fidelity(20.0, "detections")) is None

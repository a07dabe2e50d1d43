"""AWQ of ONNX networks: the float network computes the same, with scales folded or behind a Mul."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import Net, run_model

from quark.errors import InvalidValueError
from quark.onnx import get_default_config, quantize

WIDTH = 32


def network(*, has_residual: bool):
    """A normalization and two layers; with a residual sum, something else reads the normalization's result too."""
    net = Net(seed=2)
    gamma = np.exp(net.random.standard_normal(WIDTH) * 1.5).astype(np.float32)
    x = net.input("x", (1, 12, WIDTH))
    x = net.node("LayerNormalization", x, net.constant(gamma), net.constant(gamma / 7), name="norm")
    y = net.node("MatMul", x, net.weight(WIDTH, 48, name="first_w"), name="first")
    y = net.node("MatMul", net.node("Erf", y), net.weight(48, WIDTH, name="second_w"), name="second")
    return net.model(net.node("Add", x if has_residual else y, y, name="sum", output="y"))


def samples():
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((1, 12, WIDTH)).astype(np.float32)} for _ in range(16)]


def result(model, data, **fields):
    config = get_default_config("INT4_WEIGHT_ONLY_AWQ")
    config.print_summary = False
    for name, value in fields.items():
        setattr(config, name, value)
    return quantize(model, data, config)


@pytest.mark.parametrize("has_residual", [False, True])
def test_scaling_alone_changes_no_output(has_residual):
    model = network(has_residual=has_residual)
    made = result(model, samples(), nodes_to_exclude=["first", "second"])
    (facts,) = (algorithm for algorithm in made.report.algorithms if algorithm.name == "AWQ")
    where = "1 Mul inserted" if has_residual else "folded into LayerNormalization norm"
    assert any("first" in each and where in each for each in facts.changed)
    for feed in samples()[:3]:
        wanted = run_model(model, feed)["y"]
        np.testing.assert_allclose(run_model(made.model, feed)["y"], wanted, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("preset", ["INT4_WEIGHT_ONLY_AWQ", "INT4_WEIGHT_ONLY_GPTQ"])
def test_presets_with_an_algorithm_cannot_do_without_data(preset: str):
    with pytest.raises(InvalidValueError, match=f"config '{preset}' needs calibration data, and none was given"):
        quantize(network(has_residual=False), None, preset)


def test_the_bytes_are_the_same_each_time():
    first, second = (result(network(has_residual=True), samples()).model.SerializeToString() for _ in range(2))
    assert first == second

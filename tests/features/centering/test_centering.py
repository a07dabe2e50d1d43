"""Centering: the float network stays as it is, and steady channels are rounded for their distance from the mean."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx_models import Net, run_model

from quark.features.centering.on_onnx import center
from quark.onnx import get_default_config, quantize

SHAPE = (2, 8, 12, 10)


def one_convolution(*, has_bias: bool = True, **attributes):
    net = Net(seed=5)
    group = attributes.get("group", 1)
    inputs = [net.input("x", SHAPE), net.weight(16, 8 // group, 3, 3), *([net.weight(16)] if has_bias else [])]
    return net.model(net.node("Conv", *inputs, name="conv", **attributes))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("attributes", [
    {}, {"pads": [1, 1, 1, 1]}, {"pads": [2, 0, 1, 3], "strides": [2, 1]}, {"pads": [1, 2, 1, 2], "dilations": [1, 2]},
    {"group": 8, "pads": [1, 1, 1, 1]}, {"group": 2}, {"auto_pad": "VALID"},
], ids=str)  # fmt: skip
def test_the_output_stays_as_it_is(attributes, has_bias):
    model = one_convolution(has_bias=has_bias, **attributes)
    rng = np.random.default_rng(1)
    feed = {"x": rng.normal(size=SHAPE).astype(np.float32)}
    graph = ir.serde.deserialize_model(model)
    (node,) = list(graph.graph)
    center(graph, node, rng.normal(size=8).astype(np.float32))
    (before,), (after,) = (list(run_model(value, feed).values()) for value in (model, ir.serde.serialize_model(graph)))
    assert [node.op_type for node in graph.graph] == [*(["Pad"] if "pads" in attributes else []), "Sub", "Conv"]
    np.testing.assert_allclose(after, before, atol=1e-4)


def edges(offset: float):
    """A depthwise convolution that takes differences of neighbours, whose sums are 0."""
    net = Net(seed=0)
    kernel = np.zeros((8, 1, 3, 3), np.float32)
    kernel[:, 0, 1, 0], kernel[:, 0, 1, 2] = 4, -4
    x = net.node("Conv", net.input("x", SHAPE), net.constant(np.eye(8, dtype=np.float32)[:, :, None, None]),
                 net.constant(np.full(8, offset, np.float32)))  # fmt: skip
    x = net.node("Conv", net.node("Relu", x), net.constant(kernel), group=8, pads=[1, 1, 1, 1], name="edges")
    return net.model(x)


def result(model, preset: str = "MXFP8E4M3", *, has_data: bool = True, **options):
    config = get_default_config(preset)
    config.print_summary = False
    config.include_cle = False
    config.extra_options.update({"Compensation": False, "Centering": True, **options})
    rng = np.random.default_rng(2)
    samples = [{"x": 0.05 * rng.normal(size=SHAPE).astype(np.float32)} for _ in range(12)]
    return quantize(model, samples if has_data else None, config)


def facts(of):
    return next(algorithm for algorithm in of.report.algorithms if algorithm.name == "centering")


@pytest.mark.parametrize("preset", ["MXFP8E4M3", "MXFP6E2M3", "MX6", "FP8E4M3", "NVFP4", "MXFP4E2M1"])
def test_differences_of_steady_channels_survive(preset):
    plain, centered = (result(edges(1.0), preset, Centering=value) for value in (False, True))
    before, after = (min(output.sqnr_db for output in value.report.outputs) for value in (plain, centered))
    assert [each.partition(":")[0] for each in facts(centered).changed] == ["edges"]
    assert after > before + 6


def test_channels_around_zero_are_left_alone():
    found = result(edges(0.0))
    assert not facts(found).changed
    assert "Sub" not in {node.op_type for node in found.model.graph.node}


def test_what_is_not_rounded_to_floats_is_left_alone():
    assert facts(result(edges(1.0), WeightsOnly=True)).left[0].reason == "activations are not quantized"
    assert "integers" in facts(result(edges(1.0), "A8W8")).left[0].reason
    assert "no calibration data" in facts(result(edges(1.0), has_data=False, UseRandomData=True)).left[0].reason

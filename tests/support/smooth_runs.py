"""SmoothQuant as tests call it, and the questions that they ask of its result."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
from odd_models import odd_feed
from onnx_models import run_model

from quark.features.smooth_quant.on_onnx import smooth, smooth_tensors
from quark.features.smooth_quant.options import SmoothOptions
from quark.features.smooth_quant.smoothing import ChannelMoments
from quark.onnx.calibrate import FloatRunner, survey
from quark.onnx.data import input_infos, open_samples
from quark.onnx.load import load
from quark.onnx.optimize import optimize

HALF = SmoothOptions(0.5)


def opened(model):
    found = load(model).model
    optimize(found)
    return found


def feeds(model, count=8):
    return [odd_feed(model, seed) for seed in range(count)]


def looked_at(model, proto, options=HALF):
    """The statistics that `smooth` wants."""
    wanted = smooth_tensors(model)
    samples = open_samples(feeds(proto), input_infos(model))
    with FloatRunner(model, wanted) as runner:
        surveyed = survey(runner, {name: ChannelMoments(axis) for name, axis in wanted.items()}, samples)
    return {name: each.statistics for name, each in surveyed.items()}


def smoothed(proto, options=HALF):
    """The model after it, and the account."""
    model = opened(proto)
    facts = smooth(model, options, looked_at(model, proto, options))
    return model, facts


def assert_same_outputs(proto, model, tolerance=1e-4):
    assert_sorted(model)
    after = ir.serde.serialize_model(model)
    for seed in (100, 101):
        feed = odd_feed(proto, seed)
        expected, actual = run_model(proto, feed), run_model(after, feed)
        for name, y in expected.items():
            scale = max(float(np.abs(y).max(initial=0)), 1e-6)
            np.testing.assert_allclose(actual[name], y, rtol=0, atol=tolerance * scale, err_msg=name)


def op_types(model):
    return Counter(node.op_type for node in model.graph)


def assert_sorted(model):
    """Every node comes behind those that it reads from."""
    position = {node: i for i, node in enumerate(model.graph)}
    for node, i in position.items():
        assert all(position.get(value.producer(), -1) < i for value in node.inputs if value is not None), node.name


def reasons(facts):
    return {each.node: each.reason for each in facts.left}

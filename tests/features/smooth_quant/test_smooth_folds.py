"""SmoothQuant leaves the outputs of a graph as they are, and puts the division where it costs nothing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
from odd_models import ODD_MODELS, odd_feed
from onnx_models import run_model
from smooth_graphs import CASES, Case, attention, convs, gemms, norm_and_residual, norm_to_three
from smooth_runs import assert_same_outputs, looked_at, op_types, opened, smoothed

from quark.features.smooth_quant import groups as smooth_quant
from quark.features.smooth_quant.options import SmoothOptions
from quark.onnx.graph import READS_FLOAT


@pytest.fixture
def _always(monkeypatch):
    """Smooth whatever can be smoothed, whether it gains or not."""
    for name in ("MIN_GAIN_DB", "MIN_CONV_GAIN_DB", "MIN_CONV_MUL_GAIN_DB"):
        monkeypatch.setattr(smooth_quant, name, -np.inf)


always = pytest.mark.usefixtures("_always")


@always
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_stay_and_the_division_goes_where_it_can(case):
    proto = case.model()
    before = op_types(opened(proto))
    model, facts = smoothed(proto)
    assert_same_outputs(proto, model)
    assert op_types(model) - before == Counter({"Mul": case.muls} if case.muls else {})
    assert op_types(model).total() == before.total() + case.muls
    for op_type in case.into:
        assert any(f"folded into {op_type} " in phrase for phrase in facts.changed), facts.changed
    assert sum("Mul inserted" in phrase for phrase in facts.changed) == case.muls
    marked = [node for node in model.graph if READS_FLOAT in node.meta]
    assert len(marked) == case.muls
    assert all(node.op_type == "Mul" for node in marked)


@always
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0, None])
@pytest.mark.parametrize("build", [norm_to_three, norm_and_residual, gemms, convs, attention], ids=lambda b: b.__name__)
def test_outputs_stay_for_every_alpha(build, alpha):
    proto = Case(build).model()
    model, facts = smoothed(proto, SmoothOptions(alpha))
    assert facts.changed
    assert_same_outputs(proto, model)


@always
@pytest.mark.parametrize("name", ODD_MODELS)
def test_outputs_of_odd_models_stay(name):
    proto = ODD_MODELS[name]()
    model, _ = smoothed(proto)
    tolerance = 2e-2 if any(value.dtype == ir.DataType.FLOAT16 for value in model.graph.inputs) else 1e-4
    after = ir.serde.serialize_model(model)
    feed = odd_feed(proto, 100)
    for output, y in run_model(proto, feed).items():
        scale = max(float(np.abs(y).max(initial=0)), 1e-6) if y.dtype != bool else 1
        np.testing.assert_allclose(run_model(after, feed)[output], y, rtol=0, atol=tolerance * scale)


@always
def test_layers_that_share_their_input_share_scales():
    proto = Case(norm_to_three).model()
    before, (model, facts) = opened(proto), smoothed(proto)
    (phrase,) = facts.changed
    assert phrase.startswith("matmul1, matmul2, matmul3: alpha 0.5, folded into LayerNormalization ")
    ratios = []
    for old, new in zip(before.graph, model.graph, strict=True):
        if old.op_type == "MatMul":
            ratios.append(new.inputs[1].const_value.numpy() / old.inputs[1].const_value.numpy())
    for ratio in ratios:
        np.testing.assert_allclose(ratio, np.broadcast_to(ratios[0][:, :1], ratio.shape), rtol=1e-5)


@always
def test_the_input_gets_the_range_that_the_formula_gives_it():
    """alpha 1: all channels equally wide."""
    proto = Case(norm_to_three).model()
    model, _ = smoothed(proto, SmoothOptions(1.0))
    (found,) = looked_at(model, proto).values()
    assert found.reach.max() / found.reach.min() == pytest.approx(1, rel=1e-4)

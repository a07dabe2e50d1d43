"""What SmoothQuant leaves as it is, with the reason, and what is shared between layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from onnx_models import Net, transformer_block
from smooth_graphs import Case, layer_norm, norm_to_three
from smooth_runs import HALF, assert_same_outputs, looked_at, opened, reasons, smoothed

from quark.features.smooth_quant import groups as smooth_quant
from quark.features.smooth_quant.on_onnx import smooth
from quark.features.smooth_quant.options import SmoothOptions


@pytest.fixture
def _always(monkeypatch):
    """Smooth whatever can be smoothed, whether it gains or not."""
    for name in ("MIN_GAIN_DB", "MIN_CONV_GAIN_DB", "MIN_CONV_MUL_GAIN_DB"):
        monkeypatch.setattr(smooth_quant, name, -np.inf)


always = pytest.mark.usefixtures("_always")


# --- what is shared


def shared_weight(net, *, is_turned=False):
    """Two layers on tensors of their own, with one weight."""
    w = net.weight(16, 16)
    norms = [layer_norm(net, net.input(name, (2, 9, 16)), 16) for name in ("x", "z")]
    return [
        net.node("Gemm", net.node("Flatten", y, axis=2), w, transB=int(is_turned and i)) for i, y in enumerate(norms)
    ]


@always
def test_layers_that_share_a_weight_share_scales_and_go_on_sharing_it():
    net = Net()
    proto = net.model(*shared_weight(net))
    model, facts = smoothed(proto)
    assert_same_outputs(proto, model)
    (phrase,) = facts.changed
    assert phrase.count("LayerNormalization") == 2
    assert len({id(node.inputs[1]) for node in model.graph if node.op_type == "Gemm"}) == 1


@always
def test_shared_gains_of_norms_come_apart():
    net = Net()
    gains, offsets, weights = net.weight(16), net.weight(16), [net.weight(16, 8) for _ in range(2)]
    names = [net.input(name, (2, 9, 16)) for name in ("x", "z")]
    norms = [net.node("LayerNormalization", name, gains, offsets) for name in names]
    proto = net.model(*(net.node("MatMul", y, w) for y, w in zip(norms, weights, strict=True)))
    model, facts = smoothed(proto)
    assert len(facts.changed) == 2
    assert_same_outputs(proto, model)


@always
@pytest.mark.parametrize("where", ["another layer, turned", "Gather", "an output"])
def test_a_weight_that_is_read_otherwise_stays(where):
    net = Net()
    if where == "another layer, turned":
        outputs, reason = shared_weight(net, is_turned=True), "in another way"
    else:
        table = net.weight(10, 16)
        y = layer_norm(net, net.input("x", (2, 9, 16)), 16)
        outputs = [net.node("Gemm", net.node("Flatten", y, axis=2), table, transB=1)]
        reason = "an output of the model" if where == "an output" else "in another way"
        outputs.append(table if where == "an output" else net.node("Gather", table, net.input("ids", (3,), np.int64)))
    proto = net.model(*outputs)
    model, facts = smoothed(proto)
    assert facts.changed == ()
    assert {each.op_type for each in facts.left} == {"Gemm"}
    assert all(reason in each.reason for each in facts.left)
    assert_same_outputs(proto, model)


@always
def test_a_weight_that_others_read_takes_no_factor_in():
    """The layer before has its weight in common with a layer whose result is used as it is."""
    net = Net()
    w, x = net.weight(12, 16), net.input("x", (40, 12))
    y = net.node("Relu", net.node("MatMul", x, w))
    proto = net.model(net.node("MatMul", y, net.weight(16, 8)), net.node("MatMul", net.input("z", (40, 12)), w))
    model, facts = smoothed(proto)
    assert not any("folded" in phrase for phrase in facts.changed)
    assert_same_outputs(proto, model)


# --- what is left, and why


def test_a_model_without_outliers_is_left_and_says_so():
    proto = transformer_block()
    model = opened(proto)
    before = ir.serde.serialize_model(model).SerializeToString()
    facts = smooth(model, HALF, looked_at(model, proto))
    assert facts.name == "SmoothQuant"
    assert facts.changed == ()
    assert any("estimated error" in reason for reason in reasons(facts).values())
    assert sum("both operands are activations" in reason for reason in reasons(facts).values()) == 2
    assert ir.serde.serialize_model(model).SerializeToString() == before


def test_a_model_without_layers_has_nothing_to_report():
    net = Net()
    _, facts = smoothed(net.model(net.node("Relu", net.input("x", (2, 3)))))
    assert (facts.changed, facts.left) == ((), ())


@always
def test_a_tensor_that_was_not_looked_at_is_left():
    proto = Case(norm_to_three).model()
    model = opened(proto)
    found = looked_at(model, proto)
    (name,) = found
    for wrong in ({}, {name: replace(found[name], lowest=np.zeros(3), highest=np.zeros(3))}):
        facts = smooth(model, HALF, wrong)
        assert facts.changed == ()
        assert all(f"'{name}' was not looked at for each of its 16 channels" == r for r in reasons(facts).values())
    facts = smooth(model, HALF, {name: replace(found[name], highest=np.full(16, np.inf))})
    assert all("not finite" in reason for reason in reasons(facts).values())


@always
def test_other_axes_of_the_same_tensor_are_left():
    net = Net()
    y = layer_norm(net, net.input("x", (16, 16)), 16)
    proto = net.model(
        net.node("MatMul", y, net.weight(16, 8), name="columns"),
        net.node("Gemm", y, net.weight(16, 8), transA=1, name="rows"),
    )
    model, facts = smoothed(proto)
    assert "another axis" in reasons(facts)["rows"]
    assert facts.changed[0].startswith("columns: ")
    assert "Mul inserted" in facts.changed[0]
    assert_same_outputs(proto, model)


@always
def test_a_weight_stays_in_the_range_of_its_type():
    net = Net(dtype=np.float16)
    y = net.node(
        "LayerNormalization", net.input("x", (2, 9, 16)), net.constant(np.geomspace(0.01, 100, 16).astype(np.float16))
    )
    weight = np.full((16, 8), 6e4, np.float16)
    proto = net.model(net.node("Tanh", net.node("MatMul", y, net.constant(weight))))
    _, facts = smoothed(proto)
    assert facts.changed == ()
    assert list(reasons(facts).values()) == ["its weight would leave the range of its type"]


@always
def test_float16_is_smoothed_in_float16():
    net = Net(dtype=np.float16)
    y = net.node(
        "LayerNormalization", net.input("x", (2, 9, 16)), net.constant(np.geomspace(0.05, 20, 16).astype(np.float16))
    )
    proto = net.model(net.node("Add", net.node("MatMul", y, net.weight(16, 16)), y))
    model, facts = smoothed(proto)
    assert len(facts.changed) == 1
    assert {value.dtype for value in model.graph.initializers.values()} == {ir.DataType.FLOAT16}
    assert_same_outputs(proto, model, tolerance=1e-2)


def conv_behind_outlier(outlier):
    """A channel that is loud, met by weights that are small."""
    net = Net()
    factors = np.ones((8, 1, 1), np.float32)
    factors[3] = outlier
    y = net.node("Tanh", net.input("x", (1, 8, 12, 12)))
    y = net.node("Max", net.node("Mul", y, net.constant(factors)), net.constant(-1e9))
    weight = net.random.standard_normal((8, 8, 3, 3)).astype(np.float32) / factors[None, :, :, :]
    return net.model(net.node("Conv", y, net.constant(weight)))


@pytest.mark.parametrize(("outlier", "muls"), [(1.0, 0), (4.0, 0), (100.0, 1)])
def test_convolutions_take_a_mul_for_outliers_only(outlier, muls):
    proto = conv_behind_outlier(outlier)
    model, facts = smoothed(proto, SmoothOptions(None))
    assert sum("Mul inserted" in phrase for phrase in facts.changed) == muls
    assert len(facts.changed) + len(facts.left) == 1
    assert_same_outputs(proto, model)


def test_a_convolution_that_would_need_a_mul_says_so(monkeypatch):
    monkeypatch.setattr(smooth_quant, "MIN_CONV_MUL_GAIN_DB", np.inf)
    _, facts = smoothed(conv_behind_outlier(100.0), SmoothOptions(None))
    assert "would take a Mul before a convolution" in facts.left[0].reason

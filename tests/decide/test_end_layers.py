"""Which layers are first and last, and what KeepFirstLast gives them."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import Net

from quark.decide.end_layers import END_TYPES, EndLayers, first_layers, last_layers
from quark.decide.specs import AffineSpec, BlockSpec, LayerSpec, bits_of_spec
from quark.errors import UnknownNameError
from quark.onnx import get_default_config, quantize
from quark.onnx.load import load
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.view import view_of
from quark.plan import Role


def branches():
    """Two inputs, a residual connection, and two outputs, one of them of a product of two activations."""
    net = Net()
    a, b = net.input("a", (1, 16, 8, 8)), net.input("b", (1, 16, 8, 8))
    x = net.node("Relu", net.node("Conv", a, net.weight(16, 16, 1, 1), name="first_a"))
    y = net.node("Conv", b, net.weight(16, 16, 1, 1), name="first_b")
    both = net.node("Add", x, net.node("Conv", x, net.weight(16, 16, 1, 1), name="inner"))
    both = net.node("Add", both, y)
    flat = net.node("Flatten", net.node("GlobalAveragePool", both))
    head = net.node("Gemm", flat, net.weight(16, 4), name="head")
    q = net.node("MatMul", flat, net.weight(16, 8), name="query")
    k = net.node("MatMul", flat, net.weight(16, 8), name="key")
    scores = net.node("MatMul", q, net.node("Transpose", k, perm=[1, 0]), name="scores")
    return net.model(head, scores)


def test_every_branch_and_every_head_has_its_own():
    graph = view_of(load(branches()).model)
    assert first_layers(graph) == ["first_a", "first_b"]
    assert last_layers(graph) == ["head", "query", "key"]


def test_a_skip_around_the_first_layer_does_not_make_others_first():
    net = Net()
    x = net.input("x", (1, 16))
    y = net.node("Add", x, net.node("MatMul", x, net.weight(16, 16), name="one"))
    z = net.node("Add", y, net.node("MatMul", y, net.weight(16, 16), name="two"))
    graph = view_of(load(net.model(z)).model)
    assert (first_layers(graph), last_layers(graph)) == (["one"], ["two"])


def samples():
    rng = np.random.default_rng(0)
    return [{name: rng.standard_normal((1, 16, 8, 8)).astype(np.float32) for name in "ab"} for _ in range(4)]


def with_ends(preset, label):
    config = get_default_config(preset)
    config.extra_options["KeepFirstLast"] = label
    return quantize(branches(), samples(), config)


@pytest.mark.parametrize("label", [each for each in END_TYPES if each not in ("int8", "float", "first_conv_float")])
def test_narrow_types_become_wider_at_both_ends_only(label):
    result = with_ends("MXFP4E2M1", label)
    formats: dict[str, set[str]] = {}
    for tensor in result.plan:
        for reader in tensor.readers:
            formats.setdefault(reader.node, set()).add(tensor.choice.format)
    ends = {"first_a", "first_b", "head", "query", "key"}
    assert {name for name, fmt in formats.items() if fmt == {label}} == ends
    assert formats["inner"] == formats["scores"] == {"mxfp4_e2m1"}
    assert f"KeepFirstLast {label}: first first_a, first_b; last head, query, key" in result.report.remarks


def test_activations_that_are_wide_enough_stay():
    result = with_ends("MXINT8_MXFP4E2M1", "mxfp8_e4m3")
    assert {tensor.choice.format for tensor in result.plan if tensor.role is Role.ACTIVATION} == {"mxint8"}
    weights = {tensor.readers[0].node: tensor.choice.format for tensor in result.plan if tensor.role is Role.WEIGHT}
    assert weights["first_a"] == "mxfp8_e4m3"
    assert weights["inner"] == "mxfp4_e2m1"


def test_integers_at_the_ends_of_four_bit_weights():
    result = with_ends("A8W4", "int8")
    weights = {tensor.readers[0].node: str(tensor.choice) for tensor in result.plan if tensor.role is Role.WEIGHT}
    assert weights["head"] == "int8 per channel"
    assert weights["inner"] == "int4 per group of 32"


def test_float_leaves_them_out_and_says_so():
    result = with_ends("MXFP4E2M1", "float")
    reasons = {node.node: node.reason for node in result.plan.skipped}
    assert all("KeepFirstLast" in reasons[name] for name in ("first_a", "first_b", "head", "query", "key"))
    assert any(remark.startswith("KeepFirstLast float: first first_a") for remark in result.report.remarks)


def test_first_convolutions_alone_stay_in_float_unless_they_are_last():
    result = with_ends("FP8E4M3", "first_conv_float")
    assert {node.node for node in result.plan.skipped if "KeepFirstLast" in node.reason} == {"first_a", "first_b"}
    quantized = {reader.node for tensor in result.plan for reader in tensor.readers}
    assert quantized == {"inner", "head", "query", "key", "scores"}
    assert "KeepFirstLast first_conv_float: first first_a, first_b" in result.report.remarks
    net = Net()
    y = net.node("Conv", net.input("x", (1, 4, 8, 8)), net.weight(4, 4, 1, 1), name="alone")
    plan = quantize(net.model(y), np.ones((2, 1, 4, 8, 8), np.float32), "FP8E4M3").plan
    assert {reader.node for tensor in plan for reader in tensor.readers} == {"alone"}


def test_nothing_to_widen_is_a_remark():
    result = with_ends("MXINT8", "mxfp8_e4m3")
    assert "KeepFirstLast mxfp8_e4m3: no first or last layer has narrower types" in result.report.remarks


def test_the_types_are_those_of_the_presets():
    for preset, label in (("MXFP8E4M3", "mxfp8_e4m3"), ("MXFP8E5M2", "mxfp8_e5m2"), ("MXINT8", "mxint8")):
        assert EndLayers.named(label).layer.weight == settings_of(preset).choose.default.weight
    assert EndLayers.named("fp8_e4m3").layer == settings_of("FP8E4M3").choose.default
    with pytest.raises(UnknownNameError, match="mxfp8_e4m3"):
        EndLayers.named("mxfp8")


def test_only_what_is_narrower_changes():
    wide = EndLayers.named("int8")
    own = LayerSpec(AffineSpec("int16"), AffineSpec("int4", group_size=32))
    kept = wide.of(own)
    assert kept.activation == own.activation
    assert kept.weight == AffineSpec("int8", is_per_channel=True)
    blocks = settings_of("MXFP4E2M1").choose.default
    assert isinstance(blocks.weight, BlockSpec)
    assert int(bits_of_spec(EndLayers.named("mxfp8_e4m3").of(blocks).weight)) == 8

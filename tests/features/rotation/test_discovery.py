"""Residual streams, heads and down projections are found in the graph; float networks compute the same afterwards."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_models import Net, run_model
from rotated_networks import Transformer, token_samples

from quark.errors import InvalidValueError, ModelError
from quark.features.rotation.on_onnx import before_calibration
from quark.onnx import QConfig, QuantizationConfig, QuarotConfig, quantize
from quark.onnx.data.samples import Samples, SampleStore
from quark.onnx.deciding import Work
from quark.onnx.load import LoadOptions, load
from quark.onnx.optimize import optimize
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.spec import MXFP4E2M1Spec, QLayerConfig


def rotated(model, **options):
    """The float network as rotation leaves it, and what the report says of it."""
    settings = settings_of(QuantizationConfig(include_rotation=True, extra_options=options))
    store = SampleStore()
    for sample in token_samples():
        store.append(sample)
    loaded = load(model, LoadOptions()).model
    optimize(loaded)
    rotation = settings.options_of("rotation")
    (facts,) = before_calibration(Work(loaded, Samples(store, "tokens"), settings), rotation)
    return ir.to_proto(loaded), facts


def same(model, other):
    for sample in token_samples(2):
        np.testing.assert_allclose(run_model(other, sample)["y"], run_model(model, sample)["y"], rtol=1e-4, atol=1e-4)


def weight(model, node):
    (name,) = (each.input[1] for each in model.graph.node if each.name == node)
    (tensor,) = (each for each in model.graph.initializer if each.name == name)
    return onnx.numpy_helper.to_array(tensor)


NETWORKS = [
    Transformer("layer"),
    Transformer("layer_parts", has_layer_scale=True),
    Transformer("rms", has_one_projection=True),
    Transformer("rms_parts", is_tied=True),
    Transformer("rms_parts", width=36, heads=6, key_heads=2),  # heads of 6: no Hadamard matrix
    Transformer("layer", width=96, has_one_projection=True, is_tied=True),
]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda each: f"{each.norm}_{each.width}")
def test_streams_and_values_are_rotated_without_a_file(network):
    model = network.model()
    found, facts = rotated(model)
    same(model, found)
    layers = {"embed: its output", "head: its input"}
    layers |= {f"{layer}.{name}" for layer in "01" for name in ("o: its output", "down: its output", "up: its input")}
    values = "qkv" if network.has_one_projection else "v"
    layers |= {f"{layer}.{values}: its output by heads" for layer in "01"} | {"1.o: its input by heads"}
    assert layers <= set(facts.changed)
    assert facts.left == ()
    assert len(found.graph.node) <= len(model.graph.node) + 6  # biases of norms only
    assert np.abs(weight(found, "0.down") - weight(model, "0.down")).max() > 0.1


def test_online_rotations_are_exact_and_stay_in_front_of_the_layer():
    model = Transformer("rms_parts", width=36, heads=6, key_heads=2).model()
    found, facts = rotated(model, R1=False, R2=False, R3=True, R4=True)
    same(model, found)
    assert facts.changed == (
        *("0.scores: its queries and keys", "1.scores: its queries and keys"),
        *("0.down: its input", "1.down: its input"),
    )
    (down,) = (node for node in found.graph.node if node.name == "0.down")
    (before,) = (node for node in found.graph.node if down.input[0] in node.output)
    assert before.op_type == "Reshape"  # 144 channels are rotated as 12 x 12


def test_a_network_with_norms_behind_the_sums_names_what_is_in_the_way():
    model = Transformer("layer", is_post_norm=True).model()
    with pytest.raises(ModelError, match="nothing can be rotated.*is (computed|read) by LayerNormalization"):
        rotated(model, R2=False)
    found, facts = rotated(model)
    same(model, found)
    assert {each.split(": ")[1] for each in facts.changed} == {"its output by heads", "its input by heads"}
    assert any("LayerNormalization" in each.reason for each in facts.left)
    online, facts = rotated(model, OnlineR1Rotation=True, RotationSize=8, R4=True)
    same(model, online)
    assert {"0.q: its input", "0.up: its input", "0.down: its input"} <= set(facts.changed)


def test_a_size_that_does_not_fit_is_an_error():
    model = Transformer().model()
    with pytest.raises(ModelError, match="24 channels, and RMatrixDim is 64"):
        rotated(model, RMatrixDim=64, R2=False)
    with pytest.raises(ModelError, match="RotationSize = 7 does not divide its 24 channels"):
        rotated(model, RotationSize=7, R2=False)
    with pytest.raises(InvalidValueError, match="all False"):
        rotated(model, R1=False, R2=False)
    with pytest.raises(InvalidValueError, match="OnlineR1Rotation"):
        rotated(model, OnlineR1Rotation=True, R1=False)


def test_outputs_of_the_stream_and_its_end_are_rotated_back():
    network = Transformer("rms", heads=1, key_heads=1)
    model = network.model()
    (last,) = (node for node in model.graph.node if "head" in node.name)
    stream = next(node for node in model.graph.node if last.input[0] in node.output).input[0]
    model.graph.output.append(onnx.helper.make_tensor_value_info(stream, onnx.TensorProto.FLOAT, None))
    found, facts = rotated(model)
    for sample in token_samples(2):
        expected, result = run_model(model, sample), run_model(found, sample)
        for name in ("y", stream):
            np.testing.assert_allclose(result[name], expected[name], rtol=1e-4, atol=1e-4)
    assert f"{stream}: a product behind it" in facts.changed


def test_blocks_are_quantized_behind_their_rotation():
    """An outlier in every block of the input of a layer in MXFP4 is spread over the block."""
    net, random = Net(seed=2), np.random.default_rng(4)
    outliers = np.where(np.arange(64) % 32 == 5, 12.0, 1.0).astype(np.float32)
    model = net.model(net.node("MatMul", net.input("x", (8, 64)), net.weight(64, 16), name="layer", output="y"))
    samples = [{"x": (each * outliers).astype(np.float32)} for each in random.standard_normal((8, 8, 64))]
    layer = QLayerConfig(activation=MXFP4E2M1Spec(), weight=MXFP4E2M1Spec())
    sqnr = []
    for algorithms in ([], [QuarotConfig(rotation_size=32, online_r1_rotation=True)]):
        result = quantize(model, samples, QConfig(layer, algo_config=algorithms, PrintSummary=False))
        sqnr.append(result.report.outputs[0].sqnr_db)
    assert sqnr[1] > sqnr[0] + 1
    rotations = [node for node in result.model.graph.node if node.name.startswith("layer_rotation") and not node.domain]
    quantized = {choice.tensor for choice in result.report.plan.tensors}
    assert [node.op_type for node in rotations] == ["Reshape", "MatMul", "Reshape"]
    assert quantized.isdisjoint(name for node in rotations for name in node.input)
    assert rotations[-1].output[0] in quantized

"""What is found about every layer: its own error, that of all before it, and what it costs."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import onnx
import pytest
from diagnosed_networks import images, quantized_model, with_larger_weight

from quark.cli.options import read_config
from quark.compare.measures import log_probabilities, mean_divergence
from quark.demo import network_path
from quark.errors import InvalidValueError
from quark.inspect.diagnose import diagnose, first_divergence
from quark.inspect.diagnose.advice import first_steps
from quark.inspect.diagnose.files import read_side
from quark.inspect.diagnose.running import Run
from quark.onnx import get_default_config, quantize
from quark.onnx.graph import piece
from quark.onnx.quantization.config.options import settings_of

PRESETS = ("XINT8", "A8W8", "MXFP4E2M1", "BF16")


@pytest.fixture(scope="module")
def diagnoses():
    return {name: diagnose(network_path(), quantized_model(name), images(), num_samples=8) for name in PRESETS}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_layer_with_a_weight_has_all_figures(diagnoses, preset):
    found = diagnoses[preset]
    convolutions = [node for node in onnx.load(network_path()).graph.node if node.op_type in ("Conv", "Gemm")]
    with_weights = [layer for layer in found.layers if layer.weights]
    assert len(with_weights) == len(convolutions)
    for weight in with_weights:
        assert weight.parameters > 0
        assert weight.bits is not None
        assert 5 < weight.local.sqnr_db < 120
        assert 0 <= weight.sensitivity < math.inf
    assert sum(layer.share for layer in found.layers) == pytest.approx(1)
    assert [diagnosis.rank for diagnosis in found.ranked] == list(range(1, len(found.layers) + 1))
    assert found.outputs[0].name == "logits"
    assert found.basis.measure == "kl"


def test_the_first_layer_inherits_nothing(diagnoses):
    first = diagnoses["MXFP4E2M1"].layers[0]
    assert first.local.sqnr_db == pytest.approx(first.accumulated.sqnr_db, abs=0.1)


def test_equalization_is_no_error(diagnoses):
    """XINT8 rescales channels: compared as they are, layers would be below 0 dB."""
    found = diagnoses["XINT8"]
    assert any("equalized" in remark for remark in found.remarks)
    assert min(layer.local.sqnr_db for layer in found.layers) > 12
    assert not any("equalized" in remark for remark in diagnoses["A8W8"].remarks + diagnoses["MXFP4E2M1"].remarks)


def test_equalized_sixteen_bits_are_nearly_exact():
    model = quantized_model("INT16_CNN_DEFAULT", include_cle=True)
    diagnosis = diagnose(network_path(), model, images(), num_samples=4, has_sensitivity=False)
    assert any("equalized" in remark for remark in diagnosis.remarks)
    assert min(layer.local.sqnr_db for layer in diagnosis.layers) > 40


def test_a_damaged_layer_is_found(diagnoses):
    before = diagnoses["A8W8"]
    victim = [layer for layer in before.layers if layer.weights][4]
    model = with_larger_weight(quantized_model("A8W8"), victim.name, 4.0)
    diagnosis = diagnose(network_path(), model, images(), num_samples=8, histograms=0)
    assert diagnosis.ranked[0].name == victim.name
    parted = first_divergence(diagnosis)
    assert parted.layer.name == victim.name
    assert parted.is_below
    assert parted.is_own
    others = [(a, b) for a, b in zip(before.layers, diagnosis.layers, strict=True) if a.name != victim.name]
    assert all(a.local.sqnr_db == pytest.approx(b.local.sqnr_db, abs=0.01) for a, b in others)


def test_sensitivity_is_what_the_output_does_when_one_layer_is_quantized(diagnoses):
    found = diagnoses["MXFP4E2M1"]
    exact, other = read_side(network_path()).model, read_side(quantized_model("MXFP4E2M1")).model
    layer = found.ranked[0]
    shared = [layer.tensor for layer in found.layers]
    everything = Run(exact, "float", extra=shared)
    node = next(node for node in other.graph if node.name == layer.name)
    value = node.inputs[0].producer().inputs[0]
    while value.producer() is not None and value.name not in shared:  # a centered layer begins before its quantizer
        value = value.producer().inputs[0]
    source = value.name
    assert source is not None
    local = Run(piece(other, [source], [layer.tensor]), "layer")
    rest = Run(piece(exact, [layer.tensor], ["logits"]), "rest")
    costs = []
    for image in images()[:8]:
        tensors = {"input": image[None], **everything({"input": image[None]})}
        (moved,) = local({source: tensors[source]}).values()
        costs.append(mean_divergence(tensors["logits"], rest({layer.tensor: moved})["logits"]))
    assert layer.sensitivity == pytest.approx(np.mean(costs), rel=1e-3)


def test_the_same_twice():
    runs = [diagnose(network_path(), quantized_model("XINT8"), images(), num_samples=6).to_json() for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_remedy_is_an_option_that_is_taken(diagnoses, preset):
    import yaml

    options = {remedy.option for layer in diagnoses[preset].layers for remedy in layer.remedies if remedy.option}
    assert any(option.startswith("nodes_to_exclude=") for option in options)
    for option in options:
        key, _, value = option.partition("=")
        settings_of(read_config(preset, ((key, yaml.safe_load(value)),)))


@pytest.mark.parametrize(
    ("count", "which"), [(1, "the most sensitive layer in"), (2, "the 2 most sensitive layers in")]
)
def test_the_first_step_counts_layers(diagnoses, count, which):
    worst = [replace(diagnosis, share=1 / count) for diagnosis in diagnoses["XINT8"].ranked if diagnosis.weights][
        :count
    ]
    assert f"leave {which} float (100 % of the output error" in first_steps(worst)[0].text


def test_leaving_a_layer_in_float_says_what_it_gains_and_costs(diagnoses):
    worst = diagnoses["XINT8"].ranked[0]
    text = next(remedy.text for remedy in worst.remedies if remedy.option.startswith("nodes_to_exclude="))
    assert text == f"leave it in float ({100 * worst.share:.0f} % of the output error, {worst.parameters:,} parameters)"


def test_pictures_and_bits(diagnoses):
    found = diagnoses["MXFP4E2M1"]
    worst = found.ranked[0]
    assert sum(worst.weight_histogram.counts) == worst.parameters == sum(worst.weight_histogram.quantized)
    assert sum(worst.input_histogram.counts) == sum(worst.input_histogram.quantized) > 0
    assert len(worst.input_histogram.counts) == 64
    assert 4.25 <= found.weights.format_bits < 8 < found.weights.float_bits == 32
    limits = diagnoses["XINT8"].ranked[0].input_histogram.clip
    assert limits[0] < limits[1]


def test_skipped_nodes_are_those_of_the_report(tmp_path):
    config = get_default_config("MXINT8")
    name = next(node.name for node in onnx.load(network_path()).graph.node if node.op_type == "Conv")
    config.nodes_to_exclude = [name]
    path = quantize(network_path(), images(), config).save(tmp_path / "q.onnx")
    diagnosis = diagnose(network_path(), path, images(), num_samples=2, histograms=0)
    assert next(node for node in diagnosis.skipped if node.node == name).reason == "excluded by name"
    (tmp_path / "q.json").write_text("{}")
    diagnosis = diagnose(network_path(), path, images(), num_samples=2, histograms=0)
    assert [node.node for node in diagnosis.skipped] == [name]
    assert diagnosis.skipped[0].reason == "no quantizer in the file"


def test_json_has_all_of_it(diagnoses):
    content = json.loads(diagnoses["A8W8"].to_json())
    assert content["layers"][0]["nodes"]
    assert content["result"]["sha256"]


def test_a_model_does_not_part_from_itself():
    diagnosis = diagnose(network_path(), network_path(), images(), num_samples=2, histograms=0)
    assert first_divergence(diagnosis) is None


def test_models_in_the_wrong_order():
    with pytest.raises(InvalidValueError, match="give the float model first"):
        diagnose(quantized_model("A8W8"), network_path(), images())


def test_models_of_other_outputs_are_named():
    other = onnx.load(network_path())
    other.graph.output[0].name = other.graph.node[-1].output[0] = "scores"
    with pytest.raises(InvalidValueError, match="outputs differ: .*'logits'.*'scores'"):
        diagnose(network_path(), other, images())


def test_models_without_a_tensor_in_common():
    other = onnx.load(network_path())
    names = {each for node in other.graph.node for each in node.output} - {"logits"}
    for node in other.graph.node:
        node.input[:] = [f"other/{each}" if each in names else each for each in node.input]
        node.output[:] = [f"other/{each}" if each in names else each for each in node.output]
    with pytest.raises(InvalidValueError, match="no layer in common"):
        diagnose(network_path(), other, images())


def test_a_float_network_that_says_nan():
    broken = onnx.load(network_path())
    bias = next(each for each in broken.graph.initializer if each.name == broken.graph.node[-1].input[2])
    bias.CopyFrom(onnx.numpy_helper.from_array(np.full(10, np.nan, np.float32), bias.name))
    with pytest.raises(InvalidValueError, match="output 'logits' has NaN for sample 0"):
        diagnose(broken, quantized_model("A8W8"), images(), num_samples=2)


def test_probabilities_are_taken_as_they_are():
    rows = np.array([[0.25, 0.75]])
    assert np.allclose(np.exp(log_probabilities(rows)), rows)
    assert np.allclose(np.exp(log_probabilities(rows * 10)).sum(), 1)
    assert mean_divergence(np.array([[1.0, 2.0]]), np.array([[np.nan, 0.0]])) == math.inf

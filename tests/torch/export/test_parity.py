"""What differs is found, and the layer named; what only falls on the other side of a rounding is let pass."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from frozen_networks import Style, example_of, frozen_network
from onnx import numpy_helper

from quark.onnx.insert import insert as real_insert
from quark.torch.export import ParityError, write_onnx
from quark.torch.export.deployable import SAMPLES, samples_around
from quark.torch.export.parity import LAYER_SQNR_DB, ParityReport, check_parity, first_divergence

torch.set_num_threads(1)
LAYERS = {"features.0": "conv2d", "features.2": "conv2d_1", "classifier": "linear"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path, dict[str, str]]:
    """The file, and the names of values in it: those of torch, but for the output."""
    network = frozen_network("plain", "uint8")
    path = write_onnx(network, example_of("plain"), tmp_path_factory.mktemp("parity") / "n.onnx").path
    made = {value for node in onnx.load(path).graph.node for value in node.output}
    return (
        network,
        path,
        {str(node.name): str(node.name) for node in network.graph.nodes if node.name in made and node.op != "output"},
    )


def broken(path: Path, initializer: str, factor: float, target: Path) -> Path:
    """The file with other numbers in one initializer."""
    proto = onnx.load(path)
    tensor = next(each for each in proto.graph.initializer if each.name == initializer)
    array = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array((array * np.float32(factor)).astype(array.dtype), tensor.name))
    onnx.save(proto, target)
    return target


@pytest.mark.parametrize("layer", list(LAYERS))
def test_a_wrong_scale_of_a_weight_names_its_layer(layer, exported, tmp_path) -> None:
    network, path, values = exported
    wrong = broken(path, f"{layer}.weight_scale", 1.2, tmp_path / "wrong.onnx")
    batches = samples_around((example_of("plain"),), [{0}])
    with pytest.raises(ParityError, match=f"first layer that differs.*'{layer}'") as info:
        check_parity(network, wrong, batches, values)
    divergence = info.value.report.first_divergence
    assert divergence is not None
    assert divergence.layer == layer
    assert divergence.tensor == LAYERS[layer]
    assert divergence.sqnr_db < LAYER_SQNR_DB


def test_a_wrong_scale_of_an_activation_names_the_layer_that_reads_it(exported, tmp_path) -> None:
    network, path, values = exported
    wrong = broken(path, "relu_scale", 1.02, tmp_path / "wrong.onnx")
    divergence = first_divergence(network, wrong, (example_of("plain"),), values)
    assert divergence is not None
    assert divergence.layer == "features.2"


def test_the_right_file_diverges_nowhere(exported) -> None:
    network, path, values = exported
    assert set(LAYERS.values()) - {"linear"} <= set(values)
    assert first_divergence(network, path, (example_of("plain"),), values) is None


def test_float_weights_behind_quantized_activations_stay_float(tmp_path) -> None:
    """ONNX Runtime would quantize them by itself, and the file would be another network."""
    network = frozen_network("residual", Style("uint8", None))
    parity = write_onnx(network, example_of("residual"), tmp_path / "n.onnx").parity
    assert parity is not None
    assert parity.sqnr_db > 60
    assert parity.first_divergence is None


def test_a_wrong_export_is_refused_and_the_file_left(monkeypatch, tmp_path) -> None:
    """The plan is given another scale on its way into the file."""

    def insert(model, plan, options):
        weight = next(
            initializer for initializer in model.graph.initializers.values() if initializer.name == "features.2.weight"
        )
        weight.const_value = ir.tensor(weight.const_value.numpy() * np.float32(2))
        real_insert(model, plan, options)

    network = frozen_network("plain", "int8")
    write_onnx(network, example_of("plain"), tmp_path / "n.onnx")  # the card of which must not stay
    monkeypatch.setattr("quark.torch.export.exporter.insert", insert)
    with pytest.raises(ParityError, match="'features.2'"):
        write_onnx(network, example_of("plain"), tmp_path / "n.onnx")
    beside = json.loads((tmp_path / "n.json").read_text())
    assert beside["result"]["sha256"] == hashlib.sha256((tmp_path / "n.onnx").read_bytes()).hexdigest()
    assert beside["parity"] is None


def test_samples_begin_with_the_example_and_integers_stay() -> None:
    x, ids = torch.randn(3, 4), torch.arange(3)
    (batch,) = samples_around((x, ids), [{0}, {0}])
    assert batch[0].shape == (SAMPLES, 4)
    assert torch.equal(batch[0][:3], x)
    assert not torch.equal(batch[0][3:6], x)
    assert torch.equal(batch[1], torch.arange(SAMPLES) % 3)
    assert [inputs[0].shape[0] for inputs in samples_around((x, ids), [set(), set()])] == [3, 3]


def test_a_report_is_one_line_and_json() -> None:
    report = ParityReport(8, 0.0, float("inf"), 1.0)
    assert str(report) == "SQNR inf dB, largest difference 0, same class for 100.0% over 8 samples"
    assert report.to_json()["sqnr_db"] == "inf"

"""The embedded network is what its documentation says."""

import numpy as np
import onnx
import onnxruntime
import pytest

from quark.demo import load_network, network_metadata, network_path
from quark.demo.digits import HELD_OUT_COUNT, load_digits


@pytest.fixture(scope="module")
def session():
    return onnxruntime.InferenceSession(network_path(), providers=["CPUExecutionProvider"])


def test_names_shapes_and_opset():
    model = load_network()
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.input] == ["input"]
    assert [value.name for value in model.graph.output] == ["logits"]
    assert model.opset_import[0].version == 17
    assert network_path().stat().st_size < 500_000


def test_it_has_what_a_quantizer_meets_in_a_mobilenet():
    nodes = load_network().graph.node
    counts = {kind: sum(node.op_type == kind for node in nodes) for kind in {node.op_type for node in nodes}}
    assert counts["BatchNormalization"] == counts["Conv"]
    assert counts["Add"] >= 2
    assert counts["Clip"] >= 5
    groups = [attribute.i for node in nodes for attribute in node.attribute if attribute.name == "group"]
    assert sum(group > 1 for group in groups) >= 3


@pytest.mark.parametrize("count", [1, 7])
def test_any_batch_size_runs(session, count):
    (logits,) = session.run(["logits"], {"input": np.zeros((count, 1, 8, 8), np.float32)})
    assert logits.shape == (count, 10)
    assert np.isfinite(logits).all()


def test_held_out_accuracy_is_what_the_metadata_says(session):
    _, held_out = load_digits()
    assert len(held_out) == HELD_OUT_COUNT
    (logits,) = session.run(["logits"], {"input": held_out.images})
    percent = 100 * np.mean(logits.argmax(1) == held_out.labels)
    assert percent >= 97
    assert percent == pytest.approx(float(network_metadata()["held_out_accuracy_percent"]), abs=0.5)


def test_training_and_held_out_part_share_no_image():
    training, held_out = load_digits()
    seen = {image.tobytes() for image in training.images}
    assert not any(image.tobytes() in seen for image in held_out.images)
    assert len(training) + len(held_out) == 1797

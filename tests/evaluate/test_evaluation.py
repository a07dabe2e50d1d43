"""Accuracy and comparison of models on folders and archives, against ONNX Runtime run by hand."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from PIL import Image
from tiny_models import SIZE, brightness_model, image, save_brightness_model, save_images

from quark.errors import InvalidValueError, ModelError, QuarkError
from quark.evaluate import Network, compare, evaluate, measure_in_turns, measure_speed, open_dataset
from quark.evaluate.datasets import evenly_spaced


@pytest.fixture
def model(tmp_path):
    return save_brightness_model(tmp_path / "float.onnx")


@pytest.fixture
def data(tmp_path):
    return save_images(tmp_path / "val")


def spoiled(path):
    """The model with its scores of dark and bright exchanged for some brightnesses."""
    model = brightness_model()
    for each in model.graph.initializer:
        if each.name == "offset":
            each.CopyFrom(numpy_helper.from_array(np.array([40, -40], np.float32), "offset"))
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("batch", ["N", 1, 5])
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_every_batch_size_and_every_fixed_batch_gives_the_same(tmp_path, data, batch, batch_size):
    network = Network(save_brightness_model(tmp_path / "m.onnx", batch=batch))
    result = evaluate(network, open_dataset(data, network), batch_size)
    assert (result.accuracy.count, result.accuracy.top1, result.accuracy.top5) == (12, 1.0, 1.0)
    assert result.speed.ms_per_sample > 0
    assert result.remarks == ()


def test_outputs_are_those_of_the_runtime(tmp_path, model, data):
    network = Network(model)
    (batch,) = open_dataset(data, network).batches(50)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(network.run(batch.inputs)[0], session.run(None, batch.inputs)[0], rtol=1e-5)


def test_preprocessing_is_the_documented_one(tmp_path, model):
    """Short side SIZE + 32, centre crop, mean and deviation of ImageNet, channels first."""
    folder = tmp_path / "flat"
    folder.mkdir()
    image(120, seed=3, size=SIZE + 32).save(folder / "x.png")
    (batch,) = open_dataset(folder, Network(model)).batches(1)
    pixels = np.asarray(Image.open(folder / "x.png"), np.float64)
    top, left = 16, (pixels.shape[1] - SIZE) // 2
    crop = pixels[top : top + SIZE, left : left + SIZE] / 255
    expected = ((crop - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]).transpose(2, 0, 1)
    np.testing.assert_allclose(batch.inputs["input"][0], expected, atol=1e-5)
    assert batch.inputs["input"].dtype == np.float32
    assert batch.labels is None


def test_limit_takes_evenly_spaced_samples(model, data):
    taken = open_dataset(data, Network(model), limit=4)
    assert taken.labels.tolist() == [0, 0, 1, 1]
    assert evenly_spaced(1000, 50) == list(range(0, 1000, 20))
    assert evenly_spaced(3, 50) == [0, 1, 2]
    assert len(set(evenly_spaced(1000, 300))) == 300
    assert max(evenly_spaced(1000, 300)) >= 996


def test_labels_from_a_file(tmp_path, model):
    folder = tmp_path / "flat"
    folder.mkdir()
    image(190).save(folder / "bright.png")
    image(60).save(folder / "dark.png")
    labels = tmp_path / "labels.txt"
    labels.write_text("bright.png 1\ndark.png 0\n")
    network = Network(model)
    assert evaluate(network, open_dataset(folder, network, labels=labels)).accuracy.top1 == 1.0
    labels.write_text("bright.png 1\n")
    with pytest.raises(InvalidValueError, match="dark.png"):
        open_dataset(folder, network, labels=labels)
    labels.write_text("bright.png one\n")
    with pytest.raises(InvalidValueError, match="labels.txt"):
        open_dataset(folder, network, labels=labels)


def test_archives_with_and_without_labels(tmp_path, model):
    network = Network(model)
    x = np.stack([np.full((3, SIZE, SIZE), value, np.float32) for value in (-2, 2, -2)])
    np.savez(tmp_path / "labelled.npz", anything=x, labels=[0, 1, 1])
    assert evaluate(network, open_dataset(tmp_path / "labelled.npz", network)).accuracy.top1 == pytest.approx(2 / 3)
    np.savez(tmp_path / "plain.npz", input=x)
    with pytest.raises(InvalidValueError, match="no labels"):
        evaluate(network, open_dataset(tmp_path / "plain.npz", network))
    assert open_dataset(tmp_path / "plain.npz", network, limit=2).count == 2
    with pytest.raises(InvalidValueError, match="about a folder of images"):
        open_dataset(tmp_path / "plain.npz", network, labels=tmp_path / "labels.txt")


def test_a_model_compared_with_itself(model, data):
    network = Network(model)
    result = compare(network, Network(model), open_dataset(data, network), batch_size=5)
    assert result.agreement == 1.0
    assert result.outputs[0].sqnr_db == float("inf")
    assert result.accuracies.top1_difference == 0
    assert result.accuracies.standard_error == 0
    assert result.to_json()["outputs"][0]["sqnr_db"] == "inf"


def test_paired_difference_counts_gains_and_losses(tmp_path, model, data):
    first, second = Network(model), Network(spoiled(tmp_path / "spoiled.onnx"))
    result = compare(first, second, open_dataset(data, first))
    pair = result.accuracies
    assert pair.first.top1 == 1.0
    assert pair.lost == 6
    assert pair.gained == 0
    assert result.agreement is not None
    assert pair.top1_difference == result.agreement - 1 == -0.5
    assert 0 < pair.standard_error < 0.2


def test_comparison_without_labels(tmp_path, model):
    folder = tmp_path / "flat"
    folder.mkdir()
    image(60).save(folder / "a.jpg")
    network = Network(model)
    result = compare(network, network, open_dataset(folder, network))
    assert result.accuracies is None
    assert result.count == 1


def test_more_folders_than_classes(tmp_path, model, data):
    for name in ("c", "d"):
        (data / name).mkdir()
        image(60).save(data / name / "x.png")
    network = Network(model)
    with pytest.raises(InvalidValueError, match="2 classes"):
        evaluate(network, open_dataset(data, network))


def test_fewer_folders_than_classes_are_remarked(tmp_path, data):
    network = Network(save_brightness_model(tmp_path / "m.onnx", classes=7))
    assert "2 folders" in evaluate(network, open_dataset(data, network)).remarks[0]


def test_an_input_without_a_shape_is_no_scalar(tmp_path):
    made = [helper.make_node("Add", ["x", "y"], ["z"])]
    ports = [helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", None), ("y", []), ("z", None))]
    graph = helper.make_graph(made, "g", ports[:2], ports[2:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    assert [input_.shape for input_ in Network(tmp_path / "m.onnx").inputs] == [None, ()]


def test_speed_of_the_best_run(model):
    network = Network(model, threads=1)
    speed = measure_speed(network, {"input": np.zeros((4, 3, SIZE, SIZE), np.float32)}, repeats=3)
    assert (speed.batch_size, speed.repeats) == (4, 3)
    assert speed.ms_per_sample > 0


def test_models_are_timed_in_turns_and_the_best_counts(model):
    inputs = {"input": np.zeros((2, 3, SIZE, SIZE), np.float32)}
    ran = []

    class Watched(Network):
        def run(self, inputs):
            ran.append(self)
            return super().run(inputs)

    one, other = Watched(model, threads=1), Watched(model, threads=1)
    times = iter([0.0, 9.0, 0.0, 8.0, *[0.0, 4.0] * 2, *[0.0, 3.0] * 99])
    speeds = measure_in_turns((one, other), inputs, clock=lambda: next(times))
    assert [speed.repeats for speed in speeds] == [12, 12]
    assert [speed.ms_per_sample for speed in speeds] == [1500, 1500]  # 3 s for two samples, not the first rounds
    turns = [each for i, each in enumerate(ran) if i == 0 or ran[i - 1] is not each]
    assert turns == [one, other] * 4


def test_a_reference_with_nan_is_an_error_and_not_equal(tmp_path, model, data):
    broken = onnx.load(model)
    for each in broken.graph.initializer:
        if each.name == "offset":
            each.CopyFrom(numpy_helper.from_array(np.full(2, np.nan, np.float32), "offset"))
    onnx.save(broken, tmp_path / "broken.onnx")
    networks = Network(tmp_path / "broken.onnx"), Network(model)
    with pytest.raises(InvalidValueError, match="broken.onnx': its output 'logits' has NaN"):
        compare(*networks, open_dataset(data, networks[0]))
    assert compare(*networks[::-1], open_dataset(data, networks[0])).outputs[0].verdict.value != "ok"


@pytest.mark.parametrize(
    ("make", "fragment"),
    [
        (lambda folder: folder / "absent", "no such folder"),
        (lambda folder: folder, "no images"),
        (lambda folder: savez(folder, input=np.ones((1, 3))).parent, "quark report --calib"),
        (lambda folder: write(folder / "x.txt", b"text"), "not an .npz archive"),
        (lambda folder: write(folder / "x.npz", b"PK\x03\x04 nonsense"), "not a readable numpy file"),
        (lambda folder: savez(folder, other=np.ones((1, 3)), more=np.ones((1, 3))), "more, other"),
        (lambda folder: savez(folder, input=np.ones((0, 3, SIZE, SIZE))), "at least 1"),
        (lambda folder: savez(folder, input=np.ones((2, 3, SIZE, SIZE)), labels=[1]), "same number"),
    ],
)
def test_bad_data_is_named(tmp_path, model, make, fragment):
    folder = tmp_path / "bad"
    folder.mkdir()
    path = make(folder)
    with pytest.raises(InvalidValueError, match=fragment) as caught:
        open_dataset(path, Network(model))
    assert path.name in str(caught.value)


def write(path, content):
    path.write_bytes(content)
    return path


def savez(folder, **arrays):
    np.savez(folder / "x.npz", **arrays)
    return folder / "x.npz"


def test_an_image_that_is_none_is_named(tmp_path, model, data):
    (data / "a_dark" / "003.png").write_bytes(b"not an image")
    network = Network(model)
    with pytest.raises(QuarkError, match="003.png"):
        evaluate(network, open_dataset(data, network))


def test_models_that_do_not_go_together(tmp_path, model, data):
    first, second = Network(model), Network(save_brightness_model(tmp_path / "m.onnx", classes=3))
    with pytest.raises(ModelError, match="logits.*shape"):
        compare(first, second, open_dataset(data, first))


def test_missing_model(tmp_path):
    with pytest.raises(InvalidValueError, match="no such file"):
        Network(tmp_path / "absent.onnx")


def test_arrays_that_do_not_fit_the_model(tmp_path, model):
    network = Network(model)
    np.savez(tmp_path / "x.npz", input=np.ones((2, 3, 5, 5), np.float32), labels=[0, 1])
    with pytest.raises(ModelError, match="float.onnx"):
        evaluate(network, open_dataset(tmp_path / "x.npz", network))

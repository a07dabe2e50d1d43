"""Histograms of weights and activations as pictures, and the data that activations are drawn on."""

from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from quark.errors import InvalidValueError
from quark.onnx.convert import distributions
from quark.onnx.tools import save_tensor_hist, save_weights_hist
from quark.report import histogram_picture


def info(name, shape):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


@pytest.fixture
def model(tmp_path):
    """y = relu(x) with weights that nothing needs to read."""
    weights = [
        numpy_helper.from_array(np.array([[1.0, -2.0], [3.0, 4.0]], np.float32), "a/w:0"),
        numpy_helper.from_array(np.array([7], np.int64), "shape"),
        numpy_helper.from_array(np.zeros((0, 3), np.float32), "empty"),
    ]
    nodes = [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("Neg", ["h"], ["y"])]
    graph = helper.make_graph(nodes, "g", [info("x", [1, 3, 4, 6])], [info("y", [1, 3, 4, 6])], weights)
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def saved(folder, name, array):
    folder.mkdir(exist_ok=True)
    np.save(folder / name, array)


def test_weights(model, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        distributions, "write_histogram", lambda path, counts, edges, title: drawn.update({path.name: (counts, edges)})
    )
    save_weights_hist.TOOL.run(["--input_model", str(model), "--output", str(tmp_path / "out")])
    assert sorted(drawn) == ["a_w_0.png", "shape.png"]
    counts, edges = drawn["a_w_0.png"]
    assert (len(counts), counts.sum(), edges[0], edges[-1]) == (128, 4, -2.0, 4.0)
    assert save_weights_hist.sanitize_filename("a/w:0.b") == "a_w_0_b"


def test_ranges_of_channels(model, tmp_path):
    save_weights_hist.main(str(model), str(tmp_path / "out"), perchannel=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a_w_0_per_channel.png", "shape.png"]
    pixels = np.asarray(Image.open(tmp_path / "out" / "a_w_0_per_channel.png").convert("RGB")).astype(int)
    blue = (pixels == histogram_picture._BAR).all(-1)
    lengths = blue.sum(0)[blue.any(0)]
    # two lines, from -2 to 1 and from 3 to 4: the second is a third of the first
    assert lengths.min() / lengths.max() == pytest.approx(1 / 3, abs=0.02)


def test_activations_are_drawn_from_all_samples(model, tmp_path, monkeypatch):
    samples = [np.full((1, 3, 4, 6), value, np.float32) for value in (-1.0, 0.0, 1.0, 2.0)]
    for index, sample in enumerate(samples):
        saved(tmp_path / "data", f"{index}.npy", sample)
    histograms = {}
    from quark.onnx.calibrate import pictures

    monkeypatch.setattr(
        pictures, "write_histogram", lambda path, counts, edges, *_: histograms.update({path.name: counts})
    )
    words = ["--input_model", model, "--data_path", tmp_path / "data", "--output_path", tmp_path / "out"]
    save_tensor_hist.TOOL.run([str(word) for word in words])
    assert sorted(histograms) == ["h.png", "x.png", "y.png"]
    assert [counts.sum() for counts in histograms.values()] == [4 * 72] * 3
    assert histograms["x.png"][np.nonzero(histograms["x.png"])].tolist() == [72] * 4


def test_pictures_are_written(model, tmp_path):
    reader = save_tensor_hist.HistDataReader
    saved(tmp_path / "data", "0.npy", np.linspace(-1, 1, 72, dtype=np.float32).reshape(3, 4, 6))
    save_tensor_hist.save_tensor_hist_figure(str(model), reader(str(model), str(tmp_path / "data")), tmp_path / "out")
    for name in ("h", "x", "y"):
        with Image.open(tmp_path / "out" / f"{name}.png") as image:
            assert image.size == (histogram_picture.WIDTH, histogram_picture.HEIGHT)


def test_bfloat16_activations_are_left_out(tmp_path):
    casts = [("x", "h", TensorProto.BFLOAT16), ("h", "y", TensorProto.FLOAT)]
    nodes = [helper.make_node("Cast", [source], [result], to=kind) for source, result, kind in casts]
    graph = helper.make_graph(nodes, "g", [info("x", [1, 2])], [info("y", [1, 2])])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    saved(tmp_path / "data", "0.npy", np.array([[1, 2]], np.float32))
    reader = save_tensor_hist.HistDataReader(tmp_path / "m.onnx", tmp_path / "data")
    save_tensor_hist.save_tensor_hist_figure(tmp_path / "m.onnx", reader, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["x.png", "y.png"]


def test_images_fill_the_input_in_its_layout(tmp_path):
    pixels = np.zeros((4, 6, 3), np.uint8)
    pixels[..., 0] = 255
    Image.fromarray(pixels).save(tmp_path / "red.png")  # as large as the input
    Image.fromarray(pixels.repeat(2, 0).repeat(2, 1)).save(tmp_path / "larger.png")
    first = save_tensor_hist.load_data(str(tmp_path), [1, 3, 4, 6])
    for name in ("red.png", "larger.png"):
        assert first[name].shape == (1, 3, 4, 6)
        np.testing.assert_array_equal(first[name][0, :, 0, 0], [1, -1, -1])
    last = save_tensor_hist.load_img_data2(str(tmp_path), ["red.png"], [1, 4, 6, 3])["red.png"]
    np.testing.assert_array_equal(last, first["red.png"].transpose(0, 2, 3, 1))
    reverse = save_tensor_hist.load_img_data(str(tmp_path), ["red.png"], [1, 4, 6, 3])["red.png"]
    np.testing.assert_array_equal(reverse, last[..., ::-1])


def test_files_of_several_inputs(tmp_path):
    nodes = [helper.make_node("Add", ["a", "b"], ["y"])]
    graph = helper.make_graph(nodes, "g", [info("a", [1, 2]), info("b", ["N", 2])], [info("y", [1, 2])])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    data = tmp_path / "data"
    data.mkdir()
    for name, values in (("a_0", (1, 2)), ("a_1", (3, 4)), ("b_0", (5, 6)), ("b_1", (7, 8))):
        (data / f"{name}.bin").write_bytes(np.array(values, np.float32).tobytes())
    reader = save_tensor_hist.HistDataReader(str(tmp_path / "m.onnx"), str(data), {"b": [1, 2]})
    first, second = reader.get_next() or {}, reader.get_next() or {}
    assert (first["a"].tolist(), first["b"].tolist()) == ([[1, 2]], [[5, 6]])
    assert (second["a"].tolist(), second["b"].tolist(), reader.get_next()) == ([[3, 4]], [[7, 8]], None)
    (data / "b_1.bin").unlink()
    with pytest.raises(InvalidValueError, match=r"sample '_1.bin' has no file for input 'b'"):
        save_tensor_hist.HistDataReader(str(tmp_path / "m.onnx"), str(data))
    (data / "b_1.bin").write_bytes(b"123")
    with pytest.raises(InvalidValueError, match=r"b_1.bin' has 3 bytes: expected 8"):
        save_tensor_hist.HistDataReader(str(tmp_path / "m.onnx"), str(data))


def test_data_that_does_not_fit(model, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InvalidValueError, match="no files with data"):
        save_tensor_hist.HistDataReader(str(model), str(empty))
    saved(empty, "a.npy", np.zeros((2, 2), np.float32))
    with pytest.raises(InvalidValueError, match=r"a.npy' is of shape \[2, 2\]: expected \[1, 3, 4, 6\]"):
        save_tensor_hist.HistDataReader(str(model), str(empty))


def test_histograms_of_a_calibrator(tmp_path):
    collected = {"a/b": (np.array([1, 2]), np.array([0.0, 1.0, 2.0]), 0.0, 2.0)}
    calibrator = SimpleNamespace(collector=SimpleNamespace(histogram_dict=collected))
    save_tensor_hist.save_figure(calibrator, str(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a_b.png"]

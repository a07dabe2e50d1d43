"""The networks of the scaling benchmark are what was asked for, and growth is that of the points."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from bench.child import Outcome
from bench.layered_network import Shape, build
from bench.runs import Runs
from bench.scaling import Line, growth, points_of, processors, write_images


@pytest.mark.parametrize(("layers", "width"), [(1, 4), (5, 8), (60, 4), (5000, 4)])
def test_a_network_has_its_layers_and_keeps_its_activations(tmp_path: Path, layers: int, width: int) -> None:
    path = build(tmp_path / "net.onnx", Shape(layers, width, 8))
    onnx.checker.check_model(str(path))
    convolutions = [node for node in onnx.load(path).graph.node if node.op_type == "Conv"]
    assert len(convolutions) == layers
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": np.random.default_rng(0).standard_normal((2, 3, 8, 8), np.float32)})
    assert 1e-3 < np.abs(result).max() < 1e6


def test_growth_is_per_doubling_and_leaves_out_what_is_missing() -> None:
    assert growth([1, 2, 4], [5, 10, 20]) == pytest.approx(2)
    assert growth([1, 2, 4], [5, None, 80]) == pytest.approx(4)
    assert growth([1, 2], [5, None]) is None


def test_the_summary_is_of_the_axis_and_of_bytes_for_the_width() -> None:
    runs = {value: {"ours": Runs([Outcome(value**2.0, 100.0)])} for value in (2, 4, 8)}
    megabytes = {value: value**2.0 for value in runs}
    assert Line("layers", "A8W8", runs, megabytes).summary()[-2:] == ["4.00 x", "1.00 x"]
    assert Line("width", "A8W8", runs, megabytes).summary()[-2:] == ["2.00 x", "1.00 x"]


def test_the_axes_are_as_wide_as_promised() -> None:
    assert (min(points_of("images")), max(points_of("images"))) == (8, 128)
    assert (min(points_of("layers")), max(points_of("layers"))) == (10, 400)
    assert max(points_of("many_images")) == 10_000
    assert max(points_of("many_layers")) == 5000


def test_images_are_written_one_by_one_as_numpy_reads_them(tmp_path: Path) -> None:
    write_images(tmp_path / "images.npy", (5, 3, 4, 4))
    images = np.load(tmp_path / "images.npy")
    assert (images.shape, images.dtype) == ((5, 3, 4, 4), np.float32)
    assert len(np.unique(images)) == images.size


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone says which processors to use")
def test_processors_are_given_back() -> None:
    before = os.sched_getaffinity(0)
    with processors(1):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before

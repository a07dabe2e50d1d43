"""The accuracy table: what is left to measure after a break, presets by group, CIFAR's images."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from bench.accuracy import Figure, joined, main, resume
from bench.calibration_sets import figure_of, images_of_set
from bench.child import NO_EQUIVALENT, OURS
from bench.cifar import CifarSource, prepare
from bench.layered_network import Shape, build
from bench.models import NamedModel, named_presets
from bench.record import Record
from bench.side_by_side import Score

from quark.demo import network_path
from quark.evaluate import Dataset
from quark.onnx.quantization.presets import PRESETS

HEADER = ["model", "preset", "images", "float", OURS]


def record_of(folder: Path, images: int = 8, presets: tuple[str, ...] = ("A8W8",)) -> Record:
    arguments = Namespace(output=folder, label="", images=images, presets=list(presets), peers=["none"])
    return Record.begin("accuracy", arguments, HEADER)


def add_row(record: Record, preset: str) -> None:
    scores = {OURS: Score(70.0, 85.0, -10.0, 3.0, 88.0, 0, 1)}
    figure = Figure("net", preset, 10, 80.0, 90.0, scores, {}, {"nncf": NO_EQUIVALENT})
    record.add([figure.cells([OURS])], figure, figure.blanks())


def test_rows_of_today_are_kept_and_known(tmp_path: Path) -> None:
    first = record_of(tmp_path)
    assert resume(first) == set()
    add_row(first, "A8W8")
    second = record_of(tmp_path, presets=("A8W8", "MX6"))
    second.arguments["calib"] = None  # another model, with other images
    assert resume(second) == {("net", "A8W8")}
    add_row(second, "MX6")
    found = Record.read(second.path)
    assert [row[1] for row in found.rows] == ["A8W8", "MX6"]
    assert [blank.what for blank in found.blanks] == ["A8W8", "MX6"]


def test_rows_that_were_measured_otherwise_are_not_mixed_in(tmp_path: Path) -> None:
    add_row(record_of(tmp_path), "A8W8")
    with pytest.raises(SystemExit, match="--resume.*'images': 8.*'images': 16.*--label"):
        resume(record_of(tmp_path, images=16))


def test_all_and_finetuned_are_every_preset_once() -> None:
    plain, finetuned = named_presets(["all"]), named_presets(["finetuned"])
    assert sorted([*plain, *finetuned]) == sorted(PRESETS)
    assert named_presets(["MX6", "all"])[0] == "MX6"
    assert len(named_presets(["MX6", "all"])) == len(plain)
    assert not any(name.endswith(("_ADAROUND", "_ADAQUANT", "_ACCURATE", "_DISTILL")) for name in plain)


def test_a_cell_has_top1_and_the_paired_difference() -> None:
    figure = Figure(
        "net", "A8W8", 10, 80.0, 90.0, {OURS: Score(70.0, 85.0, -10.0, 3.0, 88.0, 0, 1)}, {}, {"nncf": "no"}
    )
    assert figure.cells([OURS, "nncf"]) == ["net", "A8W8", "10", "80.00", "70.00 (-10.00 ± 3.00)", ""]
    assert [blank.reason for blank in figure.blanks()] == ["no"]


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    arrays = {f"{part}_x": random.integers(0, 256, (12, 28, 28, 3), np.uint8) for part in ("train", "test")}
    path = tmp_path / "cifar.npz"
    np.savez(path, **arrays, train_y=np.arange(12) % 10, test_y=np.arange(12) % 10)
    return path


def test_cifars_images_are_scaled_and_channels_come_first(cifar: Path, tmp_path: Path) -> None:
    white = prepare(np.full((1, 2, 2, 3), 255, np.uint8))
    assert white.shape == (1, 3, 2, 2)
    assert white.dtype == np.float32
    np.testing.assert_allclose(white[0, :, 0, 0], [(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225], 1e-6)
    source = CifarSource(cifar, NamedModel("net", network_path()))
    data = source.data(3)
    assert (data.count, data.labels.tolist()) == (3, [0, 4, 8])
    samples = np.load(source.samples(4, tmp_path).path)
    with np.load(cifar) as file:
        np.testing.assert_array_equal(samples[:4], prepare(file["train_x"][::3]))


def test_an_archive_without_images_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(SystemExit, match="--cifar.*other.npz.*train_x"):
        CifarSource(tmp_path / "other.npz", NamedModel("net", network_path())).data(None)


def test_what_belongs_together_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["accuracy", "--cifar", "x.npz"])
    with pytest.raises(SystemExit, match="--cifar-model"):
        main()


@pytest.mark.slow
def test_a_run_that_goes_on_measures_nothing_twice(
    cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network = build(tmp_path / "net.onnx", Shape(2, 4, 28))
    places = ["--cifar", str(cifar), "--cifar-model", str(network), "--output", str(tmp_path / "out")]
    given = ["--presets", "MXINT8", "--images", "4", "--peers", "none", "--threads", "1", "--resume"]
    monkeypatch.setattr(sys, "argv", ["accuracy", *places, *given])
    main()
    assert "MXINT8 ours: quantized" in capsys.readouterr().err
    (path,) = (tmp_path / "out").glob("*.json")
    before = Record.read(path)
    assert before.rows[0][:3] == ["cifar_resnet20", "MXINT8", "12"]
    assert before.figures[0]["made"]["ours"]["file_mb"] > 0
    main()
    assert "everything is in the record" in capsys.readouterr().err
    assert Record.read(path) == before


def test_the_images_of_several_folders_are_judged_together() -> None:
    def part(values: list[int]) -> Dataset:
        return Dataset("part", len(values), np.array(values) % 10, lambda i: {"x": np.full(1, values[i])}, 10)

    both = joined([part([3, 4]), part([15, 16, 17])])
    assert (both.count, both.labels.tolist()) == (5, [3, 4, 5, 6, 7])
    assert [int(x) for batch in both.batches(2) for x in batch.inputs["x"].ravel()] == [3, 4, 15, 16, 17]


def test_sets_of_calibration_images_have_none_in_common(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(24):
        Image.fromarray(np.full((28, 28), 10 * number, np.uint8)).save(tmp_path / f"{number:02}.png")
    model = NamedModel("net", network_path(), "none")
    sets = [images_of_set(model, tmp_path, 3, number, 7) for number in range(3)]
    values = [{float(image.mean()) for image in images} for images in sets]
    assert [len(value) for value in values] == [8, 8, 8]  # seven to calibrate on, one held out
    assert len(set.union(*values)) == 24
    assert figure_of("net", "XINT8", [(0.02, 99.0), (0.03, 98.0)]).cells() == [
        "net",
        "XINT8",
        "0.0200",
        "0.0300",
        "1.50 x",
    ]

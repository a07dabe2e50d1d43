"""Images for training and evaluation: which they are, what they look like, and how processes share them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import SIZE, image, save_brightness_model, save_images
from tiny_training import tiny_arrays

from quark.errors import InvalidValueError
from quark.evaluate import Network, open_dataset
from quark.vision.data import ArrayBatches, ArrayHeldOut, Arrays, FolderBatches, FolderHeldOut, open_folders
from quark.vision.data.arrays import PADDING, moved
from quark.vision.data.folders import TrainingTransform, random_box
from quark.vision.training import Processes


@pytest.fixture
def root(tmp_path):
    save_images(tmp_path / "train", count=5)
    save_images(tmp_path / "val", count=3)
    return tmp_path


def test_train_and_val_are_told_apart(root):
    folders = open_folders(root)
    assert folders.classes == ("a_dark", "b_bright")
    assert (len(folders.training), len(folders.held_out)) == (10, 6)
    assert folders.calibration == folders.training
    assert not folders.is_calibrated_on_held_out
    save_images(root / "calib", count=1)
    folders = open_folders(root)
    assert (len(folders.training), len(folders.calibration)) == (10, 2)


def test_calib_serves_for_training_where_there_is_no_train(root):
    (root / "train").rename(root / "calib")
    folders = open_folders(root)
    assert folders.training == folders.calibration
    assert len(folders.training) == 10


def test_class_folders_alone_are_what_is_judged_by(root):
    folders = open_folders(root / "val")
    assert folders.training is None
    assert folders.is_calibrated_on_held_out


def test_a_class_has_the_same_number_in_every_part(root):
    (root / "val" / "zebra").mkdir()
    image(99).save(root / "val" / "zebra" / "1.png")
    (root / "train" / "ant").mkdir()
    image(99).save(root / "train" / "ant" / "1.png")
    folders = open_folders(root)
    assert folders.classes == ("a_dark", "ant", "b_bright", "zebra")
    assert sorted(set(folders.held_out.labels)) == [0, 2, 3]
    (root / "classes.txt").write_text("zebra\nother\nb_bright\na_dark bat\nant\n")
    assert sorted(set(open_folders(root).held_out.labels)) == [0, 2, 3]
    assert open_folders(root).held_out.labels[0] == 3


def test_a_folder_that_cannot_be_used_says_why(root):
    with pytest.raises(InvalidValueError, match="no such folder"):
        open_folders(root / "nowhere")
    with pytest.raises(InvalidValueError, match="no class folders"):
        open_folders(root / "val" / "a_dark")
    (root / "classes.txt").write_text("a_dark\n")
    with pytest.raises(InvalidValueError, match=r"b_bright' is not in classes\.txt"):
        open_folders(root)
    (root / "classes.txt").unlink()
    (root / "val").rename(root / "elsewhere")
    with pytest.raises(InvalidValueError, match="no folder val"):
        open_folders(root)


def test_evaluation_sees_what_quark_evaluate_sees(root):
    network = Network(save_brightness_model(root / "net.onnx"))
    expected = open_dataset(root / "val", network)
    (batch,) = expected.batches(6)
    ((images, labels),) = FolderHeldOut(open_folders(root).held_out, 6, size=SIZE)
    assert np.array_equal(images.numpy(), batch.inputs["input"])
    assert np.array_equal(labels.numpy(), batch.labels)


def test_what_is_random_depends_on_seed_epoch_and_image_alone(root):
    images = open_folders(root).training
    transform = TrainingTransform(size=SIZE)

    def seen(epoch, workers=0, seed=0, processes=None):
        data = FolderBatches(images, 5, transform, seed, workers, processes or Processes())
        return [each for batch in data.epoch(epoch) for each in batch[0]]

    assert all(torch.equal(*pair) for pair in zip(seen(1), seen(1, workers=1), strict=True))
    assert not torch.equal(seen(1)[0], seen(2)[0])
    assert not torch.equal(seen(1)[0], seen(1, seed=1)[0])
    halves = [seen(1, processes=Processes(rank, 2)) for rank in range(2)]
    alternating = [each for pair in zip(*halves, strict=True) for each in pair]
    assert all(torch.equal(*pair) for pair in zip(seen(1), alternating, strict=True))


def test_a_random_box_lies_in_the_image_and_has_its_area():
    random = np.random.default_rng(0)
    for width, height in ((300, 200), (10, 1000), (1, 1), (57, 64)):
        for _ in range(50):
            left, upper, right, lower = random_box(width, height, 0.25, random)
            assert 0 <= left < right <= width
            assert 0 <= upper < lower <= height
            if width < 100 < height:
                continue
            assert (right - left) * (lower - upper) >= 0.24 * width * height


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"nothing")
    with pytest.raises(InvalidValueError, match=r"broken\.jpg"):
        TrainingTransform().load(tmp_path / "broken.jpg", np.random.default_rng(0))


def test_moved_images_are_cut_from_black_edges():
    images = torch.randint(1, 255, (3, 6, 5, 2), dtype=torch.uint8)
    shifts = torch.tensor([[PADDING, PADDING], [0, PADDING], [PADDING + 1, PADDING]])
    result = moved(images, shifts, torch.tensor([False, False, True]))
    assert torch.equal(result[0], images[0])
    assert torch.equal(result[1, PADDING:], images[1, : 6 - PADDING])
    assert not result[1, :PADDING].any()
    assert torch.equal(result[2, :-1], images[2, 1:].flip(1))


def test_processes_share_an_epoch_of_arrays():
    arrays = tiny_arrays(count=22)
    whole = [each for batch in ArrayBatches(arrays, 4, seed=5).epoch(3) for each in batch[0]]
    assert len(whole) == 20
    parts = [ArrayBatches(arrays, 2, seed=5, processes=Processes(rank, 2)) for rank in range(2)]
    assert [len(part) for part in parts] == [5, 5]
    joined = []
    for batches in zip(*(part.epoch(3) for part in parts), strict=True):
        joined += [image for pair in zip(*(batch[0] for batch in batches), strict=True) for image in pair]
    assert all(torch.equal(*pair) for pair in zip(whole, joined, strict=True))


def test_held_out_arrays_are_normalized_and_whole():
    arrays = tiny_arrays(count=10)
    batches = list(ArrayHeldOut(arrays, 4))
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    pixel = arrays.images[0, 3, 2].numpy() / 255
    expected = (pixel - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    assert np.allclose(batches[0][0][0, :, 3, 2].numpy(), expected, atol=1e-6)


def test_arrays_are_read_by_name_and_checked(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, train_x=np.zeros((2, 4, 4, 3), np.uint8), train_y=np.arange(2), floats=np.zeros((2, 4, 4, 3)))
    assert len(Arrays.read(path, "train_x", "train_y")) == 2
    with pytest.raises(InvalidValueError, match="no array 'test_x': it has train_x, train_y, floats"):
        Arrays.read(path, "test_x", "train_y")
    with pytest.raises(InvalidValueError, match="uint8"):
        Arrays.read(path, "floats", "train_y")
    with pytest.raises(InvalidValueError, match="cannot be read"):
        Arrays.read(Path(tmp_path / "none.npz"), "train_x", "train_y")

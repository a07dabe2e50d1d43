"""Images of a folder, pixel for pixel as an independent script prepares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quark.errors import InvalidValueError
from quark.onnx.data import InputInfo, Preprocessing, find_preprocessing, open_samples
from quark.onnx.data.images import image_loader

FLOAT = np.dtype(np.float32)
NCHW = InputInfo("x", FLOAT, ("N", 3, 224, 224))


def write_images(folder: Path, count: int, size: tuple[int, int] = (300, 260)) -> list[Path]:
    generator = np.random.default_rng(0)
    paths = []
    for i in range(count):
        path = folder / f"class_{i % 3}" / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (size[1], size[0], 3), np.uint8)).save(path)
        paths.append(path)
    return sorted(paths)


def reference(path: Path, preset: str, size: int) -> Any:
    """Written from the description: short side, centre crop, normalization; channels first."""
    image = Image.open(path).convert("RGB")
    width, height = image.size
    short = 256 if size == 224 else size + 32
    if min(width, height) != short:
        factor = short / min(width, height)
        image = image.resize((round(width * factor), round(height * factor)), Image.Resampling.BILINEAR)
        width, height = image.size
    left, top = (width - size) // 2, (height - size) // 2
    x: np.ndarray = np.asarray(image.crop((left, top, left + size, top + size)), np.float32)
    if preset == "lite":
        x = (x - 127) / 128
    elif preset == "imagenet":
        x = (x / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    return x.transpose(2, 0, 1).astype(np.float32)


@pytest.mark.parametrize("preset", ["imagenet", "lite", "none"])
@pytest.mark.parametrize("side", [224, 64, 240])
@pytest.mark.parametrize("size", [(300, 260), (256, 256), (40, 90)])
def test_pixels_are_those_of_the_description(tmp_path: Path, preset: str, side: int, size: tuple[int, int]) -> None:
    path = write_images(tmp_path, 1, size)[0]
    info = InputInfo("x", FLOAT, (1, 3, side, side))
    loaded = image_loader(info, find_preprocessing(preset)).load(path)
    np.testing.assert_array_equal(loaded, reference(path, preset, side))
    last = InputInfo("x", FLOAT, (1, side, side, 3))
    np.testing.assert_array_equal(image_loader(last, find_preprocessing(preset)).load(path).transpose(2, 0, 1), loaded)


def test_free_sizes_are_224_and_gray_models_get_gray(tmp_path: Path) -> None:
    path = write_images(tmp_path, 1)[0]
    assert image_loader(InputInfo("x", FLOAT, ("N", 3, "H", "W")), Preprocessing()).load(path).shape == (3, 224, 224)
    assert image_loader(InputInfo("x", FLOAT, ("N", 1, 32, 32)), Preprocessing()).load(path).shape == (1, 32, 32)
    raw = image_loader(InputInfo("x", np.dtype(np.uint8), ("N", 8, 8, 3)), Preprocessing()).load(path)
    assert raw.dtype == np.uint8


def test_samples_are_evenly_spaced_and_held_out_ones_come_from_the_rest(tmp_path: Path) -> None:
    paths = write_images(tmp_path, 40, (40, 40))
    info = InputInfo("x", FLOAT, ("N", 3, 8, 8))
    samples = open_samples(tmp_path, [info], count=10)
    assert samples.count == 10
    assert len(samples.held_out) == 1
    for i, sample in enumerate(samples):
        np.testing.assert_array_equal(sample["x"][0], reference(paths[4 * i], "imagenet", 8))
    used = {sample["x"].tobytes() for sample in samples}
    assert all(each["x"].tobytes() not in used for each in samples.held_out)
    assert "10 images" in samples.source


def test_all_images_without_a_count(tmp_path: Path) -> None:
    write_images(tmp_path, 9, (40, 40))
    samples = open_samples(tmp_path, [InputInfo("x", FLOAT, ("N", 3, 8, 8))], batch_size=2)
    assert samples.count + len(samples.held_out) == 5
    assert next(iter(samples))["x"].shape == (2, 3, 8, 8)


def test_unreadable_images_are_named(tmp_path: Path) -> None:
    write_images(tmp_path, 2)
    bad = tmp_path / "class_0" / "broken.jpg"
    bad.write_bytes(b"\xff\xd8 no image")
    with pytest.raises(InvalidValueError, match=r"broken\.jpg cannot be read"):
        open_samples(tmp_path, [NCHW])


@pytest.mark.parametrize(
    "shape", [("N", 10), ("N", 5, 32, 32), ("N", 3, 32, 64), None], ids=["rank 2", "5 channels", "oblong", "unknown"]
)
def test_inputs_that_are_no_images_are_refused(tmp_path: Path, shape: Any) -> None:
    write_images(tmp_path, 1)
    with pytest.raises(InvalidValueError, match="folder of images"):
        open_samples(tmp_path, [InputInfo("x", FLOAT, shape)])


def test_preprocessing_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("mean: 127\nstd: [128, 128, 128]\ndivisor: 1\nshort_side: 100\n")
    assert find_preprocessing(path) == Preprocessing((127.0,), (128.0, 128.0, 128.0), 1, 100)
    assert find_preprocessing(str(path)).short_side == 100


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("meen: 3", "mean"),
        ("- 1", "mapping"),
        ("std: 0", "zeros"),
        ("mean: [1, 2]", "three channels"),
        ("short_side: -1", "short_side"),
        ("mean: !!python/object/apply:os.getcwd []", "yaml"),
        ("{", "yaml"),
    ],
)
def test_bad_preprocessing_files_are_refused(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(InvalidValueError, match=word):
        find_preprocessing(path)


def test_unknown_preprocessing_offers_the_known() -> None:
    with pytest.raises(InvalidValueError, match="imagenet"):
        find_preprocessing("imagnet")
    with pytest.raises(InvalidValueError, match="no_such"):
        find_preprocessing("no_such.yaml")


@pytest.mark.parametrize(
    ("preset", "lowest", "highest"), [("unit", 0.0, 1.0), ("minus_one_one", -1.0, 1.0), ("none", 0.0, 255.0)]
)
def test_presets_cover_the_range_that_their_name_promises(
    tmp_path: Path, preset: str, lowest: float, highest: float
) -> None:
    Image.fromarray(np.repeat(np.array([[0, 255]], np.uint8), 64, 0).repeat(32, 1)).save(tmp_path / "a.png")
    loaded = image_loader(InputInfo("x", FLOAT, (1, 3, 32, 32)), find_preprocessing(preset)).load(tmp_path / "a.png")
    assert (loaded.min(), loaded.max()) == (lowest, highest)


def test_letterbox_keeps_the_whole_image_and_its_shape(tmp_path: Path) -> None:
    Image.fromarray(np.full((20, 40, 3), 255, np.uint8)).save(tmp_path / "a.png")
    info = InputInfo("x", FLOAT, (1, 3, 32, 64))
    loaded = image_loader(info, find_preprocessing("letterbox")).load(tmp_path / "a.png")
    np.testing.assert_array_equal(loaded, np.ones((3, 32, 64), np.float32))  # 20 x 40 fits without borders
    square = InputInfo("x", FLOAT, (1, 3, 64, 64))
    loaded = image_loader(square, find_preprocessing("letterbox")).load(tmp_path / "a.png")
    assert (loaded[:, 16:48] == 1).all()
    np.testing.assert_allclose(loaded[:, :16], 114 / 255, rtol=1e-6)
    np.testing.assert_allclose(loaded[:, 48:], 114 / 255, rtol=1e-6)


def test_stretch_takes_rectangles_and_a_crop_refuses_them(tmp_path: Path) -> None:
    path = write_images(tmp_path, 1)[0]
    info = InputInfo("x", FLOAT, (1, 3, 32, 64))
    assert image_loader(info, find_preprocessing("stretch")).load(path).shape == (3, 32, 64)
    with pytest.raises(InvalidValueError, match="letterbox or stretch"):
        image_loader(info, find_preprocessing("unit"))


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [((1, 3, 224, 224), FLOAT, "imagenet"), (("N", 32, 32, 3), FLOAT, "imagenet"), ((1, 64, 64, 3), np.uint8, "none")],
)
def test_auto_assumes_what_the_shape_tells_and_says_so(shape: Any, dtype: Any, expected: str) -> None:
    loader = image_loader(InputInfo("x", np.dtype(dtype), shape), find_preprocessing("auto"))
    assert loader.preprocessing.name == expected
    assert str(loader).startswith(f"{expected}: ")
    assert str(loader).endswith("assumed, because --preprocess was not given")
    named = image_loader(InputInfo("x", np.dtype(dtype), shape), find_preprocessing(expected))
    assert "assumed" not in str(named)


@pytest.mark.parametrize(
    "shape", [(1, 3, 640, 640), (1, 3, 320, 320), (1, 1, 28, 28), (1, 3, "H", "W"), (1, 3, 48, 320)]
)
def test_auto_refuses_where_a_guess_would_be_wild(shape: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"letterbox \(whole image") as error:
        image_loader(InputInfo("x", FLOAT, shape), find_preprocessing("auto"))
    assert "--preprocess" in str(error.value)


def test_letterbox_of_a_free_size_asks_for_the_size() -> None:
    info = InputInfo("x", FLOAT, ("N", 3, "H", "W"))
    with pytest.raises(InvalidValueError, match="letterbox:640"):
        image_loader(info, find_preprocessing("letterbox"))
    loader = image_loader(info, find_preprocessing("letterbox:64"))
    assert (loader.width, loader.preprocessing.name) == (64, "letterbox:64")

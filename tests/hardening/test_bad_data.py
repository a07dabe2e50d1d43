"""Calibration data that is of no use, through the Python API and the command: an error that names it, and no output."""

from __future__ import annotations

from pathlib import Path

import pytest
from broken_checks import OLD, command_refused, refused, untouched
from broken_data import BROKEN_FILES, BROKEN_OBJECTS, BrokenData
from tiny_models import save_brightness_model

from quark.errors import QuarkError
from quark.onnx import ModelQuantizer, QConfig, quantize


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "out.onnx").write_bytes(OLD)
    return save_brightness_model(tmp_path / "float.onnx")


@pytest.mark.parametrize("broken", [*BROKEN_FILES, *BROKEN_OBJECTS], ids=lambda broken: broken.name)
def test_quantize_refuses_it(broken: BrokenData, model: Path) -> None:
    data = broken.make(model.parent)
    quantizer = ModelQuantizer(QConfig.get_default_config("XINT8"))
    with untouched(model.parent):
        refused(lambda: quantizer.quantize_model(model, model.parent / "out.onnx", data), QuarkError, broken.words)


@pytest.mark.parametrize("broken", BROKEN_FILES, ids=lambda broken: broken.name)
def test_the_command_says_so_in_one_line(broken: BrokenData, model: Path) -> None:
    data = broken.make(model.parent)
    command_refused(model.parent, ["quantize", model, model.parent / "out.onnx", "--calib", data], broken.words)


# integers and NaN are numbers all the same, which evaluating converts and computes with
JUDGED = [broken for broken in BROKEN_FILES if broken.name not in ("NaN", "integers")]


@pytest.mark.parametrize("broken", JUDGED, ids=lambda broken: broken.name)
def test_data_to_judge_by_is_refused_too(broken: BrokenData, model: Path) -> None:
    """Evaluating reads with the labels, and checks less of the arrays: the runtime refuses other shapes."""
    data = broken.make(model.parent)
    command_refused(model.parent, ["evaluate", model, "--data", data], ())


def test_an_image_of_one_pixel_is_an_image(model: Path) -> None:
    from PIL import Image

    (model.parent / "images").mkdir()
    Image.new("RGB", (1, 1), (9, 200, 30)).save(model.parent / "images" / "one.png")
    assert quantize(model, model.parent / "images").report.outputs

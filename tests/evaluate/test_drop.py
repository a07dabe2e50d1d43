"""What --max-drop limits."""

import numpy as np
import pytest
from reports import make_report
from tiny_models import save_brightness_model, save_images

from quark.compare import FidelityMeter, OutputFidelity
from quark.errors import InvalidValueError
from quark.evaluate.comparison import measured_drop
from quark.report.summary import summary_text


def drop_of(report):
    return measured_drop(report, None, None, None, "imagenet")


def test_outputs_with_classes_lose_equal_predictions():
    drop = drop_of(make_report(outputs=(OutputFidelity("y", 0.5, 3.0, agreement=0.97),)))
    assert drop.points == pytest.approx(3)
    assert "equal predictions" in str(drop)


def test_near_ties_are_not_lost():
    """A packed file may break a tie otherwise than the graph before packing."""
    meter = FidelityMeter("y")
    expected = np.array([[7.730, 7.703, 0.0], [5.0, 1.0, 0.0], [5.0, 1.0, 0.0], [0.0, 0.0, 3.0]])
    actual = np.array([[7.703, 7.730, 0.0], [1.0, 5.0, 0.0], [5.0, 1.0, 0.0], [0.0, 0.0, 3.0]])
    meter.add(expected, actual)
    output = meter.result()
    assert (output.agreement, output.predictions, output.near_ties) == (0.5, 4, 1)
    drop = drop_of(make_report(outputs=(output,)))
    assert drop.points == pytest.approx(25)
    assert "apart from near ties" in str(drop)
    assert "2 of 4, 1 near tie" in summary_text(make_report(outputs=(output,)))


def test_other_outputs_lose_cosine_and_the_worst_counts():
    outputs = (
        OutputFidelity("y", 0.99, 20.0, agreement=1.0),
        OutputFidelity("z", 0.9, 8.0),
        OutputFidelity("w", 1.0, 50.0),
    )
    drop = drop_of(make_report(outputs=outputs))
    assert drop.points == pytest.approx(10)
    assert "'z'" in str(drop)


def test_nothing_compared_is_an_error():
    with pytest.raises(InvalidValueError, match="--calib or --data"):
        drop_of(make_report("unchecked"))


def test_labelled_data_give_the_paired_difference(tmp_path):
    model = save_brightness_model(tmp_path / "m.onnx")
    data = save_images(tmp_path / "val", count=2)
    drop = measured_drop(make_report("collapsed"), model, model, data, "imagenet")
    assert drop.points == 0
    assert "top-1" in str(drop)


def test_data_without_labels_is_an_error(tmp_path):
    model = save_brightness_model(tmp_path / "m.onnx")
    data = save_images(tmp_path / "val", count=2) / "a_dark"
    with pytest.raises(InvalidValueError, match="no labels"):
        measured_drop(make_report(), model, model, data, "imagenet")

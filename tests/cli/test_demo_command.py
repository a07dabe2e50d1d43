"""`quark demo`: the embedded network through presets."""

import json

import pytest
from commands import assert_one_line_error, run

from quark.demo.showcase import CALIBRATION_COUNT, GOOD_FOR, PRESETS, _calibration
from quark.onnx.quantization.presets import PRESETS as ALL_PRESETS


def test_table_and_json_of_chosen_presets():
    result = run("demo", "A8W8", "MXINT8", "MXFP4E2M1", "--json")
    assert result.exit_code == 0, result.output
    rows = {row["preset"]: row for row in json.loads(result.stdout)["rows"]}
    assert list(rows) == ["float32", "A8W8", "MXINT8", "MXFP4E2M1"]
    assert rows["float32"]["accuracy"] > 0.98
    assert rows["A8W8"]["weight_bits"] == rows["A8W8"]["activation_bits"] == 8
    assert rows["MXINT8"]["weight_bits"] == 8.25
    assert rows["A8W8"]["bytes"] < rows["float32"]["bytes"]
    for row in rows.values():
        assert row["difference"] == pytest.approx(row["accuracy"] - rows["float32"]["accuracy"])
    assert rows["MXINT8"]["agreement"] > 0.99
    assert rows["MXINT8"]["agreement"] >= rows["MXFP4E2M1"]["agreement"]


def test_table_fits_80_columns():
    result = run("demo", "MXINT8")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "MXINT8" in result.stdout
    assert result.stderr == "1 of 1: MXINT8\n"


def test_calibrates_on_training_digits_only():
    from quark.demo.digits import load_digits

    training, held_out = load_digits()
    seen = [image for sample in _calibration(training) for image in sample["input"]]
    assert len(seen) == CALIBRATION_COUNT
    known = {image.tobytes() for image in training.images}
    assert all(image.tobytes() in known for image in seen)
    assert not {image.tobytes() for image in held_out.images} & {image.tobytes() for image in seen}


def test_all_presets_of_the_demo_exist_and_train_nothing():
    assert not any(ALL_PRESETS[name].is_trained for name in PRESETS)


def test_unknown_preset():
    assert_one_line_error(run("demo", "MXINT9"), "MXINT8")


def test_every_preset_of_the_demo_says_what_it_is_good_for():
    assert set(GOOD_FOR) == set(PRESETS)
    result = run("demo", "MXFP4E2M1", "UINT8_DYNAMIC_QUANT")
    assert GOOD_FOR["MXFP4E2M1"] in " ".join(result.stdout.split())


def test_packed_files_of_block_formats_are_smaller():
    rows = {row["preset"]: row for row in json.loads(run("demo", "XINT8", "MXFP4E2M1", "--json").stdout)["rows"]}
    assert rows["XINT8"]["packed_bytes"] < rows["float32"]["packed_bytes"]
    assert rows["MXFP4E2M1"]["packed_bytes"] < rows["MXFP4E2M1"]["bytes"]

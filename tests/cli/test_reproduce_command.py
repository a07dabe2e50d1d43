"""`quark reproduce`: the same bytes from the card, wherever files lie, and a name for whatever differs."""

import hashlib
import json
import shutil

import numpy as np
import onnx
import pytest
from commands import assert_one_line_error, run
from tiny_models import save_brightness_model, save_images

import quark.onnx
from quark.account import FileFacts
from quark.card import CARD_KEY, Card
from quark.demo import network_path
from quark.onnx.pack import pack_model
from quark.onnx.quantization import making, reproduction
from quark.onnx.versions import versions


@pytest.fixture
def model(tmp_path):
    return save_brightness_model(tmp_path / "float.onnx")


@pytest.fixture
def calib(tmp_path):
    return save_images(tmp_path / "calib", 4)


@pytest.fixture
def out(tmp_path, model, calib):
    path = tmp_path / "small.onnx"
    assert run("quantize", model, path, "--config", "XINT8", "--calib", calib, "--num-calib", 4).exit_code == 0
    return path


def card_inside(path):
    props = {prop.key: prop.value for prop in onnx.load(path).metadata_props}
    return Card.from_json(props[CARD_KEY])


def assert_same(*arguments):
    result = run("reproduce", *arguments)
    assert result.exit_code == 0, result.output
    assert "same bytes" in result.stdout
    return result


@pytest.mark.parametrize("suffix", [".onnx", ".json"])
def test_the_same_bytes_come_out(out, suffix, tmp_path):
    assert_same(out.with_suffix(suffix), "--output", tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == out.read_bytes()
    card = json.loads((tmp_path / "again.json").read_text())["card"]
    assert Card.from_dict(card).inside() == card_inside(out)


def test_the_card_beside_the_model_is_that_inside_and_more(out):
    card = Card.from_dict(json.loads(out.with_suffix(".json").read_text())["card"])
    assert card.inside() == card_inside(out)
    assert card.result.bytes == out.stat().st_size
    assert card.paths == {"source": "float.onnx", "data": "calib"}
    command = "quark quantize float.onnx OUT.onnx --config XINT8 --calib calib --num-calib 4 --preprocess imagenet"
    assert card.command == command
    assert (card.data.samples, card.data.count) == (4, 4)


def test_bytes_do_not_tell_where_files_lie(out, model, calib, tmp_path):
    (tmp_path / "far" / "away").mkdir(parents=True)
    moved_model = shutil.move(model, tmp_path / "far" / "other_name.onnx")
    moved_calib = shutil.move(calib, tmp_path / "far" / "pictures")
    twin = tmp_path / "far" / "away" / "twin.onnx"
    options = ("--config", "XINT8", "--calib", moved_calib, "--num-calib", 4)
    assert run("quantize", moved_model, twin, *options).exit_code == 0
    assert twin.read_bytes() == out.read_bytes()
    assert_same(twin)
    assert_one_line_error(run("reproduce", out), "float.onnx", "--model")
    assert_same(out, "--model", moved_model, "--calib", moved_calib)
    assert_same(out, "--float", moved_model, "--calib", moved_calib)  # as report calls it


def test_the_float_model_is_found_by_its_content(out, model, calib, tmp_path):
    out.with_suffix(".json").unlink()
    model.rename(tmp_path / "renamed.onnx")
    assert_same(out, "--calib", calib)


@pytest.mark.parametrize(
    "options",
    [
        ("--config", "MXFP4E2M1", "--set", "WeightScaleRule=floor"),
        ("--config", "A8W8", "--set", "Percentile=99.9", "--set", "calibrate_method=CalibrationMethod.Percentile"),
        ("--config", "BF16"),
        ("--config", "S16S16_MIXED_S8S8"),
        ("--config", "UINT8_DYNAMIC_QUANT"),
        ("--config", "MXINT8", "--set", "use_external_data_format=true"),
    ],
)
def test_also_with_changes_and_mixed_precision(model, calib, tmp_path, options):
    out = tmp_path / "small.onnx"
    assert run("quantize", model, out, "--calib", calib, *options).exit_code == 0
    assert_same(out)


def test_also_from_a_file_by_its_own_name(model, calib, tmp_path):
    out, config = tmp_path / "small.onnx", tmp_path / "mine.yaml"
    config.write_text("preset: XINT8\nextra_options: {CLESteps: 2}\n")
    assert run("quantize", model, out, "--calib", calib, "--config", config).exit_code == 0
    config.unlink()
    assert card_inside(out).config_name == "mine"
    assert_same(out)


def test_also_by_tensors_and_from_arrays(model, tmp_path):
    images = np.random.default_rng(0).normal(0, 1, (6, 3, 16, 16)).astype(np.float32)
    spec = quark.onnx.QLayerConfig(activation=quark.onnx.Int8Spec(), weight=quark.onnx.Int8Spec())
    config = quark.onnx.QConfig(spec, exclude=["gemm"], Percentile=99.0)
    quark.onnx.quantize(model, images, config).save(tmp_path / "small.onnx")
    assert_one_line_error(run("reproduce", tmp_path / "small.onnx"), "ndarray", "--calib")
    np.savez(tmp_path / "arrays.npz", input=images)
    assert_same(tmp_path / "small.onnx", "--calib", tmp_path / "arrays.npz")


@pytest.mark.parametrize("config", ["XINT8", "MXINT8"])
def test_also_without_data(model, tmp_path, config):
    out = tmp_path / "small.onnx"
    assert run("quantize", model, out, "--config", config, "--random").exit_code == 0
    assert card_inside(out).data.kind.value == {"XINT8": "random", "MXINT8": "unused"}[config]
    assert_same(out)


def test_other_versions_are_said_and_change_nothing_by_themselves(model, calib, tmp_path, monkeypatch):
    out = tmp_path / "small.onnx"
    with monkeypatch.context() as patch:
        now = versions()
        patch.setattr(making, "versions", lambda: {**now, "numpy": "1.0.0"})
        assert run("quantize", model, out, "--calib", calib).exit_code == 0
    assert "versions.numpy: 1.0.0, now" in assert_same(out).stdout


def test_another_model_or_other_data_are_named_before_the_work(out, model, calib, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "quantize_graph", None)
    other = save_brightness_model(tmp_path / "other.onnx", classes=3)
    assert_one_line_error(run("reproduce", out, "--model", other), "other.onnx", "is not the card's")
    images = save_images(tmp_path / "images", 6)
    assert_one_line_error(run("reproduce", out, "--calib", images), "images", "other values")
    assert_one_line_error(run("reproduce", out, "--calib", tmp_path / "none"), "none", "no such")


@pytest.mark.parametrize("version", ["1.0.0", "1.1.0"])
def test_hashes_of_external_data_that_version_1_0_wrote_are_explained(tmp_path, version):
    source, out = tmp_path / "apart.onnx", tmp_path / "small.onnx"
    onnx.save(onnx.load(network_path()), source, save_as_external_data=True, location="apart.data", size_threshold=0)
    options = ("--config", "MXINT8", "--set", "use_external_data_format=true")
    assert run("quantize", source, out, *options).exit_code == 0
    report = out.with_suffix(".json")
    content = json.loads(report.read_text())
    content["card"]["versions"]["quark"] = version
    content["card"]["result"]["sha256"] = "0" * 64
    report.write_text(json.dumps(content))
    warned = run("reproduce", report)
    assert "has changed since" in warned.stdout
    assert ("quark 1.0 hashed external data in another way" in warned.stdout) == (version == "1.0.0")
    content["card"]["source"]["sha256"] = "0" * 64
    report.write_text(json.dumps(content))
    words = ("is not the card's",) + (("quark 1.0 hashed external data",) if version == "1.0.0" else ())
    result = run("reproduce", report)
    assert_one_line_error(result, *words)
    assert ("quark 1.0" in result.output) == (version == "1.0.0")


def test_what_differs_is_listed(out, tmp_path):
    proto = onnx.load(out)
    changed = next(each for each in proto.graph.initializer if each.raw_data and "scale" not in each.name)
    changed.raw_data = bytes([changed.raw_data[0] ^ 1]) + changed.raw_data[1:]
    proto.metadata_props.add(key="mine", value="x")
    onnx.save(proto, out)
    result = run("reproduce", out, "--output", tmp_path / "again.onnx")
    assert result.exit_code == 3
    assert f"1 different initializer: {changed.name}" in result.stdout
    assert "metadata: mine" in result.stdout
    content = json.loads(run("reproduce", out, "--json").stdout)
    assert not content["same"]
    assert len(content["differences"]) == 2
    assert_same(tmp_path / "again.onnx")
    assert "has changed since" in assert_same(out.with_suffix(".json")).stdout


def test_packed_files_are_packed_again(tmp_path):
    model = shutil.copy(network_path(), tmp_path / "digits.onnx")
    out, packed = tmp_path / "small.onnx", tmp_path / "packed.onnx"
    assert run("quantize", model, out, "--config", "MXFP4E2M1").exit_code == 0
    pack_model(out, packed, "portable")
    assert card_inside(packed) == card_inside(out)
    out.unlink()
    assert_same(packed, "--model", model)
    result = FileFacts("packed.onnx", packed.stat().st_size, hashlib.sha256(packed.read_bytes()).hexdigest())
    report = packed.with_suffix(".json")
    report.write_text(making.packed_report(out.with_suffix(".json").read_text(), "portable", result))
    assert json.loads(report.read_text())["card"]["command"].endswith("--config MXFP4E2M1 --pack portable")
    assert_same(report)
    packed.unlink()
    assert_same(report)


@pytest.mark.parametrize("is_packed_afterwards", [False, True])
def test_packed_weights_in_a_file_of_their_own(tmp_path, is_packed_afterwards):
    model = shutil.copy(network_path(), tmp_path / "digits.onnx")
    out, packed = tmp_path / "small.onnx", tmp_path / "packed.onnx"
    options = ("--config", "MXFP4E2M1", "--set", "use_external_data_format=true")
    if is_packed_afterwards:
        assert run("quantize", model, out, *options).exit_code == 0
        assert run("pack", out, packed).exit_code == 0
    else:
        assert run("quantize", model, packed, *options, "--pack").exit_code == 0
    assert bool(list(tmp_path.glob("packed-*.data"))) != is_packed_afterwards
    assert_same(packed, "--model", model)


def test_a_card_of_packing_where_nothing_can_be_packed(out):
    content = json.loads(out.with_suffix(".json").read_text())
    content["card"]["packing"] = "portable"
    out.with_suffix(".json").write_text(json.dumps(content))
    assert_one_line_error(run("reproduce", out.with_suffix(".json")), "packing 'portable'", "nothing to pack")


def test_a_function_cannot_be_made_again(model, calib, tmp_path):
    config = quark.onnx.get_default_config("S16S16_MIXED_S8S8")
    del config.extra_options["AutoMixprecision"]["SQNRTarget"]
    config.extra_options["AutoMixprecision"] |= {"EvaluateFunction": lambda path: 1.0, "Top1AccTarget": 0.1}
    out = tmp_path / "small.onnx"
    quark.onnx.quantize(model, calib, config).save(out)
    assert card_inside(out).functions == ("EvaluateFunction",)
    assert_one_line_error(run("reproduce", out), "EvaluateFunction", "Python function")


def test_nothing_is_overwritten(out, model):
    before = out.read_bytes(), model.read_bytes()
    for target in (out, model):
        assert_one_line_error(run("reproduce", out.with_suffix(".json"), "--output", target), target.name)
    assert (out.read_bytes(), model.read_bytes()) == before


def test_a_card_does_not_say_where_to_write(model, calib, tmp_path):
    out, folder = tmp_path / "small.onnx", tmp_path / "cache"
    options = ("--config", "A8W8", "--calib", calib, "--set", f"CalibCacheDir={folder}")
    assert run("quantize", model, out, *options).exit_code == 0
    shutil.rmtree(folder)
    assert_same(out)
    assert not folder.exists()


def test_what_has_no_card(model, out, tmp_path):
    assert_one_line_error(run("reproduce", model), "float.onnx", CARD_KEY)
    assert_one_line_error(run("reproduce", tmp_path / "none.onnx"), "none.onnx", "no such file")
    assert_one_line_error(run("reproduce", tmp_path), tmp_path.name, "is a folder")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert_one_line_error(run("reproduce", broken), "broken.json")
    broken.write_text(json.dumps({"card": {"version": 99}}))
    assert_one_line_error(run("reproduce", broken), "broken.json", "version 99")

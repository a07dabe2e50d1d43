"""What a run may write, replace and remove: nothing that a user owns is lost, by the command line or by Python."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import helper

from quark.cli.main import main
from quark.demo import network_path
from quark.errors import QuarkError
from quark.onnx import ModelQuantizer, get_default_config, quantize
from quark.onnx.pack import pack_model, unpack_model
from quark.onnx.quantization.reproduction import reproduce

SAMPLES = np.random.default_rng(0).random((6, 1, 8, 8), dtype=np.float32)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A float model, data, and a quantized model with its report."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copy(network_path(), folder / "net.onnx")
    np.savez(folder / "calib.npz", input=SAMPLES)
    quantize(folder / "net.onnx", folder / "calib.npz", "MXINT8").save(folder / "q.onnx")
    pack_model(folder / "q.onnx", folder / "packed.onnx")
    return folder


@pytest.fixture
def place(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "work"))


def command(*arguments: str | Path) -> None:
    """Run a command; what it refuses is an error, as it is in Python."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exit_code:
        assert result.exit_code == 1, result.output
        assert "this should not happen" not in result.output
        raise QuarkError(result.output)


DOORS: dict[str, Callable[[Path, Path], object]] = {
    "quantize": lambda place, out: quantize(place / "net.onnx", SAMPLES, "XINT8").save(out),
    "quantize_model": lambda place, out: ModelQuantizer(get_default_config("MXINT8")).quantize_model(
        place / "net.onnx", out
    ),
    "pack": lambda place, out: pack_model(place / "q.onnx", out),
    "unpack": lambda place, out: unpack_model(place / "packed.onnx", out),
    "reproduce": lambda place, out: reproduce(place / "q.json", output=out),
    "command quantize": lambda place, out: command(
        "quantize", place / "net.onnx", out, "--calib", place / "calib.npz", "--config", "XINT8"
    ),
    "command auto": lambda place, out: command(
        "quantize", place / "net.onnx", out, "--calib", place / "calib.npz", "--config", "auto"
    ),
    "command pack": lambda place, out: command("pack", place / "q.onnx", out),
    "command reproduce": lambda place, out: command("reproduce", place / "q.json", "--output", out),
}


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))


def a_link(path: Path) -> None:
    (path.parent / "mine.onnx").write_text("mine")
    path.symlink_to("mine.onnx")


def a_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere.onnx")


def a_folder(path: Path) -> None:
    path.mkdir()


def a_device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("making a device needs to be root")


@pytest.mark.skipif(os.name == "nt", reason="needs special files")
@pytest.mark.parametrize("make", [a_pipe, a_socket, a_link, a_dangling_link, a_folder, a_device])
@pytest.mark.parametrize("door", DOORS)
def test_only_a_regular_file_is_replaced(door, make, place):
    out = place / "out.onnx"
    make(out)
    before = os.lstat(out)
    with pytest.raises(QuarkError, match=r"out\.onnx"):
        DOORS[door](place, out)
    after = os.lstat(out)
    assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
    assert not [each.name for each in place.iterdir() if each.name.startswith(".quark-")]


@pytest.mark.skipif(os.name == "nt", reason="needs special files")
@pytest.mark.parametrize("make", [a_pipe, a_link])
@pytest.mark.parametrize("door", ["quantize", "quantize_model", "reproduce", "command quantize"])
def test_a_report_replaces_nothing_else_either(door, make, place):
    make(place / "out.json")
    with pytest.raises(QuarkError, match=r"out\.json"):
        DOORS[door](place, place / "out.onnx")
    assert not (place / "out.onnx").exists()


def test_labels_in_json_are_not_taken_for_a_report(place):
    (place / "out.json").write_text(json.dumps({"0": "tench", "1": "goldfish"}))
    with pytest.raises(QuarkError, match="which is JSON, but not a report of quark"):
        DOORS["command quantize"](place, place / "out.onnx")
    assert "goldfish" in (place / "out.json").read_text()
    assert not (place / "out.onnx").exists()


def with_external_data(place: Path) -> Path:
    model = onnx.load(place / "net.onnx")
    onnx.save(model, place / "net.onnx", save_as_external_data=True, location="net.bin", size_threshold=0)
    return place / "net.onnx"


def image_folder(place: Path) -> Path:
    from PIL import Image

    folder = place / "images"
    folder.mkdir()
    for number in range(3):
        Image.new("L", (8, 8), number * 40).save(folder / f"{number}.png")
    return folder


def config_file(place: Path, name: str) -> Path:
    path = place / name
    path.write_text(json.dumps({"per_channel": True}))
    return path


def hard_link(path: Path) -> Path:
    link = path.with_name("same.onnx")
    os.link(path, link)
    return link


# what is read: the run, and the output that would overwrite a file of it
READ: dict[str, Callable[[Path], object]] = {
    "the model": lambda p: quantize(p / "net.onnx", SAMPLES, "XINT8").save(p / "net.onnx"),
    "the model by another way": lambda p: quantize(p / "net.onnx", SAMPLES, "XINT8").save(
        p / ".." / p.name / "net.onnx"
    ),
    "the model by a hard link": lambda p: quantize(p / "net.onnx", SAMPLES, "XINT8").save(hard_link(p / "net.onnx")),
    "external data": lambda p: quantize(with_external_data(p), SAMPLES, "XINT8").save(p / "net.bin"),
    "external data, pack": lambda p: (
        onnx.save(onnx.load(p / "q.onnx"), p / "q.onnx", save_as_external_data=True, location="q.bin"),
        pack_model(p / "q.onnx", p / "q.bin"),
    ),
    "--calib FILE": lambda p: command("quantize", p / "net.onnx", p / "calib.npz", "--calib", p / "calib.npz"),
    "data": lambda p: quantize(p / "net.onnx", p / "calib.npz", "XINT8").save(p / "calib.npz"),
    "calibration_data_path": lambda p: ModelQuantizer(get_default_config("XINT8")).quantize_model(
        p / "net.onnx", p / "calib.npz", None, p / "calib.npz"
    ),
    "a sample in the folder of data": lambda p: quantize(
        p / "net.onnx", image_folder(p), "XINT8", preprocessing="unit"
    ).save(p / "images" / "1.png"),
    "--config FILE.json by the report": lambda p: command(
        *("quantize", p / "net.onnx", p / "config.onnx", "--calib", p / "calib.npz"),
        *("--config", config_file(p, "config.json")),
    ),
    "config by the report": lambda p: quantize(
        p / "net.onnx", p / "calib.npz", str(config_file(p, "config.json"))
    ).save(p / "config.onnx"),
    "--config FILE.yaml": lambda p: command(
        *("quantize", p / "net.onnx", p / "config.yaml", "--calib", p / "calib.npz"),
        *("--config", config_file(p, "config.yaml")),
    ),
    "the card": lambda p: reproduce(p / "q.json", output=p / "q.bin"),
    "the card by an absolute path": lambda p: command(
        "reproduce", os.path.relpath(p / "q.json"), "--output", (p / "q.bin").resolve()
    ),
    "the model of the card": lambda p: reproduce(p / "q.json", output=p / "q.onnx"),
    "the data of the card": lambda p: reproduce(
        quantize(p / "net.onnx", p / "calib.npz", "XINT8").save(p / "x.onnx").with_suffix(".json"),
        output=p / "calib.npz",
    ),
    "the output by the page": lambda p: command(
        *("quantize", p / "net.onnx", p / "out.html", "--calib", p / "calib.npz", "--report", p / "out.html"),
    ),
    "the data by the page": lambda p: command(
        *("report", p / "q.onnx", "--float", p / "net.onnx"),
        *("--calib", shutil.copy(p / "calib.npz", p / "page.html"), "-o", p / "page.html"),
    ),
}


@pytest.mark.parametrize("case", READ)
def test_what_the_run_reads_is_never_overwritten(case, place):
    before = {each: each.read_bytes() for each in place.iterdir()}
    with pytest.raises(QuarkError, match="choose another name"):
        READ[case](place)
    for path, content in before.items():
        if path.name not in ("net.onnx", "q.onnx") or "external" not in case:
            assert path.read_bytes() == content, path.name


def two_files(place: Path, name: str, preset: str = "XINT8") -> Path:
    """Save with the weights beside the model; the file of the weights."""
    config = get_default_config(preset)
    config.use_external_data_format = True
    path = quantize(place / "net.onnx", SAMPLES, config).save(place / name)
    (entry,) = {
        value.value
        for tensor in onnx.load(path, load_external_data=False).graph.initializer
        for value in tensor.external_data
        if value.key == "location"
    }
    return place / entry


def test_weights_of_the_replaced_model_are_removed_and_no_others(place):
    first = two_files(place, "out.onnx")
    strangers = [place / "out-0123456789ab.data", place / "other-0123456789ab.data", place / "out-notes.data"]
    for stranger in strangers:
        stranger.write_text("mine")
    second = two_files(place, "out.onnx", "BF16")
    assert second != first
    assert second.exists()
    assert not first.exists()
    assert all(stranger.read_text() == "mine" for stranger in strangers)
    quantize(place / "net.onnx", SAMPLES, "XINT8").save(place / "out.onnx")
    assert not second.exists()


def test_a_model_of_another_suffix_keeps_its_weights(place):
    weights = two_files(place, "out.onnx")
    two_files(place, "out.mxfp4", "BF16")
    assert weights.exists()
    onnx.load(place / "out.onnx")


def test_a_copy_of_the_replaced_model_keeps_its_weights(place):
    weights = two_files(place, "out.onnx")
    shutil.copy(place / "out.onnx", place / "backup.onnx")
    two_files(place, "out.onnx", "BF16")
    assert weights.exists()
    onnx.load(place / "backup.onnx")


def test_the_weights_of_a_float_model_are_not_removed(place):
    """It is replaced, which was asked for; that its weights have a name like ours is chance."""
    model = onnx.load(place / "net.onnx")
    onnx.save(model, place / "out.onnx", save_as_external_data=True, location="out-0123456789ab.data", size_threshold=0)
    quantize(place / "net.onnx", SAMPLES, "XINT8").save(place / "out.onnx")
    assert (place / "out-0123456789ab.data").exists()


def test_hostile_locations_in_the_replaced_model_remove_nothing(place):
    (place / "inner").mkdir()
    victim = place / "inner" / "out-0123456789ab.data"
    victim.write_text("mine")
    tensor = helper.make_tensor("w", onnx.TensorProto.FLOAT, [1], [0.0])
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="inner/out-0123456789ab.data")
    hostile = helper.make_model(helper.make_graph([], "g", [], [], [tensor]), producer_name="quark")
    (place / "out.onnx").write_bytes(hostile.SerializeToString())
    (place / "out-0123456789aa.data").write_text("so that the old model is looked at")
    quantize(place / "net.onnx", SAMPLES, "XINT8").save(place / "out.onnx")
    assert victim.read_text() == "mine"


def test_weights_of_a_run_that_was_killed_while_renaming_are_removed_by_the_next(place):
    program = """
import os, signal, sys
from pathlib import Path
from quark.files import output
from quark.onnx import get_default_config, quantize
import numpy as np

replace, done = Path.replace, []

def dying(self, target):
    if done:
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(target)
    return replace(self, target)

Path.replace = dying
config = get_default_config("XINT8")
config.use_external_data_format = True
quantize(sys.argv[1], np.zeros((2, 1, 8, 8), np.float32), config).save(sys.argv[2])
"""
    subprocess.run(
        [sys.executable, "-c", program, place / "net.onnx", place / "out.onnx"], check=False, capture_output=True
    )
    (orphan,) = place.glob("out-*.data")
    assert not (place / "out.onnx").exists()
    kept = two_files(place, "out.onnx", "BF16")
    assert not orphan.exists()
    assert kept.exists()
    assert not [each.name for each in place.iterdir() if each.name.startswith(".quark-")]


@pytest.mark.parametrize("saves", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_concurrent_saves_of_different_weights_leave_one_whole_result(saves, tmp_path):
    """Model, weights and report that are there in the end belong to one run, and nothing else is left."""
    program = Path(__file__).with_name("concurrent_saves.py")
    result = subprocess.run(
        [sys.executable, program, tmp_path, "--saves", str(saves)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{saves} saves" in result.stdout

"""`quark quantize-torch` and the example script: from weights and images to a file, or to one line of error."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tiny_models import save_images
from tiny_training import tiny_options

from quark.cli.file_commands import reproduce
from quark.cli.quantize_torch_command import quantize_torch
from quark.vision.data import FolderBatches, FolderHeldOut, open_folders
from quark.vision.data.folders import TrainingTransform
from quark.vision.networks import build_network
from quark.vision.tensor_file import load_checkpoint
from quark.vision.training import Trainer

SCRIPT = Path(__file__).parents[2] / "examples" / "torch" / "vision" / "quantize.py"
SIZE = 16
FLAGS = Path("/proc/cpuinfo")
HAS_VNNI = FLAGS.exists() and "vnni" in FLAGS.read_text()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Images of two classes, and a network that can tell them apart."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("classifier")
    save_images(folder / "data" / "train", count=16)
    save_images(folder / "data" / "val", count=8)
    torch.manual_seed(0)
    network = build_network("cifar_resnet20", 2)
    folders = open_folders(folder / "data")
    data = FolderBatches(folders.training, 8, TrainingTransform(SIZE))
    options = tiny_options(epochs=12, learning_rate=0.02)
    result = Trainer(network, options, folder / "float").train(data, FolderHeldOut(folders.held_out, 16, SIZE))
    assert result.best.top1 > 0.9
    torch.save(network.state_dict(), folder / "net.pth")
    return folder


def arguments(root, *more, **changed):
    given = {
        "model_name": "cifar_resnet20",
        "pretrained": root / "net.pth",
        "data_dir": root / "data",
        "device": "cpu",
        "workers": 0,
        "image_size": SIZE,
        "batch_size": 8,
        "calibration_images": 16,
        "epochs": 2,
        **changed,
    }
    return [*(f"--{name}={value}" for name, value in given.items()), *map(str, more)]


def run(root, *more, **changed):
    return CliRunner().invoke(quantize_torch, arguments(root, *more, **changed))


def shares(text):
    """Row -> top-1 in percent, of the table."""
    return {name: float(top1) for name, top1 in re.findall(r"│ (\w+) +│ +([\d.]+) %", text)}


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--lsq", "--a8w8"),
        ("--nvfp4",),
        *(
            pytest.param((value,), marks=pytest.mark.slow)
            for value in ("--mse_powof2", "--non_overflow", "--a16w8", "--a8w4", "--fp8")
        ),
    ],
    ids=" ".join,
)
def test_every_method_is_calibrated_and_measured(root, tmp_path, flags):
    done = run(root, *flags, export_dir=tmp_path)
    assert done.exit_code == 0, done.output
    found = shares(done.stdout)
    assert list(found) == ["float", "PTQ"]
    assert found["PTQ"] >= found["float"] - 15
    assert ("--qat trains" in done.stderr) == ("--lsq" in flags)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def trained(root, tmp_path_factory):
    """A whole run: calibrated, trained, exported."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, run(root, "--qat", "--tqt", "--model_export=onnx", export_dir=folder)


def test_a_trained_network_is_exported_and_measured(trained):
    folder, done = trained
    assert done.exit_code == 0, done.output
    found = shares(done.stdout)
    assert list(found) == ["float", "PTQ", "QAT", "ONNX"]
    assert found["QAT"] >= found["PTQ"]
    assert abs(found["ONNX"] - found["QAT"]) <= 100 / 16
    assert (folder / "cifar_resnet20_tqt_a8w8.onnx").is_file()
    assert {each.name for each in (folder / "checkpoints").iterdir()} == {"best.pt", "last.pt"}
    assert len(re.findall(r"epoch \d of 2: loss \d", done.stderr)) == 2
    assert "trained up to epoch 2; the best is epoch" in done.stdout


@pytest.mark.skipif(not HAS_VNNI, reason="the formulas are those of processors with VNNI")
def test_simulated_rows_are_about_the_file(root, tmp_path):
    result = run(root, "--qat", "--simulate_runtime", "--model_export=onnx", epochs=1, export_dir=tmp_path)
    assert result.exit_code == 0, result.output
    agreements = re.findall(r"│ ONNX +│.* ([\d.]+) % │", result.output)
    assert agreements == ["100.00"]


@pytest.mark.parametrize("is_moved", [False, True])
def test_its_file_is_made_again_by_the_card_alone(root, trained, tmp_path, is_moved):
    path = trained[0] / "cifar_resnet20_tqt_a8w8.onnx"
    where = []
    if is_moved:
        path = shutil.copy(path, tmp_path)
        assert CliRunner().invoke(reproduce, [str(path)]).exit_code == 1  # the card inside says no paths
        where = ["--model", str(root / "net.pth"), "--calib", str(root / "data")]
    done = CliRunner().invoke(reproduce, [str(path), *where])
    assert done.exit_code == 0, done.output
    assert "same bytes" in done.output


def test_the_command_of_its_card_is_that_of_the_run(trained):
    card = json.loads((trained[0] / "cifar_resnet20_tqt_a8w8.json").read_text())["card"]
    assert card["command"].startswith("quark quantize-torch --model_name cifar_resnet20 --model_export onnx --tqt")
    assert card["command"].endswith("--pretrained net.pth --data_dir data")


def test_a_run_that_is_done_is_resumed_without_training(root, trained):
    folder, before = trained
    done = run(root, "--qat", "--tqt", "--resume", export_dir=folder)
    assert done.exit_code == 0, done.output
    assert "epoch 1 of" not in done.stderr
    assert shares(done.stdout)["QAT"] == shares(before.stdout)["QAT"]


def test_class_folders_alone_calibrate_with_a_note_and_do_not_train(root, tmp_path):
    data = root / "data" / "val"
    done = run(root, data_dir=data, export_dir=tmp_path)
    assert done.exit_code == 0, done.output
    assert "which flatters" in done.stderr
    refused = run(root, "--qat", data_dir=data, export_dir=tmp_path)
    assert refused.exit_code == 1
    assert "train or calib beside val" in refused.stderr


@pytest.mark.parametrize(
    ("more", "changed", "code", "fragment"),
    [
        (["--tqt", "--lsq"], {}, 2, "--tqt and --lsq exclude each other"),
        (["--a8w8", "--a16w8"], {}, 2, "--a8w8 and --a16w8 exclude each other"),
        (["--resume"], {}, 2, "--qat"),
        ([], {"model_name": "resnet81"}, 1, "resnet18"),
        ([], {"model_name": "resnet18"}, 1, "shape"),
        ([], {"pretrained": "nowhere.pth"}, 1, "nowhere.pth"),
        ([], {"data_dir": "nowhere"}, 1, "no such folder"),
        ([], {"device": "cuda:99"}, 1, "CUDA"),
        (["--qat"], {"learning_rate": -1}, 1, "learning_rate"),
        (["--qat"], {"batch_size": 100}, 1, "smaller batch size"),
        (["--qat", "--resume"], {}, 1, "last.pt"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(root, tmp_path, more, changed, code, fragment):
    done = run(root, *more, **{"export_dir": tmp_path, **changed})
    assert done.exit_code == code, done.output
    assert fragment in done.stderr
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1


def test_without_torch_it_says_what_to_install(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    done = run(root)
    assert done.exit_code == 1
    assert "pip install torch" in done.stderr


@pytest.mark.slow
def test_the_script_under_torchrun_trains_one_network(root, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    given = arguments(root, "--qat", "--tqt", export_dir=tmp_path, epochs=1)
    done = subprocess.run([*command, *given], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found = shares(done.stdout)
    assert list(found) == ["float", "PTQ", "QAT"]
    best = load_checkpoint(tmp_path / "checkpoints" / "best.pt")
    assert best["top1"] * 100 == pytest.approx(found["QAT"], abs=0.01)

"""Several processes at work in one folder at the same time: each output has the bytes of a run alone.

Different outputs of one input; the same output, written by all; an input with external data; one folder of finished
layers. The processes start together, and each prints nothing but trouble.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from quark.demo import network_path
from quark.onnx import quantize

PROGRAM = """
import sys
import numpy as np
from quark.onnx import get_default_config, quantize
source, data, targets, preset, times, cache = sys.argv[1:]
config = get_default_config(preset)
if cache:
    config.extra_options["FastFinetune"].update({"NumIterations": 20, "BatchSize": 1, "CacheDir": cache})
if "two_files" in targets:
    config.use_external_data_format = True
for _ in range(int(times)):
    for target in targets.split(","):
        quantize(source, data, config).save(target)
"""


def start(folder: Path, targets: str, preset: str = "XINT8", times: int = 1, cache: str = "") -> subprocess.Popen[str]:
    place = str(folder.parent / cache) if cache else ""  # the config, which is in the file, says where
    outputs = ",".join(str(folder / part) for part in targets.split(","))
    command = [sys.executable, "-c", PROGRAM, folder / "in.onnx", folder / "data.npz", outputs, preset, times, place]
    return subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(processes: list[subprocess.Popen[str]]) -> None:
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def prepare(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    model = onnx.load(network_path())
    onnx.save(model, folder / "in.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    np.savez(folder / "data.npz", input=np.random.default_rng(0).random((6, 1, 8, 8), dtype=np.float32))


def test_neither_the_same_nor_other_outputs_disturb_each_other(tmp_path: Path) -> None:
    prepare(tmp_path / "alone")
    prepare(tmp_path / "together")
    alone = quantize(tmp_path / "alone" / "in.onnx", tmp_path / "alone" / "data.npz", "XINT8")
    alone.save(tmp_path / "alone" / "one.onnx")
    together = tmp_path / "together"
    before = digest(together / "weights.bin")
    finish([start(together, names, times=2) for names in ("one.onnx,two.onnx", "one.onnx")])
    expected = digest(tmp_path / "alone" / "one.onnx")
    assert digest(together / "one.onnx") == digest(together / "two.onnx") == expected
    assert digest(together / "weights.bin") == before
    names = ["data.npz", "in.onnx", "one.json", "one.onnx", "two.json", "two.onnx", "weights.bin"]
    assert sorted(each.name for each in together.iterdir()) == names


@pytest.mark.slow
def test_outputs_of_two_files_keep_their_weights(tmp_path: Path) -> None:
    """All write the same bytes, and so the same file of weights: nobody takes it away from another."""
    prepare(tmp_path / "alone")
    prepare(tmp_path / "together")
    finish([start(tmp_path / "alone", "two_files.onnx")])
    together = tmp_path / "together"
    finish([start(together, "two_files.onnx", times=10) for _ in range(4)])
    (data,) = together.glob("two_files-*.data")
    assert digest(together / "two_files.onnx") == digest(tmp_path / "alone" / "two_files.onnx")
    assert digest(data) == digest(tmp_path / "alone" / data.name)


@pytest.mark.slow
def test_one_folder_of_finished_layers_serves_all(tmp_path: Path) -> None:
    prepare(tmp_path / "alone")
    prepare(tmp_path / "together")
    finish([start(tmp_path / "alone", "one.onnx", "XINT8_ADAROUND", cache="layers")])
    shutil.rmtree(tmp_path / "layers")
    together = tmp_path / "together"
    finish([start(together, f"{name}.onnx", "XINT8_ADAROUND", cache="layers") for name in ("a", "b", "c")])
    expected = digest(tmp_path / "alone" / "one.onnx")
    assert {digest(together / f"{name}.onnx") for name in ("a", "b", "c")} == {expected}
    assert not [each.name for each in (tmp_path / "layers").rglob(".*")]


@pytest.mark.slow
def test_a_second_search_in_the_folder_is_refused(tmp_path: Path) -> None:
    prepare(tmp_path)
    quark = Path(sys.executable).with_name("quark")
    command = [quark, "search", tmp_path / "in.onnx", "--calib", tmp_path / "data.npz", "--out", tmp_path / "found"]
    both = [
        subprocess.Popen([*map(str, command), "--presets", "XINT8,BF16"], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes in ([0, 0], [0, 1]), said  # one may have finished before the other began
    assert codes == [0, 0] or any("another search is at work" in each for each in said)

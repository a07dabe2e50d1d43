"""Peers: which of our presets they have, environments that are made once, and peers that are not to be had.

Nothing is installed: the interpreter that makes environments is a script of the test's.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from pathlib import Path

import pytest
from bench.child import NO_EQUIVALENT, OURS, ChildError
from bench.one_quantization import PREPARE
from bench.peers import PEERS, add_peer_arguments, make_environment, open_peers

from quark.onnx.quantization.config.config import get_default_config
from quark.onnx.quantization.presets import PRESETS

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the fake interpreters are shell scripts")

# venv makes a folder with itself as the interpreter; pip and imports leave a line in the log, or fail
FAKE = """#!/bin/sh
echo "$*" >> "{log}"
case "$*" in
  *"-m venv"*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python" ;;
  *{fails}*) echo "the reason"; exit 1 ;;
  *importlib*) echo "versions:it 1.0" ;;
esac
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def fake_python(tmp_path: Path, log: Path, fails: str = "nothing-fails") -> str:
    path = tmp_path / "fake-python"
    path.write_text(FAKE.format(log=log, fails=fails))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_peer_arguments(parser)
    return parser.parse_args(given)


def test_every_requirement_is_pinned_and_torch_comes_alone() -> None:
    for peer in PEERS.values():
        for step in peer.requirements:
            assert all("==" in each for each in step)
            assert not any(each.startswith("torch==") for each in step) or len(step) == 1
        assert peer.name in PREPARE


@pytest.mark.parametrize("name", ["onnxruntime", "nncf"])
def test_equivalents_are_of_presets_that_we_have(name: str) -> None:
    equivalents = PEERS[name].equivalents
    assert equivalents
    assert set(equivalents) <= set(PRESETS)
    with pytest.raises(ChildError, match=NO_EQUIVALENT):
        PEERS[name].settings("MXFP4E2M1")


def test_onnxruntime_is_asked_for_the_types_and_the_method_of_the_preset() -> None:
    equivalents = PEERS["onnxruntime"].equivalents
    assert equivalents is not None
    for preset, settings in equivalents.items():
        config = get_default_config(preset)
        assert settings["weight"] == config.weight_type.name
        if settings["method"] != "dynamic":
            assert settings["activation"] == config.activation_type.name
            assert settings["method"] == config.calibrate_method.name
            assert settings["per_channel"] == config.per_channel
            symmetric = config.extra_options.get("ActivationSymmetric", False)
            assert settings["options"].get("ActivationSymmetric", False) == symmetric


def test_an_environment_is_made_once(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, log))
    folder = tmp_path / "environments"
    python = make_environment(PEERS["amd-quark"], folder)
    lines = log.read_text().splitlines()
    assert python == folder / "amd-quark" / "bin" / "python"
    assert [line.split()[-1] for line in lines if " pip " in line] == [
        "torch==2.13.0",
        "onnx==1.22.0",
        "accelerate==1.15.0",
    ]
    assert os.listdir(folder) == ["amd-quark"]
    assert make_environment(PEERS["amd-quark"], folder) == python
    assert log.read_text().splitlines() == lines


def test_other_pins_make_it_anew(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, log))
    python = make_environment(PEERS["nncf"], tmp_path / "environments")
    stamp = python.parents[1] / "made_of.json"
    stamp.write_text(json.dumps({"python": "3.1", "requirements": []}))
    (python.parents[1] / "old").touch()
    make_environment(PEERS["nncf"], tmp_path / "environments")
    assert not (python.parents[1] / "old").exists()
    assert len([line for line in log.read_text().splitlines() if " pip " in line]) == 2


@pytest.mark.parametrize("fails", ["nncf==", "import_module('nncf.onnx')"])
def test_a_peer_that_is_not_to_be_had_is_a_blank_and_no_failure(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: str
) -> None:
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, log, f'"{fails}"'))
    folder = tmp_path / "environments"
    found = open_peers(arguments("--peers", "nncf", "onnxruntime", "--environments", str(folder)))
    assert found.quantizers == (OURS, "nncf", "onnxruntime")
    assert found.missing == {"nncf": "the reason"}
    assert found.facts == {"onnxruntime": "it 1.0", "nncf": "not measured: the reason"}
    with pytest.raises(ChildError, match="the reason"):
        found.run("nncf", "one_quantization.py", {})
    assert "NNCF is left out: the reason" in capsys.readouterr().err
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


def test_an_interpreter_that_is_given_is_used_as_it_is(tmp_path: Path, log: Path) -> None:
    python = fake_python(tmp_path, log)
    found = open_peers(arguments("--peers", f"amd-quark={python}", "--environments", str(tmp_path / "none")))
    assert found.present["amd-quark"] == (PEERS["amd-quark"], python)
    assert not (tmp_path / "none").exists()


def test_a_program_that_is_no_interpreter_is_left_out(tmp_path: Path) -> None:
    program = tmp_path / "true"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    found = open_peers(arguments("--peers", f"nncf={program}"))
    assert "is it a Python?" in found.missing["nncf"]


def test_environments_that_cannot_be_written_are_blanks_too(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = open_peers(arguments("--peers", "nncf", "--environments", str(tmp_path / "file" / "below")))
    assert "Not a directory" in found.missing["nncf"]


def test_no_peers_and_peers_that_nobody_knows() -> None:
    assert open_peers(arguments("--peers", "none")).quantizers == (OURS,)
    with pytest.raises(SystemExit, match="no peer 'tensorrt'.*amd-quark, onnxruntime, nncf, or none"):
        open_peers(arguments("--peers", "tensorrt"))
    with pytest.raises(SystemExit, match="--peers nncf=no/such/python: no such program"):
        open_peers(arguments("--peers", "nncf=no/such/python"))

"""Input files that another program changes while quark uses them.

Files of a large model are mapped. One that shrinks would end the process by SIGBUS when a page beyond its end is
touched; one that is written to in place would give other weights to a part of the steps. Either must be a ModelError
that names the file, and the output must stay as it was. A small model is held in memory, so that nothing matters to it.

The work is in `changed_inputs.py`, a process of its own for each case.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from hashlib import sha256

import changed_inputs
import numpy as np
import onnx
import pytest
from changed_inputs import CHANGES, LAYERS, OLD, STEPS, Case, Result, network, rewrite, shrink
from onnx import TensorProto, helper, numpy_helper

from quark.errors import ModelError
from quark.onnx import input_files, large_tensors
from quark.onnx.file_graph import read_message
from quark.onnx.input_files import MappedFile, held_still, read_file
from quark.onnx.large_tensors import byte_pieces
from quark.onnx.load import load

BAD = ("shrink", "rewrite")

LARGE = (
    *(Case("quantize", step, "shrink") for step in (*STEPS, "between samples")),
    *(Case("quantize", moment, change.__name__) for moment in ("measure", "save") for change in CHANGES),
    *(
        Case("quantize", moment, change)
        for moment in ("write_tensor", "digest", "pack_message", "model")
        for change in BAD
    ),
    *(Case("quantize", moment, change, "inline.onnx") for moment in ("measure", "save") for change in BAD),
    *(Case("pack", moment, change, "q-*.data") for moment in ("pack_message", "write_model") for change in BAD),
    *(Case("unpack", moment, change, "packed.onnx") for moment in ("unpack_message", "write_model") for change in BAD),
    *(Case("reproduce", moment, change) for moment in ("quantize_graph", "_write", "write_model") for change in BAD),
    *(Case("diagnose", moment, change) for moment in ("check_pair", "_match", "_layers") for change in BAD),
    *(Case("evaluate", "run", change) for change in BAD),
    *(Case("hash", "reading", change) for change in BAD),
)
SMALL = (
    *(Case("quantize", "save", change.__name__, is_large=False) for change in CHANGES),
    *(Case("quantize", moment, "shrink", is_large=False) for moment in ("measure", "decide", "write_tensor", "digest")),
    Case("quantize", "save", "shrink", "inline.onnx", is_large=False),
    Case("quantize", "model is in memory", "delete"),
)
UNCHANGED = (
    Case("quantize", "save", "nothing"),
    Case("quantize", "save", "nothing", is_large=False),
    Case("quantize", "save", "nothing", "inline.onnx", is_large=False),
)

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs fork, and files that can change while they are mapped")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """What became of all cases."""
    cases = json.dumps([asdict(case) for case in (*LARGE, *SMALL, *UNCHANGED)])
    command = [sys.executable, changed_inputs.__file__, str(tmp_path_factory.mktemp("changed"))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input=cases, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: Result(**fields) for name, fields in json.loads(done.stdout).items()}


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_a_change_to_a_mapped_file_is_an_error_and_the_output_stays(case, results):
    result = results[str(case)]
    assert (result.signal, result.error) == (0, "ModelError"), result
    assert (
        "start again" in result.text or "lies at bytes" in result.text
    )  # the latter if it was opened after the change
    if case.work != "hash":
        assert result.files == {"out.onnx": sha256(OLD).hexdigest()}


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_model_in_memory_does_not_depend_on_its_files(case, results):
    result = results[str(case)]
    assert (result.signal, result.error) == (0, ""), result
    expected = results[str(Case("quantize", "save", "nothing", case.changed, is_large=False))].files
    assert result.files["out.onnx"] == expected["out.onnx"]


@pytest.mark.parametrize("case", UNCHANGED, ids=str)
def test_without_a_change_there_is_no_error(case, results):
    result = results[str(case)]
    assert (result.signal, result.error) == (0, ""), result
    assert set(result.files) == {"out.onnx", "out.json"}
    assert result.files == results[str(UNCHANGED[1])].files or case.changed == "inline.onnx"


SAYS = {
    "shrink": r"size went from \d+ to 5000 bytes, written at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}",
    "empty": r"size went from \d+ to 0 bytes",
    "grow": r"size went from \d+ to \d+ bytes",
    "rewrite": r"was written to at \d{4}-\d\d-\d\d",
    "rewrite_secretly": r"content or attributes were changed at \d{4}-\d\d-\d\d",
    "rename_over": r"another file has taken its place",
    "delete": r"was removed or renamed",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_error_says_what_changed(change, tmp_path):
    path = tmp_path / "w.data"
    path.write_bytes(bytes(20_000))
    file = MappedFile.open(path)
    file.check()
    assert file.read_bytes(100, 200) == bytes(100)
    time.sleep(0.02)  # what happens within a tick of the system's clock has the same time
    change(path)
    for use in (file.check, lambda: file.read_bytes(100, 200)):
        with pytest.raises(
            ModelError, match=f"{re.escape(str(path))}' changed while it was in use: .*{SAYS[change.__name__]}"
        ):
            use()


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    path = tmp_path / "w.data"
    path.write_bytes(bytes(20_000))
    file = MappedFile.open(path)
    path.unlink()
    os.mkfifo(path)
    for use in (file.check, lambda: file.read_bytes(0, 10)):
        with pytest.raises(ModelError, match="another file has taken its place"):
            use()


def test_a_file_that_is_held_still_cannot_be_written_to(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "w.data"
    path.write_bytes(bytes(20_000))
    with path.open("rb") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except (AttributeError, OSError):
            pytest.skip("the system has no leases for this file")
    mapped = MappedFile.open(path)
    command = [sys.executable, "-c", "import os, sys; print(flush=True); os.truncate(sys.argv[1], 5000)", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        with held_still([mapped]):
            other.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                other.wait(0.2)
        other.wait()
    with pytest.raises(ModelError, match="size went from 20000 to 5000"):
        mapped.check()


def test_a_file_that_others_write_to_is_not_held_still_and_checked_all_the_same(tmp_path):
    path = tmp_path / "w.data"
    path.write_bytes(bytes(20_000))
    time.sleep(0.02)
    mapped = MappedFile.open(path)
    with (
        path.open("r+b", buffering=0) as writer,
        pytest.raises(ModelError, match="was written to"),
        held_still([mapped]),
    ):
        writer.write(b"other")


def test_a_file_that_changes_while_it_is_read_into_memory(tmp_path, monkeypatch):
    path = tmp_path / "w.data"
    path.write_bytes(bytes(20_000))
    read = input_files._read

    def reading(*args):
        shrink(path)
        return read(*args)

    monkeypatch.setattr(input_files, "_read", reading)
    with pytest.raises(ModelError, match="size went from 20000 to 5000"):
        read_file(path)


@pytest.mark.parametrize(("limit", "is_mapped"), [(0, True), (1 << 30, False)])
def test_the_files_of_a_model_are_held_together_or_mapped_together(limit, is_mapped, tmp_path, monkeypatch):
    monkeypatch.setattr(large_tensors, "LARGE_MODEL_BYTES", limit)
    onnx.save(
        network(), tmp_path / "net.onnx", save_as_external_data=True, all_tensors_to_one_file=False, size_threshold=0
    )
    loaded = load(tmp_path / "net.onnx")
    names = {file.path.name for file in loaded.files}
    assert names == ({"net.onnx", *(f"w{i}" for i in range(LAYERS))} if is_mapped else set())


def test_a_small_model_is_read_once_and_its_hash_is_of_what_was_read(tmp_path, monkeypatch):
    onnx.save(network(), tmp_path / "net.onnx", save_as_external_data=True, location="net.data", size_threshold=0)
    reads, read = [], input_files._read

    def reading(file, *args):
        reads.append(file)
        return read(file, *args)

    monkeypatch.setattr(input_files, "_read", reading)
    loaded = load(tmp_path / "net.onnx")
    expected, weights = (
        loaded.sha256,
        [value.const_value.tobytes() for value in loaded.model.graph.initializers.values()],
    )
    assert len(reads) == 2
    rewrite(tmp_path / "net.data")
    assert loaded.sha256 == expected != load(tmp_path / "net.onnx").sha256
    assert weights == [value.const_value.tobytes() for value in loaded.model.graph.initializers.values()]


@pytest.mark.parametrize("kind", [TensorProto.INT4, TensorProto.UINT8, TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_weights_of_every_width_are_the_same_mapped_and_held(kind, tmp_path, monkeypatch):
    numbers = np.random.default_rng(0).integers(0, 8, (65, 33))
    weight = helper.make_tensor("w", kind, numbers.shape, numbers.ravel())
    node = helper.make_node("Identity", ["w"], ["y"], "n")
    output = helper.make_tensor_value_info("y", kind, numbers.shape)
    model = helper.make_model(helper.make_graph([node], "g", [], [output], [weight]))
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), "w"))
    onnx.save(model, tmp_path / "net.onnx", save_as_external_data=True, location="net.data", size_threshold=0)
    held, _, files = read_message(tmp_path / "net.onnx")
    assert not files
    monkeypatch.setattr(large_tensors, "LARGE_MODEL_BYTES", 0)
    mapped, _, files = read_message(tmp_path / "net.onnx")
    assert [file.path.name for file in files] == ["net.onnx", "net.data"]
    assert held.weights["w"].tobytes() == mapped.weights["w"].tobytes() == b"".join(byte_pieces(mapped.weights["w"]))
    np.testing.assert_array_equal(held.weights["w"].numpy(), mapped.weights["w"].numpy())
    shrink(tmp_path / "net.data")
    for use in (mapped.weights["w"].numpy, mapped.weights["w"].tobytes):
        with pytest.raises(ModelError, match="changed while it was in use"):
            use()
